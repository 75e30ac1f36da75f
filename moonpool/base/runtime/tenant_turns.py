"""Turns of tenants: whose work is next where work for requests shares a thread or an event loop.

Each tenant has a queue, and the tenant that has cost least so far is next (start-time fair queueing, `FairShares`). A
tenant with many requests waits for its own. Work whose client leaves before its turn is never begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import count
from typing import TypeVar

from moonpool.base import world
from moonpool.base.scheduling.fair_share import FairQueue, FairShares, QueueKey

T = TypeVar("T")
LEAST_COST_S = 1e-4
"""What a turn on a thread costs at least, in seconds: handing work over takes time, too."""
CREDIT_S = 0.02
"""Seconds of work by which a tenant that was away may be behind the others."""


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
        while len(self._queue):
            number = self._queue.first().number
            self._queue.remove(number)
            turn = self._waiting.pop(number)
            if not turn.done():  # else the caller was cancelled in this moment
                turn.set_result(None)
                return
        self.taken -= 1
        if not self.taken:
            self._forget_costs()  # nobody waits: what each has had so far counts no more

    def _forget_costs(self) -> None:
        self._shares = FairShares(self._credit)
        self._queue = FairQueue(self._shares)


class TenantPlaces:
    """So many places of each tenant's own: a tenant's further works wait, and no other tenant's.

    Args:
        places: of each tenant.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._turns: dict[str, Turns] = {}

    def __len__(self) -> int:
        """Tenants that hold places."""
        return len(self._turns)

    async def take(self, tenant: str, rank: float) -> Callable[[], None]:
        """Wait for a place; return what gives the place back, of no effect when called again.

        `rank` is the order among the tenant's works, least first.
        """
        turns = self._turns.setdefault(tenant, Turns(self._places))
        await turns.begin(tenant, rank)
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                turns.end(tenant, 0.0)
                if turns.taken == 0:
                    self._turns.pop(tenant, None)

        return give_back


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
