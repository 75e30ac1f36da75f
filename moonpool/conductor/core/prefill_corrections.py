"""What prompts took, and how predictions of prefill are corrected by that."""

from __future__ import annotations

from moonpool.base.scheduling.latency import PrefillWork, Speeds, work_seconds
from moonpool.base.scheduling.regression import Regression

CHANGE_SAMPLES = 16
"""Prompts in a row beyond the gate that are taken for a change."""
LEARNING_DRIFT = 5e-3
"""Drift of the coefficients: if times differ by a third, the last twenty prompts count most."""
MIN_ERROR_S = 0.005
"""Errors of shorter predictions count as if the prediction were this long, seconds."""
GROWING_SPREAD, SHARED_HOST_SPREAD = 0.2, 0.5
"""Standard deviation of the factor before anything was measured; the second if other programs may use the cores."""
OVERHEAD_SAMPLES = 15
"""Samples whose median is the overhead: a few long samples do not count, and the median follows the machine's load."""


class PrefillCorrections:
    """A prefill instance's speeds: reported, and corrected by what prompts took.

    - `growing`: factor of computing that grows with tokens. If other programs use the cores, prompts take longer than
      the instance reports, which assumes all the instance's cores; the fixed part of a step and the queue hardly do.
    - `overhead`: what is left of the time that the conductor measures: calls, tokenising, tokens on their way.

    An instance learns from each step, too, and reports the speeds. The factor covers what the instance cannot see. The
    factor
    is learnt slowly: otherwise both would learn one slow moment, which would count twice.

    Args:
        reported: the speeds that the instance reports.
        alone: the instance neither takes cores from others nor loses cores to them, as emulated engines.

    Attributes:
        overhead: seconds beside the predicted work.
    """

    __slots__ = ("_learnt", "_reported", "_speeds", "overhead")

    def __init__(self, reported: Speeds, *, alone: bool = False) -> None:
        self._reported = self._speeds = reported
        self.overhead = OverheadModel()
        self._learnt = Regression(
            (1.0,),
            (GROWING_SPREAD if alone else SHARED_HOST_SPREAD,),
            change=CHANGE_SAMPLES,
            drift=LEARNING_DRIFT,
            least_s=MIN_ERROR_S,
        )

    @property
    def growing(self) -> float:
        """Factor of what grows with tokens."""
        return self._learnt.coefficients[0]

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds; the same object until something changes."""
        return self._speeds

    def report(self, speeds: Speeds) -> None:
        """Take the speeds that the instance reports. The learned factor stays."""
        if speeds != self._reported:
            self._reported = speeds
            self._correct()

    def slowdown(self, work: PrefillWork) -> float:
        """Return the factor by which some work takes longer than by the reported speeds."""
        reported_s = work_seconds(self._reported, *work)
        return work_seconds(self._speeds, *work) / reported_s if reported_s else self.growing

    def observe(self, growing_s: float, rest_s: float, there_s: float) -> None:
        """Learn from the seconds between a prompt's arrival at the instance and the first token.

        Args:
            growing_s: predicted by the reported speeds: what grows with tokens.
            rest_s: predicted: all else.
            there_s: measured by the instance.
        """
        self._learnt.observe((growing_s,), there_s, rest_s)
        self._correct()

    def _correct(self) -> None:
        factor = self.growing
        self._speeds = self._reported if factor == 1.0 else self._reported.slowed_prefill(factor, fixed_factor=1.0)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._reported, *self._learnt.state, *self.overhead.state


class OverheadModel:
    """Seconds that requests take beside the predicted work: the median of the latest."""

    __slots__ = ("_latest", "seconds")

    def __init__(self) -> None:
        self._latest: tuple[float, ...] = ()
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Learn the overhead of a request."""
        self._latest = (*self._latest[-OVERHEAD_SAMPLES + 1 :], max(seconds, 0.0))
        self.seconds = sorted(self._latest)[len(self._latest) // 2]

    @property
    def state(self) -> tuple[float, ...]:
        """Everything that later predictions depend on."""
        return self._latest
