"""A decode instance: the parts and states (open, draining, closing), the gRPC service, and the draft model."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from moonpool.base import world
from moonpool.base.checkpoint import load_config, resolve
from moonpool.base.cluster.proto_conversion import check_instance, speeds_to_proto
from moonpool.base.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unavailable
from moonpool.base.kv_transfer.inbound_transfer import TransferState
from moonpool.base.kv_transfer.read_server import check_hello
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import Service
from moonpool.base.rpc.stream_writes import bare_write
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.settings import stated_values
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, MetricSet, counter
from moonpool.base.transport.payloads import ReceiveBuffer
from moonpool.base.transport.server_stream import ServerStream
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.decode.core.request import COPYING, RequestStatus
from moonpool.engine.decode.core.scheduler import DecodeScheduler
from moonpool.engine.decode.core.settings import WATERMARK, DecodeSettings
from moonpool.engine.decode.draft_model import DraftModel
from moonpool.engine.decode.executor import DecodeExecutor, Drafting
from moonpool.engine.decode.live_requests import LiveRequest
from moonpool.engine.decode.receiver import TransferReceiver
from moonpool.engine.decode.run_loop import SOURCE_METRICS, SourceFigures
from moonpool.engine.decode.speculation import DraftSource
from moonpool.engine.instance import EngineRole, InstanceContext, StartEngine
from moonpool.engine.role_service import PoolServicer, RoleService
from moonpool.engine.setup import EngineSetup, engine_setup
from moonpool.engine.subscriber import Order, SubscribedStream, Subscriber, conductor_identity, known_tokens
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2

log = get_logger(__name__)
PREEMPTED = (RequestStatus.PREEMPTED, *COPYING)
MAX_STORES = 16
SECRET_BYTES = (16, 64)
Context = grpc.aio.ServicerContext[Any, Any]


class DecodeInstance(RoleService):
    """One decode instance.

    Attributes:
        core: the scheduler.
        executor: carries out the scheduler's actions; has the requests.
        subscribers: conductors on a Steps stream.
        receivers: prefill processes on a ReceiveKV stream.
    """

    def __init__(self, context: InstanceContext, config: DecodeConfig, draft_model: DraftModel | None = None) -> None:
        super().__init__(context, config)
        if context.emulated is not None:
            context.emulated.decodes = True
        self.core = DecodeScheduler(core_settings(context, config))
        self.loading = self.open_loader()
        self.executor = DecodeExecutor(
            self.core,
            self.executor_parts(config.journal()),
            context.setup.max_tokens,
            self.loading,
            drafting=Drafting(
                always=config.speculative not in ("auto", "off"),
                ngram=config.speculative != "draft",
                model=draft_model,
                recent_tokens=config.recent_tokens if self.core.settings.draft_tokens else 0,
            ),
        )
        self.offer(self.executor, self.core.blocks, self.core.lending)
        self.subscribers: dict[Subscriber, None] = {}
        self.receivers: dict[TransferReceiver, None] = {}
        self.draining = False
        self._notify = context.notify
        self._received_bytes = 0
        self._stray_frames = 0

    # --- requests --------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise Unavailable if new requests are refused."""
        if self.executor.dead:
            raise Unavailable(self.executor.dead)
        if self.draining:
            raise Unavailable(f"{self.identity.id} is draining")

    def retire(self, receiver: TransferReceiver) -> None:
        """Note that a prefill process's stream has ended."""
        receiver.broken()
        self._received_bytes += receiver.received_bytes
        self._stray_frames += receiver.stray_frames

    # --- lifecycle -------------------------------------------------------------------------------------------------

    def end_requests(self) -> None:
        """End every request; the conductors' streams end when all is told."""
        self.executor.die("the instance stops")
        for subscriber in self.subscribers:
            subscriber.close()

    async def close(self) -> None:
        """Close the streams that prefixes are read on; others open the rest, and have ended them."""
        await self.loading.aclose()

    def replicate(self, order: conductor_pb2.ReplicateOrder) -> None:
        """Refuse: decode keeps no replicas, and no conductor orders a replica."""
        log.warning("order to copy blocks refused: decode keeps no copies", source=order.source.id)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self._notify()

    @property
    def speeds(self) -> Speeds:
        """The engine's speeds, as measured so far."""
        return self.core.tracker.speeds

    # --- reports ---------------------------------------------------------------------------------------------------

    def load(self) -> conductor_pb2.LoadReport:
        """Return the load now."""
        self.loras.sweep()
        core, requests = self.core, list(self.core.requests.values())
        prompts = core.planner.prompts if core.settings.computes_prompts else None
        return conductor_pb2.LoadReport(
            queued_tokens=prompts.tokens_left(requests) if prompts is not None else 0,
            drain_s=prompts.drain_s(requests) if prompts is not None else None,
            running=len(core.planner.batch),
            waiting=core.sequences - len(core.planner.batch),
            free_blocks=self.manager.num_free,
            cached_blocks=self.manager.num_cached,
            promised_blocks=core.budget.promised + core.budget.expected,
            context_tokens=core.context_tokens,
            speed=speeds_to_proto(core.planner.speeds(world.monotonic())),
            draining=self.draining,
            taken=self.executor.taken,
            expected_answer_tokens=core.expected_answer_tokens,
            preemptions=core.preempted.preemptions,
            draft_tokens=core.planner.drafted_tokens,
            accepted_tokens=core.planner.accepted_tokens,
        )

    def gauges(self) -> MetricSet:
        """Return everything the instance reports."""
        metrics = self.metrics().add(DECODE_METRICS, self)
        for source in DraftSource:
            metrics.add(SOURCE_METRICS, SourceFigures(self.executor.running, source), source=source.value)
        return metrics

    @property
    def messages_unsent(self) -> int:
        """Messages on KV streams that wait to be written."""
        stores = self.write_back.traffic + self.reads.traffic
        return stores.unsent + sum(len(receiver.send_queue) for receiver in self.receivers)

    @property
    def received_bytes(self) -> int:
        """KV bytes from prefill instances, on all streams so far."""
        return self._received_bytes + sum(receiver.received_bytes for receiver in self.receivers)

    @property
    def stray_frames(self) -> int:
        """Frames that belonged to no transfer, on all streams so far."""
        return self._stray_frames + sum(receiver.stray_frames for receiver in self.receivers)


