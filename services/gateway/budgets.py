"""Budgets of keys and tenants: requests and tokens per minute.

Each budget is a bucket that fills evenly and holds a minute's worth. Requests are counted when they come, tokens when
they are there: nobody knows before how many there will be. So tokens may be overdrawn by the requests that run, and
nothing new is let in until that is made up for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.rpc.keys import Owner
from services.gateway.errors import BudgetSpentError

MINUTE_S = 60.0


class Bucket:
    """So many per minute; full at first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def take(self, amount: int, now: float) -> None:
        """Take some, though there may be less."""
        self._fill(now)
        self._level -= amount

    def wait_s(self, now: float) -> float:
        """Seconds until there is one; 0 = now."""
        self._fill(now)
        return max(0.0, (1.0 - self._level) * MINUTE_S / self.per_minute)

    def change(self, per_minute: int, now: float) -> None:
        """Fill by another rate from now on; what was used stays used."""
        self._fill(now)
        self._level += per_minute - self.per_minute
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        gained = (now - self._filled_at) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._filled_at = now


class Spending:
    """What one request uses, on all budgets that it is on."""

    def __init__(self, tokens: Sequence[Bucket] = (), clock: Callable[[], float] = lambda: 0.0) -> None:
        """`tokens` are the budgets of tokens; `clock` gives seconds."""
        self._tokens = tokens
        self._clock = clock
        self._prompt_tokens = 0

    def used(self, prompt_tokens: int, new_tokens: int) -> None:
        """Count new tokens of answers, and what is new of the prompts, which have so many tokens by now."""
        amount = new_tokens + prompt_tokens - self._prompt_tokens
        self._prompt_tokens = prompt_tokens
        for bucket in self._tokens:
            bucket.take(amount, self._clock())


class Budgets:
    """The budgets of this gateway. They begin full, and are not shared with other gateways."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def admit(self, owners: Sequence[Owner]) -> Spending:
        """Let a request in, or say when it may come again.

        Raises:
            BudgetSpentError: one of the budgets is used up.
        """
        now = self._clock()
        requests = self._of("requests", owners, now)
        tokens = self._of("tokens", owners, now)
        for what, found in (("requests", requests), ("tokens", tokens)):
            for owner, bucket in found:
                if (wait_s := bucket.wait_s(now)) > 0:
                    raise BudgetSpentError(what, owner.told, bucket.per_minute, wait_s)
        for _, bucket in requests:
            bucket.take(1, now)
        return Spending([bucket for _, bucket in tokens], self._clock)

    def _of(self, what: str, owners: Sequence[Owner], now: float) -> list[tuple[Owner, Bucket]]:
        limited = [(owner, getattr(owner.limits, what)) for owner in owners]
        return [(owner, self._bucket((owner.name, what), limit, now)) for owner, limit in limited if limit is not None]

    def _bucket(self, key: tuple[str, str], per_minute: int, now: float) -> Bucket:
        bucket = self._buckets.setdefault(key, Bucket(per_minute, now))
        if bucket.per_minute != per_minute:
            bucket.change(per_minute, now)
        return bucket
