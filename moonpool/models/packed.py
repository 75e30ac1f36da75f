"""Packed weights: codes with 4 or 8 bits and a scale for each group of inputs.

A packed weight is what a file holds, or what `pack_int8` and `pack_int4` make of a dense weight. Kernels arrange packed
weights as they need them (`kernels.arranged_weights`). `PackedWeight.dequantise` says which numbers a packed weight
stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK = 32
"""Inputs of a row that share a scale in products (`kernels.packed`)."""
_PIECE_GROUPS = 1 << 12  # groups that are packed at a time stay in the cache
_SCALE_TYPES = (torch.float16, torch.float32)
_SHRUNK = tuple(1 - 0.025 * step for step in range(13))  # parts of a group's range that a search tries
_REFINED = 2  # least squares and codes in turn, so many times for each start


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A linear weight [outputs, inputs] as codes.

    The number that a code stands for is `scale * (code - zero) + offset`, computed in float32. With a table of values
    the number is `scale * values[code]`.

    Raises:
        ValueError: a field does not fit the others; names the field.
    """

    codes: Tensor
    """uint8. 8 bits: [outputs, inputs]. 4 bits: [outputs, inputs / 2], of two inputs the first in the low nibble."""
    bits: int
    """Of a code: 4 or 8."""
    group: int
    """Inputs that share a scale: a multiple of 16, or all inputs."""
    scales: Tensor
    """[outputs, inputs / group], float16 or float32."""
    zero: int = 0
    """The code that stands for 0 (or for the offset); 0 with a table of values."""
    offsets: Tensor | None = None
    """[outputs, inputs / group], float16 or float32; None: 0."""
    values: Tensor | None = None
    """float32 [16] or [256], by code; None: codes are whole numbers."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits: must be 4 or 8, not {self.bits}")
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"codes: must be uint8 [outputs, bytes], not {self.codes.dtype} {list(self.codes.shape)}")
        inputs = self.inputs
        if self.group < 1 or inputs % self.group or (self.group % 16 and self.group != inputs):
            raise ValueError(f"group: must be a multiple of 16 that divides {inputs} inputs, or {inputs}: {self.group}")
        for name, part in (("scales", self.scales), ("offsets", self.offsets)):
            if part is None:
                continue
            if part.dtype not in _SCALE_TYPES or part.shape != (self.outputs, inputs // self.group):
                raise ValueError(
                    f"{name}: must be float16 or float32 [{self.outputs}, {inputs // self.group}], "
                    f"not {part.dtype} {list(part.shape)}"
                )
        if not 0 <= self.zero < 1 << self.bits:
            raise ValueError(f"zero: must be a code of {self.bits} bits, not {self.zero}")
        if self.values is not None:
            if self.values.dtype != torch.float32 or self.values.shape != (1 << self.bits,):
                raise ValueError(f"values: must be float32 [{1 << self.bits}], not {list(self.values.shape)}")
            if self.zero or self.offsets is not None:
                raise ValueError("values: a table of values has neither zero nor offsets")

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        """Number of columns."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""
        return torch.Size((self.outputs, self.inputs))

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales, offsets and table, bytes."""
        parts = (self.codes, self.scales, self.offsets, self.values)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def kind(self) -> str:
        """Bits and group, for example "int4/32"; with a table "table4/32"."""
        return f"{'int' if self.values is None else 'table'}{self.bits}/{self.group}"

    def byte_codes(self) -> Tensor:
        """Return the codes one a byte, uint8 [outputs, inputs]."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)

    def dequantise(self) -> Tensor:
        """Return the numbers that the codes stand for, float32 [outputs, inputs]."""
        codes = self.byte_codes()
        numbers = codes.float() - self.zero if self.values is None else self.values[codes.long()]
        grouped = numbers.view(self.outputs, -1, self.group) * self.scales.float()[..., None]
        if self.offsets is not None:
            grouped += self.offsets.float()[..., None]
        return grouped.flatten(1)

    def select(self, rows: Tensor | slice) -> PackedWeight:
        """Return some rows, by int64 [n] or a slice, as a packed weight."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], offsets=offsets)

    def to(self, device: torch.device) -> PackedWeight:
        """Return the weight on another device."""
        offsets, values = (None if part is None else part.to(device) for part in (self.offsets, self.values))
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), offsets=offsets, values=values)

    def for_products(self) -> PackedWeight | None:
        """Return the weight in the products' form, or None if inputs or groups do not fit.

        Products take whole numbers as codes. A table of other values becomes bytes, each the nearest number.
        """
        if self.inputs % CHUNK or (self.group != CHUNK // 2 and self.group % CHUNK):
            return None
        exact = self.without_table()
        return pack_int8(self.dequantise()) if exact is None else exact

    def without_table(self) -> PackedWeight | None:
        """Return the same numbers as bytes without a table of values; None: no bytes hold them exactly."""
        if self.values is None:
            return self
        for doublings in range(4):
            numbers = self.values * 2**doublings
            if bool((numbers == numbers.round()).all()) and float(numbers.min()) >= -128 and float(numbers.max()) < 128:
                codes = (numbers + 128).to(torch.uint8)[self.byte_codes().long()]
                scales = self.scales / 2**doublings
                if not torch.equal(scales * 2**doublings, self.scales):  # float16 has no smaller one
                    scales = self.scales.float() / 2**doublings
                return PackedWeight(codes, 8, self.group, scales, zero=128)
        return None


def join_rows(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """Return weights with the same inputs as one weight, the rows one below the other; None: no form holds all exactly.

    If forms differ, the joined weight has the finest: bytes, the smallest group, float32, offsets.
    """
    if any(weight.values is not None for weight in weights):
        tables = [weight.values for weight in weights]
        first = tables[0]
        if any(first is None or its is None or not torch.equal(first, its) for its in tables):
            exact = [its for weight in weights if (its := weight.without_table()) is not None]
            return join_rows(exact) if len(exact) == len(weights) else None
    bits = max(weight.bits for weight in weights)
    if bits == 4 and len({weight.zero for weight in weights}) > 1:
        bits = 8
    group = min(weight.group for weight in weights)
    zero = max(weight.zero for weight in weights)
    if any(weight.group % group for weight in weights):
        return None
    moved = [zero - weight.zero for weight in weights]
    codes = [weight.codes if bits == weight.bits else weight.byte_codes() for weight in weights]
    if any(by and int(its.max()) + by > 255 for its, by in zip(codes, moved, strict=True)):
        return None
    return PackedWeight(
        torch.cat([its + by if by else its for its, by in zip(codes, moved, strict=True)]),
        bits,
        group,
        _join_scales([(weight.scales, weight.group // group) for weight in weights]),
        zero,
        None
        if all(weight.offsets is None for weight in weights)
        else _join_scales(
            [
                (torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets, weight.group // group)
                for weight in weights
            ]
        ),
        weights[0].values,
    )


def _join_scales(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return scales one below the other, each repeated so many times."""
    return torch.cat([scales.repeat_interleave(times, 1) for scales, times in parts])


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


