"""Write-back: full blocks of an engine's pool on their way to a kvstore, in the background.

Owns the bounded queue of jobs and the references that keep the blocks' bytes in place until a job has ended. Must not
know of requests, engines or schedulers: whoever submits hands over references, and `release` takes them back exactly
once per job, whatever happens. A store that is slow, gone or full costs dropped jobs and a counter, never a request.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from moonpool.errors import MoonpoolError
from moonpool.kv.credits import Traffic
from moonpool.kv.keys import BlockKey
from moonpool.kv.peers import KVClient, Peers
from moonpool.kv.streams import PutOutcome
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

log = get_logger(__name__)


class Writer(KVClient, Protocol):
    """What a job is written with; `StoreWriter` is one."""

    async def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        tenant: str,
        read: Callable[[int, int], memoryview],
        *,
        timeout_s: float,
    ) -> PutOutcome:
        """Stores blocks; returns once they are visible."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WriteBackLimits:
    """Bounds of the write-back.

    Attributes:
        blocks: blocks held for it at most, waiting and under way; more are dropped.
        workers: jobs under way at once.
        timeout_s: seconds a job may take.
        pause_s: seconds for which a store is left alone after a job to it failed.
    """

    blocks: int
    workers: int = 2
    timeout_s: float = 30.0
    pause_s: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    store: kv_pb2.Instance
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]
    tenant: str
    blocks: Sequence[int]


class WriteBack:
    """Background writer of one engine instance.

    Args:
        limits: the bounds.
        open_writer: makes the client of the store at an address.
        slice_of: `(layer, block) -> memoryview` of the pool.
        release: takes back one reference on each block of a job.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limits: WriteBackLimits,
        open_writer: Callable[[str], Writer],
        slice_of: Callable[[int, int], memoryview],
        release: Callable[[Sequence[int]], None],
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._stores: Peers[Writer] = Peers(open_writer)
        self._slice_of = slice_of
        self._release = release
        self._clock = clock
        self._queue: collections.deque[_Job] = collections.deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.blocks_held = 0
        self.blocks_stored = 0
        self.blocks_present = 0
        self.blocks_dropped = 0

    @property
    def sessions(self) -> int:
        """Jobs under way at stores."""
        return self._stores.sessions

    @property
    def traffic(self) -> Traffic:
        """What is under way on the streams to all stores."""
        return self._stores.traffic

    def accepts(self, store: kv_pb2.Instance, blocks: int) -> bool:
        """Whether a job of so many blocks would be taken now; one that would not be is counted as dropped."""
        room = self.blocks_held + blocks <= self._limits.blocks
        if self._closed or not room or self._stores.paused(store, self._clock()):
            self.blocks_dropped += blocks
            return False
        return True

    def submit(
        self,
        store: kv_pb2.Instance,
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey],
        tenant: str,
        blocks: Sequence[int],
    ) -> None:
        """Takes a job for which `accepts` has just said yes; one reference on each block passes to the write-back."""
        assert not self._closed
        assert len(keys) == len(parents) == len(blocks)
        self.blocks_held += len(blocks)
        self._idle.clear()
        self._queue.append(_Job(store, keys, parents, tenant, blocks))
        self._wake.set()

    async def run(self) -> None:
        """Works until cancelled; then every job is dropped and every stream closed."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._limits.workers):
                    group.create_task(self._work())
        finally:
            self._closed = True
            while self._queue:
                self._drop(self._queue.popleft())
            await self._stores.aclose()

    async def idle(self, timeout_s: float) -> bool:
        """Waits until nothing is held any more; False when the time was over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _work(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            await self._do(self._queue.popleft())

    async def _do(self, job: _Job) -> None:
        if self._stores.paused(job.store, self._clock()):
            self._drop(job)
            return
        try:
            writer = await self._stores.get(job.store)
            outcome = await writer.put(
                job.keys,
                job.parents,
                job.tenant,
                lambda layer, index: self._slice_of(layer, job.blocks[index]),
                timeout_s=self._limits.timeout_s,
            )
            self.blocks_stored += outcome.stored
            self.blocks_present += outcome.present
        except MoonpoolError as error:
            self._failed(job)
            log.warning("write-back failed", store=job.store.id, blocks=len(job.blocks), reason=str(error))
        except Exception:
            # A defect here must cost stored blocks, not the engine that serves requests.
            self._failed(job)
            log.exception("write-back failed", store=job.store.id, blocks=len(job.blocks))
        finally:
            self._give_back(job)

    def _failed(self, job: _Job) -> None:
        self.blocks_dropped += len(job.blocks)
        self._stores.pause(job.store, self._clock() + self._limits.pause_s)

    def _drop(self, job: _Job) -> None:
        self.blocks_dropped += len(job.blocks)
        self._give_back(job)

    def _give_back(self, job: _Job) -> None:
        self.blocks_held -= len(job.blocks)
        self._release(job.blocks)
        if not self.blocks_held:
            self._idle.set()
