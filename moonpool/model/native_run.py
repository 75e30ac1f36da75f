"""Further steps of a run in one native call each (`kernels/native/go_on.cpp`), from chosen tokens to logits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native import structures
from kernels.panels import Panels
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


class NativeRun:
    """The rest of a run; `StageModel.going_on` makes it.

    Attributes:
        logits: of the last step [T, vocab], float32; they may be overwritten.
        logits_at: their address.
        filled: blocks that it has filled.
    """

    def __init__(
        self, layers: NativeLayers, batch: PackedBatch, parts: Parts, room: int, chosen: int, out: Tensor | None
    ) -> None:
        head, rows = parts.head.panels, batch.num_tokens
        assert head is not None
        shape = (rows, head.structure.outputs)
        reused = out is not None and out.shape == shape
        self.logits = out if out is not None and reused else torch.empty(shape, dtype=torch.float32)
        self.filled: list[int] = []
        self._native, self._batch, self._parts, self._left = layers.native, batch, parts, room
        self.logits_at = self.logits.data_ptr()
        self._normed = torch.empty_like(parts.hidden)
        rows_of = parts.embedding.structure if isinstance(parts.embedding, Panels) else None
        self._call = structures.GoOn(
            ctypes.pointer(layers.model), ctypes.pointer(parts.step),
            chosen, batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.context_lens.data_ptr(),
            parts.turns.data_ptr(), parts.cos.data_ptr(), parts.sin.data_ptr(),
            None if rows_of is None else ctypes.pointer(rows_of),
            parts.embedding.data_ptr() if isinstance(parts.embedding, Tensor) else None,
            parts.norm.data_ptr(), ctypes.pointer(head.structure), self._normed.data_ptr(), self.logits_at,
            0,
        )  # fmt: skip

    def go_on(self) -> bool:
        """Compute a step with the tokens that were chosen; False when the watch stopped it: then there are no logits.

        Raises:
            InvalidRequest: the block tables hold no further token.
        """
        if not self._left:
            raise InvalidRequest("sequences", "a block table does not hold a run's next token")
        self._left -= 1
        done: bool = self._native.go_on(self._call) == self._parts.step.last
        self.filled = self._batch.full_blocks() if self._call.filled else []
        return done


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
