"""Tensor operations for the sampler without sorting the vocabulary and without waiting for the device.

`keep_top_k` and `keep_top_p` find the least kept weight digit by digit, ten bits at a time: non-negative floats have
the same order as their bits. `top` checks only those runs of 128 values that can hold one of the highest values.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.kernels.choice import choose


def triton_sampling(device: torch.device) -> ModuleType | None:
    """Return `kernels.triton.sampling` where Triton samples: a few launches for about a hundred of torch's."""
    if choose("sampling", device, torch.float32) != "triton":
        return None
    from moonpool.engine.kernels.triton import sampling

    return sampling


_DIGIT = 10
_DIGITS = 1 << _DIGIT
_SHIFTS = (20, 10, 0)
"""Weights are at most 1: the two highest bits are 0."""


def running_sums(values: Tensor) -> Tensor:
    """Return running sums along each row in `values` [R, n], with each value added to the sum before.

    On a GPU torch adds in this order along every dimension but the last, unless there is one row only.
    """
    rows = values.shape[0]
    columns = values.expand(2, -1) if rows == 1 else values
    return columns.t().contiguous().cumsum(0)[:, :rows].t().contiguous()


def keep_top_k(weights: Tensor, counts: Tensor) -> None:
    """Set all but the highest `counts` [R] float64 of each row's `weights` [R, n] in [0, 1] to 0.

    Among equals, the first are kept.
    """
    _keep_leading(weights, counts, by_weight=False)


def keep_top_p(weights: Tensor, shares: Tensor) -> None:
    """As `keep_top_k`, for tokens before which, in falling order, less than `shares` [R] float64 of the sum lies.

    At least one is kept.
    """
    _keep_leading(weights, shares, by_weight=True)


def _keep_leading(weights: Tensor, goals: Tensor, *, by_weight: bool) -> None:
    fused = triton_sampling(weights.device)
    if fused is not None:
        fused.keep_leading(weights, goals, by_weight=by_weight)
        return
    bits = weights.view(torch.int32)
    least, above = torch.zeros_like(bits[:, :1]), torch.zeros_like(goals)[:, None]
    for shift in _SHIFTS:
        digits = (bits >> shift) - (least << _DIGIT)
        inside = (digits >= 0) & (digits < _DIGITS)
        amounts = torch.where(inside, weights, 0.0).double() if by_weight else inside.double()
        masses = amounts.new_zeros(len(weights), _DIGITS)
        masses.scatter_add_(1, digits.clamp_(0, _DIGITS - 1).long(), amounts)
        sums = running_sums(torch.cat((above, masses.flip(1)), 1))
        if shift == _SHIFTS[0]:
            goals = (goals * sums[:, -1] if by_weight else goals)[:, None]
        # Rounding may put the goal behind all digits: then the last digit counts.
        place = (sums[:, 1:] < goals).sum(1, keepdim=True).clamp_(max=_DIGITS - 1)
        above = sums.gather(1, place)
        least = (least << _DIGIT) + (_DIGITS - 1 - place).int()
    each = least.view(torch.float32).double() if by_weight else torch.ones_like(above)
    kept = _fitting(goals, above, each).clamp_(1, weights.shape[1]).int()
    equal = bits == least
    weights.masked_fill_((bits < least) | (equal & (equal.cumsum(1, dtype=torch.int32) > kept)), 0)


def _fitting(goals: Tensor, above: Tensor, each: Tensor) -> Tensor:
    """Return how many equal weights `each` there are before which, with what is `above`, less than the goal lies."""
    count = ((goals - above) / each).ceil()
    count -= (above + (count - 1) * each >= goals).double()
    return count + (above + count * each < goals).double()


RUN = 128


def runs_of(count: int) -> int:
    """Return the runs that so many values begin."""
    return -(-count // RUN)


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` greatest values in each row of `values` [R, n], and their indices; equals by index."""
    if values.device.type != "cpu" or not 0 < 2 * count < values.shape[1]:
        return _top_by_sorting(values, count)
    # On a CPU `topk` takes a third to a tenth of the time, but has equals in any order, also of the last and the next.
    likely = values.topk(count + 1)
    indices = likely.indices[:, :count].sort().values
    found, order = values.gather(1, indices).sort(descending=True, stable=True)
    indices = indices.gather(1, order)
    unsure = (~(likely.values[:, count - 1] > likely.values[:, count])).nonzero()[:, 0]
    if len(unsure):
        found[unsure], indices[unsure] = _top_by_sorting(values[unsure], count)
    return found, indices


def _top_by_sorting(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    size = values.shape[1]
    if 2 * count >= runs_of(size):
        ordered = values.sort(descending=True, stable=True)
        return ordered.values[:, :count], ordered.indices[:, :count]
    padded = functional.pad(values, (0, -size % RUN), value=-torch.inf)
    runs = padded.view(values.shape[0], -1, RUN)
    chosen = runs.amax(-1).sort(descending=True, stable=True).indices[:, :count].sort().values
    found = runs.gather(1, chosen[:, :, None].expand(-1, -1, RUN)).flatten(1)
    ordered = found.sort(descending=True, stable=True)
    at = ordered.indices[:, :count]
    return ordered.values[:, :count], chosen.gather(1, at // RUN) * RUN + at % RUN
