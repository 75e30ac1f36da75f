"""Packed weights: codes with 4 to 8 bits and a scale for each group of inputs.

A packed weight is what a file holds, or what `moonpool.engine.weights.packing` makes of a dense weight. Kernels arrange
packed weights as they need them (`moonpool.engine.kernels.arranged_weights`). `PackedWeight.dequantise` says which
numbers a packed weight stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.base.checkpoint.weight_formats import DEQUANTISED_OUTPUTS
from moonpool.engine.kernels import ops
from moonpool.engine.kernels.arranged_weights import arrange_packed
from moonpool.engine.kernels.choice import choose, replaced
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.packed import CHUNK, byte_codes, bytes_of_rows, float8_of, in_units, reads_bytes
from moonpool.engine.kernels.self_check import SelfCheck, allowed, running
from moonpool.engine.weights.linear import LinearMethod, LinearWeight, NativeMethod

_SCALE_TYPES = (torch.float16, torch.float32)
_NOT_FINITE = {torch.float8_e4m3fn: 127, torch.float8_e5m2: 124}  # codes without a sign, from which on none is


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight(LinearWeight):
    """A linear weight [outputs, inputs] as codes.

    The number that a code stands for is `scale * (code - zero) + offset`, computed in float32. With a table of values
    the number is `scale * values[code]`. Scales and offsets of one byte are whole numbers of a unit.

    Raises:
        ValueError: a field does not fit the others; names the field.
    """

    codes: Tensor
    """uint8. 4 bits: [outputs, inputs / 2], of two inputs the first in the low nibble. Else [outputs, inputs]."""
    bits: int
    """Of a code: 4, 5, 6 or 8."""
    group: int
    """Inputs that share a scale: a multiple of 16, or all inputs."""
    scales: Tensor
    """[outputs, inputs / group], float16 or float32; int8 with `units`."""
    zero: int = 0
    """The code that stands for 0 (or for the offset); 0 with a table of values."""
    offsets: Tensor | None = None
    """[outputs, inputs / group], float16 or float32; int8 with `offset_units`. None: 0."""
    values: Tensor | None = None
    """float32 [16] or [256], by code; None: codes are whole numbers."""
    units: Tensor | None = None
    """float16 [outputs, blocks], what 1 stands for in `scales`; a block is some groups."""
    offset_units: Tensor | None = None
    """float16 [outputs, blocks], what 1 stands for in `offsets`."""
    floats: bool = field(init=False)
    """Whether codes stand for floats, which multiply rows as they are: a table of numbers that are no bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "floats", not reads_bytes(self.values))
        if self.bits not in (4, 5, 6, 8):
            raise ValueError(f"bits: must be 4, 5, 6 or 8, not {self.bits}")
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"codes: must be uint8 [outputs, bytes], not {self.codes.dtype} {list(self.codes.shape)}")
        inputs = self.inputs
        if self.group < 1 or inputs % self.group or (self.group % 16 and self.group != inputs):
            raise ValueError(f"group: must be a multiple of 16 that divides {inputs} inputs, or {inputs}: {self.group}")
        for name, part, units in (
            ("scales", self.scales, self.units),
            ("offsets", self.offsets, self.offset_units),
        ):
            if part is not None:
                self._check_scales(name, part, units)
        if not 0 <= self.zero < 1 << self.bits:
            raise ValueError(f"zero: must be a code of {self.bits} bits, not {self.zero}")
        if self.values is not None:
            if self.values.dtype != torch.float32 or self.values.shape != (1 << self.bits,):
                raise ValueError(f"values: must be float32 [{1 << self.bits}], not {list(self.values.shape)}")
            if self.zero or self.offsets is not None:
                raise ValueError("values: a table of values has neither zero nor offsets")

    def _check_scales(self, name: str, part: Tensor, units: Tensor | None) -> None:
        groups = self.inputs // self.group
        types = _SCALE_TYPES if units is None else (torch.int8,)
        if part.dtype not in types or part.shape != (self.outputs, groups):
            raise ValueError(
                f"{name}: must be {' or '.join(str(dtype).removeprefix('torch.') for dtype in types)} "
                f"[{self.outputs}, {groups}], not {part.dtype} {list(part.shape)}"
            )
        if units is None:
            return
        blocks = units.shape[1] if units.dim() == 2 else 0
        if units.dtype != torch.float16 or units.shape != (self.outputs, blocks) or not blocks or groups % blocks:
            raise ValueError(f"{name}: units must be float16 [{self.outputs}, blocks of {groups} groups]")
        if self.units is not None and blocks != self.units.shape[1]:
            raise ValueError("offset_units: must have as many blocks as units")

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""
        return torch.Size((self.outputs, self.inputs))

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales, offsets and table, bytes; arranged codes of 5 and 6 bits take less."""
        return sum(part.nbytes for part in (*self._by_row(), self.values) if part is not None)

    @property
    def kind(self) -> str:
        """Bits and group, for example "int4/32"; with a table "table4/32"."""
        return f"{'int' if self.values is None else 'table'}{self.bits}/{self.group}"

    def dequantise(self) -> Tensor:
        """Return the numbers that the codes stand for, float32 [outputs, inputs]."""
        codes = byte_codes(self)
        numbers = codes.float() - self.zero if self.values is None else self.values[codes.long()]
        grouped = numbers.view(self.outputs, -1, self.group) * in_units(self.scales, self.units)[..., None]
        if self.offsets is not None:
            grouped += in_units(self.offsets, self.offset_units)[..., None]
        return grouped.flatten(1)

    def select(self, rows: Tensor | slice) -> PackedWeight:
        """Return some rows, by int64 [n] or a slice, as a packed weight."""
        return self._with_rows([None if part is None else part[rows] for part in self._by_row()])

    def narrow(self, begin: int, end: int) -> PackedWeight | None:
        """Return some inputs; None if they are not whole groups, or whole blocks of groups with units."""
        one = self.group == self.inputs  # all inputs share a scale
        of_units = [self.inputs // its.shape[1] for its in (self.units, self.offset_units) if its is not None]
        least = 2 if one else max(self.group, *of_units, 0)
        if begin % least or end % least:
            return None

        def part(of: Tensor | None) -> Tensor | None:
            if of is None or (one and of is not self.codes):
                return of
            width = self.inputs // of.shape[1]  # inputs of a column
            return of[:, begin // width : end // width].contiguous()

        group = end - begin if one else self.group
        codes, scales, offsets, units, offset_units = map(part, self._by_row())
        assert codes is not None
        assert scales is not None
        return replace(
            self, codes=codes, scales=scales, offsets=offsets, units=units, offset_units=offset_units, group=group
        )

    def to(self, device: torch.device) -> PackedWeight:
        """Return the weight on another device."""
        moved = self._with_rows([None if part is None else part.to(device) for part in self._by_row()])
        return moved if self.values is None else replace(moved, values=self.values.to(device))

    def _by_row(self) -> list[Tensor | None]:
        return [self.codes, self.scales, self.offsets, self.units, self.offset_units]

    def _with_rows(self, parts: Sequence[Tensor | None]) -> PackedWeight:
        codes, scales, offsets, units, offset_units = parts
        assert codes is not None
        assert scales is not None
        return replace(self, codes=codes, scales=scales, offsets=offsets, units=units, offset_units=offset_units)

    def for_products(self) -> PackedWeight | None:
        """Return the same numbers in a form that products take, or None if no such form holds them exactly.

        Products take whole numbers as codes, a table of 16 numbers, or floats of 8 bits that are finite. A table of
        whole or half numbers becomes one of bytes, for which rows are bytes, too; other rows stay as they are.
        """
        if not self._fits_products():
            return None
        weight = replace(self, bits=6) if self.bits == 5 and self.group % CHUNK else self
        if weight.values is None:
            return weight
        if weight.bits == 4:
            return weight._with_byte_table() or (_plain_scales(weight) if weight.offsets is None else None)
        dtype = float8_of(weight.values)
        if dtype is None or weight.offsets is not None or bool((weight.codes & 127 >= _NOT_FINITE[dtype]).any()):
            return None
        return _plain_scales(weight)

    def _with_byte_table(self) -> PackedWeight | None:
        """Return the same numbers with a table of bytes; None: there is none."""
        assert self.values is not None
        for doublings in range(4):
            numbers = self.values * 2**doublings
            if reads_bytes(numbers):
                return _divided(replace(self, values=numbers), 2**doublings)
        return None

    def _fits_products(self) -> bool:
        return not self.inputs % CHUNK and (self.group == CHUNK // 2 or not self.group % CHUNK)

    def without_table(self) -> PackedWeight | None:
        """Return the same numbers as bytes without a table of values; None: no bytes hold them exactly."""
        if self.values is None:
            return self
        whole = self._with_byte_table() if self.bits == 4 else None
        if whole is None:
            return None
        assert whole.values is not None
        codes = (whole.values + 128).to(torch.uint8)[byte_codes(self).long()]
        return replace(whole, codes=codes, bits=8, zero=128, values=None)

    def join(self, others: Sequence[LinearWeight]) -> PackedWeight | None:
        """Return the rows of `others` below this weight's; see `join_rows`."""
        packed = [other for other in others if isinstance(other, PackedWeight)]
        return join_rows([self, *packed]) if len(packed) == len(others) else None

    def method(self, bias: Tensor | None, dtype: torch.dtype, *, gated: bool, arena: WeightArena) -> LinearMethod:
        """Return native products, or elsewhere torch's and Triton's."""
        panels = arrange_packed(self, bias, dtype, gated=gated, arena=arena)
        return PackedMethod(self, bias, dtype) if panels is None else NativeMethod(panels, panels.memory.nbytes)


