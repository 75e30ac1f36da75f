"""Time per output token: forecasts, and what answers took."""

from typing import NamedTuple

from moonpool.base.scheduling.regression import Regression
from moonpool.conductor.core.prefill_corrections import CHANGE_SAMPLES, LEARNING_DRIFT, MIN_ERROR_S

LOAD_BUCKETS = 5
"""Load buckets by prompts at the prefill instance: 0, 1, 2-3, 4-7, 8 and more. Each is learned apart."""


def load_bucket(others: int) -> int:
    """Return the load bucket of a prefill instance with `others` prompts."""
    return min(others.bit_length(), LOAD_BUCKETS - 1)


TPOT_SPREAD = 1.0
"""Standard deviation of the steps that are added, before anything was measured."""


class TpotForecast(NamedTuple):
    """Forecast of an answer's time per output token (TPOT), seconds.

    Attributes:
        tbt_s: time between tokens that decode predicted when reserving memory; 0 = none.
        tpot_s: mean over the answer; 0 = no forecast.
        others: prompts that were at the prefill instance when the answer was placed.
    """

    tbt_s: float = 0.0
    tpot_s: float = 0.0
    others: int = 0


NO_TPOT_FORECAST = TpotForecast()


class TpotModel:
    """By how much answers take longer at a decode instance than their reserved steps, as learnt.

    The time between tokens at the reservation follows the load of the moment. Later load adds a multiple of `step_s`,
    learnt for each load bucket. A bucket begins with the nearest bucket's multiple, the first bucket with 0.

    Args:
        step_s: seconds for a step over one sequence, as reported at the start.
    """

    __slots__ = ("_added", "_step_s")

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._added: list[Regression | None] = [None] * LOAD_BUCKETS

    def forecast(self, tbt_s: float, others: int) -> TpotForecast:
        """Forecast for an answer with reserved steps of `tbt_s`, and `others` prompts at the prefill instance."""
        return TpotForecast(tbt_s, tbt_s + self._steps(others) * self._step_s, others)

    def observe(self, foreseen: TpotForecast, steps: int, seconds: float) -> None:
        """Learn from the seconds between an answer's first token and the last token, `steps` later."""
        bucket = load_bucket(foreseen.others)
        learnt = self._added[bucket]
        if learnt is None:
            first = (self._steps(foreseen.others),)  # the nearest bucket knows more than nothing
            learnt = Regression(first, (TPOT_SPREAD,), change=CHANGE_SAMPLES, drift=LEARNING_DRIFT, least_s=MIN_ERROR_S)
            self._added[bucket] = learnt
        learnt.observe((steps * self._step_s,), seconds, steps * foreseen.tbt_s)

    def _steps(self, others: int) -> float:
        bucket = load_bucket(others)
        known = [(abs(other - bucket), other, learnt) for other, learnt in enumerate(self._added) if learnt is not None]
        return min(known)[2].coefficients[0] if known else 0.0

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._step_s, *[None if learnt is None else learnt.state for learnt in self._added]
