"""Fair sharing between tenants, and priorities within a tenant.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time that grows by cost / weight for
the work served. The tenant with the smallest virtual time is next. As in Sheng et al.'s virtual token counter (2024),
cost is charged when spent. An idle tenant is lifted towards the others, at most `credit` behind them, so that no tenant
saves up for a burst. While the server is idle, all tenants are forgiven the idle capacity.

Within a tenant, a priority is a head start in arrival time. Requests that arrive later than the head start go behind,
so low priorities never starve, and urgent requests gain nothing over other tenants.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from moonpool.base.errors import InvalidRequest
from moonpool.base.frozen import frozen
from moonpool.base.scheduling.state_machine import digest_of

LEAST_PRIORITY, MOST_PRIORITY = -100, 100
PRIORITY_S = 60.0
"""Seconds of arrival time that each priority level is worth."""
MAX_CREDIT_S = 10.0
"""Seconds of work by which a tenant may be behind."""
MAX_TENANTS = 4096
"""Most tenants remembered; beyond this number, tenants with the smallest virtual time are dropped."""


def priority_rank(came: float, priority: int) -> float:
    """Rank among a tenant's own requests, least first. `came`: arrival, seconds. A lower priority goes first."""
    return came + PRIORITY_S * priority


def check_priority(priority: int, field: str) -> None:
    """Raises InvalidRequest, naming the field, if a priority is out of bounds."""
    if not LEAST_PRIORITY <= priority <= MOST_PRIORITY:
        raise InvalidRequest(field, f"must be in [{LEAST_PRIORITY}, {MOST_PRIORITY}], is {priority}")


@frozen
class QueueKey:
    """Orders a waiting item: tenant, rank among the tenant's own items, and a unique number."""

    tenant: str
    rank: float
    number: int
    weight: float = 1.0

    def delayed(self, seconds: float) -> "QueueKey":
        """The key of an item that stands so many seconds behind."""
        return QueueKey(self.tenant, self.rank + seconds, self.number, self.weight)

    @property
    def order_in_tenant(self) -> tuple[float, int]:
        """Order one tenant's items."""
        return self.rank, self.number


@frozen
class QueueEntry:
    """A waiting item and the predicted cost."""

    key: QueueKey
    cost: float


