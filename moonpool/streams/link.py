"""The way out of one I/O process: traffic to decode before traffic to the store, and an optional rate limit.

The rate limit is for tests and for networks that are shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from moonpool.streams.waiters import WaiterQueue

TO_DECODE = 0
"""Priority of KV that a generation waits for."""
TO_STORE = 1
"""Priority of everything else."""

BURST_S = 0.005
"""Time by which a late timer is made up for, in seconds."""


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class Link:
    """One per I/O process. Waiting traffic to decode goes before waiting traffic to the store.

    With a rate, slots are given one after the other, each lasting as long as its bytes take at that rate, so that what
    is sent after its slot arrives as over a link of that speed. Without one, `slot` lets everything pass, except that
    traffic to the store lets traffic to decode that is ready in the same moment go first.
    """

    def __init__(
        self,
        rate_bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = _loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if rate_bytes_per_s is not None and rate_bytes_per_s <= 0:
            raise ValueError(f"rate_bytes_per_s must be positive, is {rate_bytes_per_s}")
        self._rate = rate_bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._waiters: WaiterQueue[None, bool] = WaiterQueue(self._occupy, lambda _, __: self._free())
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
        await self._waiters.get(None, priority=priority)
        try:
            now = self._clock()
            # Idle time beyond the burst is lost, as on a wire.
            self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._rate
            await self._sleep(max(0.0, self._free_at - now))
        finally:
            self._free()
            self._waiters.notify()

    def _occupy(self, _: None) -> bool | None:
        if self._busy:
            return None
        self._busy = True
        return True

    def _free(self) -> None:
        self._busy = False
