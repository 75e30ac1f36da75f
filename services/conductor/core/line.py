"""Requests that wait for a placement within their limits, and when each of them is planned again.

Where a request would be refused, one that has a deadline waits here instead. When load falls is known by forecast only,
so they look again and again: the first in fair order each time, the others when their refusal said so. Who has laxer
limits may pass others.
"""

from itertools import islice

from moonpool.core.digest import digest_of
from moonpool.core.fair import FairQueue, Place, Shares
from moonpool.core.timers import Timers
from moonpool.frozen import frozen

PAUSE_S = 0.05
"""Between two looks of the whole line, at least."""
MAX_PAUSE_S = 1.0
"""Between two looks of one request, at most: forecasts err."""
FIRST = 4
"""So many look each time."""
MOST = 12
"""So many at most look at once: each look costs a plan."""
TIMER = ("line", 0)


@frozen
class Waiting:
    """A request in the line, and bytes of its prompt."""

    place: Place
    nbytes: int


class Line:
    """The line, bounded in number and bytes. What it costs does not grow with those who wait, but for their tenants.

    Args:
        shares: of the tenants.
        timers: of the core; `TIMER` is set to when somebody looks again.
        most: requests.
        most_bytes: of their prompts.
    """

    def __init__(self, shares: Shares, timers: Timers[tuple[str, int]], most: int, most_bytes: int) -> None:
        self._queue = FairQueue(shares)
        self._timers = timers
        self._most = most
        self._most_bytes = most_bytes
        self._waiting: dict[int, Waiting] = {}
        self._again: Timers[int] = Timers()  # when each looks again
        self._held: dict[str, int] = {}  # bytes, by tenant
        self._looked_at = 0.0
        self.nbytes = 0
        """Of all prompts."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def count(self) -> dict[str, int]:
        """How many wait, by tenant."""
        return self._queue.count()

    def add(self, now: float, place: Place, nbytes: int, cost: float, retry_s: float) -> list[int]:
        """One more waits, who was told to look again after `retry_s`.

        Returns:
            Those for whom there is no room any more, maybe this one; they are not in the line. They are the last of
            whoever has most bytes in it for his weight.
        """
        again_at = now + min(max(retry_s, PAUSE_S), MAX_PAUSE_S)
        self._queue.add(place, cost)
        self._waiting[place.number] = Waiting(place, nbytes)
        self._again.set(place.number, again_at)
        self._hold(place.tenant, nbytes)
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
            self._hold(waiting.place.tenant, -waiting.nbytes)
            self._wake()

    def looking(self, now: float) -> list[int]:
        """Those who look for a place now: the first of all, and who has waited for longest since he was to look."""
        self._looked_at = now
        found = list(islice(self._queue, FIRST))
        for number in found:
            self._again.clear(number)
        while len(found) < MOST and (due := self._again.pop_due(now)) is not None:
            found.append(due)
        for number in found:  # whoever finds a place leaves the line
            self._again.set(number, now + MAX_PAUSE_S)
        self._wake()
        return found

    def _hold(self, tenant: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._held[tenant] = self._held.get(tenant, 0) + nbytes
        if not self._held[tenant]:
            del self._held[tenant]

    def _largest(self) -> str:
        """The tenant that has most in the line for its weight; of equal ones the last in the alphabet."""
        return max(self._held, key=lambda tenant: (self._held[tenant] / self._weight(tenant), tenant))

    def _weight(self, tenant: str) -> float:
        return self._waiting[self._queue.last_of(tenant)].place.weight

    def _wake(self) -> None:
        first = self._again.next()
        if first is None:
            self._timers.clear(TIMER)
        else:
            self._timers.set(TIMER, max(first, self._looked_at + PAUSE_S))

    def check_invariants(self) -> None:
        """Asserts that sums, order and timer are those of who waits."""
        self._queue.check_invariants()
        assert sorted(self._queue) == sorted(self._waiting)
        assert self.nbytes == sum(it.nbytes for it in self._waiting.values()) <= self._most_bytes
        held: dict[str, int] = {}
        for it in self._waiting.values():
            held[it.place.tenant] = held.get(it.place.tenant, 0) + it.nbytes
        assert self._held == held
        assert len(self._again) == len(self._waiting)
        assert len(self) <= self._most
        assert (self._timers.at(TIMER) is not None) == bool(self._waiting)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._waiting, self._again, self._queue, self._looked_at, self.nbytes)
