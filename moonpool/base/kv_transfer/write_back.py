"""Write-back: full blocks of an engine's pool on their way to a kvstore, in the background.

A job holds references that keep the blocks' bytes in place; one call to the job's `over` hands the references back,
whatever happens. A store that is slow, lost or full costs dropped jobs and a counter, never a request; each store has a
separate queue and workers.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from moonpool.base.errors import FrameError, InvalidRequest, MoonpoolError, Overloaded
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv_transfer.store_writer import PutOutcome
from moonpool.base.telemetry import spans, trace_context
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.peer_clients import PeerClient, PeerClients
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
MAX_PAUSE_S = 30.0
"""Longest time for which a store that says when room will be there is left alone."""


class BlockWriter(PeerClient, Protocol):
    """What a job is written with; `StoreWriter` is one."""

    async def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        tenant: str,
        read: Callable[[int, int], tuple[memoryview, int]],
        *,
        timeout_s: float,
        windowed: Collection[int],
        forgotten: Sequence[str] = (),
    ) -> PutOutcome:
        """Store blocks; return once they are visible. See `PartedWriter.put`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WriteBackLimits:
    """Bounds of the write-back.

    Attributes:
        blocks: most blocks held for write-back, waiting and under way, counted once per store; more are dropped.
        workers: jobs under way at once, for each store.
        timeout_s: seconds a job may take.
        pause_s: seconds for which a store is left alone after a job failed there.
    """

    blocks: int
    workers: int = 2
    timeout_s: float = 30.0
    pause_s: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WriteBackJob:
    """Blocks for one kvstore.

    Attributes:
        windowed: indices of blocks that are stored with the slices of layers with a window.
        traceparent: of the span that wrote the blocks' KV; "" = nobody traces it.
    """

    store: kv_pb2.Instance
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]
    tenant: str
    blocks: Sequence[int]
    over: Callable[[bool], None]
    windowed: Collection[int]
    traceparent: str


@dataclasses.dataclass(slots=True)
class _StoreQueue:
    """The jobs for one store at one address; the queue exists only with jobs."""

    queue: collections.deque[WriteBackJob] = dataclasses.field(default_factory=collections.deque)
    blocks_held: int = 0
    workers: int = 0


