"""Held-out bits per byte, by position in the context."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.bundled_model.config import CONTEXT
from tools.bundled_model.network import Llama
from tools.bundled_model.text import Document
from tools.bundled_model.tokenizer import encode_document, token_bytes

#: Positions are reported in blocks of so many tokens.
BLOCK = 1024
BLOCKS = CONTEXT // BLOCK
#: Seconds between progress lines.
LINE_S = 15.0


@dataclasses.dataclass
class Evaluation:
    """Held-out bits per byte.

    ``first`` and ``last`` are over positions 0-1023 and 7168-8191 of all ``windows``, which lie in ``files`` files;
    ``by_block`` is the curve between them. ``same_text_*`` score exactly the same tokens at both ranges: those that are
    at 7168-8191 in one window and at 0-1023 in another. ``whole`` is over all held-out files.
    """

    windows: int
    files: int
    first: float
    last: float
    same_text_first: float
    same_text_last: float
    by_block: list[float]
    whole: float


class PositionTally:
    """Nats and bytes of windows, summed by block of positions."""

    def __init__(self, byte_sizes: Tensor) -> None:
        """Count nothing yet; ``byte_sizes`` has the bytes of each token id."""
        self.windows = 0
        self._sizes = byte_sizes
        self._nats = torch.zeros(BLOCKS, dtype=torch.float64)
        self._bytes = torch.zeros(BLOCKS, dtype=torch.float64)
        #: (file, place of a block in it) -> block's number in the window -> nats and bytes.
        self._places: dict[tuple[str, int], dict[int, tuple[float, int]]] = {}

    def add(self, name: str, start: int, losses: Tensor, targets: Tensor) -> None:
        """Count a window at token ``start`` of the file ``name``: the losses (nats) and ids of ``CONTEXT`` tokens."""
        nats = losses.double().view(BLOCKS, BLOCK).sum(1)
        counts = self._sizes[targets].view(BLOCKS, BLOCK).sum(1)
        self._nats += nats
        self._bytes += counts
        self.windows += 1
        for block in (0, BLOCKS - 1):
            place = self._places.setdefault((name, start + block * BLOCK), {})
            place[block] = (nats[block].item(), int(counts[block]))

    def curve(self) -> list[float]:
        """Return the bits per byte of each block."""
        bits: list[float] = (self._nats / self._bytes / math.log(2)).tolist()
        return bits

    def same_text(self) -> tuple[float, float]:
        """Return the bits per byte of text seen in the first and in the last block: as the first, as the last."""
        matched = [place for place in self._places.values() if len(place) == 2]
        first, last = (
            sum(place[block][0] for place in matched) / max(sum(place[block][1] for place in matched), 1) / math.log(2)
            for block in (0, BLOCKS - 1)
        )
        return first, last


@torch.inference_mode()
def evaluate(model: Llama, documents: Sequence[Document], tokenizer: Tokenizer, stride: int) -> Evaluation:
    """Measure bits per byte by position in 8k windows, each within one held-out file, one every ``stride`` tokens.

    Each file is also read whole, from its start (with ``<s>``) in chunks of at most 8k tokens.

    Raises:
        RuntimeError: no file is as long as the context.
    """
    tally = PositionTally(torch.tensor(token_bytes(tokenizer)))
    long_files = 0
    whole_nats = whole_bytes = 0.0
    began = last_line = time.monotonic()
    for number, document in enumerate(documents):
        ids = encode_document(tokenizer, document.text)
        for start in range(0, len(ids) - 1, CONTEXT):
            part = torch.tensor(ids[start : start + CONTEXT + 1])
            whole_nats += sum(x.sum().item() for x in model.losses(part[None, :-1], part[1:]))
        whole_bytes += len(document.text.encode())
        starts = range(0, len(ids) - CONTEXT, stride)
        long_files += bool(starts)
        for start in starts:
            part = torch.tensor(ids[start : start + CONTEXT + 1])
            tally.add(document.name, start, torch.cat(list(model.losses(part[None, :-1], part[1:]))), part[1:])
        if time.monotonic() - last_line > LINE_S:
            last_line = time.monotonic()
            print(f"evaluation: {number + 1}/{len(documents)} files, {last_line - began:.0f} s", flush=True)
    if not tally.windows:
        raise RuntimeError("no held-out file is as long as the context")
    curve = tally.curve()
    whole = whole_nats / whole_bytes / math.log(2)
    return Evaluation(tally.windows, long_files, curve[0], curve[-1], *tally.same_text(), curve, whole)
