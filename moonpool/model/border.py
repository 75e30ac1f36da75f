"""Which weights are the first in falling order, up to a number or a share of their sum: no sort, no look at the host.

The bits of floats that are not negative have the floats' order. So the border's weight is found digit by digit, ten
bits at a time: weights that begin as it does are added up by their next digit, and the digit is the one at which the
sum from the highest down reaches the goal. What is added up for one digit has one exponent: these sums, in float64, are
exact, in whatever order a device adds. Sums over digits have one order (`running`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_DIGIT = 10
_DIGITS = 1 << _DIGIT
_SHIFTS = (20, 10, 0)
"""Weights are at most 1: the two highest bits are 0."""


def running(values: Tensor) -> Tensor:
    """Return the sums along each row of `values` [R, n], with each value added to the sum of those before it.

    On a GPU torch adds in this order along every dimension but the last, unless there is one row only.
    """
    rows = values.shape[0]
    columns = values.expand(2, -1) if rows == 1 else values
    return columns.t().contiguous().cumsum(0)[:, :rows].t().contiguous()


def keep_number(weights: Tensor, counts: Tensor) -> None:
    """Set all but the highest `counts` [R] float64 of each row's `weights` [R, n] in [0, 1] to 0.

    Of equal ones the first are kept.
    """
    _keep(weights, counts, by_weight=False)


def keep_share(weights: Tensor, shares: Tensor) -> None:
    """As `keep_number`, of those before which, in falling order, less than `shares` [R] float64 of the sum lies.

    At least one is kept.
    """
    _keep(weights, shares, by_weight=True)


def _keep(weights: Tensor, goals: Tensor, *, by_weight: bool) -> None:
    bits = weights.view(torch.int32)
    least, above = torch.zeros_like(bits[:, :1]), torch.zeros_like(goals)[:, None]
    for shift in _SHIFTS:
        digits = (bits >> shift) - (least << _DIGIT)
        inside = (digits >= 0) & (digits < _DIGITS)
        amounts = torch.where(inside, weights, 0.0).double() if by_weight else inside.double()
        masses = amounts.new_zeros(len(weights), _DIGITS)
        masses.scatter_add_(1, digits.clamp_(0, _DIGITS - 1).long(), amounts)
        sums = running(torch.cat((above, masses.flip(1)), 1))
        if shift == _SHIFTS[0]:
            goals = (goals * sums[:, -1] if by_weight else goals)[:, None]
        # Rounding may put the goal behind all of them: then it is the last digit.
        place = (sums[:, 1:] < goals).sum(1, keepdim=True).clamp_(max=_DIGITS - 1)
        above = sums.gather(1, place)
        least = (least << _DIGIT) + (_DIGITS - 1 - place).int()
    each = least.view(torch.float32).double() if by_weight else torch.ones_like(above)
    kept = _fitting(goals, above, each).clamp_(1, weights.shape[1]).int()
    equal = bits == least
    weights.masked_fill_((bits < least) | (equal & (equal.cumsum(1, dtype=torch.int32) > kept)), 0)


def _fitting(goals: Tensor, above: Tensor, each: Tensor) -> Tensor:
    """How many equal weights `each` there are before which, with what is `above`, less than the goal lies."""
    count = ((goals - above) / each).ceil()
    count -= (above + (count - 1) * each >= goals).double()
    return count + (above + count * each < goals).double()
