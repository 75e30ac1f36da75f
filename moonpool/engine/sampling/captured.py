"""Plain sampling as captured work: what rows want lies in buffers, so that the same work serves every step.

Rows are plain if nothing but logits, temperature, filters and seed decides. Tokens are those of
`moonpool.engine.sampling.torch_sampler`, to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moonpool.base.sampling_params import SampleSpec
from moonpool.engine.kernels.to_device import send_to_device, send_together
from moonpool.engine.sampling.ops import keep_top_k, keep_top_p
from moonpool.engine.sampling.random_sampler import LEAST_TEMPERATURE, DrawNumbers, pick, scale_of, weights_of
from moonpool.engine.sampling.torch_sampler import highest_of

Choice = Literal["greedy", "drawn", "filtered"]
"""How a step's rows are chosen: none is drawn; rows are drawn from all tokens; rows may have filters."""
MAX_ENDS = 15
"""End tokens of a row whose tokens captured work chooses, at most."""
_NO_ROW, _NO_TOKEN = -1, -2
CHOICES: tuple[Choice, ...] = ("greedy", "drawn", "filtered")


def is_plain(spec: SampleSpec) -> bool:
    """Whether captured work can choose the row's tokens in all steps of a run."""
    params = spec.params
    processed = params.penalised or params.logit_bias or params.response_format or spec.banned
    more = spec.samples != 1 or spec.best or params.logprobs is not None or params.embedding
    return not processed and not more and spec.forced is None


class PlainRows:
    """What the rows of a run want, on the host.

    Args:
        specs: each row's, for the run's first step; `is_plain`.
        ends: each row's end tokens, `MAX_ENDS` at most.
        vocab: tokens of the model.
    """

    def __init__(self, specs: Sequence[SampleSpec], ends: Sequence[Collection[int]], vocab: int) -> None:
        params = [spec.params for spec in specs]
        drawn = np.array([each.temperature >= LEAST_TEMPERATURE for each in params])
        limits = np.array([(each.top_k, each.top_p, each.min_p) for each in params], np.float64).T.copy()
        limits[0, limits[0] >= vocab] = 0
        limits[1, limits[1] >= 1] = 0
        limits[:, ~drawn] = 0
        scales = [scale_of(each) if hot else 0.0 for each, hot in zip(params, drawn, strict=True)]
        self.choice: Choice = "greedy" if not drawn.any() else "filtered" if (limits > 0).any() else "drawn"
        self.limits, self.scales = torch.from_numpy(limits), torch.tensor(scales, dtype=torch.float32)
        sets = dict[frozenset[int], int]()  # rows mostly have the same ends
        numbers = [sets.setdefault(frozenset(row), len(sets)) for row in ends]
        padded = [[_NO_TOKEN, *row, *[_NO_ROW] * (MAX_ENDS - len(row))] for row in sets]
        self.ends = torch.tensor(padded, dtype=torch.int32)[numbers]
        self._draws = DrawNumbers([spec.seed for spec in specs], [spec.position for spec in specs])

    def numbers(self, later: int) -> Tensor:
        """Return each row's number in [0, 1), float64 [R], so many steps after the run's first."""
        return torch.from_numpy(self._draws.at(later))


class CapturedSampling:
    """Chooses the tokens of up to `rows` rows.

    Args:
        rows: most rows.
        device: the logits' device.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._limits = torch.zeros(3, rows, dtype=torch.float64, device=device)  # top_k, top_p, min_p; 0: none
        self._scales = torch.zeros(rows, dtype=torch.float32, device=device)  # 0: the highest logit is chosen
        self._numbers = torch.zeros(rows, dtype=torch.float64, device=device)
        self._each = torch.arange(rows, device=device)
        self._ends = torch.full((rows, 1 + MAX_ENDS), _NO_ROW, dtype=torch.int32, device=device)

    def begin(self, rows: PlainRows) -> None:
        """Copy what a run's rows want to the device, within work of a stream."""
        self._ends.fill_(_NO_ROW)
        self._ends[: len(rows.ends)].copy_(send_to_device(rows.ends, self._ends.device))
        if rows.choice != "greedy":
            limits, scales = send_together((rows.limits, rows.scales), self._numbers.device)
            self._limits[:, : len(scales)].copy_(limits)
            self._scales[: len(scales)].copy_(scales)

    def set_numbers(self, numbers: Tensor) -> None:
        """Copy the next step's numbers to the device, within work of a stream."""
        self._numbers[: len(numbers)].copy_(send_to_device(numbers, self._numbers.device))

    def choose(self, choice: Choice, logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return tokens [R] int64 and highest logits [R] of `logits` [R, vocab] float32, which are overwritten.

        The first row is number `first`. If a row's highest logit is not finite, the row's token means nothing.
        """
        highest, tokens = highest_of(logits)
        if choice == "greedy":
            return tokens, highest
        rows = slice(first, first + len(logits))
        scales = self._scales[rows]
        logits.masked_fill_(~torch.isfinite(highest)[:, None], 0)
        weights = weights_of(logits, scales)
        if choice == "filtered":
            top_k, top_p, min_p = self._limits[:, rows]
            for goals, keep in ((top_k, keep_top_k), (top_p, keep_top_p)):
                kept = weights.clone()
                keep(kept, torch.where(goals > 0, goals, 1.0))
                weights = torch.where(goals[:, None] > 0, kept, weights)
            weights.masked_fill_(weights < min_p[:, None].float(), 0)
        drawn = pick(weights, self._each[: len(logits)], self._numbers[rows])
        return torch.where(scales > 0, drawn, tokens), highest

    def over(self, tokens: Tensor, highest: Tensor) -> Tensor:
        """Return whether a run ends with these tokens, bool []: one ends its row's answer, or is none.

        Args:
            tokens: of all rows, int32 [R].
            highest: logits of these rows, float32 [R].
        """
        tokens = torch.where(highest * 0 == 0, tokens, _NO_TOKEN)
        return (self._ends[: len(tokens)] == tokens[:, None]).any()
