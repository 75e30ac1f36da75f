"""The way out of one I/O process: who may send next, and how fast.

Owns priority between traffic to decode and to the store, and an optional rate limit (for tests and shared networks).
Must not know what is sent.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

TO_DECODE = 0
"""Priority of KV that a generation waits for."""
TO_STORE = 1
"""Priority of everything else."""

BURST_S = 0.005
"""Time by which a late timer is made up for, in seconds."""

_sleep = asyncio.sleep


def _now() -> float:
    return asyncio.get_running_loop().time()


class Link:
    """One per I/O process. Waiting traffic to decode goes before waiting traffic to the store.

    With a rate, slots are given one after the other, each lasting as long as its bytes take at that rate, so that what
    is sent after its slot arrives as over a link of that speed. Without one, `slot` lets everything pass, except that
    traffic to the store lets traffic to decode that is ready in the same moment go first.
    """

    def __init__(self, rate_bytes_per_s: float | None = None) -> None:
        if rate_bytes_per_s is not None and rate_bytes_per_s <= 0:
            raise ValueError(f"rate_bytes_per_s must be positive, is {rate_bytes_per_s}")
        self._rate = rate_bytes_per_s
        self._order = count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._busy = False
        self._free_at = 0.0

    @property
    def waiting(self) -> int:
        """Number of waiting `slot` calls."""
        return len(self._waiters)

    async def slot(self, nbytes: int, priority: int) -> None:
        """Returns when `nbytes` may be handed to the network. The caller sets the deadline.

        Args:
            nbytes: Payload bytes.
            priority: TO_DECODE or TO_STORE.
        """
        if self._rate is None:
            if priority != TO_DECODE:
                await asyncio.sleep(0)
            return
        await self._turn(priority)
        try:
            now = _now()
            # Idle time beyond the burst is lost, as on a wire.
            self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._rate
            await _sleep(max(0.0, self._free_at - now))
        finally:
            self._next()

    async def _turn(self, priority: int) -> None:
        if not self._busy:
            self._busy = True
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (priority, next(self._order), future)
        heapq.heappush(self._waiters, entry)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                self._next()
            elif entry in self._waiters:  # `_next` may have met and dropped it since it was cancelled
                self._waiters.remove(entry)
                heapq.heapify(self._waiters)
            raise

    def _next(self) -> None:
        while self._waiters:
            future = heapq.heappop(self._waiters)[2]
            if not future.done():
                future.set_result(None)
                return
        self._busy = False
