"""Rotary position embeddings.

Source: Su et al. 2021 (RoFormer), in the half-split form of transformers' `rotate_half`; Llama-3 scaling as in
transformers' `_compute_llama3_parameters`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moonpool.base.families.spec import RopeScaling, RopeSpec
from moonpool.engine.kernels.deterministic import elementwise

TABLE = 8192
"""Leading positions with kept angles: a step's look-up takes a fifth of the time."""


class RopeTable:
    """Angles for one rotary embedding table in one element type, for at least `positions` positions."""

    def __init__(self, rope: RopeSpec, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._frequencies = inverse_frequencies(rope).to(device)
        self._dtype = dtype
        kept = self._computed(torch.arange(min(TABLE, positions), device=device))
        self._kept = torch.stack(kept)  # [2, positions, width]: one look-up for both

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and *signed* sin for `positions` [T], each [T, width], computed in float32.

        The first half of sin is negated, as `moonpool.engine.kernels.ops.rope` requires.
        """
        # Elsewhere than on a CPU, looking at a position would wait for the device.
        if positions.device.type != "cpu" or int(positions.numpy().max()) >= self._kept.shape[1]:
            return self._computed(positions)
        cos, sin = self._kept.index_select(1, positions)
        return cos, sin

    def angles_of(self, positions: Tensor, components: Tensor) -> tuple[Tensor, Tensor]:
        """As `angles`, of tokens with several positions [C, T]: each pair of elements turns by one of them.

        `components` [width / 2] int64: by which.
        """
        each = [self.angles(row.contiguous()) for row in positions]
        chosen = torch.cat((components, components)).to(positions.device)[None, None]
        cos, sin = (
            torch.stack(parts).gather(0, chosen.expand(1, *parts[0].shape))[0] for parts in zip(*each, strict=True)
        )
        return cos, sin

    def ahead(self, positions: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return cos and signed sin, each [N, width], for `positions` [T] (on a CPU) and the positions after them.

        Row `turns[i]` belongs to `positions[i]`, and up to `steps` rows follow for the next positions; `turns` [T]
        int64.
        """
        if int(positions.max()) + steps < self._kept.shape[1]:
            return self._kept[0], self._kept[1], positions.clone()
        later = positions[:, None] + torch.arange(steps + 1)
        return *self._computed(later.flatten()), torch.arange(len(positions)) * (steps + 1)

    def query_factors(self, positions: Tensor) -> Tensor | None:
        """Return what queries at `positions` [T] are multiplied with, [T, 1, 1]; None if 1."""
        if self._rope.by_length is None:
            return None
        beta, length = self._rope.by_length
        positions = positions + self._rope.length_from
        steps = torch.div(positions, length, rounding_mode="floor").float()
        factors = 1 + beta * elementwise(torch.log1p, steps[:, None, None])
        return factors.to(self._dtype)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = (elementwise(turn, angles) * self._rope.magnitude for turn in (torch.cos, torch.sin))
        return torch.cat((cos, cos), dim=-1).to(self._dtype), torch.cat((-sin, sin), dim=-1).to(self._dtype)


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Return the angle per position for each pair of elements, float32 [width / 2]."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.int64).float() / rope.width
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "divisors":
        return frequencies / torch.tensor(scaling.divisors)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return (_yarn if scaling.kind == "yarn" else _llama3)(frequencies, scaling)


def _yarn(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep the frequencies for the ramp's first pairs, divide those for the last pairs by `factor`."""
    low, high = scaling.ramp
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the low frequencies down by `factor`, keep the high ones, go over smoothly between."""
    original = scaling.original_max_position_embeddings
    low_wavelength = original / scaling.low_freq_factor
    high_wavelength = original / scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    slowed = torch.where(wavelength > low_wavelength, frequencies / scaling.factor, frequencies)
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * slowed / scaling.factor + smooth * slowed
    medium = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(medium, between, slowed)