class PackedMethod(LinearMethod):
    """Products with a packed weight by Triton, or by torch, which dequantises some outputs at a time.

    Rows multiply in bytes, or as they are if codes stand for floats (`moonpool.engine.kernels.packed`).
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(dtype, weight.codes.device, weight.nbytes)
        self._weight, self._bias = weight, bias

    def product(self, x: Tensor) -> Tensor:
        weight = self._weight
        if (check := running()) is not None and check.due("packed_linear", (weight.shape, weight.bits, len(x) > 16)):
            with check.room("packed_linear"):
                self._compare(check, check.draws.normal(x))
        if choose("packed_linear", x.device, x.dtype) == "triton":
            return ops.packed_linear(x, weight, self._bias)
        rows = x.float()
        if not weight.floats:
            numbers, scales = bytes_of_rows(x)
            rows = numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)
        parts = []
        for begin in range(0, weight.outputs, DEQUANTISED_OUTPUTS):
            outputs = slice(begin, begin + DEQUANTISED_OUTPUTS)
            bias = None if self._bias is None else self._bias[outputs].float()
            parts.append(functional.linear(rows, weight.select(outputs).dequantise(), bias).to(self.dtype))
        return torch.cat(parts, dim=1)

    def _compare(self, check: SelfCheck, x: Tensor) -> None:
        if choose("packed_linear", x.device, x.dtype) != "triton":
            return

        def by_torch() -> list[Tensor]:
            with replaced("packed_linear"):
                return [self.product(x)]

        shape = f"{len(x)} rows, {list(self._weight.shape)} in {self._weight.bits} bits, {self.dtype}"
        check.compare("packed_linear", shape, lambda: [self.product(x)], by_torch, [allowed(self.dtype)])

    def dense(self) -> Tensor:
        return self._weight.dequantise().to(self.dtype)


def _divided(weight: PackedWeight, by: int) -> PackedWeight:
    """Return the weight with scales divided by a power of two."""
    scales = weight.scales if weight.units is None else weight.units
    divided = scales / by
    if not torch.equal(divided * by, scales):  # float16 has no smaller one
        return replace(weight, scales=in_units(weight.scales, weight.units) / by, units=None)
    return replace(weight, scales=divided) if weight.units is None else replace(weight, units=divided)


def join_rows(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """Return weights with the same inputs as one weight, the rows one below the other; None: no form holds all exactly.

    If forms differ, the joined weight has the finest: the most bits, the smallest group, float32, offsets.
    """
    if any(weight.values is not None for weight in weights):
        first = weights[0].values
        if any(not _same_table(first, weight.values) for weight in weights):
            bare = [weight.without_table() for weight in weights]
            exact = [weight for weight in bare if weight is not None]
            return join_rows(exact) if len(exact) == len(weights) else None
    group = min(weight.group for weight in weights)
    if any(weight.group % group for weight in weights):
        return None
    zero = max(weight.zero for weight in weights)
    moved = [zero - weight.zero for weight in weights]
    bits = max(weight.bits for weight in weights)
    codes = [weight.codes for weight in weights]
    if bits > min(weight.bits for weight in weights) or any(moved):
        codes = [byte_codes(weight) for weight in weights]
        most = max(int(part.max()) + by for part, by in zip(codes, moved, strict=True))
        bits = next((wide for wide in (5, 6, 8) if wide >= bits and most < 1 << wide), 0)
    if not bits:
        return None
    plain = len({_block(weight) for weight in weights}) > 1 or _block(weights[0]) == 0
    parts = [_plain_scales(weight) if plain else weight for weight in weights]
    repeats = [weight.group // group for weight in weights]
    return PackedWeight(
        torch.cat([part + by if by else part for part, by in zip(codes, moved, strict=True)]),
        bits,
        group,
        _joined([part.scales for part in parts], repeats),
        zero,
        _joined_offsets([part.offsets for part in parts], [part.scales for part in parts], repeats),
        weights[0].values,
        None if plain else torch.cat([part.units for part in parts if part.units is not None]),
        None if plain else _joined_offsets([part.offset_units for part in parts], [part.units for part in parts]),
    )


def _same_table(table: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether two tables have the same numbers; 8-bit floats have some that are none."""
    if table is None or other is None:
        return table is other
    return torch.equal(table.view(torch.int32), other.view(torch.int32))


