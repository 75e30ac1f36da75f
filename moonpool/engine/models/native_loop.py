"""Further steps of a run in native calls (`kernels/engine/go_on.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moonpool.base.errors import InvalidRequest
from moonpool.engine.kernels.arranged_weights import ArrangedWeight
from moonpool.engine.kernels.int8_head import Int8Head
from moonpool.engine.kernels.native import structures
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.native_step import NativeLayers
from moonpool.engine.weights.linear import Linear


class NativeLoop:
    """The rest of a run as a native loop; made by `StageModel.native_run`.

    Attributes:
        logits: the last step's [T, vocab], float32; may be overwritten. If this loop samples, they may be those of an
            earlier step: the int8 head finds greedy tokens without logits.
        logits_at: their address.
        samples: whether this loop also samples the tokens.
    """

    def __init__(
        self, layers: NativeLayers, batch: PackedBatch, parts: RunInputs, steps: int, chosen: int, out: Tensor | None
    ) -> None:
        head, rows = parts.head.panels, batch.num_tokens
        assert head is not None
        shape = (rows, head.structure.outputs)
        reused = out is not None and out.shape == shape
        self.logits = out if out is not None and reused else torch.empty(shape, dtype=torch.float32)
        self.logits_at = self.logits.data_ptr()
        self.samples = False
        self._native, self._batch, self._parts, self._left = layers.native, batch, parts, steps
        self._normed = torch.empty_like(parts.hidden)
        self._full = np.zeros(steps * rows, np.int64)
        self._found, self._over_ns = np.zeros((steps, rows), np.int32), np.zeros(steps, np.int64)
        self._ends = np.zeros(0, np.int32)
        embedded = parts.embedding.structure if isinstance(parts.embedding, ArrangedWeight) else None
        self._call = structures.GoOn(
            ctypes.pointer(layers.model), ctypes.pointer(parts.step),
            chosen, batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.context_lens.data_ptr(),
            parts.turns.data_ptr(), parts.cos.data_ptr(), parts.sin.data_ptr(),
            None if embedded is None else ctypes.pointer(embedded),
            parts.embedding.data_ptr() if isinstance(parts.embedding, Tensor) else None,
            parts.norm.data_ptr(), ctypes.pointer(head.structure), self._normed.data_ptr(), self.logits_at,
            None if parts.int8_head is None else ctypes.pointer(parts.int8_head.structure),
            full=self._full.ctypes.data, found=self._found.ctypes.data, over_ns=self._over_ns.ctypes.data,
        )  # fmt: skip

    def sample_by(self, attach: Callable[[structures.GoOn], bool], ends: Collection[int]) -> None:
        """Sample tokens in the same call, if a sampler's `attach` allows this; stop after a token of `ends`."""
        self.samples = attach(self._call)
        self._ends = np.array(list(ends), np.int32)
        self._call.ends, self._call.end_count = self._ends.ctypes.data, len(self._ends)

    def go_on(self, most: int = 1, until_ns: int = 0) -> RunResult:
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
        return RunResult(
            steps, bool(self._call.stopped), self._full[: self._call.filled].tolist() if self._call.filled else []
        )

    def tokens(self, steps: int) -> list[tuple[list[int], int]]:
        """For the last call's steps, if tokens are chosen here: each sequence's tokens, and when each was over."""
        return list(zip(self._found[:steps].tolist(), self._over_ns[:steps].tolist(), strict=True))

    @property
    def failed(self) -> bool:
        """Of the last step: no token was found for a sequence."""
        return bool(self._call.failed)


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Inputs of a run's further steps."""

    step: structures.NativeStep
    """A step over all layers, with one row per sequence."""
    hidden: Tensor
    """[T, hidden], the step's states."""
    angles: Tensor
    """[2, T, head_dim], the step's cos and sin."""
    cos: Tensor
    """[N, head_dim], of all positions that the run may come to; and `sin`."""
    sin: Tensor
    turns: Tensor
    """[T] int64: the row of these that belongs to each sequence's position; from now on changed in place."""
    embedding: Tensor | ArrangedWeight
    norm: Tensor
    head: Linear
    int8_head: Int8Head | None


@dataclass(slots=True)
class RunResult:
    """One call's result."""

    steps: int
    """Number of steps that are done."""
    stopped: bool
    """Whether another step was begun and aborted by the signals."""
    filled: list[int]
    """Blocks that became full."""


def make_native_run(
    layers: NativeLayers, batch: PackedBatch, parts: RunInputs, blocks: int, steps: int, chosen: int, out: Tensor | None
) -> NativeLoop | None:
    """Return the rest of a run, or None if Python has to run the steps.

    Args:
        layers: all the model's layers.
        batch: as in `StageModel.native_run`.
        parts: the stage's parts.
        blocks: blocks in the pool.
        steps: as in `StageModel.native_run`.
        chosen: as in `StageModel.native_run`.
        out: as in `StageModel.native_run`.
    """
    tables, context = batch.arrays["block_tables"], batch.arrays["context_lens"]
    if parts.head.panels is None or tables.min() < 0 or tables.max() >= blocks:
        return None
    room = int((batch.arrays["capacity"] - context).min())
    return NativeLoop(layers, batch, parts, min(room, steps), chosen, out)