DECODE_METRICS: tuple[Metric[DecodeInstance], ...] = (
    Metric("sequences_running", "Sequences in the batch.", lambda instance: len(instance.core.planner.batch), 0),
    Metric(
        "sequences_waiting",
        "Requests that wait for a slot in the batch.",
        lambda instance: len(instance.core.planner.waiting),
        0,
    ),
    Metric("sequences_preempted", "Preempted requests.", lambda instance: instance.core.count(*PREEMPTED), 0),
    Metric(
        "sequences_catching_up",
        "Sequences whose KV is recomputed after preemption.",
        lambda instance: len(instance.core.planner.recomputing),
        0,
    ),
    Metric(
        "requests",
        "Requests that are promised, waiting, running or preempted.",
        lambda instance: len(instance.executor),
        0,
    ),
    Metric("sequences_orphaned", "Sequences without a conductor.", lambda instance: len(instance.core.orphans), 0),
    Metric(
        "logs", "Ended requests with output kept for a conductor.", lambda instance: len(instance.core.orphans.retained)
    ),
    Metric("log_bytes", "Bytes of output of ended requests.", lambda instance: instance.core.orphans.retained.bytes),
    Metric(
        "steps_in_flight",
        "1 while the engine computes a step or a run of steps.",
        lambda instance: instance.executor.step_in_flight,
        0,
    ),
    Metric(
        "transfers_promised",
        "Requests with reserved blocks and no transfer begun.",
        lambda instance: instance.executor.count(TransferState.PROMISED),
        0,
    ),
    Metric(
        "transfers_receiving",
        "Requests with arriving KV.",
        lambda instance: instance.executor.count(TransferState.RECEIVING),
        0,
    ),
    Metric(
        "transfers_complete",
        "Requests with all KV that have not started.",
        lambda instance: instance.executor.count(TransferState.COMPLETE),
        0,
    ),
    Metric(
        "promised_blocks",
        "Blocks promised to requests and not allocated yet.",
        lambda instance: instance.core.budget.promised,
        0,
    ),
    Metric(
        "expected_blocks",
        "Further blocks that running answers will likely need.",
        lambda instance: instance.core.budget.expected,
        0,
    ),
    Metric(
        "swapped_blocks",
        "Blocks of preempted requests in swap memory.",
        lambda instance: instance.core.preempted.swapped_blocks,
        0,
    ),
    Metric("pool_blocks", "Size of the KV pool in blocks.", lambda instance: instance.manager.num_blocks),
    Metric("blocks_used", "Pool blocks that requests hold.", lambda instance: instance.manager.num_used, 0),
    Metric(
        "blocks_cached",
        "Pool blocks that no request holds and later prompts may hit.",
        lambda instance: instance.manager.num_cached,
    ),
    Metric("blocks_free", "Pool blocks without KV.", lambda instance: instance.manager.num_free),
    Metric("context_tokens", "Tokens of all started sequences.", lambda instance: instance.core.context_tokens, 0),
    Metric(
        "tokens_unsent",
        "Outputs that wait to be sent to conductors.",
        lambda instance: sum(subscriber.waiting for subscriber in instance.subscribers),
        0,
    ),
    Metric(
        "credits_kept_bytes",
        "Bytes from prefill instances with credits not yet handed back.",
        lambda instance: sum(receiver.credits_kept for receiver in instance.receivers),
        0,
    ),
    Metric(
        "messages_unsent",
        "Messages on KV streams that wait to be written.",
        lambda instance: instance.messages_unsent,
        0,
    ),
    Metric("conductor_streams", "Open streams of conductors.", lambda instance: len(instance.subscribers)),
    Metric("prefill_streams", "Open streams of prefill instances.", lambda instance: len(instance.receivers)),
    counter(
        "sequences_adopted_total",
        "Sequences that another conductor took over.",
        lambda instance: instance.executor.log.adopted,
    ),
    counter("preemptions_total", "Requests preempted.", lambda instance: instance.core.preempted.preemptions),
    counter("swaps_total", "Preempted requests swapped out.", lambda instance: instance.core.preempted.swaps),
    counter(
        "recomputed_tokens_total",
        "Tokens computed again after preemption.",
        lambda instance: instance.core.planner.recomputed_tokens,
    ),
    counter(
        "prompts_computed_total",
        "Prompts with their remainder computed here.",
        lambda instance: instance.core.planner.starts.begun,
    ),
    counter(
        "load_blocks_total",
        "Blocks of prompts' prefixes loaded from kvstores and other instances.",
        lambda instance: instance.core.planner.loads.loaded_blocks,
    ),
    counter(
        "load_failures_total",
        "Loads that failed for another reason than missing or damaged blocks.",
        lambda instance: instance.core.planner.loads.sources.failures,
    ),
    Metric(
        "prompts_waiting",
        "Whole prompts that wait for their turn to be computed here.",
        lambda instance: len(instance.core.planner.prompts),
        0,
    ),
    counter("received_bytes_total", "Bytes of KV from prefill instances.", lambda instance: instance.received_bytes),
    counter("stray_frames_total", "Frames that belonged to no transfer.", lambda instance: instance.stray_frames),
    counter("steps_total", "Steps computed.", lambda instance: instance.executor.running.steps),
    counter(
        "draft_tokens_total",
        "Guessed tokens that steps checked.",
        lambda instance: instance.core.planner.drafted_tokens,
    ),
    counter(
        "accepted_tokens_total",
        "Tokens that answers got beside one for each step, because guesses were right.",
        lambda instance: instance.core.planner.accepted_tokens,
    ),
)


