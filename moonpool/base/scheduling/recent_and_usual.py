"""Sums and means that fade with time: what is recent, and what is usual."""

from dataclasses import dataclass
from math import exp, inf

RECENT_S = 60.0
"""Time constant of what is called recent, seconds."""
USUAL_S = 600.0
"""Time constant of what is called usual, seconds."""


@dataclass(slots=True)
class RecentRate:
    """A sum that fades with `RECENT_S`, by event times: `total` as of the time `at`. The first came at `since`."""

    total: float = 0.0
    at: float = 0.0
    since: float | None = None

    def add(self, amount: float, now: float) -> None:
        self.since = now if self.since is None else self.since
        self.total, self.at = self._left(now) + amount, max(now, self.at)

    def per_s(self, now: float) -> float:
        total = self.total
        return total * exp(min(self.at - now, 0.0) / RECENT_S) / RECENT_S if total else 0.0

    def mean_per_s(self, now: float) -> float:
        """Return as `per_s`, of the time since the first amount alone, however short."""
        if self.since is None or now <= self.since:
            return inf if self.total else 0.0
        return self.per_s(now) / (1.0 - exp((self.since - now) / RECENT_S))

    def _left(self, now: float) -> float:
        return self.total * exp(min(self.at - now, 0.0) / RECENT_S)


@dataclass(slots=True)
class UsualValue:
    """A mean over samples within `USUAL_S`, each weighted by the time since the sample before."""

    value: float = 0.0
    at: float = 0.0

    def sample(self, value: float, now: float) -> None:
        kept = exp(min(self.at - now, 0.0) / USUAL_S)
        self.value, self.at = kept * self.value + (1.0 - kept) * value, max(now, self.at)
