"""An adapter: its gRPC services, and its process, which joins the cluster whenever the engine is there."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc.aio
import msgspec

from moonpool.base import world
from moonpool.base.cluster import ChangeBell, ClusterMembership, HeldKeys, InstanceReport
from moonpool.base.errors import ConfigError, InvalidRequest, MoonpoolError, TransferFailed, Unavailable
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import serving
from moonpool.base.rpc.stream_writes import bare_write
from moonpool.base.rpc.tls import Security
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet, counter
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.engine.request import IncomingRequest, RequestReader
from moonpool.engine.subscriber import Order, SubscribedStream, Subscriber, conductor_identity, known_tokens
from moonpool.interop.adapter.answers import PromisedRequest, first_token_message
from moonpool.interop.adapter.base import EngineClient, EngineFacts
from moonpool.interop.adapter.calibration import keeps_kv, measured_speeds
from moonpool.interop.adapter.config import AdapterConfig
from moonpool.interop.adapter.engine_life import EngineLife, ServedCheckpoint, identify_loras
from moonpool.interop.adapter.http_session import HttpSession
from moonpool.interop.adapter.sglang import SglangClient
from moonpool.interop.adapter.vllm import VllmClient
from moonpool.interop.kv_events.stream import EventStream
from moonpool.v1 import adapter_pb2, decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.adapter_pb2_grpc import AdapterServiceStub

POLL_S = 0.25
"""Seconds between two looks at the engine's load."""
MAX_FAILED_POLLS = 3
RETRY_S = 0.5
SETTLE_S = 3.0
"""Seconds within which the engine's past events are to come, before it joins."""
BESIDE_THREADS = 2
HAND_OVER_S = 5.0
KINDS = {"prefill": kv_pb2.INSTANCE_KIND_PREFILL, "decode": kv_pb2.INSTANCE_KIND_DECODE}
ENGINE_CLIENTS: dict[str, tuple[str, Callable[[HttpSession], EngineClient]]] = {
    "vllm": ("vLLM", VllmClient),
    "sglang": ("SGLang", SglangClient),
}
"""By `AdapterConfig.kind`: the make's name, and what makes a client."""
log = get_logger(__name__)


class Adapter:
    """The current engine, and what outlives the engine.

    Attributes:
        life: the engine's; None while there is no engine.
        subscribers: conductors on a Steps stream.
        closing: set when long-lived streams are to end.
    """

    def __init__(self, config: AdapterConfig, beside: ThreadOffload) -> None:
        self.config = config
        self.life: EngineLife | None = None
        self.subscribers: dict[Subscriber, None] = {}
        self.closing = asyncio.Event()
        self.lives = 0
        self.reader = RequestReader(lambda spec: self.engine().incoming(spec), beside)
        self.identities: dict[int, kv_pb2.Instance] = {}

    def engine(self) -> EngineLife:
        """The engine that takes requests. Raises Unavailable."""
        if self.life is None:
            raise Unavailable("the engine is not there")
        self.life.check_open()
        return self.life

    def identity(self, kind: kv_pb2.InstanceKind.ValueType) -> kv_pb2.Instance:
        """The engine as an instance. Raises Unavailable if the role is another one."""
        found = next((it for it in self.identities.values() if it.kind == kind), None)
        if found is None:
            raise Unavailable(f"the engine's role is {self.config.role}")
        return found

    def gauges(self) -> MetricSet:
        """Everything the adapter reports."""
        return MetricSet().add(PROCESS_METRICS, None).add(ADAPTER_METRICS, self)

    def connected(self, identity: str) -> bool:
        """Whether a conductor has a Steps stream open."""
        return any(conductor_identity(it.conductor) == identity for it in self.subscribers)

    def watch(self, live: PromisedRequest) -> None:
        """Ends a promise in time, unless the conductor is connected."""

        def expire() -> None:
            if live.subscriber is None and not live.over:
                if self.connected(live.conductor):
                    self.watch(live)
                else:
                    live.end()

        live.expiry = asyncio.get_running_loop().call_later(self.config.lease_s, expire)

    def left(self, subscriber: Subscriber) -> None:
        """A conductor's stream has ended, and the conductor's requests with the stream."""
        self.subscribers.pop(subscriber, None)
        identity = conductor_identity(subscriber.conductor)
        for live in list(self.life.requests.values()) if self.life is not None else ():
            if live.subscriber is subscriber or (live.conductor == identity and not self.connected(identity)):
                live.subscriber = None
                live.end()


def _of_life(read: Callable[[EngineLife], float]) -> Callable[[Adapter], float]:
    return lambda adapter: 0.0 if adapter.life is None else read(adapter.life)


