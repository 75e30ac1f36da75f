"""An adapter: the engine's life, as instances of the cluster; the gRPC services; and the process."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from moonpool import world
from moonpool.checkpoint import (
    ModelConfig,
    config_hash,
    kv_layout,
    load_config,
    model_name,
    resolve,
    resolve_dtype,
    weights_fingerprint,
)
from moonpool.cluster import ChangeBell, ClusterMembership, HeldKeys, InstanceReport
from moonpool.cluster.proto_conversion import read_deletions, speeds_to_proto
from moonpool.engine.request import IncomingRequest, RequestReader
from moonpool.engine.subscriber import SubscribedStream, Subscriber, conductor_identity, known_tokens
from moonpool.errors import InvalidRequest, MoonpoolError, Overloaded, TransferFailed, Unavailable
from moonpool.kv.blocks import KeyChanges
from moonpool.kv.keys import BlockKey, chain_root, namespace
from moonpool.kv.layout import KVLayout
from moonpool.rpc.channels import Channels
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import serving
from moonpool.rpc.stream_writes import bare_write
from moonpool.rpc.tls import Security
from moonpool.scheduling.latency import SpeedTracker
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet, counter
from moonpool.telemetry.prometheus import PrometheusMetrics
from moonpool.transport.async_utils import ThreadOffload
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2
from services.adapter.answers import EngineAnswer, EnginePart, PromisedRequest, first_token_message
from services.adapter.base import EngineClient, EngineFacts, EngineLoad
from services.adapter.calibration import measured_speeds
from services.adapter.config import AdapterConfig
from services.adapter.core.engine_cache import EngineCache
from services.adapter.core.kv_events import ExtraKeys
from services.adapter.event_stream import EventStream
from services.adapter.vllm import VllmClient

POLL_S = 0.25
"""Seconds between two looks at the engine's load."""
MAX_FAILED_POLLS = 3
RETRY_S = 0.5
SETTLE_S = 3.0
"""Seconds within which the engine's past events are to come, before it joins."""
NAMES_PER_BLOCK = 4
BESIDE_THREADS = 2
ENGINE_CLIENTS: dict[str, Callable[[str, str], EngineClient]] = {"vllm": VllmClient}
"""By `AdapterConfig.kind`: makes the client of an engine at a URL, with an API key."""
SALT_MARK = "moonpool:"
"""Salts of prompts begin so: what follows names the root of the chain, and no hash of an image looks like it."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """The checkpoint that the engine serves."""

    name: str
    config: ModelConfig
    dtype: str
    fingerprint: bytes

    @classmethod
    def load(cls, config: AdapterConfig) -> "ServedCheckpoint":
        """Reads it; blocks for as long as hashing the weights takes. Raises CheckpointError."""
        folder: Path = resolve(config.model)
        model = load_config(folder)
        return cls(model_name(config.model), model, resolve_dtype(model, config.dtype), weights_fingerprint(folder))

    def layout(self, block_tokens: int) -> KVLayout:
        """Arrangement of its KV in blocks of so many tokens."""
        return kv_layout(self.config, self.dtype, block_tokens)


class EngineLife:
    """The engine from its start, or the adapter's, to its end.

    Args:
        client: of the engine.
        facts: of the engine.
        checkpoint: what it serves.
        config: the adapter's flags.
        notify: called when load or keys have changed.
    """

    def __init__(
        self,
        client: EngineClient,
        facts: EngineFacts,
        checkpoint: ServedCheckpoint,
        config: AdapterConfig,
        notify: Callable[[], None],
    ) -> None:
        self.facts, self.layout = facts, checkpoint.layout(facts.block_tokens)
        self.namespace = namespace(checkpoint.fingerprint, self.layout)
        self.client, self._config, self._notify = client, config, notify
        self._checkpoint = checkpoint
        self._plain_root = chain_root(self.namespace, "")
        self._epoch = ""  # in salts: another one after each deletion
        self.cache = EngineCache(facts.block_tokens, self._root_of, NAMES_PER_BLOCK * facts.blocks)
        self.cache_changed = asyncio.Event()
        self.streams = [EventStream(source, self.cache, self.cache_changed) for source in facts.sources]
        self.load = EngineLoad(0, 0, 0.0)
        self.speeds: SpeedTracker
        self.requests: dict[int, PromisedRequest] = {}
        self._numbers = itertools.count(1)
        self.prompts_taken = self.promises_taken = self.prompts_recomputed = self.answers_failed = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self.draining = False
        self.lost = ""

    # --- keys ------------------------------------------------------------------------------------------------------

    def _root_of(self, extra: ExtraKeys | None) -> BlockKey | None:
        """The chain of a first block: the salt says its root. Without a salt it is that of nobody's tenant."""
        if extra is None or len(extra) > 1:
            return None
        if not extra:
            return BlockKey(self._plain_root) if not self._epoch else None
        salt = extra[0]
        if not isinstance(salt, str) or not salt.startswith(SALT_MARK):
            return None
        root, _, epoch = salt.removeprefix(SALT_MARK).partition(":")
        try:
            return BlockKey(bytes.fromhex(root)) if epoch == self._epoch and len(root) == 64 else None
        except ValueError:
            return None

    def _salt_of(self, root: bytes) -> str:
        if not self._epoch:
            return "" if root == self._plain_root else f"{SALT_MARK}{root.hex()}"
        return f"{SALT_MARK}{root.hex()}:{self._epoch}"

    async def forget(self, request: kv_pb2.ForgetRequest) -> kv_pb2.ForgetResponse:
        """Deletes KV: all of it, where some of it is named. What the engine cannot delete is not found any more."""
        held, concerned = set(self.cache.held), bool(request.ttl_s)
        for chosen in await read_deletions(request.deletions):
            for selection in chosen.values():
                everyones = bool(selection.tenants) or self.namespace in selection.namespaces
                concerned = concerned or everyones or not held.isdisjoint(selection.keys)
        if not concerned:
            return kv_pb2.ForgetResponse()
        self._epoch = world.random_hex(4)
        self.cache.restart()
        self.cache_changed.set()
        await self.client.clear_cache()
        return kv_pb2.ForgetResponse(blocks=len(held), bytes=len(held) * self.layout.block_bytes)

    # --- requests --------------------------------------------------------------------------------------------------

    def incoming(self, spec: kv_pb2.SequenceSpec) -> IncomingRequest:
        """A checked request. Raises InvalidRequest, also for options that the engine does not have."""
        incoming = IncomingRequest.from_proto(
            spec,
            namespace=self.namespace,
            block_tokens=self.facts.block_tokens,
            vocab_size=self._checkpoint.config.vocab_size,
            max_tokens=self.facts.max_tokens,
        )
        for option in incoming.sampling.params.uncommon:
            if option in self.facts.unsupported:
                raise InvalidRequest(f"sequence.sampling.{option}", f"{self.facts.version} behind an adapter has none")
        return incoming

    def check_open(self) -> None:
        """Raises Unavailable if new requests are refused."""
        if self.lost or self.draining:
            raise Unavailable(self.lost or "the adapter is draining")

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        own = sum([self.layout.blocks_for(it.context_tokens) for it in self.requests.values()])
        return min(self.facts.blocks, max(own, round(self.load.usage * self.facts.blocks)))

    @property
    def promised_blocks(self) -> int:
        """Blocks promised to requests that the engine does not know yet."""
        return sum([it.blocks for it in self.requests.values() if not it.answers])

    @property
    def running(self) -> int:
        """Answers that the engine generates for this adapter."""
        return sum([not answer.over for it in self.requests.values() for answer in it.answers])

    def reserve(self, incoming: IncomingRequest, asked: decode_pb2.ReserveRequest) -> PromisedRequest:
        """Promises memory.

        Raises:
            Overloaded: there is none now, or the time between tokens cannot be kept.
            InvalidRequest: there is nothing to generate, or the engine is too small.
        """
        sampling, tokens, width = incoming.sampling, len(incoming.token_ids), incoming.spec.width
        if sampling.total_tokens(self.facts.max_tokens) <= tokens:
            raise InvalidRequest("sequence.sampling.max_tokens", "leaves no token to generate")
        blocks = self.layout.blocks_for(tokens) + width
        if blocks > self.facts.blocks:
            raise InvalidRequest("sequence.token_ids", f"needs {blocks} blocks, the engine has {self.facts.blocks}")
        most, used = self._config.max_running, self.used_blocks + self.promised_blocks
        if used + blocks > self.facts.blocks or (most and self.running + width > most):
            raise Overloaded("the engine has no room now", reason="no_decode_room", retry_after_s=1.0)
        tbt_s = self.tbt_s(width)
        if asked.HasField("tbt_slo_s") and tbt_s > asked.tbt_slo_s:
            raise Overloaded(
                "tokens would come too slowly", reason="tbt_slo", predicted_tbt_s=tbt_s, slo_s=asked.tbt_slo_s,
                retry_after_s=1.0,
            )  # fmt: skip
        who = conductor_identity(asked.conductor)
        live = PromisedRequest(next(self._numbers), self.part(incoming), who, blocks, self._ended)
        self.requests[live.number] = live
        self.promises_taken += 1
        self.empty.clear()
        self._notify()
        return live

    def tbt_s(self, joining: int = 0) -> float:
        """Predicted seconds between tokens."""
        speeds = self.speeds.speeds
        return speeds.decode_base_s + speeds.decode_per_sequence_s * (self.running + joining)

    def part(self, incoming: IncomingRequest) -> EnginePart:
        """Begins answers to a request at the rank that holds most of its prompt."""
        _, rank = self.cache.matched_blocks(incoming.spec.keys)
        single = len(self.facts.sources) == 1
        salt = self._salt_of(incoming.chain_root)
        expected = self.cached_tokens(incoming)

        def told(cached_tokens: int) -> None:
            self.prompts_recomputed += cached_tokens < expected

        return EnginePart(self.client, incoming, salt, -1 if single else rank, self._config.token_timeout_s, told)

    def cached_tokens(self, incoming: IncomingRequest) -> int:
        """Tokens of a prompt that the engine is known to hold; the last one is computed in any case."""
        blocks, _ = self.cache.matched_blocks(incoming.spec.keys)
        most = (len(incoming.token_ids) - 1) // self.facts.block_tokens
        return min(blocks, most) * self.facts.block_tokens

    def promised(self, transfer_id: int, generation: int, request_id: str) -> PromisedRequest | None:
        """The request of a promise."""
        live = self.requests.get(transfer_id)
        return live if live is not None and (live.number, live.request_id) == (generation, request_id) else None

    def _ended(self, live: PromisedRequest) -> None:
        self.requests.pop(live.number, None)
        for answer in live.answers:
            self.answers_failed += answer.error is not None
            if answer.finish and len(answer.tokens) > 1:
                mean_s = (answer.last_at - answer.first_at) / (len(answer.tokens) - 1)
                self.speeds.observe_decode(max(1, self.running), len(answer.prompt.token_ids), mean_s)
        if not self.requests:
            self.empty.set()
        self._notify()

    def computed(self, answer: EngineAnswer, cached_tokens: int, *, alone: bool) -> None:
        """A prompt has its first token; `alone`: nothing else was computed meanwhile."""
        new, seconds = len(answer.prompt.token_ids) - cached_tokens, answer.first_at - answer.began
        if alone and seconds > 0:
            self.speeds.observe_prefill([(new, cached_tokens, True)], seconds)

    def lose(self, why: str) -> None:
        """The engine is lost: every request fails."""
        self.lost = why
        for live in list(self.requests.values()):
            live.fail(why)

    # --- reports ---------------------------------------------------------------------------------------------------

    def load_report(self, kind: kv_pb2.InstanceKind.ValueType) -> conductor_pb2.LoadReport:
        """The load now, as that of an instance of this kind."""
        decode, used = kind == kv_pb2.INSTANCE_KIND_DECODE, self.used_blocks
        waiting = [it for it in self.requests.values() if it.answers and not it.answers[0].tokens]
        queued = sum([len(it.part.incoming.token_ids) for it in waiting])
        return conductor_pb2.LoadReport(
            running=self.running if decode else len(waiting),
            waiting=len([it for it in self.requests.values() if not it.answers]) if decode else 0,
            queued_tokens=0 if decode else queued,
            free_blocks=max(0, self.facts.blocks - used - len(self.cache)),
            cached_blocks=min(len(self.cache), self.facts.blocks - used),
            promised_blocks=self.promised_blocks if decode else 0,
            context_tokens=sum([it.context_tokens for it in self.requests.values()]) if decode else 0,
            speed=speeds_to_proto(self.speeds.speeds),
            draining=self.draining or bool(self.lost),
            taken=self.promises_taken if decode else self.prompts_taken,
            preemptions=self.load.preemptions if decode else 0,
        )

    def hello(self, instance: kv_pb2.Instance, domain: str, model: conductor_pb2.ModelInfo) -> conductor_pb2.JoinHello:
        """How the engine joins as an instance."""
        return conductor_pb2.JoinHello(
            instance=instance,
            model=model,
            total_blocks=self.facts.blocks,
            speed=speeds_to_proto(self.speeds.speeds),
            process=world.this_process(),
            kv_domain=domain,
            unsupported=self.facts.unsupported,
        )

    def model_info(self) -> conductor_pb2.ModelInfo:
        """What the engine serves."""
        return conductor_pb2.ModelInfo(
            name=self._checkpoint.name,
            namespace=self.namespace,
            layout=self.layout.to_proto(),
            config_hash=config_hash(self._checkpoint.config),
            vocab_size=self._checkpoint.config.vocab_size,
            max_tokens=min(self.facts.max_tokens, self._checkpoint.config.max_position_embeddings),
        )