def core_settings(context: InstanceContext, config: DecodeConfig) -> DecodeSettings:
    """Return the scheduler's settings."""
    layout, engine = context.setup.layout, context.engine
    return DecodeSettings(
        num_blocks=engine.blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        speeds=context.speeds,
        watermark_blocks=int(engine.blocks * WATERMARK),
        swap_blocks=config.swap_bytes // layout.block_bytes,
        run_steps=engine.run_steps,
        ahead_steps=engine.run_steps if engine.run_steps > 1 else 0,
        window_blocks=layout.window_blocks,
        window_slots=engine.pool.slots,
        window_bytes=layout.windowed_bytes,
        recurrent=layout.recurrent,
        states_alone=layout.states_alone,
        draft_tokens=_draft_tokens(context, config),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        **stated_values(DecodeSettings, config)
        | {"chunked_prefill_size": config.chunk_tokens(engine.max_num_batched_tokens)},
    )


def _draft_tokens(context: InstanceContext, config: DecodeConfig) -> int:
    """Return most guessed tokens that a step checks for a sequence; 0 = none.

    Raises:
        ConfigError: guesses are wanted, but this engine can check no guess.
    """
    recurrent = (
        "a recurrent state cannot go back behind guesses that were wrong" if context.setup.layout.recurrent else ""
    )
    emulated = "the emulated engine's tokens mean nothing" if context.setup.spec.emulated is not None else ""
    why_not = recurrent or emulated
    if config.draft_model and why_not:
        raise ConfigError("draft_model", why_not)
    if config.speculative not in ("auto", "off") and why_not:
        raise ConfigError("speculative", why_not)
    return 0 if config.speculative == "off" or why_not else config.num_speculative_tokens