def _of_streams(read: Callable[[EventStream], float]) -> Callable[[Adapter], float]:
    return _of_life(lambda life: sum([read(one) for one in life.streams]))


ADAPTER_METRICS: tuple[Metric[Adapter], ...] = (
    Metric("engine_up", "1 while the engine answers.", lambda it: it.life is not None),
    Metric("requests", "Requests that are promised memory, or run.", _of_life(lambda it: len(it.requests)), 0),
    Metric("answers_running", "Answers that the engine generates.", _of_life(lambda it: it.running), 0),
    Metric(
        "promised_blocks",
        "Blocks promised to requests that have not begun.",
        _of_life(lambda it: it.promised_blocks),
        0,
    ),
    Metric("pool_blocks", "KV blocks of the engine.", _of_life(lambda it: it.facts.blocks)),
    Metric("indexed_blocks", "KV blocks of the engine that conductors know of.", _of_life(lambda it: len(it.cache))),
    Metric("conductor_streams", "Open streams of conductors.", lambda it: len(it.subscribers)),
    counter("engine_lives_total", "Starts of the engine that were seen.", lambda it: it.lives),
    counter("event_batches_total", "Batches of KV events that came.", _of_streams(lambda it: it.batches)),
    counter("event_gaps_total", "Times that KV events were missing.", _of_streams(lambda it: it.feed.gaps)),
    counter(
        "event_losses_total",
        "Times that missing KV events could not be had again.",
        _of_streams(lambda it: it.feed.lost),
    ),
    counter(
        "prompts_recomputed_total",
        "Prompts of which the engine held less than conductors knew.",
        _of_life(lambda it: it.prompts_recomputed),
    ),
    counter(
        "transfer_tokens_recomputed_total",
        "Prompt tokens whose KV should have come from another engine and was computed again.",
        _of_life(lambda it: it.tokens_recomputed),
    ),
    counter("answers_failed_total", "Answers that the engine did not finish.", _of_life(lambda it: it.answers_failed)),
)

Context = grpc.aio.ServicerContext[Any, Any]


