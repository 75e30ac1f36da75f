"""Work that is done once for all who ask for it at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Rounds:
    """One piece of work, done again and again, one round at a time.

    Who asks while a round is under way may lack what came after its beginning, so he waits for the next one, with all
    the others who ask meanwhile.
    """

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        """`work` is one round; it raises nothing that matters to those who wait."""
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._began = 0.0

    @property
    def idle(self) -> bool:
        """Whether no round is under way or waited for."""
        return self._next is None and (self._running is None or self._running.done())

    @property
    def since_s(self) -> float:
        """Seconds since the round that is under way has begun; 0 when none is."""
        if self._running is None or self._running.done():
            return 0.0
        return asyncio.get_running_loop().time() - self._began

    def next(self) -> asyncio.Task[None]:
        """The next round to begin. Who waits for it must not cancel it."""
        if self._next is None:
            self._next = asyncio.create_task(self._round(self._running))
        return self._next

    async def aclose(self) -> None:
        """Ends what is under way."""
        tasks = [task for task in (self._running, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        self._began = asyncio.get_running_loop().time()
        await self._work()