class DecodeServicer(PoolServicer):
    """One decode instance's gRPC service."""

    def __init__(self, instance: DecodeInstance, gauges: MetricSet) -> None:
        super().__init__(instance)
        self._instance = instance
        self._gauges = gauges

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """Promise blocks, or refuse."""
        instance = self._instance
        instance.check_open()
        _check_stores(request)
        if request.HasField("tbt_slo_s") and not request.tbt_slo_s > 0:
            raise InvalidRequest("tbt_slo_s", "must be above 0")
        _check_prompt(request, instance.core.settings)
        if not 0 <= request.starts_in_s < math.inf:
            raise InvalidRequest("starts_in_s", "must be finite and not negative")
        _check_secret(request)
        caller, with_rows = (
            conductor_identity(request.conductor),
            instance.with_rows if request.computes_prompt else None,
        )
        incoming = await instance.request_reader.read(request.sequence, caller, with_rows)
        async with instance.loras.using(request.sequence.lora):
            instance.check_open()  # the work before may have taken a while
            left_s = context.time_remaining()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded("nobody waits for this promise any more")
            promised, predicted = instance.executor.reserve(incoming, request)
        return decode_pb2.ReserveResponse(
            target=self._target(promised),
            lease_s=instance.core.settings.lease_s,
            predicted_tbt_s=predicted,
            number=instance.executor.taken,
        )

    async def ReceiveKV(  # noqa: N802
        self, requests: AsyncIterator[PayloadMessage[decode_pb2.ReceiveKVRequest]], context: Context
    ) -> None:
        """Receive KV for many transfers from one prefill process."""
        stream = _ReceiveStream(self._instance)
        with self._instance.streams.running(stream):
            await stream.run(requests, bare_write(context))

    async def Steps(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Context
    ) -> None:
        """Start and cancel sequences; return tokens."""
        stream = _StepsStream(self._instance)
        with self._instance.streams.running(stream):
            await stream.run(requests, bare_write(context))

    async def DecodeStats(  # noqa: N802
        self, request: decode_pb2.DecodeStatsRequest, context: Context
    ) -> decode_pb2.DecodeStatsResponse:
        """Return the instance's gauges."""
        return decode_pb2.DecodeStatsResponse(instance=self._instance.identity, gauges=self._gauges.read())

    def _target(self, request: LiveRequest) -> kv_pb2.TransferTarget:
        return kv_pb2.TransferTarget(
            decode=self._instance.identity,
            transfer_id=request.transfer.transfer_id,
            generation=request.transfer.generation,
            held_blocks=request.transfer.held_blocks,
        )


