"""Products with packed weights in plain torch: their arithmetic, which native kernels keep to the bit."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

#: Inputs of a row that share a scale in products with packed weights.
CHUNK = 32
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Floats of 8 bits that products read as they are stored."""


class PackedTensor(Protocol):
    """A packed weight [outputs, inputs]: `moonpool.engine.weights.packed.PackedWeight` says what the fields are."""

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""
        ...

    @property
    def codes(self) -> Tensor:
        """uint8 [outputs, inputs], or [outputs, inputs / 2] of nibbles."""
        ...

    @property
    def bits(self) -> int: ...

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        ...

    @property
    def scales(self) -> Tensor:
        """[outputs, inputs / group]."""
        ...

    @property
    def zero(self) -> int:
        """The code of 0."""
        ...

    @property
    def offsets(self) -> Tensor | None:
        """[outputs, inputs / group]."""
        ...

    @property
    def values(self) -> Tensor | None:
        """Table of values by code."""
        ...

    @property
    def floats(self) -> bool:
        """Whether codes stand for floats, which multiply rows as they are: see `reads_bytes`."""
        ...

    @property
    def units(self) -> Tensor | None:
        """[outputs, blocks], what 1 stands for in scales of one byte."""
        ...

    @property
    def offset_units(self) -> Tensor | None:
        """[outputs, blocks], what 1 stands for in offsets of one byte."""
        ...


def float8_of(values: Tensor) -> torch.dtype | None:
    """Return the float of 8 bits whose numbers a table [256] has by code, NaN among them; None: none."""
    for dtype in FLOATS8:
        if torch.equal(float8_table(dtype).view(torch.int32), values.cpu().view(torch.int32)):
            return dtype
    return None


def float8_table(dtype: torch.dtype) -> Tensor:
    """Return the numbers of a float of 8 bits by code, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def reads_bytes(values: Tensor | None) -> bool:
    """Tell whether products read rows as bytes, for codes with this table of values: all but tables of floats."""
    if values is None:
        return True
    whole = bool((values == values.round()).all()) and float(values.min()) >= -128 and float(values.max()) <= 127
    return len(values) == 16 and whole


def byte_codes(weight: PackedTensor) -> Tensor:
    """Return the codes one a byte, uint8 [outputs, inputs]."""
    codes = weight.codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1) if weight.bits == 4 else codes


def in_units(numbers: Tensor, units: Tensor | None) -> Tensor:
    """Return scales or offsets [outputs, groups] as float32, from whole numbers of `units` [outputs, blocks] if any."""
    wide = numbers.float()
    return wide if units is None else wide * units.float().repeat_interleave(wide.shape[1] // units.shape[1], 1)


def bytes_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [M, K] as products with packed weights read them: whole numbers -127 to 127, and scales [M, K / 32].

    Both are float32. A chunk with a number that is not finite has numbers of 0, and a scale that is not finite.
    """
    chunks = x.float().view(x.shape[0], -1, CHUNK)
    most = chunks.abs().amax(-1, keepdim=True)
    some = (most > 1e-30) & (most < torch.inf)
    scales = most / 127
    numbers = torch.where(some, chunks / scales, 0).round()
    return numbers.flatten(1), scales.squeeze(-1)


def packed_linear(
    x: Tensor,  # [M, K]
    weight: PackedTensor,  # [N, K]
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N], contiguous
) -> None:
    """Write x @ weight.T + bias, with `x` in bytes unless codes stand for floats: native kernels' very arithmetic.

    Sums over a chunk, or over half a chunk if groups are so small, are whole numbers. The sums are added in order in
    float32, each multiplied by both scales' product, as on a processor with fused multiplication and addition. Slow.
    """
    outputs, inputs = weight.shape
    part = min(weight.group, CHUNK)
    codes = byte_codes(weight)
    if weight.floats:
        assert weight.values is not None
        total = _float_sums(x.float(), weight.values[codes.long()], in_units(weight.scales, None), part, weight.group)
        out.copy_(total if bias is None else total + bias.float())
        return
    whole = codes.float() - weight.zero if weight.values is None else weight.values[codes.long()]
    scales_of = in_units(weight.scales, weight.units)
    offsets_of = None if weight.offsets is None else in_units(weight.offsets, weight.offset_units)
    numbers, scales = bytes_of_rows(x)
    total = torch.zeros(x.shape[0], outputs)
    for begin in range(0, inputs, part):
        some, row_scales = numbers[:, begin : begin + part], scales[:, begin // CHUNK, None]
        sums = some @ whole[:, begin : begin + part].t()
        group = begin // weight.group
        both = row_scales * scales_of[:, group]
        total = (total.double() + sums.double() * both.double()).float()
        if offsets_of is not None:
            more = row_scales * some.sum(-1, keepdim=True)
            total = (total.double() + more.double() * offsets_of[:, group].double()).float()
    out.copy_(total if bias is None else total + bias.float())


def _float_sums(x: Tensor, values: Tensor, scales: Tensor, part: int, group: int) -> Tensor:
    """Return sums [M, N]: over `part` inputs in order, each sum times the group's scale added in order."""
    total = torch.zeros(x.shape[0], values.shape[0], dtype=torch.float64)
    for begin in range(0, x.shape[1], part):
        sums = torch.zeros_like(total)
        for k in range(begin, begin + part):
            sums = (sums + x[:, k, None].double() * values[:, k].double()).float().double()
        total = (total + sums * scales[:, begin // group].double()).float().double()
    return total.float()
