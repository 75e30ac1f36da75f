"""Turns of tenants: whose work is next where work for requests shares a thread or an event loop.

Each tenant has a queue, and the tenant that has cost least so far is next (start-time fair queueing, `FairShares`). A
tenant with many requests waits for its own. Work whose client leaves before its turn is never begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from itertools import count
from typing import TypeVar

from moonpool.base import world
from moonpool.base.scheduling.fair_share import FairQueue, FairShares, QueueKey

T = TypeVar("T")
LEAST_COST_S = 1e-4
"""What a turn on a thread costs at least, in seconds: handing work over takes time, too."""
CREDIT_S = 0.02
"""Seconds of work by which a tenant that was away may be behind the others."""
UNHURRIED, MEASURED_AGAIN = 8, 1024
"""Of `TenantPlaces`: works that show how long a work takes with the least places; works after which it is measured
again."""
LONGER, LONGER_BESIDE = 1.5, 1.1
"""How much longer works may take with more places; beside other tenants."""
LEAST_BESIDE = 1
"""The least places of a tenant beside other tenants."""
LINGER_S = 1.0
"""Seconds for which a tenant counts as there after the end of its last request: its next one may follow."""


class Turns:
    """Places of which each is one tenant's at a time.

    Args:
        places: turns that are taken at the same time.
        credit: cost by which a tenant that was away may be behind the others.
    """

    def __init__(self, places: int = 1, credit: float = CREDIT_S) -> None:
        self._places = places
        self.taken = 0
        """Places that have a turn now."""
        self._credit = credit
        self._forget_costs()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        """Works that wait for a turn."""
        return len(self._queue)

    async def begin(self, tenant: str, rank: float = 0.0) -> None:
        """Wait for a turn of this tenant, which lasts until `end`. A caller that is cancelled has had no turn.

        Args:
            tenant: whose turn it shall be.
            rank: order among the tenant's own works, least first; of equal ranks, the one that came first.
        """
        if self.taken < self._places:
            self.taken += 1
            return
        number = next(self._numbers)
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._queue.add(QueueKey(tenant, rank, number))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn came at the same moment
                self.end(tenant, 0.0)
            raise
        finally:
            self._queue.remove(number)
            self._waiting.pop(number, None)

    def end(self, tenant: str, cost: float) -> None:
        """A turn is over: charge the tenant, and give the place to who is next."""
        if cost:
            self._shares.serve(tenant, cost)
        self.taken -= 1
        self._hand_out()
        if not self.taken:
            self._forget_costs()  # nobody waits: what each has had so far counts no more

    def resize(self, places: int) -> None:
        """Change the number of places. Turns that are taken last until they end."""
        self._places = places
        self._hand_out()

    def _hand_out(self) -> None:
        while len(self._queue) and self.taken < self._places:
            number = self._queue.first().number
            self._queue.remove(number)
            turn = self._waiting.pop(number)
            if not turn.done():  # else the caller was cancelled in this moment
                self.taken += 1
                turn.set_result(None)

    def _forget_costs(self) -> None:
        self._shares = FairShares(self._credit)
        self._queue = FairQueue(self._shares)


class TenantPlaces:
    """Places of each tenant's own: a tenant's further works wait, and no other tenant's.

    More works at once than the services can do only queue up there, before other tenants' works. So a tenant begins
    with few places. They become more as long as works do not take much longer than with few. Beside other tenants'
    requests a tenant begins with one place, and works may take hardly longer: the others' requests find the services
    with few works to do, not busy without end.

    Args:
        least: places of each tenant at first, and at least, while no other tenant has requests.
        most: places of a tenant at most.
    """

    def __init__(self, least: int, most: int) -> None:
        self._bounds = least, most
        self._tenants: dict[str, _OwnPlaces] = {}
        self._requests: dict[str, int] = {}  # those of each tenant that is there
        self._left: dict[str, float] = {}  # tenants that are not, and when their last request ended; oldest first

    def __len__(self) -> int:
        """Tenants that hold places."""
        return len(self._tenants)

    @contextmanager
    def present(self, tenant: str) -> Iterator[None]:
        """Count one of a tenant's requests, with places or without, until the body ends."""
        self._requests[tenant] = self._requests.get(tenant, 0) + 1
        self._left.pop(tenant, None)
        for other, places in self._tenants.items():
            places.set_beside(self._others_than(other))
        try:
            yield
        finally:
            self._requests[tenant] -= 1
            if not self._requests[tenant]:
                del self._requests[tenant]
                self._left[tenant] = world.monotonic()

    def _others_than(self, tenant: str) -> bool:
        """Return whether another tenant has requests, or had some a moment ago."""
        now = world.monotonic()
        while self._left and now - next(iter(self._left.values())) > LINGER_S:
            del self._left[next(iter(self._left))]
        return any(len(there) > (tenant in there) for there in (self._requests, self._left))

    async def take(self, tenant: str, rank: float) -> TakenPlace:
        """Wait for a place. `rank` is the order among the tenant's works, least first."""
        places = self._tenants.get(tenant)
        if places is None:
            places = self._tenants[tenant] = _OwnPlaces(*self._bounds)
        places.set_beside(self._others_than(tenant))
        try:
            await places.turns.begin(tenant, rank)
        except asyncio.CancelledError:
            self._forget_unused(tenant, places)  # the place may have come at the same moment
            raise
        began = world.monotonic()

        def give_back(seconds: float | None) -> None:
            places.set_beside(self._others_than(tenant))
            if seconds is not None:
                places.measured(seconds)
            places.turns.end(tenant, 0.0)
            self._forget_unused(tenant, places)

        return TakenPlace(began, give_back)

    def _forget_unused(self, tenant: str, places: _OwnPlaces) -> None:
        if not places.turns.taken and self._tenants.get(tenant) is places:
            del self._tenants[tenant]


