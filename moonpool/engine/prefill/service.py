"""A prefill instance: the parts, the states open, draining and closing, and the gRPC service."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.kv_transfer.sender import TransferSender
from moonpool.base.rpc.server import Service
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.settings import stated_values
from moonpool.base.telemetry.metrics import Metric, MetricSet, counter
from moonpool.engine.instance import EngineRole, InstanceContext
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.prefill.core.events import CancelPrefill, Drain
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.engine.prefill.executor import PrefillExecutor
from moonpool.engine.prefill.kv_io import KVSender
from moonpool.engine.prefill.live_requests import LivePrefill, check_prefill
from moonpool.engine.role_service import PoolServicer, RoleService
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2

CONNECT_TIMEOUT_S = 2.0
Context = grpc.aio.ServicerContext[Any, Any]


class PrefillInstance(RoleService):
    """One prefill instance.

    Attributes:
        core: the scheduler.
        executor: carries out the scheduler's actions.
        sending: streams to decode instances.
        loading: streams from kvstores and other instances.
    """

    def __init__(self, context: InstanceContext, config: PrefillConfig) -> None:
        super().__init__(context, config)
        engine, emulated = context.engine, context.emulated
        self._numbers = itertools.count(1)
        self.core = PrefillScheduler(_prefill_settings(context, config), context.speeds)
        self.spans = context.spans
        self.sending = KVSender(engine, self._open_sender, context.spans, context.histograms)
        self.loading = self.open_loader()
        if emulated is not None:
            emulated.decodes = False
        self.executor = PrefillExecutor(
            self.core,
            self.executor_parts(config.journal()),
            self.loading,
            self.sending,
        )
        self.offer(self.executor, self.core.state.manager, self.core.state.lending)

    async def submit(self, request: prefill_pb2.PrefillRequest) -> LivePrefill:
        """Take a request; the first event says whether the request is accepted.

        Raises:
            Unavailable: the instance does not run, or the request was cancelled meanwhile.
            InvalidRequest: the request is wrong.
            Overloaded: there is no room for the request's LoRA adapter.
        """
        incoming = await self.request_reader.read(request.sequence, with_rows=self.with_rows)
        check_prefill(request, incoming)
        async with self.loras.using(request.sequence.lora):
            taken = LivePrefill(next(self._numbers), incoming, request)
            taken.forgotten = self.deletions.matching(incoming.spec.keys, incoming.spec.tenant)
            self.executor.submit(taken)
        return taken

    def cancel(self, request: LivePrefill) -> None:
        """Cancel a request; ignored if the request has ended."""
        self.executor.post(CancelPrefill(request.id))

    def end_requests(self) -> None:
        """The executor has ended them."""

    async def close(self) -> None:
        """Close the streams to decode instances, kvstores and peers."""
        await self.sending.aclose()
        await self.loading.aclose()

    def replicate(self, order: conductor_pb2.ReplicateOrder) -> None:
        """The conductor wants blocks to be copied into the pool."""
        self.executor.copying.order(order)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.executor.post(Drain())

    @property
    def speeds(self) -> Speeds:
        """The engine's speeds, as measured so far."""
        return self.core.state.tracker.speeds

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
        return self.metrics().add(PREFILL_METRICS, self)

    @property
    def messages_unsent(self) -> int:
        """Messages on KV streams that wait to be written."""
        return sum(streams.traffic.unsent for streams in (self.sending, self.loading, self.write_back, self.reads))

    def _open_sender(self, address: str) -> TransferSender:
        return TransferSender(self.context.endpoint(address, CONNECT_TIMEOUT_S))


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
        lambda instance: instance.core.loads.sources.failures,
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


class PrefillServicer(PoolServicer):
    """Serves one prefill instance."""

    def __init__(self, instance: PrefillInstance, gauges: MetricSet) -> None:
        super().__init__(instance)
        self._instance = instance
        self._gauges = gauges

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Compute one prompt; leaving the call cancels the prompt."""
        spans, sequence = self._instance.spans, request.sequence
        with spans.span("prefill", sequence.traceparent, request=sequence.request_id):
            taken = await self._instance.submit(request)
            try:
                while (event := await taken.next()) is not None:
                    yield event
            finally:
                self._instance.cancel(taken)

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

    async def PrefillStats(  # noqa: N802
        self, request: prefill_pb2.PrefillStatsRequest, context: Context
    ) -> prefill_pb2.PrefillStatsResponse:
        """Return everything the instance holds."""
        return prefill_pb2.PrefillStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())


SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"]


def contract(instance: PrefillInstance) -> Service:
    """One instance's PrefillService."""
    return SERVICE, PrefillServicer(instance, instance.gauges())


def prefill_role(config: PrefillConfig) -> EngineRole:
    """The role prefill, with these settings."""

    def build(shared: InstanceContext) -> tuple[PrefillInstance, PrefillServicer]:
        instance = PrefillInstance(shared, config)
        return instance, PrefillServicer(instance, instance.gauges())

    return EngineRole(
        kv_pb2.INSTANCE_KIND_PREFILL,
        SERVICE,
        build,
        lambda engine: config.max_num_batched_tokens or engine.max_num_batched_tokens,
    )