def _block(weight: PackedWeight) -> int:
    """Return the inputs that share units; 0: scales or offsets have none."""
    if weight.units is None or (weight.offsets is not None and weight.offset_units is None):
        return 0
    return weight.inputs // weight.units.shape[1]


def _plain_scales(weight: PackedWeight) -> PackedWeight:
    """Return the weight with scales and offsets without units."""
    scales = weight.scales if weight.units is None else in_units(weight.scales, weight.units)
    offsets = weight.offsets
    if offsets is not None and weight.offset_units is not None:
        offsets = in_units(offsets, weight.offset_units)
    return replace(weight, scales=scales, offsets=offsets, units=None, offset_units=None)


def _joined(parts: Sequence[Tensor], repeats: Sequence[int]) -> Tensor:
    """Return scales one below the other, each repeated so many times."""
    return torch.cat([part.repeat_interleave(times, 1) for part, times in zip(parts, repeats, strict=True)])


def _joined_offsets(
    parts: Sequence[Tensor | None], scales: Sequence[Tensor | None], repeats: Sequence[int] = ()
) -> Tensor | None:
    """As `_joined`; None is 0 in the shape of the scales, or None if all are."""
    if all(part is None for part in parts):
        return None
    found = [
        torch.zeros_like(like) if part is None else part
        for part, like in zip(parts, scales, strict=True)
        if like is not None
    ]
    return _joined(found, repeats or [1] * len(found))
