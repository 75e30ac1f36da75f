"""Budgets a minute: token buckets, which fill evenly and hold one minute's units."""

MINUTE_S = 60.0


class TokenBucket:
    """A budget of `per_minute` units a minute. The bucket starts full."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def level(self, now: float) -> float:
        """Units in the bucket; below 0 if more were taken than there were."""
        gained = (now - self._filled_at) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._filled_at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take `amount` units. The level may become negative."""
        self._level = self.level(now) - amount

    def wait_s(self, now: float) -> float:
        """Seconds until the bucket holds one unit; 0 if the bucket does now."""
        return max(0.0, (1.0 - self.level(now)) * MINUTE_S / self.per_minute)

    def change(self, per_minute: int, now: float) -> None:
        """Change the size from now on. Units that were taken stay taken."""
        self._level = self.level(now) + per_minute - self.per_minute
        self.per_minute = per_minute
