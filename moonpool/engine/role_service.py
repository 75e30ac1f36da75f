"""What prefill and decode services share: write-back, the pool for others, deletion, adapters, the end of a role."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc.aio

from moonpool.base import world
from moonpool.base.errors import Internal
from moonpool.base.kv.delete_kv import DeletionLog
from moonpool.base.kv_transfer.prefix_reader import FROM_STORE, BlockReader, ReadMethod
from moonpool.base.kv_transfer.stored_parts import PartedReader, PartedWriter
from moonpool.base.kv_transfer.write_back import WRITE_BACK_METRICS, WriteBack, WriteBackLimits
from moonpool.base.pictures.files import PictureFiles
from moonpool.base.runtime.journal import JournalWriter
from moonpool.base.scheduling.block_lending import BlockLending
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.telemetry.metrics import MetricSet
from moonpool.base.transport.open_streams import OpenStreams
from moonpool.engine.block_loader import BlockLoader
from moonpool.engine.config import EngineConfig
from moonpool.engine.instance import WRITE_BACK_GRACE_S, ExecutorParts, Handover, InstanceContext, run_together
from moonpool.engine.kv_service import LENDING_METRICS, READ_METRICS, KVDeletion, PoolCalls, PoolReads
from moonpool.engine.loras import LORA_METRICS, InstanceLoras
from moonpool.engine.picture_rows import PICTURE_METRICS, PictureStores
from moonpool.engine.request import IncomingRequest, RequestReader
from moonpool.v1 import kv_pb2

CONNECT_TIMEOUT_S = 2.0
"""Seconds for a connection to a source of KV."""
READ_GRACE_S = 3.0
"""Seconds that a draining instance waits for what other instances read."""
END_S = 2.0
"""Seconds that long-lived streams have for their end, once they are told."""
LOOK_S = 0.01
"""Seconds between two looks at blocks that are still used at the end of a role."""
LOOKS = 200
"""Looks until such blocks are a defect."""
Context = grpc.aio.ServicerContext[Any, Any]


class RoleExecutor(Protocol):
    """What a role's executor has.

    Attributes:
        pool: reads and deletions in the pool that others ask for.
        empty: set while there is no request.
    """

    pool: PoolCalls
    empty: asyncio.Event

    def loras(self) -> set[bytes]:
        """LoRA adapters of all requests."""
        ...

    async def run(self) -> None:
        """Work until cancelled."""
        ...

    async def failure(self) -> NoReturn:
        """Wait until the core fails; raise Internal then."""
        ...

    def close(self) -> None:
        """Take no more events."""
        ...


class RoleService(ABC):
    """One role's service of an engine instance.

    Attributes:
        identity: this instance in this role.
        setup: what is served.
        layout: arrangement of the KV.
        pool: the engine's pool.
        context: what the service was built from.
        beside: threads for work that would delay the event loop.
        listener: offers transports to other instances.
        request_reader: reads and checks requests.
        deletions: deletions carried out here.
        write_back: writes full blocks to kvstores.
        rows: reads encoded pictures from kvstores, and writes them; None: nothing is encoded here.
        streams: long-lived streams of this role.
        closing: set when long-lived streams are to end.
        manager: the pool's blocks; keys and events are reported to the conductor.
        lending: blocks that other instances read.
        loras: LoRA adapters in the engine.
        deletion: deletes KV.
        reads: reads by other instances.
    """

    manager: BlockManager
    lending: BlockLending
    loras: InstanceLoras
    deletion: KVDeletion
    reads: PoolReads

    def __init__(self, context: InstanceContext, config: EngineConfig) -> None:
        """Make what needs no core; the role's own part then makes core and executor, and calls `offer`."""
        engine, setup, handover = context.engine, context.setup, context.handover
        self.identity, self.setup, self.layout, self.pool = context.instance, setup, setup.layout, engine.pool
        self.context, self.beside, self.listener = context, context.beside, context.listener
        looks = setup.spec.emulated is None and not isinstance(setup.pictures, str)
        self.request_reader = RequestReader(setup.incoming, context.beside, PictureFiles() if looks else None)
        self.deletions = DeletionLog(setup.namespace, world.monotonic) if handover is None else handover.deletions
        self.write_back = WriteBack(
            WriteBackLimits(config.write_back_limit(engine.blocks)),
            lambda address: PartedWriter(context.endpoint(address)),
            engine.pool.read,
            world.monotonic,
            self.deletions.matching,
        )
        self.rows = self._open_rows()
        self.streams = OpenStreams()
        self.closing = asyncio.Event()

    def _open_rows(self) -> PictureStores | None:
        """What reads and writes encoded pictures; None: nothing is encoded here."""
        setup, rule = self.setup, self.setup.pictures
        if isinstance(rule, str) or not setup.row_bytes:
            return None
        open_endpoint = partial(self.context.endpoint, connect_timeout_s=CONNECT_TIMEOUT_S)
        deletions = self.deletions
        return PictureStores(
            setup.namespace, rule, setup.row_bytes, open_endpoint, lambda tenant: deletions.matching((), tenant)
        )

    async def with_rows(self, incoming: IncomingRequest, asked: kv_pb2.SequenceSpec) -> IncomingRequest:
        """Return a request with the rows of its pictures that kvstores give."""
        return incoming if self.rows is None else await self.rows.added(incoming, asked.media)

    def executor_parts(self, journal: JournalWriter | None) -> ExecutorParts:
        """What the role's executor works with; `journal` records the scheduler's events."""
        context = self.context
        return ExecutorParts(
            context.engine, self.write_back, context.spans, context.histograms, context.notify, journal
        )

    def open_loader(self) -> BlockLoader:
        """Make the reader of KV from kvstores and other instances; whoever asks closes it."""
        context, emulated = self.context, self.context.emulated

        def open_reader(address: str, method: ReadMethod) -> BlockReader | PartedReader:
            source, forgotten = context.endpoint(address, CONNECT_TIMEOUT_S), self.deletions.demanded
            read = partial(BlockReader, method=method, forgotten=forgotten, offload=self.beside)
            return PartedReader(source, read) if method is FROM_STORE else read(source)

        load_s = None if emulated is None else emulated.load_s
        return BlockLoader(context.engine, open_reader, context.spans, context.histograms, load_s)

    def offer(self, executor: RoleExecutor, manager: BlockManager, lending: BlockLending) -> None:
        """Offer pool and adapters to others, with what the former role has left in them."""
        handover, engine = self.context.handover, self.context.engine
        self._executor, self.manager, self.lending = executor, manager, lending
        if handover is not None:
            manager.take_over(handover.blocks)
        most = self.setup.spec.max_loras
        self.loras = InstanceLoras(engine, most, executor.loras) if handover is None else handover.loras
        self.loras.used_by(executor.loras)
        block_bytes, pool = self.layout.block_bytes, executor.pool
        self.deletion = KVDeletion(block_bytes, self.write_back, pool.forget, self.deletions)
        self.reads = PoolReads(self.context, pool, manager, self.closing, self.deletions)

    # --- lifecycle -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled; then requests and streams have ended, and nothing uses the pool but a last step.

        Raises:
            Unavailable: the engine died.
            Internal: the core has failed.
        """
        executor = self._executor
        try:
            rows = () if self.rows is None else (self.rows.run(),)
            await run_together(self.write_back.run(), *rows, executor.run(), executor.failure())
        finally:
            self.closing.set()
            self.end_requests()
            try:
                await self._released()
            finally:
                executor.close()
                self.request_reader.close()
                await self.close()

    async def _released(self) -> None:
        """Wait until streams have ended and their blocks have come back, while the core listens; not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.streams.quiet.wait()
                await self.reads.quiet.wait()
        for _ in range(LOOKS):  # threads may still write what has come
            if not self.manager.num_used:
                return
            await asyncio.sleep(LOOK_S)

    @abstractmethod
    def end_requests(self) -> None:
        """End every request that is left; called when the executor does not run any more."""

    @abstractmethod
    async def close(self) -> None:
        """Close what the role has opened; called last."""

    async def drained(self) -> None:
        """Wait until no request is left, and nobody reads or writes blocks. The caller bounds the wait."""
        await self._executor.empty.wait()
        rows = () if self.rows is None else (self.rows.idle(WRITE_BACK_GRACE_S),)
        await asyncio.gather(self.write_back.idle(WRITE_BACK_GRACE_S), self.reads.idle(READ_GRACE_S), *rows)

    @property
    @abstractmethod
    def speeds(self) -> Speeds:
        """The engine's speeds, as measured so far."""

    def hand_over(self) -> Handover:
        """What the engine's next role goes on with, once `run` has ended and the engine runs no step.

        Raises:
            Internal: blocks are still referenced.
        """
        if self.manager.num_used:
            raise Internal(f"{self.manager.num_used} blocks are still referenced at the end of a role")
        return Handover(self.manager, self.deletions, self.loras, self.speeds)

    # --- reports ---------------------------------------------------------------------------------------------------

    def metrics(self) -> MetricSet:
        """Return what both roles report."""
        metrics = self.context.metrics().add(WRITE_BACK_METRICS, self.write_back).add(LORA_METRICS, self.loras)
        metrics.add(READ_METRICS, self.reads).add(LENDING_METRICS, self.lending)
        return metrics if self.rows is None else metrics.add(PICTURE_METRICS, self.rows)


class PoolServicer:
    """The RPCs that both roles answer."""

    def __init__(self, instance: RoleService) -> None:
        self._shared = instance

    async def ReadKV(  # noqa: N802
        self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: Context
    ) -> None:
        """Another instance reads blocks in the pool."""
        await self._shared.reads.serve(requests, context)

    async def Forget(  # noqa: N802
        self, request: kv_pb2.ForgetRequest, context: Context
    ) -> kv_pb2.ForgetResponse:
        """Delete KV from the pool."""
        return await self._shared.deletion.forget(request)

    async def LoadLora(  # noqa: N802
        self, request: kv_pb2.LoadLoraRequest, context: Context
    ) -> kv_pb2.LoadLoraResponse:
        """Load a LoRA adapter ahead of requests."""
        return await self._shared.loras.load(request)

    async def UnloadLora(  # noqa: N802
        self, request: kv_pb2.UnloadLoraRequest, context: Context
    ) -> kv_pb2.UnloadLoraResponse:
        """Drop a LoRA adapter once no request uses the adapter."""
        return self._shared.loras.unload(request)
