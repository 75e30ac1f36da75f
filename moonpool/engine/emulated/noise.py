"""Disturbance of emulated times, so that predicting a step is more than reading the profile."""

from dataclasses import dataclass

from moonpool.core.draws import draw_unit

_SPEED, _STEP = 0, 1


@dataclass(frozen=True, slots=True)
class Noise:
    """How far an instance's steps are from its profile. Nothing that the instance reports tells of it."""

    seed: int = 0
    """Of the draws; each instance has one of its own."""
    jitter: float = 0.0
    """A step takes up to this share longer or shorter, uniformly drawn for each step; in [0, 1)."""
    speed_error: float = 0.0
    """All steps of the instance are slower or quicker by one factor, drawn from 1 ± this; in [0, 1)."""
    slowdown: float = 0.0
    """So many times longer all steps take from SIGUSR1 to SIGUSR2; 0 = these signals are not taken."""

    def factor(self, step_id: int, *, slowed: bool = False) -> float:
        """Seconds of a step over those of the profile; `slowed`: between the two signals."""
        slower = self.slowdown if slowed else 1.0
        return slower * self._around(self.speed_error, _SPEED) * self._around(self.jitter, _STEP, step_id)

    def _around(self, width: float, *counters: int) -> float:
        return 1.0 + width * (2.0 * draw_unit(self.seed, *counters) - 1.0) if width else 1.0


NO_NOISE = Noise()