class FairShares:
    """Tenants' virtual times.

    Args:
        credit: most work by which a tenant may be behind, in the costs' unit.
    """

    def __init__(self, credit: float = MAX_CREDIT_S) -> None:
        self._credit = credit
        self._times: dict[str, float] = {}
        self._least = 0.0  # no tenant's time is behind this time, which tenants not remembered have
        self._idle_at = 0.0

    def time(self, tenant: str) -> float:
        """The tenant's virtual time."""
        return max(self._times.get(tenant, 0.0), self._least)

    def serve(self, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Charge a tenant for work of this cost."""
        time = self.time(tenant)
        # A tenant that was away is behind by the credit at most: its return does not stop the others (ADR 17).
        self._least = max(self._least, time - self._credit)
        self._times[tenant] = time + cost / weight
        if len(self._times) > MAX_TENANTS:
            self._forget()

    def forgive_idle(self, cost: float) -> None:
        """Forgive all tenants this cost, for work that the idle server could have done."""
        # Idle time counts against nobody: a tenant that was served alone keeps its share (ADR 17).
        self._least += cost

    def forgive_idle_until(self, now: float, rate: float) -> None:
        """Forgive the time since the last call; `rate`: cost per second of work that could have been done."""
        self.forgive_idle((now - self._idle_at) * rate)
        self._idle_at = now

    def key(self, item: QueueKey) -> tuple[float, float, int]:
        """Sort key over all tenants' items: the least is served next."""
        return self.time(item.tenant), *item.order_in_tenant

    def order(self, queues: Iterable[Sequence[QueueEntry]]) -> Iterator[QueueEntry]:
        """All waiting items in the order of service, if each costs as predicted.

        Args:
            queues: each tenant's items, in order; no queue is empty. Queues must not change meanwhile.
        """
        heap = [(*self.key(queue[0].key), 0, queue) for queue in queues]
        if len(heap) == 1:
            yield from heap[0][-1]
            return
        heapify(heap)
        while heap:
            time, _, _, at, queue = heap[0]
            entry = queue[at]
            yield entry
            if at + 1 < len(queue):
                after = time + entry.cost / entry.key.weight
                heapreplace(heap, (after, *queue[at + 1].key.order_in_tenant, at + 1, queue))
            else:
                heappop(heap)

    def order_unsorted(self, entries: Iterable[QueueEntry]) -> Iterator[QueueEntry]:
        """As `order`, for items in any order."""
        queues: dict[str, list[QueueEntry]] = {}
        for entry in entries:
            queues.setdefault(entry.key.tenant, []).append(entry)
        for queue in queues.values():
            queue.sort(key=lambda entry: entry.key.order_in_tenant)
        return self.order(queues.values())

    def digest(self) -> bytes:
        return digest_of(self._times, self._least, self._idle_at)

    def _forget(self) -> None:
        # Those furthest ahead stay: to forget them would forgive the most work.
        kept = sorted(self._times, key=lambda tenant: self._times[tenant], reverse=True)[: MAX_TENANTS // 2]
        self._times = {tenant: self._times[tenant] for tenant in kept if self._times[tenant] > self._least}


class FairQueue:
    """Waiting items, in fair order."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._queues: dict[str, list[QueueEntry]] = {}
        self._entries: dict[int, QueueEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def __iter__(self) -> Iterator[int]:
        """Numbers in fair order; the queue must not change meanwhile."""
        return (entry.key.number for entry in self._shares.order(self._queues.values()))

    def add(self, key: QueueKey, cost: float = 0.0) -> None:
        """Add an item; the cost matters for the order behind this item."""
        assert key.number not in self._entries, f"{key.number} waits already"
        entry = self._entries[key.number] = QueueEntry(key, cost)
        insort(self._queues.setdefault(key.tenant, []), entry, key=_order_in_tenant)

    def remove(self, number: int) -> None:
        """Remove an item; unknown numbers are ignored."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        queue = self._queues[entry.key.tenant]
        del queue[bisect_left(queue, entry.key.order_in_tenant, key=_order_in_tenant)]
        if not queue:
            del self._queues[entry.key.tenant]

    def first(self) -> QueueKey:
        """The next item. The queue must not be empty."""
        return min((queue[0].key for queue in self._queues.values()), key=self._shares.key)

    def last_of(self, tenant: str) -> int:
        """Number of a tenant's last item. The tenant must have an item."""
        return self._queues[tenant][-1].key.number

    def count(self) -> dict[str, int]:
        """Number of items by tenant."""
        return {tenant: len(queue) for tenant, queue in self._queues.items()}

    def check_invariants(self) -> None:
        """Assert that the tenants' queues are in order and hold all items."""
        found = [entry for queue in self._queues.values() for entry in queue]
        assert {entry.key.number: entry for entry in found} == self._entries
        assert len(found) == len(self._entries)
        for tenant, queue in self._queues.items():
            assert queue == sorted(queue, key=_order_in_tenant)
            assert {entry.key.tenant for entry in queue} == {tenant}

    def digest(self) -> bytes:
        return digest_of(self._queues)


def _order_in_tenant(entry: QueueEntry) -> tuple[float, int]:
    return entry.key.order_in_tenant


def may_admit(there: Counter[str], tenant: str, limit: int, weight_of: Callable[[str], float]) -> bool:
    """Whether a tenant may add an item if `limit` items are allowed.

    Beyond the limit, tenants below their share are admitted up to twice the limit: one tenant's flood does not shut
    others out.

    Args:
        there: number of items by tenant.
        tenant: the new item's tenant.
        limit: most items.
        weight_of: a tenant's weight.
    """
    total = there.total()
    if total < limit:
        return True
    weights = sum([weight_of(name) for name in {*there, tenant}])
    return total < 2 * limit and there[tenant] + 1 <= limit * weight_of(tenant) / weights
