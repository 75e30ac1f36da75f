"""Weight matrices packed once for the native products (`native/panels.h`).

One packed form serves any number of rows. Every output is one running sum over the inputs in their order, so that a
row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.choice import choose
from kernels.memory import WeightArena
from kernels.native import library, structures
from kernels.native.library import TYPES, Library

_PLAIN, _WIDE = 0, 2  # enum End of panels.h


class PackedWeights:
    """A weight [outputs, inputs] and its bias, arranged; `arrange` makes it."""

    def __init__(self, native: Library, memory: Tensor, bias: Tensor | None, parts: structures.Panels) -> None:
        self._native = native
        self._memory = memory  # kept alive
        self._bias = bias
        self.structure = parts
        self.dtype = next(dtype for dtype, code in TYPES.items() if code == parts.type)

    def product(self, x: Tensor, *, wide: bool = False, out: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias for x [M, inputs] in the weight's type; `wide`: as float32, after rounding.

        `out`: where it is written, if that has its shape and type.
        Of a gated weight: silu(x @ gates.T) * (x @ ups.T), each rounded as by itself.

        Raises:
            ValueError: x has another shape, type or device.
        """
        parts = self.structure
        if x.dim() != 2 or x.shape[1] != parts.inputs or x.dtype != self.dtype or x.device.type != "cpu":
            raise ValueError(f"x: must be [M, {parts.inputs}] in {self.dtype}, not {list(x.shape)} in {x.dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        columns = parts.outputs // 2 if parts.gated else parts.outputs
        shape, dtype = (x.shape[0], columns), torch.float32 if wide else self.dtype
        if out is None or out.shape != shape or out.dtype != dtype:
            out = torch.empty(shape, dtype=dtype)
        self._native.product(parts, x, out, _WIDE if wide else _PLAIN)
        return out

    def rows(self, index: Tensor) -> Tensor:
        """Return rows `index` [n] (int64) of the weight as they were, [n, inputs].

        Raises:
            IndexError: there is no such row.
        """
        index = index.contiguous()
        if self._native.outside(index, 0, self.structure.outputs):
            raise IndexError(f"index: a row is outside 0..{self.structure.outputs - 1}")
        out = torch.empty((index.numel(), self.structure.inputs), dtype=self.dtype)
        self._native.rows(self.structure, index, out)
        return out


def pack_weights(weight: Tensor, bias: Tensor | None, *, gated: bool, arena: WeightArena) -> PackedWeights | None:
    """Return `weight` [outputs, inputs] arranged in memory from `arena`, or None where native kernels do not take it.

    `gated`: the outputs are gates, then as many ups. `weight` is not referred to afterwards, `bias` is.
    """
    if choose("linear", weight.device, weight.dtype) != "native":
        return None
    native = library.get()
    assert native is not None
    parts = structures.Panels(
        None, None if bias is None else bias.data_ptr(), *weight.shape, TYPES[weight.dtype], int(gated)
    )
    nbytes = native.panels_bytes(parts)
    if not nbytes:
        return None
    memory = arena.take(nbytes)
    parts.weight = memory.data_ptr()
    native.arrange(parts, weight.contiguous())
    return PackedWeights(native, memory, bias, parts)
