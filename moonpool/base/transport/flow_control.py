"""Flow control: byte credits between sender and receiver, and the priority of a process's outgoing traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moonpool.base.errors import TransferFailed
from moonpool.base.transport.async_utils import WaiterQueue

TO_DECODE = 0
"""Priority of KV that a generation waits for."""
TO_STORE = 1
"""Priority of everything else."""
BURST_S = 0.005
"""Time by which a late timer is made up for, in seconds."""


@dataclass(frozen=True, slots=True)
class StreamTraffic:
    """What is under way on streams; all zero once no channel is open.

    Attributes:
        credits_out: bytes sent which the peers have not handed back.
        credits_kept: bytes taken from peers and not handed back to them.
        unsent: messages that wait to be written.
    """

    credits_out: int = 0
    credits_kept: int = 0
    unsent: int = 0

    def __add__(self, other: StreamTraffic) -> StreamTraffic:
        return StreamTraffic(
            self.credits_out + other.credits_out,
            self.credits_kept + other.credits_kept,
            self.unsent + other.unsent,
        )


class ByteCredits:
    """The sender's side: bytes that may still be sent. First come, first served.

    The window is the most that was ever available. A receiver returns credits in batches and may hold back less than a
    quarter of the window. So a call waits for at most three quarters of the window. A message larger than the
    window goes when that much is available (`available` is negative after that).
    """

    def __init__(self, window: int = 0) -> None:
        self._window = window
        self._available = window
        self._waiters: WaiterQueue[int, bool] = WaiterQueue(self._try, lambda n, _: self.grant(n))
        self._closed = False

    @property
    def available(self) -> int:
        """Bytes that may be sent now; negative after an oversize message."""
        return self._available

    @property
    def window(self) -> int:
        """The most that was ever available."""
        return self._window

    @property
    def out(self) -> int:
        """Bytes taken that have not come back."""
        return self._window - self._available

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def grant(self, n: int) -> None:
        """Add bytes: the peer's credit, or what was acquired and then not sent."""
        self._available += n
        self._window = max(self._window, self._available)
        if self._waiters:
            self._waiters.notify()

    def take(self, n: int) -> bool:
        """Take `n` bytes if they are there at once and no other call waits."""
        return not self._closed and not self._waiters and self._try(n) is not None

    def overdraw(self, n: int) -> None:
        """Take `n` bytes whether they are there or not; `available` may be negative after that."""
        self._available -= n

    async def acquire(self, n: int, *, timeout_s: float) -> None:
        """Take `n` bytes, waiting until they are there. A cancelled wait takes no bytes.

        Raises:
            TransferFailed: They were not there within `timeout_s`.
            Exception: The error given to `close`.
        """
        if self.take(n):
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiters.get(n)
        except TimeoutError:
            raise TransferFailed(f"no credit for {n} bytes within {timeout_s:g} s") from None

    def close(self, error: Exception) -> None:
        """End all waiting and later `acquire` calls with `error`. Idempotent."""
        self._closed = True
        self._waiters.close(error)

    def _try(self, n: int) -> bool | None:
        if self._available <= 0 or self._available < min(n, self._window - self._window // 4):
            return None
        self._available -= n
        return True


class CreditReturn:
    """The receiver's side: collects credits for handled bytes, and returns them in batches of a quarter window or more.

    If no more is expected, all credits are handed back at once, so that at rest no credit is out.
    """

    def __init__(self, window: int) -> None:
        self._threshold = max(1, window // 4)
        self._pending = 0

    @property
    def pending(self) -> int:
        """Bytes dealt with and not yet handed back; always less than a quarter window, or 0."""
        return self._pending

    def consumed(self, n: int, *, idle: bool = False) -> int:
        """Note that `n` bytes are dealt with; return the bytes to hand back now, 0 for none. `idle`: all of them."""
        self._pending += n
        return self.flush() if idle or self._pending >= self._threshold else 0

    def flush(self) -> int:
        """The bytes to hand back because no more are expected for now."""
        returned, self._pending = self._pending, 0
        return returned


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class EgressLink:
    """One per I/O process. Waiting traffic to decode goes before waiting traffic to the store.

    With a rate, slots are given one after the other, each lasting as long as the bytes take at that rate. What is sent
    after the slot then arrives as over a link of that speed. Without a rate, `slot` lets everything pass, except that
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
        return len(self._waiters)

    async def slot(self, nbytes: int, priority: int) -> None:
        """Return when `nbytes` may be handed to the network. The caller sets the deadline.

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
