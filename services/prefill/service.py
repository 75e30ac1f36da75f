"""A prefill instance: its parts and its states open, draining and closing; its gRPC service; and its process."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from moonpool import world
from moonpool.cluster.proto_conversion import speeds_to_proto
from moonpool.engine.emulated.engine import EmulatedEngine
from moonpool.engine.instance import WRITE_BACK_GRACE_S, ExecutorParts, InstanceContext, first_error, run_instance
from moonpool.engine.kv_service import DeletionLog, KVDeletion, pool_reads, read_gauges
from moonpool.engine.request import RequestReader
from moonpool.kv_transfer.prefix_reader import BlockReader, ReadMethod
from moonpool.kv_transfer.sender import TransferSender
from moonpool.kv_transfer.store_writer import StoreWriter
from moonpool.kv_transfer.write_back import WriteBack, WriteBackLimits
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import Service
from moonpool.scheduling.block_manager import BlockManager
from moonpool.telemetry.gauges import Gauges, process_entries
from moonpool.transport.sessions import StreamSettings
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from services.prefill.config import PrefillConfig
from services.prefill.core.events import CancelJob, Drain
from services.prefill.core.jobs import PrefillSettings
from services.prefill.core.scheduler import PrefillScheduler
from services.prefill.executor import PrefillExecutor
from services.prefill.kv_io import BlockLoader, KVSender
from services.prefill.live_requests import LivePrefill

CONNECT_TIMEOUT_S = 2.0


class PrefillInstance:
    """One prefill instance.

    Attributes:
        core: the scheduler.
        executor: carries out the scheduler's actions.
        sending: streams to decode instances.
        loading: streams from kvstores and other instances.
        write_back: writes full blocks to kvstores.
        deletion: deletes KV.
        request_reader: reads and checks requests.
        reads: reads of other instances.
        closing: set when long-lived streams are to end.
    """

    def __init__(self, context: InstanceContext, config: PrefillConfig) -> None:
        engine = context.engine
        self.identity, self.layout = context.instance, context.setup.layout
        self._context = context
        self._numbers = itertools.count(1)
        self.request_reader = RequestReader(context.setup.incoming, context.beside)
        self.core = PrefillScheduler(_prefill_settings(context, config), engine.speeds)
        self.sending = KVSender(engine, self._open_sender, context.spans)
        emulated_load_s = engine.load_s if isinstance(engine, EmulatedEngine) else None
        self.loading = BlockLoader(engine, self._open_reader, context.spans, emulated_load_s)
        self._deletions = deletions = DeletionLog(context.setup.namespace, world.monotonic)
        self.write_back = WriteBack(
            WriteBackLimits(config.write_back_limit(engine.blocks)),
            self._open_writer,
            engine.pool.read,
            world.monotonic,
            deletions.matching,
        )
        self.executor = PrefillExecutor(
            self.core,
            ExecutorParts(engine, self.write_back, context.spans, context.notify, config.journal()),
            self.loading,
            self.sending,
        )
        self.deletion = KVDeletion(self.layout.block_bytes, self.write_back, self.executor.pool.forget, deletions)
        self.closing = asyncio.Event()
        self.reads = pool_reads(context, self.executor.pool, self.manager, self.closing, deletions)

    @property
    def manager(self) -> BlockManager:
        """The pool's blocks; its keys and events are reported to the conductor."""
        return self.core.state.manager

    async def submit(self, request: prefill_pb2.PrefillRequest) -> LivePrefill:
        """Takes a request; its first event says whether it is accepted.

        Raises:
            Unavailable: the instance does not run, or the request was cancelled meanwhile.
            InvalidRequest: the request is wrong.
        """
        incoming = await self.request_reader.read(request.sequence)
        taken = LivePrefill.from_proto(request, incoming, next(self._numbers))
        taken.forgotten = self._deletions.matching(incoming.spec.keys, incoming.spec.tenant)
        self.executor.submit(taken)
        return taken

    def cancel(self, request: LivePrefill) -> None:
        """Cancels a request; ignored if the request has ended."""
        self.executor.post(CancelJob(request.number))

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            Unavailable: the engine died.
            Internal: the core has failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.write_back.run())
                group.create_task(self.executor.run())
                group.create_task(self.executor.failure())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self.closing.set()
            self.executor.close()
            await self.sending.aclose()
            await self.loading.aclose()

    def replicate(self, order: conductor_pb2.ReplicateOrder) -> None:
        """The conductor wants blocks to be copied into the pool."""
        self.executor.copying.order(order)

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.executor.post(Drain())

    async def drained(self) -> None:
        """Waits until no request is left and what can be written back has been."""
        await self.executor.empty.wait()
        await self.write_back.idle(WRITE_BACK_GRACE_S)

    def load(self) -> conductor_pb2.LoadReport:
        """The load now."""
        state = self.core.state
        return conductor_pb2.LoadReport(
            running=len(state.jobs) - len(state.waiting),
            waiting=len(state.waiting),
            queued_tokens=self.core.queued_tokens,
            free_blocks=state.manager.num_free,
            cached_blocks=state.manager.num_cached,
            speed=speeds_to_proto(self.core.speeds(world.monotonic())),
            draining=self.core.draining,
            drain_s=self.core.drain_seconds(world.monotonic()),
            taken=self.core.taken,
        )

    def gauges(self) -> Gauges:
        """Everything the instance holds."""
        core, state, manager = self.core, self.core.state, self.manager
        return Gauges(
            [
                ("requests", lambda: len(state.jobs), 0),
                ("sequences_waiting", lambda: len(state.waiting), 0),
                ("sequences_started", lambda: len(state.started), 0),
                ("queued_tokens", lambda: core.queued_tokens, 0),
                ("drain_seconds", core.drain_seconds, 0),
                ("steps_in_flight", lambda: len(core.steps.in_flight), 0),
                ("io_in_flight", lambda: len(state.ios), 0),
                ("blocks_total", lambda: manager.num_blocks, None),
                ("blocks_used", lambda: manager.num_used, 0),
                ("blocks_cached", lambda: manager.num_cached, None),
                ("blocks_free", lambda: manager.num_free, None),
                ("transfers", lambda: self.sending.sessions, 0),
                ("loads", lambda: self.loading.sessions, 0),
                ("loaded_blocks", lambda: core.loads.loaded_blocks, None),
                ("copied_blocks", lambda: core.copies.copied_blocks, None),
                ("load_failures", lambda: core.loads.failures, None),
                *read_gauges(self.reads, state.lending),
                ("link_waiting", lambda: self._context.link.waiting, 0),
                ("transfer_credits_out_bytes", lambda: self.sending.traffic.credits_out, 0),
                ("load_credits_kept_bytes", lambda: self.loading.traffic.credits_kept, 0),
                ("write_back_puts", lambda: self.write_back.sessions, 0),
                ("write_back_credits_out_bytes", lambda: self.write_back.traffic.credits_out, 0),
                ("messages_unsent", lambda: self._messages_unsent(), 0),
                ("write_back_blocks", lambda: self.write_back.blocks_held, 0),
                ("write_back_stored_blocks", lambda: self.write_back.blocks_stored, None),
                ("write_back_present_blocks", lambda: self.write_back.blocks_present, None),
                ("write_back_dropped_blocks", lambda: self.write_back.blocks_dropped, None),
                ("steps", lambda: core.steps.done, None),
                *self._context.dialer.gauges(),
                *self._context.lanes.gauges(),
                *self._context.engine_gauges(),
                *process_entries(),
            ]
        )

    def _messages_unsent(self) -> int:
        return sum(it.traffic.unsent for it in (self.sending, self.loading, self.write_back, self.reads))

    def _open_sender(self, address: str) -> TransferSender:
        it = self._context
        return TransferSender(
            it.channels,
            address,
            it.hello(),
            self.layout,
            StreamSettings(it.dialer, it.link, CONNECT_TIMEOUT_S),
        )

    def _open_reader(self, address: str, method: ReadMethod) -> BlockReader:
        it = self._context
        return BlockReader(
            it.channels,
            address,
            it.hello(),
            self.layout,
            StreamSettings(it.dialer, it.link, CONNECT_TIMEOUT_S),
            method=method,
            forgotten=self._deletions.demanded,
            offload=it.beside,
        )

    def _open_writer(self, address: str) -> StoreWriter:
        it = self._context
        return StoreWriter(it.channels, address, it.hello(), self.layout, StreamSettings(it.dialer, it.link))


