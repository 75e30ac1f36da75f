"""Packed weights: codes with 4 or 8 bits and a scale for each group of inputs.

A packed weight is what a file holds, or what `pack_int8` and `pack_int4` make of a dense weight. Kernels arrange packed
weights as they need them (`moonpool.engine.kernels.arranged_weights`). `PackedWeight.dequantise` says which numbers a
packed weight stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moonpool.engine.kernels.packed import CHUNK, byte_codes, float8_of, in_units, reads_bytes

_PIECE_GROUPS = 1 << 12  # groups that are packed at a time stay in the cache
_SCALE_TYPES = (torch.float16, torch.float32)
_SHRUNK = tuple(1 - 0.025 * step for step in range(13))  # parts of a group's range that a search tries
_LEAST = 1e-3  # what an input's error counts at least, of the mean
_NOT_FINITE = {torch.float8_e4m3fn: 127, torch.float8_e5m2: 124}  # codes without a sign, from which on none is
_REFINED = 2  # least squares and codes in turn, so many times for each start


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
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
                f"{name}: must be {' or '.join(str(its).removeprefix('torch.') for its in types)} "
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
        """Number of rows."""
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        """Number of columns."""
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
            exact = [its for weight in weights if (its := weight.without_table()) is not None]
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
        most = max(int(its.max()) + by for its, by in zip(codes, moved, strict=True))
        bits = next((its for its in (5, 6, 8) if its >= bits and most < 1 << its), 0)
    if not bits:
        return None
    plain = len({_block(weight) for weight in weights}) > 1 or _block(weights[0]) == 0
    parts = [_plain_scales(weight) if plain else weight for weight in weights]
    repeats = [weight.group // group for weight in weights]
    return PackedWeight(
        torch.cat([its + by if by else its for its, by in zip(codes, moved, strict=True)]),
        bits,
        group,
        _joined([its.scales for its in parts], repeats),
        zero,
        _joined_offsets([its.offsets for its in parts], [its.scales for its in parts], repeats),
        weights[0].values,
        None if plain else torch.cat([its.units for its in parts if its.units is not None]),
        None if plain else _joined_offsets([its.offset_units for its in parts], [its.units for its in parts]),
    )


def _same_table(one: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether two tables have the same numbers; 8-bit floats have some that are none."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


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
    return torch.cat([its.repeat_interleave(times, 1) for its, times in zip(parts, repeats, strict=True)])


def _joined_offsets(
    parts: Sequence[Tensor | None], scales: Sequence[Tensor | None], repeats: Sequence[int] = ()
) -> Tensor | None:
    """As `_joined`; None is 0 in the shape of the scales, or None if all are."""
    if all(its is None for its in parts):
        return None
    found = [
        torch.zeros_like(like) if its is None else its
        for its, like in zip(parts, scales, strict=True)
        if like is not None
    ]
    return _joined(found, repeats or [1] * len(found))


def pack_int8(weight: Tensor, group: int = 32) -> PackedWeight:
    """Return a dense `weight` [outputs, inputs] in bytes, each the nearest multiple of the group's scale.

    Raises:
        ValueError: `group` does not divide the inputs, or a weight is not finite.
    """
    groups = _groups(weight, group)
    codes = torch.empty(groups.shape, dtype=torch.uint8)
    scales = torch.empty(groups.shape[0])
    for begin in range(0, len(groups), _PIECE_GROUPS):
        piece = groups[begin : begin + _PIECE_GROUPS].float()
        scale = _storable(piece.abs().amax(1) / 127)
        nearest = (piece / scale.masked_fill(scale == 0, 1)[:, None]).round().clamp(-127, 127)
        codes[begin : begin + len(piece)] = (nearest + 128).to(torch.uint8)
        scales[begin : begin + len(piece)] = scale
    return PackedWeight(codes.view(weight.shape), 8, group, _stored(scales, weight), zero=128)


def pack_int4(weight: Tensor, group: int = 32, importance: Tensor | None = None) -> PackedWeight:
    """Return a dense `weight` [outputs, inputs] in nibbles.

    Each group has the scale and the offset of the least squared error that a search finds. Errors of large weights
    count more, and an input's as `importance` [inputs] says, float32.

    Raises:
        ValueError: `group` does not divide the inputs, or a weight is not finite; `importance` has another shape.
    """
    groups = _groups(weight, group)
    counts = None if importance is None else _counts(importance, weight.shape[1]).view(-1, group)
    codes = torch.empty((groups.shape[0], group // 2), dtype=torch.uint8)
    scales, offsets = torch.empty(groups.shape[0]), torch.empty(groups.shape[0])
    for begin in range(0, len(groups), _PIECE_GROUPS):
        its = slice(begin, begin + _PIECE_GROUPS)
        piece = groups[its].float()
        counted = torch.ones(()) if counts is None else counts[torch.arange(begin, begin + len(piece)) % len(counts)]
        scales[its], offsets[its], nibbles = _searched(piece, counted)
        pairs = nibbles.to(torch.uint8).view(len(nibbles), -1, 2)
        codes[its] = pairs[..., 0] | pairs[..., 1] << 4
    return PackedWeight(codes.view(weight.shape[0], -1), 4, group, _stored(scales, weight), 0, _stored(offsets, weight))


def _groups(weight: Tensor, group: int) -> Tensor:
    """Return `weight` as [groups of all outputs, group]."""
    if weight.dim() != 2 or group < 16 or group % 16 or weight.shape[1] % group:
        raise ValueError(f"group: must be a multiple of 16 that divides the inputs of {list(weight.shape)}: {group}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: a number is not finite")
    return weight.contiguous().view(-1, group)


def _counts(importance: Tensor, inputs: int) -> Tensor:
    """Return what the inputs' errors count; none counts nothing, as other texts may use the input."""
    if importance.shape != (inputs,) or not bool(torch.isfinite(importance).all()) or float(importance.min()) < 0:
        raise ValueError(f"importance: must be {inputs} numbers of 0 or more, not {list(importance.shape)}")
    mean = float(importance.mean())
    return importance.float() / mean + _LEAST if mean > 0 else torch.ones(inputs)


