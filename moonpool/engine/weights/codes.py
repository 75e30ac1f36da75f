"""What weight formats share: codes and scales as `PackedWeight` has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moonpool.engine.weights.packed import PackedWeight

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The values of a 4-bit float, E2M1 in the OCP Microscaling specification."""


def packed_weight(
    codes: Tensor,
    bits: int,
    scales: Tensor | WholeScales,
    zero: int = 0,
    offsets: Tensor | WholeScales | None = None,
    values: Tensor | None = None,
) -> PackedWeight | None:
    """Return the weight from codes, one a byte; None: the scales' groups differ in size."""
    codes, (scales, units) = codes.flatten(1), stored_scales(scales)
    inputs, groups = codes.shape[1], scales.shape[1]
    group = inputs // groups
    if inputs % groups or inputs % 2 or (group % 16 and groups > 1):
        return None
    added, offset_units = (None, None) if offsets is None else stored_scales(offsets)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return PackedWeight(codes, bits, group, scales, zero, added, values, units, offset_units)


class WholeScales(NamedTuple):
    """Whole numbers [outputs, ..., groups], -128 to 127, of units [outputs, blocks, 1] that float16 holds."""

    numbers: Tensor
    units: Tensor


def stored_scales(scales: Tensor | WholeScales) -> tuple[Tensor, Tensor | None]:
    """Return scales [outputs, groups] in the narrowest type that holds them, and their units."""
    if isinstance(scales, WholeScales):
        return scales.numbers.flatten(1).to(torch.int8), scales.units.flatten(1).half()
    scales = scales.flatten(1)
    half = scales.half()
    return (half if torch.equal(half.float(), scales.float()) else scales.float()), None


def scale_numbers(stored: Tensor) -> Tensor:
    """Return scales as float32; bytes are powers of two (E8M0)."""
    if stored.dtype == torch.uint8:
        return torch.ldexp(torch.ones(stored.shape), stored.int() - 127)
    return stored.float()
