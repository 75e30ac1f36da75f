"""Requests that wait for decode memory."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import FairQueue, FairShares, QueueKey
from moonpool.conductor.core.demand import MemoryNeed
from moonpool.conductor.core.tenant_ledger import TenantLedger

HOLD_AFTER_S = 5.0
YIELD_S = 1.0
"""Seconds for which memory is left to requests that wait at other conductors, and do not take it."""
MAX_LOOKS = 64
"""Requests that do not fit into an instance's free memory, looked at for one report, at most.

One after the other gets an instance that is held free, so that no request behind them waits for ever. Requests that an
instance is too small for do not count: the instance is never held for them.
"""
SHARE_LEFT_FREE = 16
"""A tenant above the fair share leaves one in this many blocks at an instance to others."""


class DecodeMemoryQueue:
    """Requests that wait for decode memory.

    A report costs at most `MAX_LOOKS` looks, a look for each woken request, and a comparison for each request that the
    instance is too small for.

    Args:
        shares: the tenants' shares.
        ledger: knows what waits at other conductors.
    """

    def __init__(self, shares: FairShares, ledger: TenantLedger) -> None:
        self._shares = shares
        self._ledger = ledger
        self._queue = FairQueue(shares)
        self._yields: dict[str, float] = {}  # since when an instance's memory is left to other conductors' requests
        self._waiters: dict[int, MemoryWaiter] = {}
        self._holds: dict[str, int] = {}
        self._refused: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, number: int) -> bool:
        return number in self._waiters

    def count(self) -> dict[str, int]:
        """Return how many wait, by tenant."""
        return self._queue.count()

    def add(self, waiter: MemoryWaiter, now: float) -> None:
        self._queue.add(waiter.key, waiter.cost)
        self._waiters[waiter.key.number] = waiter
        self._ledger.waits(waiter.key.tenant, waiter.blocks, waiter.cost, now)

    def remove(self, number: int, now: float) -> None:
        """The request waits no more; unknown numbers are fine."""
        waiter = self._waiters.pop(number, None)
        if waiter is None:
            return
        self._queue.remove(number)
        self._ledger.waited(waiter.key.tenant, waiter.blocks, waiter.cost, now)
        self._holds = {decode: holder for decode, holder in self._holds.items() if holder != number}

    def refused(self, decode: str, available: int) -> None:
        """A decode instance refused a request although `available` blocks seemed to be free."""
        self._refused[decode] = available

    def granted(self, decode: str) -> None:
        """A decode instance has reserved memory."""
        self._refused.pop(decode, None)

    def forget(self, decode: str) -> None:
        """The instance is not there any more."""
        self._refused.pop(decode, None)
        self._holds.pop(decode, None)
        self._yields.pop(decode, None)

    def blocks_ahead(self, key: QueueKey, more_s: float, now: float) -> int:
        """Return the number of blocks of requests that wait at other conductors and go before a request.

        `more_s`: virtual time of what goes before from the request's own tenant.
        """
        return self._ledger.blocks_ahead(key, self._shares.time(key.tenant) + more_s, self._shares.time, now)

    def is_free_to(self, decode: str, key: QueueKey) -> bool:
        """Return whether the instance is not held for a request that goes before."""
        holder = self._holds.get(decode)
        if holder is None or holder == key.number:
            return True
        return self._shares.key(key) < self._shares.key(self._waiters[holder].key)

    def woken(
        self,
        decode: str,
        available: int,
        total: int,
        needs: Callable[[MemoryNeed], int],
        above_share: Callable[[QueueKey], bool],
        now: float,
    ) -> list[int]:
        """Requests that fit into one instance's free memory, in fair order; to be called after the instance's report.

        If the instance refused memory that seemed free, and nothing has changed since, one request at a time asks.
        Memory is left to requests at other conductors that go before, but not for long if they do not take it.

        Args:
            decode: the instance.
            available: blocks that the instance could reserve.
            total: blocks in the pool.
            needs: blocks that a request is expected to need there.
            above_share: whether the tenant has more than a fair share, and leaves some blocks to others.
            now: seconds.
        """
        found: list[int] = []
        looks, behind_s, yields = MAX_LOOKS, dict[str, float](), False
        left_until = self._yields.get(decode, now) + YIELD_S
        # The instance refused with as many blocks free: waking all would make all ask in vain.
        most = 1 if self._refused.get(decode) == available else len(self._waiters)
        if not total:
            return found
        for number in self._queue:
            if len(found) >= most:
                break
            waiter = self._waiters[number]
            if waiter.need.longest > total:  # will never fit here: no reason to hold the instance for the request
                continue
            blocks = needs(waiter.need)
            left = blocks_left_free(blocks, total) if above_share(waiter.key) else 0
            if blocks + left <= available and self.is_free_to(decode, waiter.key):
                tenant = waiter.key.tenant
                ahead = self.blocks_ahead(waiter.key, behind_s.get(tenant, 0.0), now) if now < left_until else 0
                # Other conductors see the same free blocks, and requests there may come first in the fair order.
                if blocks + left + ahead <= available:
                    found.append(number)
                    available -= blocks
                    behind_s[tenant] = behind_s.get(tenant, 0.0) + waiter.cost / waiter.key.weight
                    continue
                yields = True
            looks -= 1  # requests behind may fit; what a report costs stays bounded
            if self._holds_now(waiter, decode, now) or not looks:
                break
        if yields:
            self._yields.setdefault(decode, now)
        else:
            self._yields.pop(decode, None)
        return found

    def check_invariants(self) -> None:
        """Assert the order, and that instances are held for waiting requests."""
        self._queue.check_invariants()
        assert sorted(self._queue) == sorted(self._waiters)
        assert set(self._holds.values()) <= set(self._waiters)
        assert len(set(self._holds.values())) == len(self._holds)

    def state(self) -> object:
        """Return the state, for a digest."""
        return self._waiters, self._holds, self._refused, self._yields

    def _holds_now(self, waiter: MemoryWaiter, decode: str, now: float) -> bool:
        """Whether the instance is held for a request that has waited for long and does not fit into the free memory."""
        number = waiter.key.number
        if now - waiter.since >= HOLD_AFTER_S and number not in self._holds.values():
            self._holds.setdefault(decode, number)
        return self._holds.get(decode) == number


@frozen
class MemoryWaiter:
    """A request that waits for decode memory.

    Attributes:
        key: position in the queue.
        need: blocks depend on this.
        since: time since which the request waits, seconds.
        cost: predicted instance seconds, which fair sharing charges.
        blocks: that the request was expected to need at the instance that refused the request.
    """

    key: QueueKey
    need: MemoryNeed
    since: float
    cost: float = 0.0
    blocks: int = 0


def blocks_left_free(blocks: int, total: int) -> int:
    """Blocks of `total` that a request which needs `blocks` leaves to others; fewer if the instance is small."""
    return max(min(total // SHARE_LEFT_FREE, total - blocks), 0)
