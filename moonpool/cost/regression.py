"""A linear model of seconds that follows measurements: a Kalman filter that neither outliers nor noise mislead."""

from collections.abc import Sequence
from math import inf, log
from operator import mul

FIRST_NOISE = 0.2
"""Relative noise of a measurement that is assumed at first; then it is measured."""
LEAST_NOISE = 0.03
NOISE_WEIGHT = 0.05
GATE = 1.5
"""A measurement counts as if it were at most so many standard deviations from its prediction."""
LEAST_SHARE = 0.05
"""No coefficient falls below this share of its first value."""
SHORTEST_S = 1e-9
"""What took less was not measured."""


class Regression:
    """Coefficients of `seconds = sum(coefficient * size)`, none negative, by measurements one after the other.

    Errors count as logarithms of measured over predicted: twice as long and half as long weigh alike, as times have a
    long tail. Beyond a gate they count as if they were at it, so that the coefficients are about those of a median
    (Huber's estimator). Several in a row beyond the gate make the filter as uncertain as at its start. A size that does
    not vary leaves its coefficient where it was.

    Args:
        coefficients: first ones.
        spreads: how uncertain each is by itself, as a standard deviation.
        common: how uncertain the factor is that all of them have in common. Without either a coefficient stays.
        change: so many measurements in a row beyond the gate, on one side, are no outliers: what was learnt before is
            not true any more.
        drift: variance of a coefficient that each measurement adds, as a share of its first: old measurements fade.
        least_s: errors of shorter predictions are relative to so many seconds, and no logarithms.
    """

    __slots__ = (
        "_change",
        "_common",
        "_covariance",
        "_drift_share",
        "_firsts",
        "_least_s",
        "_leasts",
        "_noise",
        "_spreads",
        "_squares",
        "_streak",
        "coefficients",
    )

    def __init__(
        self,
        coefficients: Sequence[float],
        spreads: Sequence[float],
        *,
        common: float = 0.0,
        change: int = 4,
        drift: float = 5e-4,
        least_s: float = 1e-6,
    ) -> None:
        self.coefficients = self._firsts = tuple(coefficients)
        self._leasts = tuple([LEAST_SHARE * first for first in self._firsts])
        self._spreads = tuple(spreads)
        self._squares = tuple([spread**2 for spread in self._spreads])
        self._common = common * common
        self._change, self._drift_share = change, drift
        self._least_s = least_s
        self._noise = FIRST_NOISE
        self._streak = 0
        self._covariance = self._fresh()

    def seconds(self, sizes: Sequence[float]) -> float:
        """The prediction."""
        total: float = sum(map(mul, self.coefficients, sizes))
        return total

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self.coefficients, self._noise, self._streak, self._covariance

    def observe(self, sizes: Sequence[float], seconds: float, known_s: float = 0.0) -> None:
        """Learns that something of these sizes took so long. Times and sizes that no measurement gives are left out.

        `known_s` of the seconds are foreseen by something else.
        """
        predicted = known_s + self.seconds(sizes)
        if not (SHORTEST_S <= seconds < inf and predicted < inf):  # also where one of them is NaN
            return
        scale = max(predicted, self._least_s)
        shares = [size / scale for size in sizes]
        error = log(seconds / predicted) if predicted >= self._least_s else (seconds - predicted) / scale
        along, variance = self._along(shares)
        limit = GATE * variance**0.5
        if self._changed(error, limit):
            self._covariance = self._fresh()
            along, variance = self._along(shares)
            error = (seconds - predicted) / scale  # by which the coefficients are to grow
        else:
            error = min(max(error, -limit), limit)
        noise = self._noise
        noise += NOISE_WEIGHT * (1.25 * min(abs(error), 3.0 * noise) - noise)
        self._noise = max(noise, LEAST_NOISE)
        self._correct(along, variance, error)

    def _along(self, shares: list[float]) -> tuple[list[float], float]:
        """Covariance of the coefficients with the prediction, and the variance of an error."""
        along = [sum(map(mul, row, shares)) for row in self._covariance]
        return along, sum(map(mul, along, shares)) + self._noise * self._noise

    def _changed(self, error: float, limit: float) -> bool:
        """Whether this error is one of too many on one side."""
        side = 0 if abs(error) <= limit else 1 if error > 0 else -1
        self._streak = self._streak + side if side * self._streak >= 0 and side else side
        if abs(self._streak) < self._change:
            return False
        self._streak = 0
        return True

    def _correct(self, along: list[float], variance: float, error: float) -> None:
        """Moves the coefficients. Old measurements fade, so all become a little more uncertain.

        What no measurement tells of does not become more uncertain than it was at first.
        """
        gain = [one / variance for one in along]
        moved = [one + error * by for one, by in zip(self.coefficients, gain)]  # noqa: B905 - strict ones take long
        known = self.coefficients = tuple(map(max, self._leasts, moved))
        shared, drift = self._drift_share * self._common, self._drift_share
        covariance, most = self._covariance, self._most()
        for at, by in enumerate(gain):
            fades, cells = shared * known[at], zip(covariance[at], along, known)  # noqa: B905
            covariance[at] = row = [cell - by * other + fades * one for cell, other, one in cells]
            if row[at] < most[at]:
                row[at] += drift * most[at]

    def _most(self) -> list[float]:
        """The largest variance of each coefficient by itself: as at the start, more where it has grown."""
        known = zip(self._spreads, self._squares, self.coefficients, self._firsts, strict=True)
        return [(spread * (one / first)) ** 2 if one > first > 0.0 else square for spread, square, one, first in known]

    def _fresh(self) -> list[list[float]]:
        most, known = self._most(), self.coefficients
        return [
            [self._common * one * other + (most[row] if at == row else 0.0) for at, other in enumerate(known)]
            for row, one in enumerate(known)
        ]
