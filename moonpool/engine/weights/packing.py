"""Packing dense weights: codes of 4 or 8 bits for what a checkpoint holds as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from moonpool.engine.kernels.packed import CHUNK
from moonpool.engine.weights.packed import PackedWeight

_PIECE_GROUPS = 1 << 12  # groups that are packed at a time stay in the cache
_SHRUNK = tuple(1 - 0.025 * step for step in range(13))  # parts of a group's range that a search tries
_LEAST = 1e-3  # what an input's error counts at least, of the mean
_REFINED = 2  # least squares and codes in turn, so many times for each start


class Packer(Protocol):
    """Packs a dense weight."""

    def __call__(self, weight: Tensor, group: int = 32, importance: Tensor | None = None) -> PackedWeight:
        """Return a dense `weight` [outputs, inputs] in codes; errors of inputs count as `importance` [inputs] says."""
        ...


def packed_if_it_fits(weight: Tensor, pack: Packer | None, importance: Tensor | None = None) -> Tensor | PackedWeight:
    """Return `weight` packed, or unchanged if `pack` is None or the inputs are no multiple of a product's chunk."""
    return weight if pack is None or weight.shape[1] % CHUNK else pack(weight, importance=importance)


def pack_int8(weight: Tensor, group: int = 32, importance: Tensor | None = None) -> PackedWeight:
    """Return a dense `weight` [outputs, inputs] in bytes, each the nearest multiple of the group's scale.

    `importance` changes nothing: each code is the nearest.

    Raises:
        ValueError: `group` does not divide the inputs, or a weight is not finite.
    """
    del importance
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
        span = slice(begin, begin + _PIECE_GROUPS)
        piece = groups[span].float()
        counted = torch.ones(()) if counts is None else counts[torch.arange(begin, begin + len(piece)) % len(counts)]
        scales[span], offsets[span], nibbles = _searched(piece, counted)
        pairs = nibbles.to(torch.uint8).view(len(nibbles), -1, 2)
        codes[span] = pairs[..., 0] | pairs[..., 1] << 4
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
            found = (error, scale, offset, codes)
            best = tuple(torch.where(where, new, old) for where, new, old in zip(kept, found, best, strict=True))
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


PACKERS: Mapping[str, Packer] = {"int8": pack_int8, "int4": pack_int4}
"""What packs a dense weight, by `quantization`."""
