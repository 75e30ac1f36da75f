"""Products with packed weights in plain torch: their arithmetic, which native kernels keep to the bit."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

#: Inputs of a row that share a scale in products with packed weights.
CHUNK = 32


class PackedTensor(Protocol):
    """A packed weight [outputs, inputs]: `moonpool.models.packed.PackedWeight` says what the fields are."""

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""
        ...

    @property
    def codes(self) -> Tensor:
        """uint8 [outputs, inputs], or [outputs, inputs / 2] of nibbles."""
        ...

    @property
    def bits(self) -> int:
        """Of a code."""
        ...

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
    def units(self) -> Tensor | None:
        """[outputs, blocks], what 1 stands for in scales of one byte."""
        ...

    @property
    def offset_units(self) -> Tensor | None:
        """[outputs, blocks], what 1 stands for in offsets of one byte."""
        ...


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
    weight: PackedTensor,  # [N, K]; a table of values has whole numbers
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N], contiguous
) -> None:
    """Write x @ weight.T + bias, `x` in bytes: the very arithmetic of native kernels.

    Sums over a chunk, or over half a chunk if groups are so small, are whole numbers. The sums are added in order in
    float32, each multiplied by both scales' product, as on a processor with fused multiplication and addition. Slow.
    """
    outputs, inputs = weight.shape
    part = min(weight.group, CHUNK)
    codes = byte_codes(weight)
    whole = codes.float() - weight.zero if weight.values is None else weight.values[codes.long()]
    scales_of = in_units(weight.scales, weight.units)
    offsets_of = None if weight.offsets is None else in_units(weight.offsets, weight.offset_units)
    numbers, scales = bytes_of_rows(x)
    total = torch.zeros(x.shape[0], outputs)
    for begin in range(0, inputs, part):
        some, its = numbers[:, begin : begin + part], scales[:, begin // CHUNK, None]
        sums = some @ whole[:, begin : begin + part].t()
        group = begin // weight.group
        both = its * scales_of[:, group]
        total = (total.double() + sums.double() * both.double()).float()
        if offsets_of is not None:
            more = its * some.sum(-1, keepdim=True)
            total = (total.double() + more.double() * offsets_of[:, group].double()).float()
    out.copy_(total if bias is None else total + bias.float())