def _check_stores(request: decode_pb2.ReserveRequest) -> None:
    if request.HasField("write_back"):
        check_instance(request.write_back, "write_back")
    if len(request.replicas) > MAX_STORES:
        raise InvalidRequest("replicas", f"at most {MAX_STORES} kvstores")
    for index, replica in enumerate(request.replicas):
        check_instance(replica, f"replicas[{index}]")


def _check_prompt(request: decode_pb2.ReserveRequest, settings: DecodeSettings) -> None:
    if request.computes_prompt and not settings.computes_prompts:
        raise InvalidRequest("computes_prompt", "this instance computes no whole prompts (--computes-prompts)")
    if request.HasField("max_queue_s") and not (request.computes_prompt and request.max_queue_s >= 0):
        raise InvalidRequest("max_queue_s", "must not be negative, and needs computes_prompt")


def _check_secret(request: decode_pb2.ReserveRequest) -> None:
    least, most = SECRET_BYTES
    if request.resume_secret and not least <= len(request.resume_secret) <= most:
        raise InvalidRequest("resume_secret", f"must have {least} to {most} bytes, or none")


class _ReceiveStream(ServerStream[decode_pb2.ReceiveKVRequest]):
    """KV for many transfers from one prefill process."""

    def __init__(self, instance: DecodeInstance) -> None:
        super().__init__(instance.closing, listener=instance.listener)
        self._instance = instance
        self._receiver: TransferReceiver

    async def on_hello(self, message: decode_pb2.ReceiveKVRequest) -> None:
        """Take the engine's own KV only."""
        instance = self._instance
        check_hello(message.hello, namespace=instance.setup.namespace, layout=instance.layout)
        self._receiver = TransferReceiver(
            message.hello.sender,
            instance.identity,
            instance.executor,
            instance.pool,
            instance.deletions.demanded,
            instance.beside,
        )
        self.send_queue = self._receiver.send_queue
        instance.receivers[self._receiver] = None
        self._receiver.welcome(self.offer_transport(message))

    def on_message(self, message: decode_pb2.ReceiveKVRequest, payload: memoryview) -> None:
        """Open, frames and close of transfers."""
        self._receiver.take(message, payload)

    def receive_into(self, message: decode_pb2.ReceiveKVRequest, nbytes: int) -> ReceiveBuffer | None:
        """Return whole slices land in the pool."""
        return self._receiver.receive_into(message, nbytes)

    def end(self) -> None:
        """What has not come whole will not come."""
        if self._receiver in self._instance.receivers:
            del self._instance.receivers[self._receiver]
            self._instance.retire(self._receiver)


class _StepsStream(SubscribedStream):
    """Starts and cancels from one conductor, tokens to the conductor."""

    def __init__(self, instance: DecodeInstance) -> None:
        super().__init__(instance.closing)
        self._instance = instance

    async def on_hello(self, message: decode_pb2.StepsRequest) -> None:
        """Serve any conductor."""
        self._subscriber = Subscriber(message.hello.conductor)
        self._instance.subscribers[self._subscriber] = None
        self._instance.executor.subscribe(self._subscriber)

    def carry_out(self, message: decode_pb2.StepsRequest) -> None:
        """Carry out one order."""
        match message.WhichOneof("message"):
            case "start":
                _start(message.start, self._subscriber, self._instance)
            case "cancel" if message.cancel.HasField("choice"):
                self._instance.executor.stop(message.cancel)
            case "cancel":
                outcome = self._cancel(message.cancel)
                self._subscriber.cancelled(message.cancel.request_id, outcome)
            case "resume":
                self._instance.executor.resume(self._subscriber, message.resume)

    def give_up(self, order: Order, reason: str) -> None:
        """End the order's request."""
        self._instance.executor.give_up(self._subscriber, order, reason)

    def _cancel(self, message: decode_pb2.CancelSequence) -> kv_pb2.CancelOutcome.ValueType:
        outcome = self._instance.executor.cancel(self._subscriber, message)
        if outcome != kv_pb2.CANCEL_OUTCOME_UNKNOWN or message.transfer_id:
            return outcome
        read = self._instance.request_reader.cancel(message.request_id, conductor_identity(self._subscriber.conductor))
        return kv_pb2.CANCEL_OUTCOME_BEFORE_START if read else outcome

    def end(self) -> None:
        """Let the conductor's sequences end, or wait for another conductor."""
        self._instance.subscribers.pop(self._subscriber, None)
        self._instance.executor.unsubscribe(self._subscriber)


