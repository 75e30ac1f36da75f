"""Write-behind: one writer thread per disk commits batches, one after the other, and retries failed batches.

If one of several disks fails, the disk is left out, and the other disks take the batch.
"""

import asyncio
import contextlib
import dataclasses
import errno
import math
from collections.abc import Callable, Iterator, Sequence

import lmdb

from moonpool.base import world
from moonpool.base.errors import MoonpoolError
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.async_utils import wait_within
from moonpool.kvstore.core.write_queue import WriteQueue
from moonpool.kvstore.ssd.files import is_full, lacks_memory
from moonpool.kvstore.ssd.tier import SsdTier
from moonpool.kvstore.ssd.write_plan import WritePlan

log = get_logger(__name__)


# Seconds before a failed batch is tried again, the first time and so on, and then the batch's blocks, which are in DRAM
# only.
RETRY_AFTER_S = (0.0, 0.1, 1.0)
UNSAVED_AFTER_S = (1.0, 2.0, 5.0, 15.0, 60.0)
ERASE_AGAIN_S = 0.02
REPEAT_S = 60.0  # the same kind of error is logged once in this time, unless blocks became durable meanwhile
_MAY_PASS = (errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE)  # as a full device does: by a plan
_Kind = tuple[str, type[Exception], int | None]  # message, type and errno of the error; not the file


