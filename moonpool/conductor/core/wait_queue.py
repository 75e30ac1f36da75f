"""Wait queues.

Requests that wait for decode memory or for a placement within their SLO, and fair shares of tenants.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import FairQueue, FairShares, QueueKey
from moonpool.base.scheduling.state_machine import Timers, digest_of
from moonpool.conductor.core.latency_model import MemoryNeed
from moonpool.conductor.core.request import TimerKey, TimerKind
from moonpool.conductor.core.tenant_ledger import Elsewhere, TenantLedger

TENANT_MEMORY_S = 60.0
"""Seconds after the last request's end for which a tenant keeps a share."""
MAX_RECENT_TENANTS = 1024
"""Tenants without requests that are remembered."""
WEIGHT_UNIT = 2.0**-20
SHARE_LEFT_FREE = 16
"""A tenant above the fair share leaves one in this many blocks at an instance to others."""


def blocks_left_free(blocks: int, total: int) -> int:
    """Blocks of `total` that a request which needs `blocks` leaves to others; fewer if the instance is small."""
    return max(min(total // SHARE_LEFT_FREE, total - blocks), 0)


class TenantCounts:
    """Numbers of requests by tenant, and tenants that had requests lately. Costs grow with neither.

    Weights are counted in multiples of `WEIGHT_UNIT`, so that sums are exact.
    """

    def __init__(self) -> None:
        self._here: dict[str, int] = {}
        self._total = 0
        self._lately: OrderedDict[str, float] = OrderedDict()  # tenants without requests: their last request's end
        self._weights: dict[str, int] = {}  # of all tenants above
        self._weight = 0

    def came(self, key: QueueKey) -> None:
        """A tenant has one more request."""
        tenant, parts = key.tenant, _weight_units(key.weight)
        self._here[tenant] = self._here.get(tenant, 0) + 1
        self._total += 1
        self._lately.pop(tenant, None)
        self._weight += parts - self._weights.get(tenant, 0)
        self._weights[tenant] = parts

    def left(self, tenant: str, now: float) -> None:
        """A tenant has one request less."""
        self._total -= 1
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]
            self._lately[tenant] = now
            if len(self._lately) > MAX_RECENT_TENANTS:
                self._forget()

    def above_share(self, key: QueueKey, elsewhere: Elsewhere, now: float) -> bool:
        """Whether the tenant has more than a fair share of the requests, and others have, or lately had, requests.

        `elsewhere`: requests at other conductors, which count, too.
        """
        while self._lately and next(iter(self._lately.values())) < now - TENANT_MEMORY_S:
            self._forget()
        parts, tenant = _weight_units(key.weight), key.tenant
        others = [it for it in elsewhere.weights if it not in self._weights and it != tenant]
        whole = self._weight - self._weights.get(tenant, 0) + parts
        whole += sum([_weight_units(elsewhere.weights[it]) for it in others])
        own = self._here.get(tenant, 0) + elsewhere.running.get(tenant, 0)
        return whole > parts and own * whole > parts * (self._total + sum(elsewhere.running.values()))

    def _forget(self) -> None:
        """Forgets the tenant that has had no request for longest."""
        tenant, _ = self._lately.popitem(last=False)
        self._weight -= self._weights.pop(tenant)

    def check_invariants(self, here: Mapping[str, int]) -> None:
        """Asserts that these are the requests."""
        assert self._here == here
        assert self._total == sum(here.values())
        assert self._weights.keys() == self._here.keys() | self._lately.keys()
        assert not self._here.keys() & self._lately.keys()
        assert self._weight == sum(self._weights.values())
        assert len(self._lately) <= MAX_RECENT_TENANTS

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._here, self._lately, self._weights)


def _weight_units(weight: float) -> int:
    return max(1, round(weight / WEIGHT_UNIT))