def _start(message: decode_pb2.StartSequence, subscriber: Subscriber, instance: DecodeInstance) -> None:
    vocab, further = instance.setup.vocab_size, message.further_token_ids
    tokens = [(message.first_token_id,), further, *known_tokens(message, 1 + len(further))]
    if instance.executor.dead:
        subscriber.failed(message.request_id, instance.executor.dead)
    elif bad := [token for told in tokens for token in told if not 0 <= token < vocab]:
        subscriber.failed(message.request_id, f"there is no token {bad[0]}")  # an engine must never meet one
    else:
        instance.executor.start(subscriber, message)


SERVICE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]


def contract(instance: DecodeInstance) -> Service:
    """One instance's DecodeService."""
    return SERVICE, DecodeServicer(instance, instance.gauges())


def decode_role(config: DecodeConfig, draft_model: DraftModel | None = None) -> EngineRole:
    """The role decode, with these settings."""

    def build(shared: InstanceContext) -> tuple[DecodeInstance, DecodeServicer]:
        instance = DecodeInstance(shared, config, draft_model)
        return instance, DecodeServicer(instance, instance.gauges())

    told = config.told_step_tokens, config.computes_prompts
    return EngineRole(kv_pb2.INSTANCE_KIND_DECODE, SERVICE, build, *told)


@asynccontextmanager
async def draft_model_of(
    context: ProcessContext, config: DecodeConfig, start: StartEngine
) -> AsyncIterator[DraftModel | None]:
    """The draft model of these settings, on an engine that `start` starts; None without a draft model.

    Raises:
        ConfigError: a draft model is wanted but missing, or cannot be used.
        CheckpointError: the draft model's checkpoint cannot be served.
    """
    drafted = await _draft_setup(config)
    if drafted is None:
        yield None
        return
    context.starting("starting the draft model")
    async with start(drafted.spec, start_timeout_s=config.start_timeout_s, listener=context) as engine:
        yield DraftModel(engine, drafted.max_tokens)


async def _draft_setup(config: DecodeConfig) -> EngineSetup | None:
    """What the draft model's engine runs; None without a draft model.

    Raises:
        ConfigError: a draft model is wanted but missing, or cannot be used.
        CheckpointError: the draft model's checkpoint cannot be served.
    """
    if not config.draft_model:
        if config.speculative == "draft":
            raise ConfigError("draft_model", "speculative=draft needs one")
        return None
    if config.speculative not in ("auto", "draft"):
        raise ConfigError("draft_model", f"guesses nothing with speculative={config.speculative}")
    if config.device != "cpu" or config.engine != "real":
        raise ConfigError("draft_model", "only for engines that compute on a CPU")
    own = {"model": config.draft_model, "dtype": "auto", "kv_cache_dtype": "auto", "imatrix": "", "profile": ""}
    less = {"max_loras": 0, "either_role": False, "tensor_parallel_size": 1}
    setup = await asyncio.to_thread(engine_setup, config.model_copy(update=own | less))
    ours = (await asyncio.to_thread(lambda: load_config(resolve(config.model)))).vocab_size
    if setup.vocab_size != ours:
        raise ConfigError("draft_model", f"has {setup.vocab_size} tokens, the model {ours}: not the same vocabulary")
    if setup.layout.recurrent:
        raise ConfigError("draft_model", "a recurrent state cannot go back behind guesses that were wrong")
    return setup