class TakenPlace:
    """A place of `TenantPlaces`."""

    def __init__(self, began: float, give_back: Callable[[float | None], None]) -> None:
        self._began = began
        self._give_back: Callable[[float | None], None] | None = give_back

    def give_back(self, *, done: bool) -> None:
        """Give the place back; of no effect when called again. `done`: the work was done, so its time counts."""
        if self._give_back is not None:
            self._give_back(world.monotonic() - self._began if done else None)
            self._give_back = None


class _OwnPlaces:
    """The places of one tenant, and how long works take."""

    def __init__(self, least: int, most: int) -> None:
        self._least_alone, self._most = least, most
        self._least, self._longer = least, LONGER
        self._number = float(least)
        self.turns = Turns(least)
        self._seconds: list[float] = []  # of works with the least places
        self._since = 0  # works since these

    def set_beside(self, beside: bool) -> None:
        """Have the places that a tenant has beside other tenants, or alone."""
        least, longer = (LEAST_BESIDE, LONGER_BESIDE) if beside else (self._least_alone, LONGER)
        if least != self._least:
            self._least, self._longer = least, longer
            self._measure()
            self.turns.resize(least)

    def measured(self, seconds: float) -> None:
        """A work took so long: have more places, or fewer."""
        self._since += 1
        if self._since > MEASURED_AGAIN:
            self._measure()
        elif self._since > 0:  # else the work began beside more
            if len(self._seconds) < UNHURRIED:
                self._seconds.append(seconds)
            else:
                is_usual = seconds <= self._longer * sum(self._seconds) / UNHURRIED
                self._number = min(max(self._number + (0.5 if is_usual else -0.5), self._least), self._most)
        self.turns.resize(int(self._number))

    def _measure(self) -> None:
        """Have the least places, and measure how long works take then."""
        self._number, self._since, self._seconds = float(self._least), -self.turns.taken, []


class TenantTurns:
    """Work of requests on threads, whose cost is the processor time of the thread.

    Args:
        threads: run the work.
        at_once: number of threads.
    """

    def __init__(self, threads: Executor, at_once: int = 1) -> None:
        self._threads = threads
        self._turns = Turns(at_once)

    def __len__(self) -> int:
        """Works that wait for a turn."""
        return len(self._turns)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run work for a tenant's request on a thread. Work that has begun goes on if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        await self._turns.begin(tenant)
        cost_s = LEAST_COST_S

        def timed() -> T:
            nonlocal cost_s
            began = world.thread_time()
            try:
                return work()
            finally:
                cost_s += world.thread_time() - began

        def over(done: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(lambda: self._turns.end(tenant, cost_s))

        try:
            running = self._threads.submit(timed)
        except RuntimeError:  # the threads have ended
            self._turns.end(tenant, 0.0)
            raise
        running.add_done_callback(over)
        return await asyncio.wrap_future(running)


class LoopTurns:
    """Pieces of work on the event loop: one in each pass of the loop.

    What else the loop has to do, such as sending tokens that have come, waits for one piece, however many there are.

    Args:
        credit: cost by which a tenant that was away may be behind the others, in the callers' unit.
    """

    def __init__(self, credit: float = 1.0) -> None:
        self._turns = Turns(1, credit)

    def __len__(self) -> int:
        """Pieces that wait for a turn."""
        return len(self._turns)

    async def begin(self, tenant: str, cost: float = 1.0) -> None:
        """Wait for a tenant's turn, which is the work up to the caller's next `await`. The next turn is a pass later.

        Args:
            tenant: whose work it is.
            cost: of the work, in a unit of the callers'.
        """
        await self._turns.begin(tenant)
        asyncio.get_running_loop().call_soon(self._turns.end, tenant, cost)