@dataclasses.dataclass(eq=False)
class WriteBehind:
    """Commits `queue`'s batches to the disks in `ssd`, when woken. `run` once; `drain` before ending the task.

    Writing averages `bytes_per_s`, if not 0: after a batch the writer pauses. `on_committed` is told the seconds that a
    batch took, `on_left_out` the number of a disk that is; `clock` times the log messages.
    """

    queue: WriteQueue
    ssd: SsdTier
    on_committed: Callable[[float], None] = lambda seconds: None
    on_left_out: Callable[[int], None] = lambda disk: None
    bytes_per_s: int = 0
    retry_after_s: Sequence[float] = RETRY_AFTER_S
    unsaved_after_s: Sequence[float] = UNSAVED_AFTER_S
    clock: Callable[[], float] = world.monotonic

    def __post_init__(self) -> None:
        self.retries = 0  # batches that were tried again
        self._work = [asyncio.Event() for _ in self.ssd.disks]  # each disk's own: none takes another's
        self._idle = asyncio.Event()
        self._planned = asyncio.Event()  # another one after each plan
        self._busy = 0  # disks with work
        self._delays = {disk: iter(self.retry_after_s) for disk in range(len(self.ssd.disks))}
        self._unsaved_tries, self._retry_at = 0, math.inf
        self._hurry = asyncio.Event()  # the end, and deletions, wait for no pause
        self._hurrying_now = 0  # number of hurried waiters
        self._free_at = 0.0  # when what has been written so far is within the rate
        self._told: dict[_Kind, float] = {}  # when a message was logged last
        self._failing = False  # blocks were given up since one became durable
        self._failed: set[int] = set()  # disks that may be away: their files are opened anew
        self._executor = world.thread_pool(len(self.ssd.disks), "kvstore-writer")

    def wake(self) -> None:
        self._idle.clear()
        for disk in sorted(self._delays, key=lambda disk: self.ssd.disks[disk].space.turn):  # asked in this order
            self._work[disk].set()

    async def run(self) -> None:
        """Write until cancelled. The thread finishes a batch under way, but the result is lost."""
        self.wake()
        async with asyncio.TaskGroup() as group:
            for disk in self._delays:
                group.create_task(self._run(disk))

    async def _run(self, disk: int) -> None:
        while not self.ssd.disks[disk].out:
            await self._wait(self._work[disk])
            self._busy += 1
            if disk in self._failed:
                await self._reopen(disk)
            while (plan := self.queue.next_plan(disk)) is not None and await self._do(plan):
                pass
            self._busy -= 1
            woken = any(work.is_set() for work, disk in zip(self._work, self.ssd.disks, strict=True) if not disk.out)
            if not (self._busy or woken):
                self._idle.set()

    async def _do(self, plan: WritePlan) -> bool:
        """Do a plan; False when housekeeping could not be finished, which waits for the next reason to wake."""
        disk, error = plan.disk, await self._commit(plan)
        again = self._again(plan, error)
        lasting = isinstance(error, OSError | lmdb.Error) and not _may_pass(error)
        spared = lasting and again is None and self.ssd.can_spare(disk)
        if not spared:
            self._report(plan, error, again)
        self.queue.plan_done(error, disk, again=spared or again is not None)
        if spared:
            await self._leave_out(disk, error)
        elif again is not None:
            self.wake()  # others need not wait for this disk
        elif lasting:
            self._failed.add(disk)
        self._planned.set()
        self._planned = asyncio.Event()
        await asyncio.sleep(0)  # the plan's waiters are in no hurry any more
        await self._pause(plan.written_bytes)
        if again is not None:
            await asyncio.sleep(again)
        return bool(again is not None or plan.blocks or not (plan.idle or error is not None))

    async def _leave_out(self, disk: int, error: Exception | None) -> None:
        """Leave a disk out.

        Other disks take the disk's batch, and the disk's blocks that DRAM has; the disk's other blocks are misses.
        """
        log.error("a disk is left out", path=str(self.ssd.disks[disk].folder.path), error=str(error))
        self.on_left_out(disk)
        for keys in self.ssd.leave_out(disk):
            self.queue.lost(keys)
            await asyncio.sleep(0)
        self.wake()

    async def _reopen(self, disk: int) -> None:
        """Open a failed disk's files anew.

        While the disk is away the next plan fails, and the plan's blocks wait in DRAM.
        """
        try:
            gone = await asyncio.get_running_loop().run_in_executor(self._executor, self.ssd.reopen, disk)
        except OSError:
            return
        self._failed.discard(disk)
        for keys in self.ssd.drop_segments(disk, gone):
            self.queue.lost(keys)
            await asyncio.sleep(0)

    async def _pause(self, nbytes: int) -> None:
        """Wait until `nbytes` more are within the write rate; does not wait while someone waits for durability."""
        now = asyncio.get_running_loop().time
        if self.bytes_per_s and await wait_within(self.pause_after(nbytes, now()), self._hurry):
            self._free_at = now()

    def pause_after(self, nbytes: int, now: float) -> float:
        """Seconds until bytes that were written now, and those that all disks wrote before, are within the rate."""
        self._free_at = max(now, self._free_at) + nbytes / self.bytes_per_s
        return self._free_at - now

    async def _wait(self, work: asyncio.Event) -> None:
        """Wait for work, or until unsaved blocks are due for a retry, which this call begins."""
        now = asyncio.get_running_loop().time
        if not self.queue.unsaved:
            self._unsaved_tries, self._retry_at = 0, math.inf
        elif self._retry_at == math.inf:
            self._retry_at = now() + self.unsaved_after_s[min(self._unsaved_tries, len(self.unsaved_after_s) - 1)]
        await wait_within(max(0.0, self._retry_at - now()), work)
        work.clear()
        if self._retry_at <= now():
            self._unsaved_tries, self._retry_at = self._unsaved_tries + 1, math.inf
            self.queue.retry()

    async def _commit(self, plan: WritePlan) -> Exception | None:
        begin = world.monotonic()
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self.ssd.commit, plan)
        except (OSError, lmdb.Error, MoonpoolError, MemoryError) as error:
            return error
        self.on_committed(world.monotonic() - begin)
        return None

    def _again(self, plan: WritePlan, error: Exception | None) -> float | None:
        """Seconds until a failed batch is tried again; None if not."""
        if error is None:
            if plan.blocks:  # housekeeping may be no more than deleting a file
                self._delays[plan.disk] = iter(self.retry_after_s)
            return None
        again = next(self._delays[plan.disk], None) if is_full(error) or _may_pass(error) else None
        self.retries += again is not None
        return again

    def _report(self, plan: WritePlan, error: Exception | None, again: float | None) -> None:
        """Log errors, each kind at most once per `REPEAT_S`, and the first success after blocks were given up."""
        if plan.erase_error is not None:
            self._tell(log.error, "records could not be overwritten or cut off", len(plan.unerased), plan.erase_error)
        if error is None:
            if self._failing and plan.blocks:
                self._failing = False
                self._told.clear()
                log.info("blocks become durable again")
            return
        self._failing = self._failing or again is None
        if again is None:
            self._tell(log.error, "blocks could not be made durable", len(plan.blocks), error)
        else:
            self._tell(log.warning, "batches are tried again", len(plan.blocks), error)

    def _tell(self, at_level: Callable[..., None], what: str, blocks: int, error: Exception) -> None:
        kind, now = (what, type(error), error.errno if isinstance(error, OSError) else None), self.clock()
        if now - self._told.get(kind, -math.inf) >= REPEAT_S:
            self._told[kind] = now
            at_level(what, blocks=blocks, error=str(error))

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything visible is durable or unsaved; False when that takes longer than `timeout_s`."""
        with self._hurrying():
            return await wait_within(timeout_s, self._idle)

    async def erased(self, timeout_s: float) -> bool:
        """Wait until what was deleted is overwritten on disk; False when that takes longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.queue.erasing:
                    self.wake()
                    with self._hurrying():
                        await self._planned.wait()
                    if self.queue.erasing:
                        await asyncio.sleep(ERASE_AGAIN_S)  # the disk may need some time, or another plan is due
        return not self.queue.erasing

    @contextlib.contextmanager
    def _hurrying(self) -> Iterator[None]:
        self._hurrying_now += 1
        self._hurry.set()
        try:
            yield
        finally:
            self._hurrying_now -= 1
            if not self._hurrying_now:
                self._hurry.clear()

    async def aclose(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


def _may_pass(error: Exception) -> bool:
    """Whether an error says nothing lasting about the disk."""
    return lacks_memory(error) or (isinstance(error, OSError) and error.errno in _MAY_PASS)
