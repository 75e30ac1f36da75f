"""Weight filters: which tokens stay in the draw, for all rows at once. `FILTERS` has their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from moonpool.base.sampling_params import SamplingParams
from moonpool.engine.kernels.to_device import send_to_device
from moonpool.engine.sampling.base import WeightFilter
from moonpool.engine.sampling.ops import keep_top_k, keep_top_p


class _LeadingTokens:
    """Keeps the tokens with highest weight up to a goal for each row.

    Args:
        goals: by row, for rows with a goal.
        rows: number of all rows.
        device: the weights' device.
    """

    def __init__(self, goals: Mapping[int, float], rows: int, device: torch.device) -> None:
        self._rows = None if len(goals) == rows else send_to_device(torch.tensor(list(goals)), device)
        self._goals = send_to_device(torch.tensor(list(goals.values()), dtype=torch.float64), device)

    def __call__(self, logits: Tensor, weights: Tensor) -> None:
        if self._rows is None:
            self._keep(weights, self._goals)
            return
        part = weights[self._rows]
        self._keep(part, self._goals)
        weights.index_copy_(0, self._rows, part)

    def _keep(self, weights: Tensor, goals: Tensor) -> None:
        """Set all but each row's leading weights to 0; `goals` [R] float64."""
        raise NotImplementedError


class TopK(_LeadingTokens):
    """Keeps the `top_k` tokens with the highest weights; equal weights count in token order."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Self | None:
        goals = {row: wanted.top_k for row, wanted in enumerate(params) if 0 < wanted.top_k < vocab}
        return cls(goals, len(params), device) if goals else None

    def _keep(self, weights: Tensor, goals: Tensor) -> None:
        keep_top_k(weights, goals)


class TopP(_LeadingTokens):
    """Keeps tokens, in falling weight order, before which less than `top_p` of the sum lies."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Self | None:
        goals = {row: wanted.top_p for row, wanted in enumerate(params) if wanted.top_p < 1}
        return cls(goals, len(params), device) if goals else None

    def _keep(self, weights: Tensor, goals: Tensor) -> None:
        keep_top_p(weights, goals)


class MinP:
    """Keeps tokens with a weight of at least `min_p`: the highest weight is 1."""

    def __init__(self, least: Tensor) -> None:
        self._least = least  # [R, 1] float32

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Self | None:
        if not any(wanted.min_p for wanted in params):
            return None
        return cls(send_to_device(torch.tensor([wanted.min_p for wanted in params])[:, None], device))

    def __call__(self, logits: Tensor, weights: Tensor) -> None:
        weights.masked_fill_(weights < self._least, 0)


FILTERS: tuple[type[WeightFilter], ...] = (TopK, TopP, MinP)
"""In the order in which they are applied."""
