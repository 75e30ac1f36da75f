"""A running regression of seconds on the parts of a step, robust against single slow steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from operator import mul

FIRST_NOISE = 0.2
"""Relative noise of a measurement, assumed at first and measured later."""
LEAST_NOISE = 0.03
NOISE_WEIGHT = 0.05
ERROR_GATE = 1.5
"""A measurement counts as if at most this many standard deviations from the prediction."""
LEAST_COEFFICIENT = 0.05
"""No coefficient falls below this share of the first value."""
SHORTEST_S = 1e-9
"""What took less was not measured."""


class Regression:
    """Coefficients for `seconds = sum(coefficient * size)`, none negative, learnt from one measurement after the other.

    Errors count as log(measured / predicted): twice as long and half as long weigh alike, as times have a long tail.
    Errors beyond a gate count as if at the gate, so that the coefficients fit about the median (Huber's estimator).
    Several errors in a row beyond the gate make the filter as uncertain as at the start. If a size does not vary, the
    size's coefficient stays.

    Args:
        coefficients: first values.
        spreads: each coefficient's own uncertainty, as a standard deviation.
        common: uncertainty of a factor that all coefficients have in common. Without either, a coefficient stays.
        change: so many measurements in a row beyond the gate, on one side, are no outliers: the machine has changed.
        drift: variance that each measurement adds to a coefficient, relative to the first value: old measurements fade.
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
        self._leasts = tuple([LEAST_COEFFICIENT * first for first in self._firsts])
        self._spreads = tuple(spreads)
        self._squares = tuple([spread**2 for spread in self._spreads])
        self._common = common * common
        self._change, self._drift_share = change, drift
        self._least_s = least_s
        self._noise = FIRST_NOISE
        self._streak = 0
        self._covariance = self._fresh()

    def seconds(self, sizes: Sequence[float]) -> float:
        total: float = sum(map(mul, self.coefficients, sizes))
        return total

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self.coefficients, self._noise, self._streak, self._covariance

    def observe(self, sizes: Sequence[float], seconds: float, known_s: float = 0.0) -> None:
        """Learn that work with these sizes took so long. Times and sizes that no measurement gives are left out.

        `known_s`: part of the seconds that other work in the step is predicted to take.
        """
        predicted = known_s + self.seconds(sizes)
        if not (SHORTEST_S <= seconds < inf and predicted < inf):  # also if a value is NaN
            return
        scale = max(predicted, self._least_s)
        shares = [size / scale for size in sizes]
        error = log(seconds / predicted) if predicted >= self._least_s else (seconds - predicted) / scale
        along, variance = self._along(shares)
        limit = ERROR_GATE * variance**0.5
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
        """The coefficients' covariance with the prediction, and the error's variance."""
        along = [sum(map(mul, row, shares)) for row in self._covariance]
        return along, sum(map(mul, along, shares)) + self._noise * self._noise

    def _changed(self, error: float, limit: float) -> bool:
        """Whether this error completes a run of errors on one side."""
        side = 0 if abs(error) <= limit else 1 if error > 0 else -1
        self._streak = self._streak + side if side * self._streak >= 0 and side else side
        if abs(self._streak) < self._change:
            return False
        self._streak = 0
        return True

    def _correct(self, along: list[float], variance: float, error: float) -> None:
        """Move the coefficients. Old measurements fade, so all become a little more uncertain.

        A coefficient that no measurement reaches becomes no more uncertain than at first.
        """
        gain = [value / variance for value in along]
        moved = [value + error * by for value, by in zip(self.coefficients, gain)]  # noqa: B905 - strict ones take long
        known = self.coefficients = tuple(map(max, self._leasts, moved))
        shared, drift = self._drift_share * self._common, self._drift_share
        covariance, most = self._covariance, self._most()
        for at, by in enumerate(gain):
            fades, cells = shared * known[at], zip(covariance[at], along, known)  # noqa: B905
            covariance[at] = row = [cell - by * other + fades * value for cell, other, value in cells]
            if row[at] < most[at]:
                row[at] += drift * most[at]

    def _most(self) -> list[float]:
        """Each coefficient's largest variance: the first variance, or more for a coefficient that has grown.

        A spread grows with its coefficient up to the coefficient's own size: a first value that is nearly zero must not
        give a variance beside which the others are lost.
        """
        known = zip(self._spreads, self._squares, self.coefficients, self._firsts, strict=True)
        return [
            max(square, min(spread * (value / first), value) ** 2) if value > first > 0.0 else square
            for spread, square, value, first in known
        ]

    def _fresh(self) -> list[list[float]]:
        most, known = self._most(), self.coefficients
        return [
            [self._common * value * other + (most[row] if at == row else 0.0) for at, other in enumerate(known)]
            for row, value in enumerate(known)
        ]
