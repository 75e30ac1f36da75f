"""Further steps of a run in native calls (`kernels/native/go_on.cpp`), from chosen tokens to logits or other tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.native import structures
from kernels.panels import Panels
from kernels.sketch import Sketch
from moonpool.errors import InvalidRequest
from moonpool.model.batch import PackedBatch
from moonpool.model.linear import Linear
from moonpool.model.native import NativeLayers


@dataclass(frozen=True, slots=True)
class Parts:
    """What a stage computes a run's steps with."""

    step: structures.Step
    """Of all layers, over one row of each sequence."""
    hidden: Tensor
    """[T, hidden], the step's states."""
    angles: Tensor
    """[2, T, head_dim], the step's cos and sin."""
    cos: Tensor
    """[N, head_dim], of all positions that the run may come to; and `sin`."""
    sin: Tensor
    turns: Tensor
    """[T] int64: the row of these that belongs to each sequence's position; from now on changed in place."""
    embedding: Tensor | Panels
    norm: Tensor
    head: Linear
    sketch: Sketch | None


@dataclass(slots=True)
class Done:
    """What a call did."""

    steps: int
    """That are done."""
    stopped: bool
    """Another step was begun and given up: the watch stopped it."""
    filled: list[int]
    """Blocks that were filled."""


class NativeRun:
    """The rest of a run; `StageModel.going_on` makes it.

    Attributes:
        logits: of the last step [T, vocab], float32; they may be overwritten. Where tokens are chosen here they may be
            an earlier step's: a sketch of the head finds greedy tokens without them.
        logits_at: their address.
        alone: tokens are chosen here, too.
    """

    def __init__(
        self, layers: NativeLayers, batch: PackedBatch, parts: Parts, steps: int, chosen: int, out: Tensor | None
    ) -> None:
        head, rows = parts.head.panels, batch.num_tokens
        assert head is not None
        shape = (rows, head.structure.outputs)
        reused = out is not None and out.shape == shape
        self.logits = out if out is not None and reused else torch.empty(shape, dtype=torch.float32)
        self.logits_at = self.logits.data_ptr()
        self.alone = False
        self._native, self._batch, self._parts, self._left = layers.native, batch, parts, steps
        self._normed = torch.empty_like(parts.hidden)
        self._full = np.zeros(steps * rows, np.int64)
        self._found, self._over_ns = np.zeros((steps, rows), np.int32), np.zeros(steps, np.int64)
        self._ends = np.zeros(0, np.int32)
        embedded = parts.embedding.structure if isinstance(parts.embedding, Panels) else None
        self._call = structures.GoOn(
            ctypes.pointer(layers.model), ctypes.pointer(parts.step),
            chosen, batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.context_lens.data_ptr(),
            parts.turns.data_ptr(), parts.cos.data_ptr(), parts.sin.data_ptr(),
            None if embedded is None else ctypes.pointer(embedded),
            parts.embedding.data_ptr() if isinstance(parts.embedding, Tensor) else None,
            parts.norm.data_ptr(), ctypes.pointer(head.structure), self._normed.data_ptr(), self.logits_at,
            None if parts.sketch is None else ctypes.pointer(parts.sketch.structure),
            full=self._full.ctypes.data, found=self._found.ctypes.data, over_ns=self._over_ns.ctypes.data,
        )  # fmt: skip

    def choose_by(self, alone: Callable[[structures.GoOn], bool], ends: Collection[int]) -> None:
        """Choose tokens in the same call, where a sampler lets it; and further ones, but behind one of `ends`."""
        self.alone = alone(self._call)
        self._ends = np.array(list(ends), np.int32)
        self._call.ends, self._call.end_count = self._ends.ctypes.data, len(self._ends)

    def go_on(self, most: int = 1, until_ns: int = 0) -> Done:
        """Compute a step with the tokens that were chosen, and more where tokens are chosen here.

        Args:
            most: steps.
            until_ns: no step follows one that is over later, time.monotonic_ns.

        Raises:
            InvalidRequest: the block tables hold no further token.
        """
        if not self._left:
            raise InvalidRequest("sequences", "a block table does not hold a run's next token")
        self._call.most, self._call.until_ns = min(most, self._left), until_ns
        steps = self._native.go_on(self._call)
        self._left -= steps
        return Done(
            steps, bool(self._call.stopped), self._full[: self._call.filled].tolist() if self._call.filled else []
        )

    def tokens(self, steps: int) -> list[tuple[list[int], int]]:
        """Of the last call's steps, where tokens are chosen here: those of each sequence, and when each was over."""
        return list(zip(self._found[:steps].tolist(), self._over_ns[:steps].tolist(), strict=True))

    @property
    def failed(self) -> bool:
        """Of the last step: no token was found for a sequence."""
        return bool(self._call.failed)


def native_run(
    layers: NativeLayers, batch: PackedBatch, parts: Parts, blocks: int, steps: int, chosen: int, out: Tensor | None
) -> NativeRun | None:
    """Return the rest of a run, or None where it has to go one operation at a time.

    Args:
        layers: of the model, all of them.
        batch: as `StageModel.going_on` has it.
        parts: of the stage.
        blocks: of the pool.
        steps: as `StageModel.going_on` has it.
        chosen: so, too.
        out: so, too.
    """
    tables, context = batch.arrays["block_tables"], batch.arrays["context_lens"]
    if parts.head.panels is None or tables.min() < 0 or tables.max() >= blocks:
        return None
    room = int((batch.arrays["capacity"] - context).min())
    return NativeRun(layers, batch, parts, min(room, steps), chosen, out)
