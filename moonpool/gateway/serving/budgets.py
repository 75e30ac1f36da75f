"""Budgets: requests and tokens a minute of an API key or a tenant.

A budget is a token bucket. Requests are charged on arrival. Tokens are charged when they are generated, so running
requests may overdraw a token budget. New requests are refused until the budget has recovered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.base.rpc.api_keys import BudgetOwner
from moonpool.base.scheduling.budgets import TokenBucket
from moonpool.gateway.serving.errors import BudgetSpentError


class Budgets:
    """Budgets of all keys and tenants in this gateway. Other gateways have budgets of their own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def admit(self, owners: Sequence[BudgetOwner]) -> BudgetCharge:
        """Count a request against the owners' budgets.

        Raises:
            BudgetSpentError: a budget is used up; says when to retry.
        """
        now = self._clock()
        requests = self._buckets_of("requests", owners, now)
        tokens = self._buckets_of("tokens", owners, now)
        for what, buckets in (("requests", requests), ("tokens", tokens)):
            for owner, bucket in buckets:
                if (wait_s := bucket.wait_s(now)) > 0:
                    raise BudgetSpentError(what, owner.told, bucket.per_minute, wait_s)
        for _, bucket in requests:
            bucket.take(1, now)
        charged, counted = ([bucket for _, bucket in buckets] for buckets in (tokens, requests))
        return BudgetCharge(charged, counted, self._clock)

    def _buckets_of(
        self, what: str, owners: Sequence[BudgetOwner], now: float
    ) -> list[tuple[BudgetOwner, TokenBucket]]:
        limited = [(owner, getattr(owner.limits, what)) for owner in owners]
        return [(owner, self._bucket((owner.name, what), limit, now)) for owner, limit in limited if limit is not None]

    def _bucket(self, key: tuple[str, str], per_minute: int, now: float) -> TokenBucket:
        bucket = self._buckets.setdefault(key, TokenBucket(per_minute, now))
        if bucket.per_minute != per_minute:
            bucket.change(per_minute, now)
        return bucket


class BudgetCharge:
    """Charges one request to every budget that the request counts against."""

    def __init__(
        self,
        buckets: Sequence[TokenBucket] = (),
        requests: Sequence[TokenBucket] = (),
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`buckets` are the token budgets, `requests` those of requests; `clock` returns seconds."""
        self._buckets = buckets
        self._requests = requests
        self._clock = clock
        self._prompt_tokens = 0
        self.prompt_weight = 1
        """Tokens that each prompt token counts as."""

    def charge_answers(self, answers: int) -> None:
        """Charge a request that runs as so many: each answer after the first counts as one more request."""
        for bucket in self._requests:
            bucket.take(answers - 1, self._clock())

    def charge_work(self, tokens: int) -> None:
        """Charge work that takes as long as so many tokens."""
        for bucket in self._buckets:
            bucket.take(tokens, self._clock())

    def charge(self, prompt_tokens: int, new_tokens: int) -> None:
        """Charge `new_tokens` generated tokens, and the prompt tokens that were not charged before.

        `prompt_tokens` is the number of prompt tokens so far.
        """
        amount = new_tokens + (prompt_tokens - self._prompt_tokens) * self.prompt_weight
        self._prompt_tokens = prompt_tokens
        self.charge_work(amount)
