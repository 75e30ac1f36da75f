"""Whether an instance is as quick as it usually is: a "grey" failure is one that answers, ten times too slowly.

Instances learn their speeds from their own steps and report them. One that tells far slower ones than usual is *slow*:
it gets nothing new. As it computes nothing then, it cannot tell that it is well again. So after a pause it gets a
*trial*: one request, for which it is believed to be well. What is measured then counts.
"""

from dataclasses import dataclass

from moonpool.cost import Speeds

LESSONS = 20
"""Reports of something new, about five seconds of work, before an instance is judged. What it tells as it joins is from
few steps, or from a profile, and may be far from what it tells once it works."""
HOLD_S = 0.75
"""Seconds for which an instance must seem slow: a moment is no failure."""
LEAST_S = 0.05
"""Seconds that its typical work must take longer: what takes next to nothing is easily many times slower."""
FOLLOW_SLOWER_S, FOLLOW_FASTER_S = 1800.0, 10.0
"""What is usual follows what is told, within so many seconds: for good, an instance is as slow as it is."""
WELL = 0.5
"""An instance is well again when it is slower than usual by less than this share of what makes it slow."""
FIRST_TRIAL_S, LAST_TRIAL_S = 5.0, 60.0
"""Seconds until an instance that was found slow gets its trial; they double with each that it fails."""
TRIAL_S = 2.0
"""Seconds from a trial's first measurement to its verdict: the first ones count for little."""


@dataclass(slots=True)
class Vigil:
    """What is known of one instance's quickness.

    Attributes:
        slow: it gets nothing new, but for its trial.
        trial: it gets one request.
        usual_s: seconds that its typical work usually takes.
        fine: speeds as it told them last when it was well.
        told_s: seconds of the typical work by the last report.
        lessons: reports of something new so far.
    """

    slow: bool = False
    trial: bool = False
    usual_s: float = 0.0
    fine: Speeds | None = None
    told_s: float = 0.0
    lessons: int = 0
    _at: float = 0.0
    _odd_since: float | None = None
    _trial_at: float = 0.0
    _pause_s: float = FIRST_TRIAL_S
    _measured_at: float | None = None

    def hear(self, speeds: Speeds, seconds: float, now: float, factor: float, *, idle: bool) -> Speeds:
        """Takes a report.

        Args:
            speeds: as the instance tells them.
            seconds: of its typical work by these speeds.
            now: seconds.
            factor: so many times slower than usual is slow; 0 = nothing is.
            idle: nothing is there.

        Returns:
            The speeds to be believed.
        """
        measured, self.told_s = seconds != self.told_s, seconds
        self.lessons += measured
        if self.lessons <= LESSONS or not factor:
            self.usual_s, self.fine, self._at = seconds, speeds, now
            return speeds
        if not self.slow:
            self._look(speeds, seconds, now, factor)
        elif self._is_well(seconds, factor):
            self.slow = self.trial = False
            self.fine, self._odd_since, self._pause_s = speeds, None, FIRST_TRIAL_S
        elif self.trial:
            return self._on_trial(speeds, now, measured=measured)
        elif idle and now >= self._trial_at:
            self.trial, self._measured_at = True, None
            return self.fine or speeds
        self._follow(seconds, now)
        return speeds

    def _look(self, speeds: Speeds, seconds: float, now: float, factor: float) -> None:
        if seconds < factor * self.usual_s or seconds < self.usual_s + LEAST_S:
            self._odd_since = None
            if self._is_well(seconds, factor):
                self.fine = speeds
        elif self._odd_since is None:
            self._odd_since = now
        elif now - self._odd_since >= HOLD_S:
            self._found_slow(now)

    def _on_trial(self, speeds: Speeds, now: float, *, measured: bool) -> Speeds:
        if self._measured_at is None:
            if not measured:
                return self.fine or speeds
            self._measured_at = now
        if now - self._measured_at >= TRIAL_S:
            self._pause_s = min(2 * self._pause_s, LAST_TRIAL_S)
            self._found_slow(now)
        return speeds

    def _found_slow(self, now: float) -> None:
        self.slow, self.trial, self._trial_at = True, False, now + self._pause_s

    def _is_well(self, seconds: float, factor: float) -> bool:
        return seconds <= max(WELL * factor, 1.0) * self.usual_s

    def _follow(self, seconds: float, now: float) -> None:
        within_s = FOLLOW_SLOWER_S if seconds > self.usual_s else FOLLOW_FASTER_S
        self.usual_s += (seconds - self.usual_s) * min(1.0, (now - self._at) / within_s)
        self._at = now
