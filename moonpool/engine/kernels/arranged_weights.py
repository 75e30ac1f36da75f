"""Weight matrices arranged once for the native products (`native/panels.h`, of packed weights `native/packed.h`).

One arrangement serves any number of rows. Every output is one running sum over the inputs in order, so that a row's
result does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.native import library, structures
from moonpool.engine.kernels.native.library import TYPES, Library
from moonpool.engine.kernels.packed import PackedTensor, float8_of

_PLAIN, _WIDE = 0, 2  # enum End of panels.h
_PANEL = 32  # PANEL of panels.h
_WHOLE, _BYTE_TABLE, _FLOAT_TABLE = 0, 1, 2  # enum Values of panels.h
_FLOAT8 = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
_TABLE_ZERO = 128
"""Added to a table's values, which native code holds as bytes without a sign."""


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
        self._apart: tuple[structures.Panels, Tensor, Tensor | None] | None = None

    @property
    def nbytes(self) -> int:
        """Memory, bytes."""
        return self.memory.nbytes

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

    def apart(self, x: Tensor) -> Tensor:
        """Return a gated weight's gates, then ups, of `x` [M, inputs], before the activation: [M, outputs]."""
        if self._apart is None:
            self._apart = self._seats()
        parts, seats, _ = self._apart
        whole = torch.empty((x.shape[0], parts.outputs), dtype=self.dtype)
        self.native.product(parts, x if x.stride(1) == 1 else x.contiguous(), whole, _PLAIN)
        return whole.index_select(1, seats)

    def _seats(self) -> tuple[structures.Panels, Tensor, Tensor | None]:
        """Return the gated panels as plain ones, each output's column of their product, and the bias by column."""
        own, width = self.structure, self.native.width
        half, parts = own.outputs // 2, structures.Panels.from_buffer_copy(own)
        column = torch.arange(half)
        panel, lane = column // (_PANEL // 2), column % (_PANEL // 2)
        gates = panel * _PANEL + lane // width * (2 * width) + lane % width
        seats, bias = torch.cat((gates, gates + width)), None
        parts.outputs, parts.gated, parts.bias = -(-half // (_PANEL // 2)) * _PANEL, 0, None
        if self._bias is not None:
            bias = self._bias.new_zeros(parts.outputs)
            bias[seats] = self._bias
            parts.bias = bias.data_ptr()
        return parts, seats, bias

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
        arena.record(None)
        return None
    parts = structures.Panels(
        None, None if bias is None else bias.data_ptr(), *weight.shape, TYPES[weight.dtype], int(gated)
    )
    made = _in_memory(parts, bias, arena)
    if made is not None:
        made.native.arrange(parts, weight.contiguous())
    return made


def arrange_packed(
    weight: PackedTensor, bias: Tensor | None, dtype: torch.dtype, *, gated: bool, arena: WeightArena
) -> ArrangedWeight | None:
    """Return a packed weight arranged in memory from `arena`, or None where native kernels do not take the weight.

    The weight multiplies rows of `dtype`, which `bias` has too. Native kernels take inputs that are a multiple of 32,
    groups of 16 or a multiple of 32 (with 5 bits of 32), tables of 16 numbers, and floats of 8 bits (`FLOATS8`). NaN
    among such floats is not told from numbers.
    """
    values = weight.values
    meaning = _meaning(weight)
    if choose("linear", weight.codes.device, dtype) != "native" or meaning is None:
        arena.record(None)
        return None
    scales, offsets, units, offset_units = (
        None if part is None else part.contiguous()
        for part in (weight.scales, weight.offsets, weight.units, weight.offset_units)
    )
    assert scales is not None
    blocks = next((part.shape[1] for part in (units, offset_units) if part is not None), scales.shape[1])
    parts = structures.Panels(
        None, None if bias is None else bias.data_ptr(), *weight.shape, TYPES[dtype], int(gated),
        weight.bits, _TABLE_ZERO if meaning == _BYTE_TABLE else weight.zero, scales.element_size(),
        0 if offsets is None else offsets.element_size(), weight.group, weight.shape[1] // blocks, meaning,
    )  # fmt: skip
    if values is not None and meaning == _BYTE_TABLE:
        parts.table[:] = (values.int() + _TABLE_ZERO).tolist()
    if values is not None and meaning == _FLOAT_TABLE:
        parts.floats[:] = values.tolist()
    made = _in_memory(parts, bias, arena)
    if made is not None:
        codes = weight.codes.contiguous()
        addresses = (None if part is None else part.data_ptr() for part in (scales, offsets, units, offset_units))
        made.native.arrange_packed(parts, structures.PackedMatrix(codes.data_ptr(), *addresses))
    return made


def recorded_weight(bias: Tensor | None, arena: WeightArena) -> ArrangedWeight | None:
    """Return the next weight of `arena`'s whole file, as its writer arranged it; None: it is not for native kernels."""
    record = arena.recorded()
    if record is None:
        return None
    parts = structures.Panels.from_buffer_copy(bytes.fromhex(record))
    parts.bias = None if bias is None else bias.data_ptr()
    native = library.get()
    assert native is not None
    memory = arena.take(native.panels_bytes(parts))
    parts.weight = memory.data_ptr()
    return ArrangedWeight(native, memory, bias, parts)


def _meaning(weight: PackedTensor) -> int | None:
    """Return what codes stand for, `Values` of panels.h; None: native kernels do not take such a table."""
    values = weight.values
    if values is None:
        return _WHOLE
    if not weight.floats:
        return _BYTE_TABLE
    if weight.units is not None or weight.offsets is not None:
        return None
    if len(values) == 16:
        return _FLOAT_TABLE
    dtype = float8_of(values)
    return None if dtype is None else _FLOAT8[dtype]


def _in_memory(parts: structures.Panels, bias: Tensor | None, arena: WeightArena) -> ArrangedWeight | None:
    native = library.get()
    assert native is not None
    nbytes = native.panels_bytes(parts)
    if not nbytes:
        arena.record(None)
        return None
    arena.record(bytes(parts).hex())  # addresses are set anew
    memory = arena.take(nbytes)
    parts.weight = memory.data_ptr()
    return ArrangedWeight(native, memory, bias, parts)