class AdapterPrefillServicer:
    """The engine as a prefill instance."""

    def __init__(self, adapter: Adapter, gauges: MetricSet, channels: Channels) -> None:
        self._adapter, self._channels = adapter, channels
        self._gauges = gauges
        self._open: dict[PromisedRequest, None] = {}

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Has a prompt computed; the answer goes on at the engine, for the promise that is the target."""
        incoming = await self._adapter.reader.read(request.sequence)
        life = self._adapter.engine()
        live, delivered, met = self._promised(life, request, incoming), False, None
        self._open[live] = None
        try:
            cached, loaded = life.cached_tokens(incoming), life.loaded_tokens(incoming, request)
            alone = not life.running and not loaded
            live.held_tokens = max(cached + loaded, life.shared_tokens(incoming))
            apart = request.HasField("target") and self._adapter.config.role == "prefill"
            if apart:
                met = live.part.meetings(live.width)
                if met is not None:  # both engines are asked at once
                    await self._hand_over(request.target, live, met)
                live.answers = [
                    live.part.answer(
                        choice,
                        (),
                        lambda _: live.wake.set(),
                        alone=True,
                        keep=True,
                        transfer=met[choice] if met is not None else None,
                    )
                    for choice in range(live.width)
                ]
            elif request.HasField("target"):
                live.compute()
            else:
                live.answers = [live.part.answer(0, (), lambda _: live.wake.set(), alone=True)]
            life.prompts_taken += 1  # a report with this number counts the prompt
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(number=life.prompts_taken))
            await live.first_tokens()
            life.computed(live.answers[0], cached, alone=alone and len(live.answers) == 1)
            message = first_token_message(live.answers, cached, loaded)
            yield prefill_pb2.PrefillResponse(first_token=message)
            if apart and met is None:
                await self._hand_over(request.target, live, [answer.transfer for answer in live.answers])
            yield prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished())
            delivered = request.HasField("target") and not apart
        finally:
            del self._open[live]
            if not delivered:
                live.end()

    async def _hand_over(
        self, target: kv_pb2.TransferTarget, live: PromisedRequest, transfers: Sequence[Mapping[str, Any] | None]
    ) -> None:
        """Tells the adapter of the decode side where the prompt's KV is, or will be."""
        if not all(transfers):
            raise TransferFailed("the engine names no KV: it runs without a connector that moves KV (docs/engines.md)")
        stub: Any = AdapterServiceStub(self._channels.get(target.decode.address))
        told = [msgspec.json.encode(transfer).decode() for transfer in transfers]
        message = adapter_pb2.HandOverRequest(target=target, request_id=live.request_id, transfers=told)
        try:
            await stub.HandOver(message, timeout=HAND_OVER_S)
        except MoonpoolError as error:
            raise TransferFailed(f"{target.decode.id} was not told of the KV: {error}") from error

    def _promised(
        self, life: EngineLife, request: prefill_pb2.PrefillRequest, incoming: IncomingRequest
    ) -> PromisedRequest:
        if not request.HasField("target") or self._adapter.config.role == "prefill":
            return life.take(incoming)
        target = request.target
        live = life.promised(target.transfer_id, target.generation, incoming.request_id)
        known = self._adapter.identities.get(target.decode.epoch)
        if known is None or known.id != target.decode.id:
            raise TransferFailed(f"the engine's KV does not go to {target.decode.id}")
        if live is None or live.answers:
            raise TransferFailed(f"there is no transfer {target.transfer_id} here (any more)")
        return live

    async def Cancel(  # noqa: N802
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        """Cancels a prefill by request id."""
        found = [live for live in self._open if live.request_id == request.request_id]
        for live in found:
            live.end()
        outcome = kv_pb2.CANCEL_OUTCOME_IN_FLIGHT if found else kv_pb2.CANCEL_OUTCOME_UNKNOWN
        return prefill_pb2.CancelResponse(outcome=outcome)

    async def Forget(self, request: kv_pb2.ForgetRequest, context: Context) -> kv_pb2.ForgetResponse:  # noqa: N802
        """Deletes KV."""
        return await self._adapter.engine().forget(request)

    async def PrefillStats(  # noqa: N802
        self, request: prefill_pb2.PrefillStatsRequest, context: Context
    ) -> prefill_pb2.PrefillStatsResponse:
        """Everything the adapter holds."""
        return prefill_pb2.PrefillStatsResponse(gauges=self._gauges.read())


class AdapterServicer:
    """What another adapter tells this one."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    async def HandOver(  # noqa: N802
        self, request: adapter_pb2.HandOverRequest, context: Context
    ) -> adapter_pb2.HandOverResponse:
        """A prompt's KV is at another engine."""
        target, life = request.target, self._adapter.engine()
        live = life.promised(target.transfer_id, target.generation, request.request_id)
        if live is None or not live.awaits_kv or live.answers:
            raise TransferFailed(f"there is no transfer {target.transfer_id} here (any more)")
        try:
            transfers = [msgspec.json.decode(one, type=dict[str, Any]) for one in request.transfers]
        except msgspec.DecodeError as error:
            raise InvalidRequest("transfers", str(error)) from error
        if len(transfers) != live.width:
            raise InvalidRequest("transfers", f"{live.width} answers are wanted, each has one")
        live.handed_over(transfers)
        return adapter_pb2.HandOverResponse()


class AdapterDecodeServicer:
    """The engine as a decode instance."""

    def __init__(self, adapter: Adapter, gauges: MetricSet) -> None:
        self._adapter = adapter
        self._gauges = gauges

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """Promises memory, or refuses."""
        if request.HasField("tbt_slo_s") and not request.tbt_slo_s > 0:
            raise InvalidRequest("tbt_slo_s", "must be above 0")
        if not 0 <= request.starts_in_s < math.inf:
            raise InvalidRequest("starts_in_s", "must be finite and not negative")
        incoming = await self._adapter.reader.read(request.sequence, conductor_identity(request.conductor))
        life = self._adapter.engine()
        live = life.reserve(incoming, request)
        self._adapter.watch(live)
        decode = self._adapter.identity(kv_pb2.INSTANCE_KIND_DECODE)
        held = life.cached_tokens(incoming) // life.facts.block_size
        return decode_pb2.ReserveResponse(
            target=kv_pb2.TransferTarget(
                decode=decode, transfer_id=live.number, generation=live.number, held_blocks=held
            ),
            lease_s=self._adapter.config.lease_s,
            predicted_tbt_s=life.tbt_s(),
            number=life.promises_taken,
        )

    async def Steps(self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Context) -> None:  # noqa: N802
        """Starts and cancels sequences; returns tokens."""
        await _StepsStream(self._adapter).run(requests, bare_write(context))

    async def Forget(self, request: kv_pb2.ForgetRequest, context: Context) -> kv_pb2.ForgetResponse:  # noqa: N802
        """Deletes KV."""
        return await self._adapter.engine().forget(request)

    async def DecodeStats(  # noqa: N802
        self, request: decode_pb2.DecodeStatsRequest, context: Context
    ) -> decode_pb2.DecodeStatsResponse:
        """Everything the adapter holds."""
        return decode_pb2.DecodeStatsResponse(gauges=self._gauges.read())


class _StepsStream(SubscribedStream):
    """Starts and cancels from one conductor, tokens to the conductor."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.closing)
        self._adapter = adapter

    async def on_hello(self, message: decode_pb2.StepsRequest) -> None:
        """Any conductor is served."""
        self._subscriber = Subscriber(message.hello.conductor)
        self._adapter.subscribers[self._subscriber] = None

    def carry_out(self, message: decode_pb2.StepsRequest) -> None:
        """Carries out one order."""
        match message.WhichOneof("message"):
            case "start":
                self._start(message.start)
            case "cancel":
                self._cancel(message.cancel)
            case "resume":
                self._subscriber.failed(message.resume.request_id, "an adapter keeps no sequences for other conductors")

    def give_up(self, order: Order, reason: str) -> None:
        """Ends the requests of the order's id that are this conductor's."""
        life, who = self._adapter.life, conductor_identity(self._subscriber.conductor)
        for live in list(life.requests.values()) if life is not None else ():
            if live.request_id == order.request_id and live.conductor == who:
                live.subscriber = None
                live.end()
        self._subscriber.failed(order.request_id, reason)

    def _start(self, message: decode_pb2.StartSequence) -> None:
        life = self._adapter.life
        live = life.promised(message.transfer_id, message.generation, message.request_id) if life is not None else None
        if live is None or live.subscriber is not None:
            why = f"there is no transfer {message.transfer_id} here (any more)"
            self._subscriber.failed(message.request_id, why, transfer=True)
            return
        firsts = [message.first_token_id, *message.further_token_ids]
        known: list[Sequence[int]] = [
            [first, *behind] for first, behind in zip(firsts, known_tokens(message, len(firsts)), strict=True)
        ]
        if not message.compute_prompt and len(known) != live.width:
            self._subscriber.failed(message.request_id, f"{live.width} answers are wanted, each has a first token")
            live.end()
            return
        live.start(self._subscriber, [] if message.compute_prompt else known)

    def _cancel(self, message: decode_pb2.CancelSequence) -> None:
        life = self._adapter.life
        found = [it for it in life.requests.values() if it.request_id == message.request_id] if life is not None else []
        who = conductor_identity(self._subscriber.conductor)
        for live in found:
            named = live.number == message.transfer_id and live.number == message.generation
            unnamed = not message.transfer_id and live.conductor == who and live.subscriber is None
            if not named and not unnamed:
                continue
            if message.HasField("choice"):
                live.stop(message.choice)
                return
            live.subscriber = None
            live.end()
            self._subscriber.cancelled(message.request_id, kv_pb2.CANCEL_OUTCOME_IN_FLIGHT)
            return
        if not message.HasField("choice"):
            self._subscriber.cancelled(message.request_id, kv_pb2.CANCEL_OUTCOME_UNKNOWN)

    def end(self) -> None:
        """The conductor's requests end."""
        self._adapter.left(self._subscriber)


async def serve(context: ProcessContext, config: AdapterConfig) -> None:
    """Runs an adapter until told to stop; the adapter joins whenever the engine is there.

    Raises:
        ConfigError: a setting is refused, or the engine was started without something that is needed.
        CheckpointError: the checkpoint cannot be read.
        Mismatch: the conductor serves something else.
    """
    context.starting("reading the checkpoint")
    checkpoint = await asyncio.to_thread(ServedCheckpoint.load, config)
    async with contextlib.AsyncExitStack() as stack:
        security = Security.of(config)
        channels = await stack.enter_async_context(Channels(Security.tls_of(security)))
        name, made = ENGINE_CLIENTS[config.kind]
        client = made(HttpSession(name, config.engine, config.engine_api_key, config.engine_ca))
        stack.push_async_callback(client.aclose)
        beside = ThreadOffload(stack.enter_context(world.thread_pool(BESIDE_THREADS, "beside")))
        adapter = Adapter(config, beside)
        gauges, metrics = adapter.gauges(), PrometheusMetrics(config.service())
        metrics.watch(gauges)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        contracts = [
            (
                prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
                AdapterPrefillServicer(adapter, gauges, channels),
            ),
            (decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], AdapterDecodeServicer(adapter, gauges)),
            (adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"], AdapterServicer(adapter)),
        ]
        server = await stack.enter_async_context(serving(config.listen, contracts, security=security))
        address = config.advertised(server.port)
        context.starting("waiting for the engine")
        while not context.stopping.is_set():
            facts = await _wait_for_engine(client, context)
            if facts is not None:
                await _live(adapter, client, facts, checkpoint, channels, address, context)
        adapter.closing.set()


async def _wait_for_engine(client: EngineClient, context: ProcessContext) -> EngineFacts | None:
    """The engine, once answering; None if the adapter stops before."""
    told = ""
    while not context.stopping.is_set():
        try:
            return await client.describe()
        except Unavailable as error:
            if str(error) != told:
                told = str(error)
                log.warning("the engine is not there (yet)", error=told)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.stopping.wait(), RETRY_S)
    return None


