"""What an adapter holds, and reports."""

import asyncio
from collections.abc import Callable

from moonpool.base.errors import Unavailable
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet, counter
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.engine.request import RequestReader
from moonpool.engine.subscriber import Subscriber, conductor_identity
from moonpool.interop.adapter.config import AdapterConfig
from moonpool.interop.adapter.engine_life import EngineLife
from moonpool.interop.adapter.promised_request import PromisedRequest
from moonpool.interop.kv_events.stream import EventStream
from moonpool.v1 import kv_pb2


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
        found = next((joined for joined in self.identities.values() if joined.kind == kind), None)
        if found is None:
            raise Unavailable(f"the engine's role is {self.config.role}")
        return found

    def gauges(self) -> MetricSet:
        return MetricSet().add(PROCESS_METRICS, None).add(ADAPTER_METRICS, self)

    def connected(self, identity: str) -> bool:
        """Whether a conductor has a Steps stream open."""
        return any(conductor_identity(subscriber.conductor) == identity for subscriber in self.subscribers)

    def watch(self, live: PromisedRequest) -> None:
        """End a promise in time, unless the conductor is connected."""

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
    return _of_life(lambda life: sum([read(stream) for stream in life.streams]))


ADAPTER_METRICS: tuple[Metric[Adapter], ...] = (
    Metric("engine_up", "1 while the engine answers.", lambda adapter: adapter.life is not None),
    Metric("requests", "Requests that are promised memory, or run.", _of_life(lambda life: len(life.requests)), 0),
    Metric("answers_running", "Answers that the engine generates.", _of_life(lambda life: life.running), 0),
    Metric(
        "promised_blocks",
        "Blocks promised to requests that have not begun.",
        _of_life(lambda life: life.promised_blocks),
        0,
    ),
    Metric("pool_blocks", "KV blocks of the engine.", _of_life(lambda life: life.facts.blocks)),
    Metric(
        "indexed_blocks", "KV blocks of the engine that conductors know of.", _of_life(lambda life: len(life.cache))
    ),
    Metric("conductor_streams", "Open streams of conductors.", lambda adapter: len(adapter.subscribers)),
    counter("engine_lives_total", "Starts of the engine that were seen.", lambda adapter: adapter.lives),
    counter("event_batches_total", "Batches of KV events that came.", _of_streams(lambda stream: stream.batches)),
    counter("event_gaps_total", "Times that KV events were missing.", _of_streams(lambda stream: stream.feed.gaps)),
    counter(
        "event_losses_total",
        "Times that missing KV events could not be had again.",
        _of_streams(lambda stream: stream.feed.lost),
    ),
    counter(
        "prompts_recomputed_total",
        "Prompts of which the engine held less than conductors knew.",
        _of_life(lambda life: life.prompts_recomputed),
    ),
    counter(
        "transfer_tokens_recomputed_total",
        "Prompt tokens whose KV should have come from another engine and was computed again.",
        _of_life(lambda life: life.tokens_recomputed),
    ),
    counter(
        "answers_failed_total", "Answers that the engine did not finish.", _of_life(lambda life: life.answers_failed)
    ),
)