HOLD_AFTER_S = 5.0
YIELD_S = 1.0
"""Seconds for which memory is left to requests that wait at other conductors, and do not take it."""
MAX_LOOKS = 64
"""Requests that do not fit into an instance's free memory, looked at for one report, at most.

One after the other gets an instance that is held free, so that no request behind them waits for ever. Requests that an
instance is too small for do not count: the instance is never held for them.
"""


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
        """How many wait, by tenant."""
        return self._queue.count()

    def add(self, waiter: MemoryWaiter, now: float) -> None:
        """Lets a request wait."""
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
        """Blocks of requests that wait at other conductors and go before a request.

        `more_s`: virtual time of what goes before from the request's own tenant.
        """
        return self._ledger.blocks_ahead(key, self._shares.time(key.tenant) + more_s, self._shares.time, now)

    def is_free_to(self, decode: str, key: QueueKey) -> bool:
        """Whether the instance is not held for a request that goes before."""
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
        most = 1 if self._refused.get(decode) == available else len(self._waiters)
        if not total:
            return found
        for number in self._queue:
            if len(found) >= most:
                break
            waiter = self._waiters[number]
            if waiter.need.longest > total:
                continue
            blocks = needs(waiter.need)
            left = blocks_left_free(blocks, total) if above_share(waiter.key) else 0
            if blocks + left <= available and self.is_free_to(decode, waiter.key):
                tenant = waiter.key.tenant
                ahead = self.blocks_ahead(waiter.key, behind_s.get(tenant, 0.0), now) if now < left_until else 0
                if blocks + left + ahead <= available:
                    found.append(number)
                    available -= blocks
                    behind_s[tenant] = behind_s.get(tenant, 0.0) + waiter.cost / waiter.key.weight
                    continue
                yields = True
            looks -= 1
            if self._holds_now(waiter, decode, now) or not looks:
                break
        if yields:
            self._yields.setdefault(decode, now)
        else:
            self._yields.pop(decode, None)
        return found

    def check_invariants(self) -> None:
        """Asserts the order, and that instances are held for waiting requests."""
        self._queue.check_invariants()
        assert sorted(self._queue) == sorted(self._waiters)
        assert set(self._holds.values()) <= set(self._waiters)
        assert len(set(self._holds.values())) == len(self._holds)

    def state(self) -> object:
        """The state, for a digest."""
        return self._waiters, self._holds, self._refused, self._yields

    def _holds_now(self, waiter: MemoryWaiter, decode: str, now: float) -> bool:
        """Whether the instance is held for a request that has waited for long and does not fit into the free memory."""
        number = waiter.key.number
        if now - waiter.since >= HOLD_AFTER_S and number not in self._holds.values():
            self._holds.setdefault(decode, number)
        return self._holds.get(decode) == number


RETRY_PAUSE_S = 0.05
"""Least seconds between two retries by the queue."""
MAX_RETRY_PAUSE_S = 1.0
"""Most seconds between a request's two retries: forecasts err."""
RETRY_FIRST = 4
"""Requests at the front of the queue that retry each time."""
MAX_RETRIES_AT_ONCE = 12
"""Requests that retry at once, at most: each retry costs a routing decision."""
SLO_QUEUE_TIMER = (TimerKind.SLO_QUEUE, 0)


@frozen
class SloWaiter:
    """A request in the `SloQueue`, and the prompt's bytes."""

    key: QueueKey
    nbytes: int


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
        """How many wait, by tenant."""
        return self._queue.count()

    def add(self, now: float, key: QueueKey, nbytes: int, cost: float, retry_s: float) -> list[int]:
        """Lets a request wait that may try again after `retry_s` seconds.

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
        """Requests that look for a placement now: the first, and the most overdue retries."""
        self._retried_at = now
        found = list(islice(self._queue, RETRY_FIRST))
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
        """Asserts that sums, order and timer are those of the waiting requests."""
        self._queue.check_invariants()
        assert sorted(self._queue) == sorted(self._waiting)
        assert self.nbytes == sum(it.nbytes for it in self._waiting.values()) <= self._most_bytes
        held: dict[str, int] = {}
        for it in self._waiting.values():
            held[it.key.tenant] = held.get(it.key.tenant, 0) + it.nbytes
        assert self._held == held
        assert len(self._again) == len(self._waiting)
        assert len(self) <= self._most
        assert (self._timers.at(SLO_QUEUE_TIMER) is not None) == bool(self._waiting)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._waiting, self._again, self._queue, self._retried_at, self.nbytes)
