"""Requests that wait for a placement within their SLO."""

from __future__ import annotations

from itertools import islice

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import FairQueue, FairShares, QueueKey
from moonpool.base.scheduling.state_machine import Timers, digest_of
from moonpool.conductor.core.request_states import TimerKey, TimerKind

RETRY_PAUSE_S = 0.05
"""Least seconds between two retries by the queue."""
MAX_RETRY_PAUSE_S = 1.0
"""Most seconds between a request's two retries: forecasts err."""
RETRY_FIRST = 4
"""Requests at the front of the queue that retry each time."""
MAX_RETRIES_AT_ONCE = 12
"""Requests that retry at once, at most: each retry costs a routing decision."""
SLO_QUEUE_TIMER = (TimerKind.SLO_QUEUE, 0)


class SloQueue:
    """Requests that wait for a placement within their SLO, bounded in number and bytes.

    A call's cost does not grow with the number of requests, only with the number of tenants.

    Args:
        shares: the tenants' shares.
        timers: the scheduler's; `SLO_QUEUE_TIMER` is set to the time of the next retry.
        most: requests.
        most_bytes: for all prompts together.
    """

    def __init__(self, shares: FairShares, timers: Timers[TimerKey], most: int, most_bytes: int) -> None:
        self._queue = FairQueue(shares)
        self._timers = timers
        self._most = most
        self._most_bytes = most_bytes
        self._waiting: dict[int, SloWaiter] = {}
        self._again: Timers[int] = Timers()  # when each looks again
        self._held: dict[str, int] = {}  # bytes, by tenant
        self._retried_at = 0.0
        self.nbytes = 0
        """Of all prompts."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def count(self) -> dict[str, int]:
        """Return how many wait, by tenant."""
        return self._queue.count()

    def add(self, now: float, key: QueueKey, nbytes: int, cost: float, retry_s: float) -> list[int]:
        """Let a request wait that may try again after `retry_s` seconds.

        Returns:
            Requests that the queue is too long for, maybe this one; they wait no more. They are the last requests from
            the tenant with most bytes in the queue for the tenant's weight.
        """
        again_at = now + min(max(retry_s, RETRY_PAUSE_S), MAX_RETRY_PAUSE_S)
        self._queue.add(key, cost)
        self._waiting[key.number] = SloWaiter(key, nbytes)
        self._again.set(key.number, again_at)
        self._hold(key.tenant, nbytes)
        pushed = []
        # The tenant that fills the queue gives way, so that a flood does not push others out.
        while len(self) > self._most or self.nbytes > self._most_bytes:
            pushed.append(self._queue.last_of(self._largest()))
            self.remove(pushed[-1])
        self._wake()
        return pushed

    def remove(self, number: int) -> None:
        """One less; unknown numbers are fine."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            self._queue.remove(number)
            self._again.clear(number)
            self._hold(waiting.key.tenant, -waiting.nbytes)
            self._wake()

    def retrying(self, now: float) -> list[int]:
        """Return the requests that look for a placement now: the first, and the most overdue retries."""
        self._retried_at = now
        found = list(islice(self._queue, RETRY_FIRST))  # the first in fair order, whatever their forecasts said
        for number in found:
            self._again.clear(number)
        while len(found) < MAX_RETRIES_AT_ONCE and (due := self._again.pop_due(now)) is not None:
            found.append(due)
        for number in found:  # those that are placed leave the queue
            self._again.set(number, now + MAX_RETRY_PAUSE_S)
        self._wake()
        return found

    def _hold(self, tenant: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._held[tenant] = self._held.get(tenant, 0) + nbytes
        if not self._held[tenant]:
            del self._held[tenant]

    def _largest(self) -> str:
        """The tenant with most bytes in the queue for the tenant's weight; among equals the last in the alphabet."""
        return max(self._held, key=lambda tenant: (self._held[tenant] / self._weight(tenant), tenant))

    def _weight(self, tenant: str) -> float:
        return self._waiting[self._queue.last_of(tenant)].key.weight

    def _wake(self) -> None:
        first = self._again.next()
        if first is None:
            self._timers.clear(SLO_QUEUE_TIMER)
        else:
            self._timers.set(SLO_QUEUE_TIMER, max(first, self._retried_at + RETRY_PAUSE_S))

    def check_invariants(self) -> None:
        """Assert that sums, order and timer are those of the waiting requests."""
        self._queue.check_invariants()
        assert sorted(self._queue) == sorted(self._waiting)
        assert self.nbytes == sum(waiter.nbytes for waiter in self._waiting.values()) <= self._most_bytes
        held: dict[str, int] = {}
        for waiter in self._waiting.values():
            held[waiter.key.tenant] = held.get(waiter.key.tenant, 0) + waiter.nbytes
        assert self._held == held
        assert len(self._again) == len(self._waiting)
        assert len(self) <= self._most
        assert (self._timers.at(SLO_QUEUE_TIMER) is not None) == bool(self._waiting)

    def digest(self) -> bytes:
        return digest_of(self._waiting, self._again, self._queue, self._retried_at, self.nbytes)


@frozen
class SloWaiter:
    """A request in the `SloQueue`, and the prompt's bytes."""

    key: QueueKey
    nbytes: int
