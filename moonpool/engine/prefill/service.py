"""A prefill instance: the parts, the states open, draining and closing, the gRPC service, and the process."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.kv.delete_kv import DeletionLog
from moonpool.base.kv_transfer.prefix_reader import FROM_STORE, BlockReader, ReadMethod
from moonpool.base.kv_transfer.sender import TransferSender
from moonpool.base.kv_transfer.stored_parts import PartedReader, PartedWriter
from moonpool.base.kv_transfer.write_back import WRITE_BACK_METRICS, WriteBack, WriteBackLimits
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import Service
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.settings import stated_values
from moonpool.base.telemetry.metrics import Metric, MetricSet, counter
from moonpool.engine.emulated.engine import EmulatedEngine
from moonpool.engine.instance import (
    WRITE_BACK_GRACE_S,
    ExecutorParts,
    InstanceContext,
    StartEngine,
    run_instance,
    run_together,
)
from moonpool.engine.kv_service import LENDING_METRICS, READ_METRICS, KVDeletion, PoolReads
from moonpool.engine.loras import LORA_METRICS, InstanceLoras
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.prefill.core.events import CancelPrefill, Drain
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.engine.prefill.executor import PrefillExecutor
from moonpool.engine.prefill.kv_io import BlockLoader, KVSender
from moonpool.engine.prefill.live_requests import LivePrefill, check_prefill
from moonpool.engine.request import RequestReader
from moonpool.engine.start_engine import start_engine
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2

CONNECT_TIMEOUT_S = 2.0
Context = grpc.aio.ServicerContext[Any, Any]


class PrefillInstance:
    """One prefill instance.

    Attributes:
        core: the scheduler.
        executor: carries out the scheduler's actions.
        sending: streams to decode instances.
        loading: streams from kvstores and other instances.
        write_back: writes full blocks to kvstores.
        deletion: deletes KV.
        loras: LoRA adapters in the engine.
        request_reader: reads and checks requests.
        reads: reads by other instances.
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
        self.loras = InstanceLoras(engine, context.setup.spec.max_loras, self.executor.loras)
        self.deletion = KVDeletion(self.layout.block_bytes, self.write_back, self.executor.pool.forget, deletions)
        self.closing = asyncio.Event()
        self.reads = PoolReads(context, self.executor.pool, self.manager, self.closing, deletions)

    @property
    def manager(self) -> BlockManager:
        """The pool's blocks; keys and events are reported to the conductor."""
        return self.core.state.manager

    async def submit(self, request: prefill_pb2.PrefillRequest) -> LivePrefill:
        """Take a request; the first event says whether the request is accepted.

        Raises:
            Unavailable: the instance does not run, or the request was cancelled meanwhile.
            InvalidRequest: the request is wrong.
            Overloaded: there is no room for the request's LoRA adapter.
        """
        incoming = await self.request_reader.read(request.sequence)
        check_prefill(request, incoming)
        async with self.loras.using(request.sequence.lora):
            taken = LivePrefill(next(self._numbers), incoming, request)
            taken.forgotten = self._deletions.matching(incoming.spec.keys, incoming.spec.tenant)
            self.executor.submit(taken)
        return taken

    def cancel(self, request: LivePrefill) -> None:
        """Cancel a request; ignored if the request has ended."""
        self.executor.post(CancelPrefill(request.id))

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            Unavailable: the engine died.
            Internal: the core has failed.
        """
        try:
            await run_together(self.write_back.run(), self.executor.run(), self.executor.failure())
        finally:
            self.closing.set()
            self.executor.close()
            await self.sending.aclose()
            await self.loading.aclose()

    def replicate(self, order: conductor_pb2.ReplicateOrder) -> None:
        """The conductor wants blocks to be copied into the pool."""
        self.executor.copying.order(order)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.executor.post(Drain())

    async def drained(self) -> None:
        """Wait until no request is left and what can be written back has been."""
        await self.executor.empty.wait()
        await self.write_back.idle(WRITE_BACK_GRACE_S)

    def load(self) -> conductor_pb2.LoadReport:
        """Return the load now."""
        self.loras.sweep()
        state = self.core.state
        return conductor_pb2.LoadReport(
            running=len(state.requests) - len(state.waiting),
            waiting=len(state.waiting),
            queued_tokens=self.core.queued_tokens,
            free_blocks=state.manager.num_free,
            cached_blocks=state.manager.num_cached,
            speed=speeds_to_proto(self.core.speeds(world.monotonic())),
            draining=self.core.draining,
            drain_s=self.core.drain_seconds(world.monotonic()),
            taken=self.core.taken,
        )

    def gauges(self) -> MetricSet:
        """Return everything the instance reports."""
        metrics = self._context.metrics().add(PREFILL_METRICS, self).add(WRITE_BACK_METRICS, self.write_back)
        metrics.add(LORA_METRICS, self.loras)
        return metrics.add(READ_METRICS, self.reads).add(LENDING_METRICS, self.core.state.lending)

    @property
    def messages_unsent(self) -> int:
        """Messages on KV streams that wait to be written."""
        return sum(streams.traffic.unsent for streams in (self.sending, self.loading, self.write_back, self.reads))

    def _open_sender(self, address: str) -> TransferSender:
        return TransferSender(self._context.endpoint(address, CONNECT_TIMEOUT_S))

    def _open_reader(self, address: str, method: ReadMethod) -> BlockReader | PartedReader:
        source, forgotten = self._context.endpoint(address, CONNECT_TIMEOUT_S), self._deletions.demanded
        open_reader = partial(BlockReader, method=method, forgotten=forgotten, offload=self._context.beside)
        return PartedReader(source, open_reader) if method is FROM_STORE else open_reader(source)

    def _open_writer(self, address: str) -> PartedWriter:
        return PartedWriter(self._context.endpoint(address))


PREFILL_METRICS: tuple[Metric[PrefillInstance], ...] = (
    Metric(
        "requests",
        "Prompts that wait, are computed or are sent.",
        lambda instance: len(instance.core.state.requests),
        0,
    ),
    Metric(
        "sequences_waiting",
        "Prompts that wait for their first step.",
        lambda instance: len(instance.core.state.waiting),
        0,
    ),
    Metric(
        "sequences_started", "Prompts that are being computed.", lambda instance: len(instance.core.state.started), 0
    ),
    Metric("queued_tokens", "Prompt tokens that have no KV yet.", lambda instance: instance.core.queued_tokens, 0),
    Metric(
        "drain_seconds",
        "Predicted seconds until all prompts queued now are computed.",
        lambda instance: instance.core.drain_seconds(),
        0,
    ),
    Metric(
        "steps_in_flight", "Steps that the engine computes.", lambda instance: len(instance.core.steps.in_flight), 0
    ),
    Metric("io_in_flight", "Loads, sends and copies under way.", lambda instance: len(instance.core.state.ios), 0),
    Metric("pool_blocks", "Size of the KV pool in blocks.", lambda instance: instance.manager.num_blocks),
    Metric("blocks_used", "Pool blocks that requests hold.", lambda instance: instance.manager.num_used, 0),
    Metric(
        "blocks_cached",
        "Pool blocks that no request holds and later prompts may hit.",
        lambda instance: instance.manager.num_cached,
    ),
    Metric("blocks_free", "Pool blocks without KV.", lambda instance: instance.manager.num_free),
    Metric("transfers", "Open transfers to decode instances.", lambda instance: instance.sending.open_transfers, 0),
    Metric("loads", "Open reads at kvstores and peers.", lambda instance: instance.loading.open_reads, 0),
    Metric(
        "transfer_credits_out_bytes",
        "Bytes sent to decode instances with credits not yet returned.",
        lambda instance: instance.sending.traffic.credits_out,
        0,
    ),
    Metric(
        "load_credits_kept_bytes",
        "Bytes read with credits not yet handed back.",
        lambda instance: instance.loading.traffic.credits_kept,
        0,
    ),
    Metric(
        "messages_unsent",
        "Messages on KV streams that wait to be written.",
        lambda instance: instance.messages_unsent,
        0,
    ),
    counter(
        "loaded_blocks_total",
        "Blocks loaded from kvstores and peers for prompts.",
        lambda instance: instance.core.loads.loaded_blocks,
    ),
    counter(
        "copied_blocks_total",
        "Blocks copied from peers by order of the conductor.",
        lambda instance: instance.core.copies.copied_blocks,
    ),
    counter(
        "load_failures_total",
        "Loads that failed; the blocks were computed.",
        lambda instance: instance.core.loads.failures,
    ),
    counter(
        "overtaken_loads_total",
        "Loads whose blocks were computed meanwhile, as the loads took longer.",
        lambda instance: instance.core.loads.overtaken,
    ),
    counter("steps_total", "Steps computed.", lambda instance: instance.core.steps.done),
)


def _prefill_settings(context: InstanceContext, config: PrefillConfig) -> PrefillSettings:
    layout = context.setup.layout
    return PrefillSettings(
        num_blocks=context.engine.blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        layers=layout.layers,
        max_num_batched_tokens=config.max_num_batched_tokens or context.engine.max_num_batched_tokens,
        stages=context.engine.stages,
        windowed_layers=layout.windowed_layers,
        window_blocks=layout.window_blocks,
        window_slots=context.engine.pool.slots,
        window_bytes=layout.windowed_bytes if len(layout.stored_parts) > 1 else 0,
        recurrent=layout.recurrent,
        states_alone=layout.states_alone,
        **stated_values(PrefillSettings, config),
    )


class PrefillServicer:
    """Serves one prefill instance."""

    def __init__(self, instance: PrefillInstance, gauges: MetricSet) -> None:
        self._instance = instance
        self._gauges = gauges

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Compute one prompt; leaving the call cancels the prompt."""
        taken = await self._instance.submit(request)
        try:
            while (event := await taken.next()) is not None:
                yield event
        finally:
            self._instance.cancel(taken)

    async def ReadKV(  # noqa: N802
        self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: Context
    ) -> None:
        """Another instance reads blocks in the pool."""
        await self._instance.reads.serve(requests, context)

    async def Cancel(  # noqa: N802
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        """Cancel a prefill by request id."""
        found = self._instance.executor.find(request.request_id)
        read = self._instance.request_reader.cancel(request.request_id)
        outcome = kv_pb2.CANCEL_OUTCOME_BEFORE_START if read else kv_pb2.CANCEL_OUTCOME_UNKNOWN
        if found:
            started = any(self._instance.core.started(taken.id) for taken in found)
            outcome = kv_pb2.CANCEL_OUTCOME_IN_FLIGHT if started else kv_pb2.CANCEL_OUTCOME_BEFORE_START
        for taken in found:
            self._instance.cancel(taken)
        return prefill_pb2.CancelResponse(outcome=outcome)

    async def Forget(  # noqa: N802
        self, request: kv_pb2.ForgetRequest, context: Context
    ) -> kv_pb2.ForgetResponse:
        """Delete KV from the pool."""
        return await self._instance.deletion.forget(request)

    async def LoadLora(  # noqa: N802
        self, request: kv_pb2.LoadLoraRequest, context: Context
    ) -> kv_pb2.LoadLoraResponse:
        """Load a LoRA adapter ahead of requests."""
        return await self._instance.loras.load(request)

    async def UnloadLora(  # noqa: N802
        self, request: kv_pb2.UnloadLoraRequest, context: Context
    ) -> kv_pb2.UnloadLoraResponse:
        """Drop a LoRA adapter once no request uses the adapter."""
        return self._instance.loras.unload(request)

    async def PrefillStats(  # noqa: N802
        self, request: prefill_pb2.PrefillStatsRequest, context: Context
    ) -> prefill_pb2.PrefillStatsResponse:
        """Return everything the instance holds."""
        return prefill_pb2.PrefillStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())


def contract(instance: PrefillInstance) -> Service:
    """One instance's PrefillService."""
    return prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], PrefillServicer(instance, instance.gauges())


async def serve(context: ProcessContext, config: PrefillConfig, start: StartEngine = start_engine) -> None:
    """Run a prefill instance until told to stop; raise as `run_instance`."""

    def build(shared: InstanceContext) -> tuple[PrefillInstance, Service]:
        instance = PrefillInstance(shared, config)
        return instance, contract(instance)

    await run_instance(
        context,
        config,
        kv_pb2.INSTANCE_KIND_PREFILL,
        build,
        stages=config.pipeline_parallel_size,
        max_num_batched_tokens=lambda engine: config.max_num_batched_tokens or engine.max_num_batched_tokens,
        start=start,
    )
