"""Torch's operations with bits that depend on a row alone, not on the row's place in the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

FIXED_ROWS = 32
"""Rows of oneDNN's products in deterministic mode: in this shape, a row's bits depend neither on its place nor on the
others (a test holds this; in other shapes oneDNN may divide the sums in another way). Native products need no rule.
"""
_VECTOR = 64
"""Elements of which torch's operations on vectors take a whole number."""
_ONE_THREAD = (1 << 15) - 1
"""Elements that torch does not divide among threads."""


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function` of the rows of `x` [T, ...], FIXED_ROWS at a time, the last ones filled up with zeros."""
    filled = -x.shape[0] % FIXED_ROWS
    padded = torch.cat((x, x.new_zeros((filled, *x.shape[1:])))) if filled else x
    return torch.cat([function(tile) for tile in torch.split(padded, FIXED_ROWS)])[: x.shape[0]]


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor, *, deterministic: bool = True) -> Tensor:
    """Return `function` of each element of `x` [T, ...].

    On a CPU, torch computes the last elements of a thread's part one by one, with other bits than vectors give.
    `deterministic`: the bits depend on the row alone, not on the row's place.
    """
    if not deterministic or x.device.type != "cpu" or not x.numel():
        return function(x)
    flat = x.flatten(1)
    width = flat.shape[1]
    wide = functional.pad(flat, (0, -width % _VECTOR))
    parts = [function(part) for part in torch.split(wide, max(1, _ONE_THREAD // wide.shape[1]))]
    return torch.cat(parts)[:, :width].reshape(x.shape)