async def _live(
    adapter: Adapter,
    client: EngineClient,
    facts: EngineFacts,
    checkpoint: ServedCheckpoint,
    channels: Channels,
    address: str,
    context: ProcessContext,
) -> None:
    """The engine from the first answer to the last, or to the adapter's end."""
    bell, config = ChangeBell(), adapter.config
    log.info("found the engine", version=facts.version, blocks=facts.blocks, block_size=facts.block_size)
    try:
        speeds = await measured_speeds(client, facts, checkpoint.config.vocab_size)
        if config.role == "prefill" and not await keeps_kv(client):
            raise ConfigError("role", f"{facts.version} runs without a connector that moves KV (docs/engines.md)")
        if config.kvstores:
            facts = await client.describe()  # the namespace is told with the first answer
        _, load = await client.load()
    except Unavailable as error:
        log.warning("the engine answers no prompt (yet)", error=str(error))
        await asyncio.sleep(RETRY_S)
        return
    if config.kvstores and not facts.page_namespace:
        raise ConfigError("kvstores", f"{facts.version} runs without the connector of moonpool-kv (docs/engines.md)")
    loras = await asyncio.to_thread(identify_loras, facts.loras)
    life = EngineLife(client, facts, checkpoint, config, bell.ring, loras)
    life.speeds = SpeedTracker(speeds)
    life.observe(load)
    adapter.lives += 1
    ended = asyncio.Event()
    epoch = world.random_bits(63) or 1
    kinds = {name: kind for name, kind in KINDS.items() if config.role in ("both", name)}
    memberships = []
    adapter.identities = {}
    for number, (name, kind) in enumerate(kinds.items()):
        instance = kv_pb2.Instance(id=f"{config.id}-{name}", epoch=epoch + number, kind=kind, address=address)
        adapter.identities[instance.epoch] = instance
        report = InstanceReport(
            life.hello(instance, config.kv_domain or config.id, life.model_info()),
            lambda kind=kind: life.load_report(kind),  # type: ignore[misc]
            HeldKeys(1, lambda _: list(life.cache.held)),
            on_drain=lambda: _drain(life, bell),
        )
        memberships.append(ClusterMembership(channels, config.conductor, report, bell=bell))
    try:
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(stream.run()) for stream in life.streams]
            work.append(group.create_task(_tell_changes(life, memberships)))
            work.append(group.create_task(_watch(life, client, ended)))
            await _settle(life)
            adapter.life = life
            joined = [group.create_task(one.run(ended)) for one in memberships]
            if not context.announced:
                context.announce(address)
            await _first(ended.wait(), context.stopping.wait())
            if not ended.is_set():
                _drain(life, bell)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(life.empty.wait(), config.drain_s / 2)
                ended.set()
            await asyncio.wait(joined)
            for task in work:
                task.cancel()
    finally:
        life.lose(life.lost or "the adapter stops")
        adapter.life = None


def _drain(life: EngineLife, bell: ChangeBell) -> None:
    life.draining = True
    bell.ring()


async def _settle(life: EngineLife) -> None:
    """Waits for the engine's past events, for a limited time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            for stream in life.streams:
                await stream.settled.wait()


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _tell_changes(life: EngineLife, memberships: Sequence[ClusterMembership]) -> None:
    while True:
        await life.cache_changed.wait()
        life.cache_changed.clear()
        stored, removed, _ = life.cache.take_changes()
        news = list(stored), list(removed)
        for membership in memberships:
            membership.changed(KeyChanges(*news))


async def _watch(life: EngineLife, client: EngineClient, ended: asyncio.Event) -> None:
    """Follows the engine's load, until the engine is lost or is another one."""
    failed = 0
    while not ended.is_set():
        try:
            started, load = await client.load()
            life.observe(load)
            failed = 0
        except Unavailable as error:
            failed += 1
            if failed >= MAX_FAILED_POLLS:
                life.lose(f"the engine is lost: {error}")
        else:
            if started != life.facts.life:
                life.lose("the engine was restarted")
        if life.lost:
            log.warning("the engine is lost", reason=life.lost)
            ended.set()
            return
        await asyncio.sleep(POLL_S)
