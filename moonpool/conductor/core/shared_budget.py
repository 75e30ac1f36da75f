"""A tenant's budget, of which each conductor takes a part."""

from __future__ import annotations

from math import ceil, inf

from moonpool.base.scheduling.budgets import MINUTE_S, TokenBucket
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.failures import Failure, FailureKind

BUDGET_RETRY_S = 1.0
"""Retry time if a budget's part, or a place among requests at once, must come free."""


class SharedBudget:
    """A budget a minute of all conductors.

    What others have used is known late. So a conductor admits at most its part of what is left, until it looks again.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._bucket = TokenBucket(per_minute, now)
        self._part = inf

    def owed(self, now: float) -> float:
        """Return the number of units that the budget lacks to be full."""
        return self._bucket.per_minute - self._bucket.level(now)

    def look(self, parts: int, now: float) -> None:
        """Take this conductor's part of what is left among so many conductors."""
        self._part = inf if parts == 1 else ceil(max(self._bucket.level(now), 0.0) / parts)

    def take(self, amount: float, now: float) -> None:
        """Count what was used here."""
        self._bucket.take(amount, now)
        self._part -= amount

    def taken_elsewhere(self, amount: float, now: float) -> None:
        """Count what was used at other conductors."""
        self._bucket.take(amount, now)

    def owe(self, amount: float, age_s: float, now: float) -> None:
        """Another conductor found, some seconds ago, that so much was lacking: at least what is left of that is."""
        left = amount - age_s * self._bucket.per_minute / MINUTE_S
        self._bucket.take(max(0.0, left - self.owed(now)), now)

    def wait_s(self, now: float) -> float:
        """Return the seconds until something may be used; 0 = now."""
        return self._bucket.wait_s(now) or (0.0 if self._part >= 1 else BUDGET_RETRY_S)

    def refusal(self, what: str, wait_s: float) -> Failure:
        """Return the refusal of a request."""
        message = f"the tenant's budget of {self._bucket.per_minute} {what}s a minute is used up"
        return Failure(FailureKind.OVERLOADED, message, reason=f"{what}_budget", retry_after_s=wait_s)

    def digest(self) -> bytes:
        return digest_of(vars(self._bucket), self._part)
