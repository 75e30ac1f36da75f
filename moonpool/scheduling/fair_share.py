"""Fair sharing between tenants, and priorities within a tenant.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time that grows by cost / weight for
the work served; the tenant with the smallest virtual time is next. As in the virtual token counter of Sheng et al.
(2024), cost is charged when it is spent, and an idle tenant is lifted towards the others, at most `credit` behind
them, so that no tenant saves up for a burst. While the server is idle, all tenants are forgiven the idle capacity.

Within a tenant, a priority is a head start in arrival time. Requests that arrive later than the head start go behind,
so low priorities never starve, and urgent requests gain nothing over other tenants.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from moonpool.errors import InvalidRequest
from moonpool.frozen import frozen
from moonpool.scheduling.state_machine import digest_of

LEAST_PRIORITY, MOST_PRIORITY = -100, 100


PRIORITY_S = 60.0
"""Who has a priority higher by one lets those pass that come up to so much later."""


MAX_CREDIT_S = 10.0
"""Seconds of work that a tenant may be behind its share."""


MAX_TENANTS = 4096
"""Tenants that are remembered; of more, those are forgotten that have had least."""


def priority_rank(came: float, priority: int) -> float:
    """Place among a tenant's own, least first; `came` in seconds of one clock. A lower priority goes first."""
    return came + PRIORITY_S * priority


def check_priority(priority: int, field: str) -> None:
    """Raises InvalidRequest, naming the field, when a priority is out of bounds."""
    if not LEAST_PRIORITY <= priority <= MOST_PRIORITY:
        raise InvalidRequest(field, f"must be in [{LEAST_PRIORITY}, {MOST_PRIORITY}], is {priority}")


@frozen
class QueueKey:
    """Where something stands: whose it is, its `rank` among the tenant's own, and a number that no other has."""

    tenant: str
    rank: float
    number: int
    weight: float = 1.0

    @property
    def own(self) -> tuple[float, int]:
        """The place among the tenant's own."""
        return self.rank, self.number


@frozen
class QueueEntry:
    """Something that waits, and what it is predicted to cost."""

    place: QueueKey
    cost: float


class FairShares:
    """Virtual times of tenants.

    Args:
        credit: how far a tenant may be behind, in the unit of costs.
    """

    def __init__(self, credit: float = MAX_CREDIT_S) -> None:
        self._credit = credit
        self._times: dict[str, float] = {}
        self._least = 0.0  # nobody's time is behind this: it is that of all who are not remembered
        self._rested_at = 0.0

    def time(self, tenant: str) -> float:
        """The tenant's virtual time."""
        return max(self._times.get(tenant, 0.0), self._least)

    def serve(self, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Something was served that costs so much."""
        time = self.time(tenant)
        self._least = max(self._least, time - self._credit)
        self._times[tenant] = time + cost / weight
        if len(self._times) > MAX_TENANTS:
            self._forget()

    def rest(self, cost: float) -> None:
        """So much could have been served, and nobody wanted it."""
        self._least += cost

    def rest_until(self, now: float, rate: float) -> None:
        """As `rest`, for the time since this was called before; `rate` = what could have been served per second."""
        self.rest((now - self._rested_at) * rate)
        self._rested_at = now

    def key(self, place: QueueKey) -> tuple[float, float, int]:
        """By which places are compared: the least is served next."""
        return self.time(place.tenant), *place.own

    def order(self, lines: Iterable[Sequence[QueueEntry]]) -> Iterator[QueueEntry]:
        """All that wait, as they would be served if each cost what is predicted.

        Args:
            lines: what waits of each tenant, in the order of its own; none is empty. They must not change meanwhile.
        """
        heap = [(*self.key(line[0].place), 0, line) for line in lines]
        if len(heap) == 1:
            yield from heap[0][-1]
            return
        heapify(heap)
        while heap:
            time, _, _, at, line = heap[0]
            wanted = line[at]
            yield wanted
            if at + 1 < len(line):
                after = time + wanted.cost / wanted.place.weight
                heapreplace(heap, (after, *line[at + 1].place.own, at + 1, line))
            else:
                heappop(heap)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._times, self._least, self._rested_at)

    def _forget(self) -> None:
        kept = sorted(self._times, key=lambda tenant: self._times[tenant], reverse=True)[: MAX_TENANTS // 2]
        self._times = {tenant: self._times[tenant] for tenant in kept if self._times[tenant] > self._least}


class FairQueue:
    """What waits, in fair order."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._lines: dict[str, list[QueueEntry]] = {}
        self._wanted: dict[int, QueueEntry] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, number: int) -> bool:
        return number in self._wanted

    def __iter__(self) -> Iterator[int]:
        """Numbers in fair order; the queue must not change meanwhile."""
        return (wanted.place.number for wanted in self._shares.order(self._lines.values()))

    def add(self, place: QueueKey, cost: float = 0.0) -> None:
        """One more waits; its cost matters for the order of those behind it."""
        assert place.number not in self._wanted, f"{place.number} waits already"
        wanted = self._wanted[place.number] = QueueEntry(place, cost)
        insort(self._lines.setdefault(place.tenant, []), wanted, key=_own_order)

    def remove(self, number: int) -> None:
        """One less; unknown numbers are fine."""
        wanted = self._wanted.pop(number, None)
        if wanted is None:
            return
        line = self._lines[wanted.place.tenant]
        del line[bisect_left(line, wanted.place.own, key=_own_order)]
        if not line:
            del self._lines[wanted.place.tenant]

    def first(self) -> QueueKey:
        """Who is next; there must be one."""
        return min((line[0].place for line in self._lines.values()), key=self._shares.key)

    def last_of(self, tenant: str) -> int:
        """The last of a tenant's own; there must be one."""
        return self._lines[tenant][-1].place.number

    def count(self) -> dict[str, int]:
        """How many wait, by tenant."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def check_invariants(self) -> None:
        """Asserts that lines are in order and hold what waits."""
        found = [wanted for line in self._lines.values() for wanted in line]
        assert {wanted.place.number: wanted for wanted in found} == self._wanted
        assert len(found) == len(self._wanted)
        for tenant, line in self._lines.items():
            assert line == sorted(line, key=_own_order)
            assert {wanted.place.tenant for wanted in line} == {tenant}

    def digest(self) -> bytes:
        """Hash of what waits."""
        return digest_of(self._lines)


def _own_order(wanted: QueueEntry) -> tuple[float, int]:
    return wanted.place.own


def may_admit(there: Counter[str], tenant: str, limit: int, weight_of: Callable[[str], float]) -> bool:
    """Whether one more of a tenant is let in where `limit` things may be.

    When so many are there, tenants that have less than their share may still bring theirs, until there are twice as
    many: a flood does not shut others out.

    Args:
        there: how many of each tenant are there.
        tenant: who brings one more.
        limit: how many there may be.
        weight_of: a tenant's weight.
    """
    total = there.total()
    if total < limit:
        return True
    weights = sum([weight_of(one) for one in {*there, tenant}])
    return total < 2 * limit and there[tenant] + 1 <= limit * weight_of(tenant) / weights
