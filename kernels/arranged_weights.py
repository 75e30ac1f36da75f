"""Weight matrices arranged once for the native products (`native/panels.h`, of packed weights `native/packed.h`).

One arrangement serves any number of rows. Every output is one running sum over the inputs in order, so that a row's
result does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.choice import choose
from kernels.memory import WeightArena
from kernels.native import library, structures
from kernels.native.library import TYPES, Library
from kernels.packed import PackedMatrix

_PLAIN, _WIDE = 0, 2  # enum End of panels.h


class ArrangedWeight:
    """A weight [outputs, inputs] and the bias, arranged; made by `arrange_weight` and `arrange_packed`.

    Attributes:
        native: the library that arranged the weight.
        memory: what the arrangement takes.
        structure: as native code is given the weight.
        dtype: the rows' dtype.
    """

    def __init__(self, native: Library, memory: Tensor, bias: Tensor | None, parts: structures.Panels) -> None:
        self.native = native
        self.memory = memory
        self._bias = bias
        self.structure = parts
        self.dtype = next(dtype for dtype, code in TYPES.items() if code == parts.type)

    def product(self, x: Tensor, *, wide: bool = False, out: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias for x [M, inputs] in the weight's type; `wide`: as float32, after rounding.

        `out`: memory for the result, with the result's shape and type.
        For a gated weight: silu(x @ gates.T) * (x @ ups.T), each rounded as by itself.

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
        self.native.product(parts, x, out, _WIDE if wide else _PLAIN)
        return out

    def rows(self, index: Tensor) -> Tensor:
        """Return the weight's rows `index` [n] (int64), [n, inputs]: unchanged, or dequantised from packed weights.

        Raises:
            IndexError: there is no such row.
        """
        index = index.contiguous()
        if self.native.outside(index, 0, self.structure.outputs):
            raise IndexError(f"index: a row is outside 0..{self.structure.outputs - 1}")
        out = torch.empty((index.numel(), self.structure.inputs), dtype=self.dtype)
        self.native.rows(self.structure, index, out)
        return out


def arrange_weight(weight: Tensor, bias: Tensor | None, *, gated: bool, arena: WeightArena) -> ArrangedWeight | None:
    """Return `weight` [outputs, inputs] arranged in memory from `arena`, or None if native kernels refuse it.

    `gated`: the outputs are gates, then as many ups. `weight` is not referred to afterwards, `bias` is.
    """
    if choose("linear", weight.device, weight.dtype) != "native":
        return None
    parts = structures.Panels(
        None, None if bias is None else bias.data_ptr(), *weight.shape, TYPES[weight.dtype], int(gated)
    )
    made = _in_memory(parts, bias, arena)
    if made is not None:
        made.native.arrange(parts, weight.contiguous())
    return made


def arrange_packed(
    weight: PackedMatrix, bias: Tensor | None, dtype: torch.dtype, *, gated: bool, arena: WeightArena
) -> ArrangedWeight | None:
    """Return a packed weight arranged in memory from `arena`, or None where native kernels do not take the weight.

    The weight multiplies rows of `dtype`, which `bias` has too. Native kernels take weights without a value table, with
    inputs that are a multiple of 32, and groups of 16 or a multiple of 32.
    """
    if choose("linear", weight.codes.device, dtype) != "native" or weight.values is not None:
        return None
    scales, offsets = weight.scales, weight.offsets
    parts = structures.Panels(
        None, None if bias is None else bias.data_ptr(), *weight.shape, TYPES[dtype], int(gated),
        weight.bits, weight.zero, scales.element_size(), 0 if offsets is None else offsets.element_size(), weight.group,
    )  # fmt: skip
    made = _in_memory(parts, bias, arena)
    if made is not None:
        made.native.arrange_packed(
            parts, weight.codes.contiguous(), scales.contiguous(), None if offsets is None else offsets.contiguous()
        )
    return made


def _in_memory(parts: structures.Panels, bias: Tensor | None, arena: WeightArena) -> ArrangedWeight | None:
    native = library.get()
    assert native is not None
    nbytes = native.panels_bytes(parts)
    if not nbytes:
        return None
    memory = arena.take(nbytes)
    parts.weight = memory.data_ptr()
    return ArrangedWeight(native, memory, bias, parts)
