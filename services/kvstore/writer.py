"""The writer thread: takes batches to the durable tier, one after the other.

Owns the single thread that commits, and the loop that feeds it; while one batch is being committed the next gathers.
Must not know what a batch consists of.
"""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import lmdb

from moonpool.errors import MoonpoolError
from moonpool.telemetry.logs import get_logger
from services.kvstore.backend import Backend, WritePlan
from services.kvstore.writes import Writes

_log = get_logger(__name__)


class WriteBehind:
    """Commits what `writes` hands out. `run` once; `drain` before ending it.

    Args:
        writes: the queue.
        backend: where to.
    """

    def __init__(self, writes: Writes, backend: Backend) -> None:
        self._writes = writes
        self._backend = backend
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
                self._writes.plan_done(await self._commit(plan))
                if not plan.blocks:
                    break  # housekeeping that could not be finished waits for the next reason to wake
            if not self._wake.is_set():
                self._idle.set()

    async def _commit(self, plan: WritePlan) -> Exception | None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._backend.commit, plan)
        except (OSError, lmdb.Error, MoonpoolError) as error:
            _log.error("blocks could not be made durable", blocks=len(plan.blocks), error=str(error))
            return error
        return None

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
