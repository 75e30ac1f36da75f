"""The writer thread: takes batches to the durable tier, one after the other.

Owns the single thread that commits, the loop that feeds it, and whether a batch that failed is tried again; while one
batch is being committed the next gathers. Must not know what a batch consists of.
"""

import asyncio
import contextlib
import errno
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import lmdb

from moonpool.errors import MoonpoolError
from moonpool.telemetry.logs import get_logger
from services.kvstore.core.writes import Writes
from services.kvstore.ssd.commit import WritePlan
from services.kvstore.ssd.files import is_full
from services.kvstore.ssd.tier import SsdTier

_log = get_logger(__name__)

RETRY_AFTER_S = (0.0, 0.1, 1.0)
"""How long to wait before a batch is tried a second time, a third and so on; then it is not durable."""

REPEAT_S = 60.0
"""The same trouble is reported once in so long."""

_Kind = tuple[type[Exception], int | None]
"""What went wrong, not where: with the next file it is the same trouble."""

_MAY_PASS = (errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""So may a full device: the next plan makes room. What a device says when it is broken or read-only does not pass."""


class WriteBehind:
    """Commits what `writes` hands out. `run` once; `drain` before ending it.

    Args:
        writes: the queue.
        backend: where to.
        retry_after_s: see `RETRY_AFTER_S`.
        clock: seconds.

    Attributes:
        retries: batches that were tried again.
        on_committed: told the seconds that a batch took.
    """

    def __init__(
        self,
        writes: Writes,
        backend: SsdTier,
        *,
        retry_after_s: Sequence[float] = RETRY_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writes = writes
        self._backend = backend
        self._retry_after_s = retry_after_s
        self._failures = 0
        self._clock = clock
        self._retries_told: dict[_Kind, float] = {}
        self._errors_told: dict[_Kind, float] = {}  # since blocks became durable last
        self.retries = 0
        self.on_committed: Callable[[float], None] = lambda seconds: None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvstore-writer")
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    def wake(self) -> None:
        """There may be something to do."""
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Works until cancelled. A batch under way is finished by its thread, but nobody is told."""
        self.wake()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (plan := self._writes.next_plan()) is not None:
                error = await self._commit(plan)
                again = self._again(plan, error)
                self._report(plan, error, again)
                self._writes.plan_done(error, again=again is not None)
                if again is not None:
                    await asyncio.sleep(again)
                elif not plan.blocks and (plan.idle or error is not None):
                    break  # housekeeping that could not be finished waits for the next reason to wake
            if not self._wake.is_set():
                self._idle.set()

    async def _commit(self, plan: WritePlan) -> Exception | None:
        begin = time.monotonic()
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._backend.commit, plan)
        except (OSError, lmdb.Error, MoonpoolError) as error:
            return error
        self.on_committed(time.monotonic() - begin)
        return None

    def _again(self, plan: WritePlan, error: Exception | None) -> float | None:
        """In how many seconds a batch that failed is to be tried again; None for not at all."""
        if error is None:
            if plan.blocks:  # that housekeeping succeeds, which may be no more than deleting a file, says nothing
                self._failures = 0
            return None
        if not _may_pass(error) or self._failures >= len(self._retry_after_s):
            return None
        self._failures += 1
        self.retries += 1
        return self._retry_after_s[self._failures - 1]

    def _report(self, plan: WritePlan, error: Exception | None, again: float | None) -> None:
        """Says what is wrong, from time to time, and at once when it is right again."""
        if error is None:
            if self._errors_told and plan.blocks:
                self._errors_told.clear()
                _log.info("blocks become durable again")
        elif again is not None:
            if self._is_news(error, self._retries_told):
                _log.warning("batches are tried again", blocks=len(plan.blocks), error=str(error))
        elif self._is_news(error, self._errors_told):
            _log.error("blocks could not be made durable", blocks=len(plan.blocks), error=str(error))

    def _is_news(self, error: Exception, told: dict[_Kind, float]) -> bool:
        """Whether it was not told of late; now it is."""
        kind, now = (type(error), error.errno if isinstance(error, OSError) else None), self._clock()
        if now - told.get(kind, -math.inf) < REPEAT_S:
            return False
        told[kind] = now
        return True

    async def drain(self, timeout_s: float) -> bool:
        """Waits until everything visible is durable; False when that took longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                return True
        return False

    async def aclose(self) -> None:
        """Waits for the thread; call when `run` has ended."""
        await asyncio.to_thread(self._executor.shutdown)


def _may_pass(error: Exception) -> bool:
    return is_full(error) or (isinstance(error, OSError) and error.errno in _MAY_PASS)
