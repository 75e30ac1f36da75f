"""Samples rows in plain torch, on the logits' device: the reference for the native sampler.

Between logits and tokens the host does not wait: the host gives all operations to the device, then reads the results.
Shapes follow from what is asked for, never from what is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec, stream_seed
from moonpool.engine.kernels.to_device import send_to_device
from moonpool.engine.sampling.base import RowChoices, TokenMask
from moonpool.engine.sampling.logprobs import DeviceLogprobs, gather_logprobs
from moonpool.engine.sampling.processors import LogitsPipeline
from moonpool.engine.sampling.random_sampler import DrawNumbers, RandomSampler


@dataclass(slots=True)
class PendingChoices:
    """A step's choices, on the step's device."""

    tokens: Tensor
    """[D], each row's draws one after the other."""
    highest: Tensor
    """[R] float32: each row's highest logit; if not finite, none of the row's tokens is right."""
    logprobs: DeviceLogprobs | None
    """Of the rows that asked for log probabilities."""


class _RowPart:
    """Some rows and their draws, as indices on the device; indices into all draws, row after row.

    Args:
        rows: rows in the logits.
        sizes: draws for each logits row.
        device: the logits' device.
    """

    def __init__(self, rows: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        ends = list(accumulate(sizes))
        self.sizes = [sizes[row] for row in rows]
        draws = [at for row in rows for at in range(ends[row] - sizes[row], ends[row])]
        self.whole = len(rows) == len(sizes)
        self.rows = send_to_device(torch.tensor(rows), device)
        self.draws = send_to_device(torch.tensor(draws), device)
        self.row_of_draw = send_to_device(torch.arange(len(rows)).repeat_interleave(torch.tensor(self.sizes)), device)


class TorchRows:
    """Rows that are sampled in torch, step after step.

    Args:
        specs: each row's, for the first step.
        drawn: rows that are drawn; for other rows, the highest logit is chosen.
        vocab: number of tokens in the vocabulary.
        device: the logits' device.
    """

    def __init__(self, specs: Sequence[SampleSpec], drawn: Sequence[int], vocab: int, device: torch.device) -> None:
        self._specs, self._steps = specs, 0
        self._sizes = [spec.samples for spec in specs]
        self._all = _RowPart(range(len(specs)), self._sizes, device)
        self._processors = LogitsPipeline(specs, vocab, device)
        each = [(specs[row], index) for row in drawn for index in range(self._sizes[row])]
        seeds = [stream_seed(spec.seed, index) for spec, index in each]
        self._numbers = DrawNumbers(seeds, [spec.position for spec, _ in each])
        self._drawn = _RowPart(drawn, self._sizes, device) if drawn else None
        params = [specs[row].params for row in drawn]
        self._random = RandomSampler(params, [self._sizes[row] for row in drawn], vocab, device) if drawn else None
        self._counts = {row: spec.params.logprobs for row, spec in enumerate(specs) if spec.params.logprobs is not None}
        self._scored = _RowPart(list(self._counts), self._sizes, device) if self._counts else None

    def sample(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> RowChoices:
        with torch.inference_mode():
            return self.read(self.begin(logits, masks))

    def advance(self, tokens: Sequence[int]) -> None:
        """See `RowSampler.advance`; the device gets no work before the next step."""
        self._steps += 1
        self._processors.advance(tokens)

    def begin(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> PendingChoices:
        """Have tokens chosen for each row in `logits` [R, vocab] float32, which are overwritten."""
        untouched = None if self._scored is None else logits[self._scored.rows]
        self._processors(logits, masks)
        highest, greedy = highest_of(logits)
        tokens = greedy[self._all.row_of_draw]
        if self._drawn is not None and self._random is not None:
            numbers = send_to_device(torch.from_numpy(self._numbers.at(self._steps)), logits.device)
            hot, peaks = logits, highest
            if not self._drawn.whole:
                hot, peaks = logits[self._drawn.rows], highest[self._drawn.rows]
            hot.masked_fill_(~torch.isfinite(peaks)[:, None], 0)  # draws of these rows are not used
            tokens.index_copy_(0, self._drawn.draws, self._random(hot, numbers))
        logprobs = None
        if self._scored is not None and untouched is not None:
            most = max(self._counts.values())
            logprobs = gather_logprobs(untouched, self._scored.row_of_draw, tokens[self._scored.draws], most)
        return PendingChoices(tokens, highest, logprobs)

    def read(self, pending: PendingChoices) -> RowChoices:
        """Wait for what was chosen, once."""
        found = torch.cat((pending.tokens.int(), pending.highest.view(torch.int32))).cpu().numpy()
        drawn, highest = found[: len(pending.tokens)].tolist(), found[len(pending.tokens) :].view(np.float32)
        failed = {row: bool(highest[row] == -np.inf) for row in np.flatnonzero(~np.isfinite(highest)).tolist()}
        ends = accumulate(self._sizes)
        tokens = [
            [] if row in failed else drawn[end - size : end]
            for row, (size, end) in enumerate(zip(self._sizes, ends, strict=True))
        ]
        return RowChoices(tokens, failed, self._logprobs(pending.logprobs, failed))

    def _logprobs(self, pending: DeviceLogprobs | None, failed: Mapping[int, bool]) -> dict[int, Logprobs]:
        if pending is None or self._scored is None:
            return {}
        found = pending.read(self._scored.sizes, list(self._counts.values()))
        return {row: tokens for row, tokens in zip(self._counts, found, strict=True) if row not in failed}


def highest_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return every row's highest logit, and the logit's index: the lowest among equals.

    Torch's `argmax` is an order of magnitude slower than `amax`: the maximum in each run of 128 is found first.
    """
    rows, vocab = logits.shape
    width = 128 if vocab % 128 == 0 else 1
    runs = logits.view(rows, -1, width)
    highest, run = runs.amax(-1).max(-1)
    return highest, run * width + runs[torch.arange(rows, device=logits.device), run].argmax(-1)
