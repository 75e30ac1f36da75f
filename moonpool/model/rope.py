"""Rotary position embeddings, with the scalings that are supported.

Source: Su et al. 2021 (RoFormer), in the half-split form of transformers' `rotate_half`; Llama-3 scaling as in
transformers' `_compute_llama3_parameters`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moonpool.checkpoint.config import ModelConfig, RopeScaling

TABLE = 8192
"""Positions whose angles are kept, from the first on: a step looks them up in a fifth of the time."""


class RopeTable:
    """Angles for one model in one element type."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config).to(device)
        self._dtype = dtype
        kept = self._computed(torch.arange(min(TABLE, config.max_position_embeddings), device=device))
        self._kept = torch.stack(kept)  # [2, positions, head_dim]: one look-up for both

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and *signed* sin for `positions` [T], each [T, head_dim], computed in float32.

        The first half of sin is negated, as `kernels.ops.rope` wants it.
        """
        # Elsewhere than on a CPU, looking at a position would wait for the device.
        if positions.device.type != "cpu" or int(positions.numpy().max()) >= self._kept.shape[1]:
            return self._computed(positions)
        cos, sin = self._kept.index_select(1, positions)
        return cos, sin

    def ahead(self, positions: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return cos and signed sin, each [N, head_dim], of `positions` [T] (on a CPU) and of those after them.

        Row `turns[i]` belongs to `positions[i]`, and as many as `steps` follow it for the next ones; `turns` [T] int64.
        """
        if int(positions.max()) + steps < self._kept.shape[1]:
            return self._kept[0], self._kept[1], positions.clone()
        later = positions[:, None] + torch.arange(steps + 1)
        return *self._computed(later.flatten()), torch.arange(len(positions)) * (steps + 1)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(self._dtype), torch.cat((-sin, sin), dim=-1).to(self._dtype)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position of each pair of elements, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "divisors":
        return frequencies / torch.tensor(scaling.divisors)
    return frequencies / scaling.factor if scaling.kind == "linear" else _llama3(frequencies, scaling)


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