class WriteBack:
    """One engine instance's background writer.

    Args:
        limits: the bounds.
        open_writer: makes the client of the store at an address.
        read: `(layer, block)` -> the pool's slice and the slice's hash.
        clock: monotonic seconds.
        forgotten: `(keys, tenant)` -> the deletions that concern such blocks and were carried out here. A kvstore that
            knows a further deletion does not take them.
    """

    def __init__(
        self,
        limits: WriteBackLimits,
        open_writer: Callable[[str], BlockWriter],
        read: Callable[[int, int], tuple[memoryview, int]],
        clock: Callable[[], float],
        forgotten: Callable[[Sequence[BlockKey], str], Sequence[str]] = lambda keys, tenant: (),
    ) -> None:
        self._limits = limits
        self._stores: PeerClients[BlockWriter] = PeerClients(open_writer)
        self._read = read
        self._clock = clock
        self._forgotten = forgotten
        self._queues: dict[tuple[str, str], _StoreQueue] = {}
        self._group: asyncio.TaskGroup | None = None
        self._closed = False
        self._doing: list[WriteBackJob] = []
        self._ended = asyncio.Event()  # another event after each job
        self._idle = asyncio.Event()
        self._idle.set()
        self.blocks_held = 0
        self.blocks_stored = 0
        self.blocks_present = 0
        self.blocks_dropped = 0

    @property
    def transfers(self) -> int:
        """Jobs under way at stores."""
        return self._stores.channels

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way on the streams to all stores."""
        return self._stores.traffic

    def room(self, store: kv_pb2.Instance, blocks: int) -> int:
        """How many of `blocks` blocks would be taken now, leading blocks first; the others are counted as dropped.

        While blocks for several stores are held, each store may have an equal part, so that a silent store leaves room
        for the others.
        """
        taken = 0
        if not self._closed and not self._stores.paused(store, self._clock()):
            taken = max(0, min(blocks, self._limits.blocks - self.blocks_held))
            store_queue = self._queues.get(_store_key(store))
            if store_queue is not None:
                taken = max(0, min(taken, self._limits.blocks // len(self._queues) - store_queue.blocks_held))
        self.blocks_dropped += blocks - taken
        return taken

    def submit(
        self,
        store: kv_pb2.Instance,
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey],
        tenant: str,
        blocks: Sequence[int],
        over: Callable[[bool], None],
        windowed: Collection[int] = (),
        traceparent: str = "",
    ) -> None:
        """Take a job for which there is `room` now; one reference on each block passes to the write-back.

        The job is handed back by `over`, with whether all blocks are in the store now.
        """
        assert not self._closed
        assert len(keys) == len(parents) == len(blocks) > 0
        store_queue = self._queues.setdefault(_store_key(store), _StoreQueue())
        store_queue.blocks_held += len(blocks)
        self.blocks_held += len(blocks)
        self._idle.clear()
        store_queue.queue.append(WriteBackJob(store, keys, parents, tenant, blocks, over, windowed, traceparent))
        self._staff(store_queue)

    async def run(self) -> None:
        """Work until cancelled; then every job is dropped and every stream closed."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for store_queue in self._queues.values():
                    self._staff(store_queue)
                try:
                    await asyncio.Event().wait()  # until cancelled
                finally:
                    self._closed = True  # a group that ends takes no new tasks
        finally:
            for store_queue in list(self._queues.values()):
                while store_queue.queue:
                    self._drop(store_queue.queue.popleft())
            await self._stores.aclose()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no block is held; False when the time was over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def forget(self, selection: KVSelection, namespace: bytes) -> list[WriteBackJob]:
        """Drop waiting jobs with KV of a selection; return such jobs that are under way. `namespace`: of the KV."""
        for store_queue in list(self._queues.values()):
            waiting = list(store_queue.queue)
            store_queue.queue.clear()
            for job in waiting:
                if selection.touches(job.keys, job.tenant, namespace):
                    self._drop(job)
                else:
                    store_queue.queue.append(job)
        return [job for job in self._doing if selection.touches(job.keys, job.tenant, namespace)]

    async def ended(self, jobs: Collection[WriteBackJob], timeout_s: float) -> bool:
        """Wait until none of some jobs is under way any more; False when that takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(job in jobs for job in self._doing):
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _staff(self, store_queue: _StoreQueue) -> None:
        """Add a worker for the store, as long as allowed."""
        if self._group is not None and store_queue.workers < self._limits.workers:
            store_queue.workers += 1
            self._group.create_task(self._work(store_queue))

    async def _work(self, store_queue: _StoreQueue) -> None:
        try:
            while store_queue.queue:
                await self._do(store_queue.queue.popleft())
        finally:
            store_queue.workers -= 1

    async def _do(self, job: WriteBackJob) -> None:
        if self._stores.paused(job.store, self._clock()):
            self._drop(job)
            return
        stored = False
        self._doing.append(job)
        forgotten = self._forgotten(job.keys, job.tenant)  # now: the job is older than every later deletion
        try:
            outcome = await self._put(job, forgotten)
            self.blocks_stored += outcome.stored
            self.blocks_present += outcome.present
            stored = True
        except MoonpoolError as error:
            self._failed(job, error)
            log.warning("write-back failed", store=job.store.id, blocks=len(job.blocks), reason=str(error))
        except Exception as error:
            # A defect here must cost stored blocks, not the engine that serves requests.
            self._failed(job, error)
            log.exception("write-back failed", store=job.store.id, blocks=len(job.blocks))
        finally:
            self._doing.remove(job)
            self._ended.set()
            self._ended = asyncio.Event()
            self._give_back(job, stored=stored)

    async def _put(self, job: WriteBackJob, forgotten: Sequence[str]) -> PutOutcome:
        """Write a job's blocks, within a span of the trace that the blocks belong to."""
        with spans.CURRENT.get().span(
            "kv.write_back", job.traceparent, store=job.store.id, blocks=len(job.blocks)
        ) as span:
            known = trace_context.traceparent.set(span.traceparent)
            try:
                writer = await self._stores.get(job.store)
                return await writer.put(
                    job.keys,
                    job.parents,
                    job.tenant,
                    lambda layer, index: self._read(layer, job.blocks[index]),
                    timeout_s=self._limits.timeout_s,
                    windowed=job.windowed,
                    forgotten=forgotten,
                )
            finally:
                trace_context.traceparent.reset(known)

    def _failed(self, job: WriteBackJob, error: Exception) -> None:
        self.blocks_dropped += len(job.blocks)
        if isinstance(error, InvalidRequest | FrameError) or getattr(error, "reason", "") == "kvstore_guaranteed":
            return  # a fault in this job, or this tenant's limits, must not keep other tenants' blocks back
        pause_s = self._limits.pause_s
        if isinstance(error, Overloaded):
            pause_s = max(pause_s, min(error.retry_after_s, MAX_PAUSE_S))
        self._stores.pause(job.store, self._clock() + pause_s)

    def _drop(self, job: WriteBackJob) -> None:
        self.blocks_dropped += len(job.blocks)
        self._give_back(job, stored=False)

    def _give_back(self, job: WriteBackJob, *, stored: bool) -> None:
        store_queue = self._queues[_store_key(job.store)]
        store_queue.blocks_held -= len(job.blocks)
        if not store_queue.blocks_held:
            del self._queues[_store_key(job.store)]
        self.blocks_held -= len(job.blocks)
        job.over(stored)
        if not self.blocks_held:
            self._idle.set()


def _store_key(store: kv_pb2.Instance) -> tuple[str, str]:
    """A store is an id at an address; the store's epoch does not matter here."""
    return store.id, store.address


WRITE_BACK_METRICS: tuple[Metric[WriteBack], ...] = (
    Metric("write_back_blocks", "Blocks that wait for a kvstore.", lambda write_back: write_back.blocks_held, 0),
    Metric("write_back_puts", "Open writing transfers at kvstores.", lambda write_back: write_back.transfers, 0),
    Metric(
        "write_back_credits_out_bytes",
        "Bytes sent to kvstores with credits not yet returned.",
        lambda write_back: write_back.traffic.credits_out,
        0,
    ),
    counter(
        "write_back_stored_blocks_total", "Blocks that kvstores took.", lambda write_back: write_back.blocks_stored
    ),
    counter(
        "write_back_present_blocks_total",
        "Blocks that kvstores had already.",
        lambda write_back: write_back.blocks_present,
    ),
    counter(
        "write_back_dropped_blocks_total", "Blocks that no kvstore got.", lambda write_back: write_back.blocks_dropped
    ),
)