class Adapter:
    """The engine as it is now, and what outlives it.

    Attributes:
        life: of the engine; None while there is no engine.
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

    def gauges(self) -> MetricSet:
        """Everything the adapter reports."""
        return MetricSet().add(PROCESS_METRICS, None).add(ADAPTER_METRICS, self)

    def connected(self, identity: str) -> bool:
        """Whether a conductor has a Steps stream open."""
        return any(conductor_identity(it.conductor) == identity for it in self.subscribers)

    def watch(self, live: PromisedRequest) -> None:
        """Lets a promise run out, unless its conductor is connected."""

        def expire() -> None:
            if live.subscriber is None and not live.over:
                if self.connected(live.conductor):
                    self.watch(live)
                else:
                    live.end()

        live.expiry = asyncio.get_running_loop().call_later(self.config.lease_s, expire)

    def left(self, subscriber: Subscriber) -> None:
        """A conductor's stream has ended, and its requests with it."""
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
    counter("answers_failed_total", "Answers that the engine did not finish.", _of_life(lambda it: it.answers_failed)),
)

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer:
    """The engine as a prefill instance."""

    def __init__(self, adapter: Adapter, gauges: MetricSet) -> None:
        self._adapter = adapter
        self._gauges = gauges
        self._open: dict[PromisedRequest, None] = {}

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Has a prompt computed; the answer goes on at the engine, for the promise that is the target."""
        incoming = await self._adapter.reader.read(request.sequence)
        life = self._adapter.engine()
        live, delivered = self._promised(life, request, incoming), False
        self._open[live] = None
        try:
            alone, cached = not life.running, life.cached_tokens(incoming)
            life.prompts_taken += 1
            if request.HasField("target"):
                live.compute()
            else:
                live.answers = [live.part.answer(0, (), lambda _: live.wake.set(), alone=True)]
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(number=life.prompts_taken))
            await live.first_tokens()
            life.computed(live.answers[0], cached, alone=alone and len(live.answers) == 1)
            message = first_token_message(live.answers, cached)
            yield prefill_pb2.PrefillResponse(first_token=message)
            yield prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished())
            delivered = request.HasField("target")
        finally:
            del self._open[live]
            if not delivered:
                live.end()

    def _promised(
        self, life: EngineLife, request: prefill_pb2.PrefillRequest, incoming: IncomingRequest
    ) -> PromisedRequest:
        if not request.HasField("target"):
            return PromisedRequest(0, life.part(incoming), "", 0, lambda _: None)
        target = request.target
        live = life.promised(target.transfer_id, target.generation, incoming.request_id)
        known = self._adapter.identities.get(target.decode.incarnation)
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


class DecodeServicer:
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
        decode = next(it for it in self._adapter.identities.values() if it.kind == kv_pb2.INSTANCE_KIND_DECODE)
        held = life.cached_tokens(incoming) // life.facts.block_tokens
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
    """Starts and cancels from one conductor, tokens to it."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.closing)
        self._adapter = adapter

    async def on_hello(self, message: decode_pb2.StepsRequest) -> None:
        """Any conductor is served."""
        self._subscriber = Subscriber(message.hello.conductor)
        self._adapter.subscribers[self._subscriber] = None

    def on_message(self, message: decode_pb2.StepsRequest, payload: memoryview) -> None:
        """Takes one order."""
        match message.WhichOneof("message"):
            case "start":
                self._start(message.start)
            case "cancel":
                self._cancel(message.cancel)
            case "resume":
                self._subscriber.failed(message.resume.request_id, "an adapter keeps no sequences for other conductors")
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

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
    """Runs an adapter until it is told to stop; it joins whenever its engine is there.

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
        client = ENGINE_CLIENTS[config.kind](config.engine, config.engine_api_key)
        stack.push_async_callback(client.aclose)
        beside = ThreadOffload(stack.enter_context(world.thread_pool(BESIDE_THREADS, "beside")))
        adapter = Adapter(config, beside)
        gauges, metrics = adapter.gauges(), PrometheusMetrics(config.service())
        metrics.watch(gauges)
        await stack.enter_async_context(metrics.served(config.metrics_listen))
        contracts = [
            (prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], PrefillServicer(adapter, gauges)),
            (decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], DecodeServicer(adapter, gauges)),
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
    """The engine, once it answers; None if the adapter stops before."""
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
    """One life of the engine: from its first answer to its last, or to the adapter's end."""
    bell, config = ChangeBell(), adapter.config
    life = EngineLife(client, facts, checkpoint, config, bell.ring)
    log.info("found the engine", version=facts.version, blocks=facts.blocks, block_tokens=facts.block_tokens)
    try:
        life.speeds = SpeedTracker(await measured_speeds(client, facts, checkpoint.config.vocab_size))
    except MoonpoolError as error:
        log.warning("the engine answers no prompt (yet)", error=str(error))
        await asyncio.sleep(RETRY_S)
        return
    adapter.lives += 1
    ended = asyncio.Event()
    incarnation = world.random_bits(63) or 1
    kinds = {"prefill": kv_pb2.INSTANCE_KIND_PREFILL, "decode": kv_pb2.INSTANCE_KIND_DECODE}
    memberships = []
    adapter.identities = {}
    for number, (name, kind) in enumerate(kinds.items()):
        instance = kv_pb2.Instance(
            id=f"{config.id}-{name}", incarnation=incarnation + number, kind=kind, address=address
        )
        adapter.identities[instance.incarnation] = instance
        report = InstanceReport(
            life.hello(instance, config.id, life.model_info()),
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
    """Waits for what the engine still knows of its past, though not for ever."""
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
            started, life.load = await client.load()
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
