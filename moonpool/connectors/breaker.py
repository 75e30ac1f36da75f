"""Stops calls to a store that does not answer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Breaker:
    """Opens after failures in a row; then one call after each pause tries the store.

    Args:
        failures: failures in a row that open the breaker.
        pause_s: seconds without calls.
    """

    failures: int
    pause_s: float
    _failed: int = field(default=0, init=False)
    _paused_until: float = field(default=0.0, init=False)

    def allows(self, now: float) -> bool:
        """Whether a call may be made now. If the breaker is open, the call is the only one for a pause."""
        if self._failed < self.failures:
            return True
        if now < self._paused_until:
            return False
        self._paused_until = now + self.pause_s
        return True

    def answered(self) -> None:
        self._failed = 0

    def failed(self, now: float) -> None:
        self._failed += 1
        self._paused_until = now + self.pause_s

    @property
    def open(self) -> bool:
        """Whether calls are held back."""
        return self._failed >= self.failures