def _prefill_settings(context: InstanceContext, config: PrefillConfig) -> PrefillSettings:
    layout = context.setup.layout
    return PrefillSettings(
        blocks=context.engine.blocks,
        block_tokens=layout.block_tokens,
        layers=layout.layers,
        slice_bytes=layout.slice_bytes,
        step_tokens=config.max_num_batched_tokens,
        stages=context.engine.stages,
        max_queue=config.max_queue,
        load_timeout_s=config.load_timeout_s,
        verdict_timeout_s=config.verdict_timeout_s,
    )


Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer:
    """Serves one prefill instance."""

    def __init__(self, instance: PrefillInstance, gauges: Gauges) -> None:
        self._instance = instance
        self._gauges = gauges

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Computes one prompt; leaving the call cancels it."""
        taken = await self._instance.submit(request)
        try:
            while (event := await taken.next()) is not None:
                yield event
        finally:
            self._instance.cancel(taken)

    async def ReadKV(  # noqa: N802
        self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: Context
    ) -> None:
        """Another instance reads blocks of the pool."""
        await self._instance.reads.serve(requests, context)

    async def Cancel(  # noqa: N802
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        """Cancels a prefill by request id."""
        found = self._instance.executor.find(request.request_id)
        read = self._instance.request_reader.cancel(request.request_id)
        outcome = kv_pb2.CANCEL_OUTCOME_BEFORE_START if read else kv_pb2.CANCEL_OUTCOME_UNKNOWN
        if found:
            started = any(self._instance.core.started(one.number) for one in found)
            outcome = kv_pb2.CANCEL_OUTCOME_IN_FLIGHT if started else kv_pb2.CANCEL_OUTCOME_BEFORE_START
        for one in found:
            self._instance.cancel(one)
        return prefill_pb2.CancelResponse(outcome=outcome)

    async def Forget(  # noqa: N802
        self, request: kv_pb2.ForgetRequest, context: Context
    ) -> kv_pb2.ForgetResponse:
        """Deletes KV from the pool."""
        return await self._instance.deletion.forget(request)

    async def PrefillStats(  # noqa: N802
        self, request: prefill_pb2.PrefillStatsRequest, context: Context
    ) -> prefill_pb2.PrefillStatsResponse:
        """Everything the instance holds."""
        return prefill_pb2.PrefillStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())


def contract(instance: PrefillInstance) -> Service:
    """The PrefillService of one instance."""
    return prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], PrefillServicer(instance, instance.gauges())


async def serve(context: ProcessContext, config: PrefillConfig) -> None:
    """Runs a prefill instance until it is told to stop; raises as `run_instance`."""

    def build(shared: InstanceContext) -> tuple[PrefillInstance, Service]:
        instance = PrefillInstance(shared, config)
        return instance, contract(instance)

    await run_instance(
        context,
        config,
        kv_pb2.INSTANCE_KIND_PREFILL,
        build,
        stages=config.pipeline_parallel_size,
        step_tokens=config.max_num_batched_tokens,
    )
