"""Which instances are slow."""

from dataclasses import dataclass

from moonpool.base.scheduling.latency import Speeds

MIN_REPORTS = 20
"""Reports with new speeds, about five seconds of work, before an instance is judged.

Speeds at joining are from few steps, or from a profile, and may be far off.
"""
SLOW_HOLD_S = 0.75
"""Seconds for which an instance must seem slow: a moment is no failure."""
MIN_SLOWDOWN_S = 0.05
"""Least seconds by which the typical work must take longer: very short work is easily many times slower."""
FOLLOW_SLOWER_S, FOLLOW_FASTER_S = 1800.0, 10.0
"""Seconds within which the usual speed follows the reported one, if that is slower or faster."""
RECOVERED_SHARE = 0.5
"""Share of the slow factor below which a slow instance has recovered."""
FIRST_TRIAL_S, LAST_TRIAL_S = 5.0, 60.0
"""Seconds until a slow instance gets a first trial, and at most; they double with each failed trial."""
TRIAL_S = 2.0
"""Seconds from a trial's first measurement to the verdict: the first measurements count little."""


@dataclass(slots=True)
class HealthMonitor:
    """The judgement whether one instance is slow.

    Attributes:
        slow: the instance gets no new requests, except for a trial.
        trial: the instance gets one request.
        usual_s: seconds that the typical work usually takes.
        healthy_speeds: last reported speeds while the instance was not slow.
        reported_s: seconds of the typical work by the last report.
        reports: reports with new speeds so far.
    """

    slow: bool = False
    trial: bool = False
    usual_s: float = 0.0
    healthy_speeds: Speeds | None = None
    reported_s: float = 0.0
    reports: int = 0
    _at: float = 0.0
    _odd_since: float | None = None
    _trial_at: float = 0.0
    _pause_s: float = FIRST_TRIAL_S
    _measured_at: float | None = None

    def report(self, speeds: Speeds, seconds: float, now: float, factor: float, *, idle: bool) -> Speeds:
        """Take a report.

        Args:
            speeds: as the instance reports them.
            seconds: seconds for the typical work at these speeds.
            now: seconds.
            factor: an instance this many times slower than usual is slow; 0 = no instance is.
            idle: no work is there.

        Returns:
            The speeds to predict with.
        """
        measured, self.reported_s = seconds != self.reported_s, seconds
        self.reports += measured
        if self.reports <= MIN_REPORTS or not factor:  # the first speeds may be far off: whatever they are is usual
            self.usual_s, self.healthy_speeds, self._at = seconds, speeds, now
            return speeds
        if not self.slow:
            self._look(speeds, seconds, now, factor)
        elif self._is_well(seconds, factor):
            self.slow = self.trial = False
            self.healthy_speeds, self._odd_since, self._pause_s = speeds, None, FIRST_TRIAL_S
        elif self.trial:
            return self._on_trial(speeds, now, measured=measured)
        elif idle and now >= self._trial_at:
            self.trial, self._measured_at = True, None
            # By its measured speeds the instance would get no request, and could never show that it is well.
            return self.healthy_speeds or speeds
        self._follow(seconds, now)
        return speeds

    def _look(self, speeds: Speeds, seconds: float, now: float, factor: float) -> None:
        if seconds < factor * self.usual_s or seconds < self.usual_s + MIN_SLOWDOWN_S:
            self._odd_since = None
            if self._is_well(seconds, factor):
                self.healthy_speeds = speeds
        elif self._odd_since is None:
            self._odd_since = now
        elif now - self._odd_since >= SLOW_HOLD_S:
            self._found_slow(now)

    def _on_trial(self, speeds: Speeds, now: float, *, measured: bool) -> Speeds:
        if self._measured_at is None:
            if not measured:
                return self.healthy_speeds or speeds
            self._measured_at = now
        if now - self._measured_at >= TRIAL_S:
            self._pause_s = min(2 * self._pause_s, LAST_TRIAL_S)
            self._found_slow(now)
        return speeds

    def _found_slow(self, now: float) -> None:
        self.slow, self.trial, self._trial_at = True, False, now + self._pause_s

    def _is_well(self, seconds: float, factor: float) -> bool:
        return seconds <= max(RECOVERED_SHARE * factor, 1.0) * self.usual_s

    def _follow(self, seconds: float, now: float) -> None:
        # Quick to believe that an instance is fast, slow to believe that slow is its nature.
        within_s = FOLLOW_SLOWER_S if seconds > self.usual_s else FOLLOW_FASTER_S
        self.usual_s += (seconds - self.usual_s) * min(1.0, (now - self._at) / within_s)
        self._at = now