def _searched(groups: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales [n], offsets [n] and codes [n, group] of `groups` [n, group], all float32.

    `counts`: of each number's error, [n, group] or [].
    """
    root = groups.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)
    counts = counts * (1 + groups.abs() / root)  # as llama.cpp weighs them
    low, high = groups.amin(1), groups.amax(1)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, ...] | None = None
    for part in _SHRUNK:
        scale, offset = _storable(reach * part * 2 / 15), _storable(middle - reach * part)
        for _ in range(_REFINED):
            codes = _nearest(groups, scale, offset)
            scale, offset = _least_squares(groups, codes, counts)
        codes = _nearest(groups, scale, offset)
        error = ((codes * scale[:, None] + offset[:, None] - groups).square() * counts).sum(1)
        if best is None:
            best = error, scale, offset, codes
        else:
            better = error < best[0]
            kept = (better, better, better, better[:, None])
            its = (error, scale, offset, codes)
            best = tuple(torch.where(where, new, old) for where, new, old in zip(kept, its, best, strict=True))
    assert best is not None
    return best[1], best[2], best[3]


def _nearest(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return ((groups - offset[:, None]) / scale.masked_fill(scale == 0, 1)[:, None]).round().clamp(0, 15)


def _least_squares(groups: Tensor, codes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the offset that bring `codes` nearest to `groups`."""
    whole = counts.sum(1)
    mean, mid = (groups * counts).sum(1) / whole, (codes * counts).sum(1) / whole
    apart = codes - mid[:, None]
    counted = apart * counts
    spread = (counted * apart).sum(1)
    scale = _storable((counted * groups).sum(1) / spread.masked_fill(spread == 0, 1))
    return scale, _storable(mean - scale * mid)


def _storable(scale: Tensor) -> Tensor:
    """Return float32 scales as float16 holds them, where float16 has all their digits' worth."""
    half = scale.half().float()
    magnitude = scale.abs()
    return torch.where((magnitude < 2**-14) | (magnitude > 65504), scale, half)


def _stored(scales: Tensor, weight: Tensor) -> Tensor:
    """Return scales [n] as [outputs, groups], in float16 if float16 holds them."""
    half = scales.half()
    return (half if torch.equal(half.float(), scales) else scales).view(weight.shape[0], -1)