def pack_int4(weight: Tensor, group: int = 32) -> PackedWeight:
    """Return a dense `weight` [outputs, inputs] in nibbles.

    Each group has the scale and the offset of the least squared error that a search finds.

    Raises:
        ValueError: `group` does not divide the inputs, or a weight is not finite.
    """
    groups = _groups(weight, group)
    codes = torch.empty((groups.shape[0], group // 2), dtype=torch.uint8)
    scales, offsets = torch.empty(groups.shape[0]), torch.empty(groups.shape[0])
    for begin in range(0, len(groups), _PIECE_GROUPS):
        its = slice(begin, begin + _PIECE_GROUPS)
        scales[its], offsets[its], nibbles = _searched(groups[its].float())
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


def _searched(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales [n], offsets [n] and codes [n, group] of `groups` [n, group], all float32."""
    low, high = groups.amin(1), groups.amax(1)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, ...] | None = None
    for part in _SHRUNK:
        scale, offset = _storable(reach * part * 2 / 15), _storable(middle - reach * part)
        for _ in range(_REFINED):
            codes = _nearest(groups, scale, offset)
            scale, offset = _least_squares(groups, codes)
        codes = _nearest(groups, scale, offset)
        error = (codes * scale[:, None] + offset[:, None] - groups).square().sum(1)
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


def _least_squares(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the offset that bring `codes` nearest to `groups`."""
    mean, mid = groups.mean(1), codes.mean(1)
    apart = codes - mid[:, None]
    spread = apart.square().sum(1)
    scale = _storable((apart * groups).sum(1) / spread.masked_fill(spread == 0, 1))
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
