"""Reads an engine's KV events from ZMQ, asks for replays, and keeps the engine's cache by them."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio

from moonpool.base.errors import InvalidRequest
from moonpool.base.telemetry.logs import get_logger
from moonpool.interop.kv_events.events import EngineEvent, EventBatch, decode_batch
from moonpool.interop.kv_events.feed import (
    ApplyBatch,
    AskReplay,
    BatchArrived,
    BatchReplayed,
    EventFeed,
    FeedEvent,
    ForgetBlocks,
    Interrupted,
    ReplayEnded,
)

REPLAY_TIMEOUT_S = 2.0
"""Seconds without a batch after which a replay counts as broken off."""
CHECK_S = 1.0
"""Seconds without a batch after which the engine is asked whether one was missed."""
NUMBER_BYTES = 8
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine's data-parallel rank publishes KV events.

    Attributes:
        rank: the rank.
        endpoint: the PUB socket's, as a client connects.
        replay_endpoint: the ROUTER socket's; "" = no replay.
        topic: topic of the events.
        salt_field: events tell salts in a field of their own, as SGLang's do.
    """

    rank: int
    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    salt_field: bool = False


class EventSink(Protocol):
    """Takes the events of one rank, in order; see `RankCache`."""

    @property
    def opaque(self) -> bool:
        """Whether the rank caches in an unknown way."""

    def apply(self, event: EngineEvent) -> None:
        """Take an event."""

    def clear(self) -> None:
        """Forget all blocks."""

    def restart(self) -> None:
        """Forget all that was learnt."""


class EventStream:
    """One rank's events.

    Args:
        source: where they are published.
        cache: the rank's.
        changed: called after the cache has changed.

    Attributes:
        feed: puts the batches in order.
        settled: set once the first replay is over.
    """

    def __init__(self, source: EventSource, cache: EventSink, changed: "asyncio.Event") -> None:
        self._source = source
        self._cache = cache
        self._changed = changed
        self._orders: asyncio.Queue[AskReplay] = asyncio.Queue()
        self.feed = EventFeed()
        self.settled = asyncio.Event()
        self.batches = 0

    async def run(self) -> None:
        """Read events until cancelled."""
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._answer_replays(context))
                await self._read(context)
        finally:
            context.destroy(linger=0)

    async def _read(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
        socket.connect(self._source.endpoint)
        for order in self.feed.start():
            self._carry_out(order)
        while True:
            if not await socket.poll(int(CHECK_S * 1000)):
                # ZMQ tells no lost connection: after silence, a replay tells whether a batch was missed.
                if self.feed.settled and self._source.replay_endpoint:
                    self._handle(Interrupted())
                continue
            frames = await socket.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == NUMBER_BYTES:
                self.batches += 1
                self._handle(BatchArrived(int.from_bytes(frames[1], "big"), self._decoded(frames[2])))

    def _handle(self, event: FeedEvent) -> None:
        for order in self.feed.handle(event):
            self._carry_out(order)
        if self.feed.settled:
            self.settled.set()

    def _carry_out(self, order: ApplyBatch | AskReplay | ForgetBlocks) -> None:
        match order:
            case ApplyBatch(batch):
                opaque = self._cache.opaque
                for event in batch.events:
                    self._cache.apply(event)
                if self._cache.opaque and not opaque:
                    log.warning("the engine caches in an unknown way: the engine's blocks are not reported")
                self._changed.set()
            case ForgetBlocks(restarted):
                (self._cache.restart if restarted else self._cache.clear)()
                self._changed.set()
            case AskReplay():
                self._orders.put_nowait(order)

    async def _answer_replays(self, context: zmq.asyncio.Context) -> None:
        while True:
            order = await self._orders.get()
            if not self._source.replay_endpoint:
                self._handle(ReplayEnded(order.replay, complete=False))
                continue
            socket = context.socket(zmq.DEALER)
            try:
                socket.connect(self._source.replay_endpoint)
                await socket.send_multipart([b"", order.start.to_bytes(NUMBER_BYTES, "big")])
                await self._read_replay(socket, order.replay)
            finally:
                socket.close(linger=0)

    async def _read_replay(self, socket: zmq.asyncio.Socket, replay: int) -> None:
        while await socket.poll(int(REPLAY_TIMEOUT_S * 1000)):
            frames = await socket.recv_multipart()  # vLLM sends the topic, too; SGLang does not
            if len(frames) < 2 or len(frames[-2]) != NUMBER_BYTES:
                break
            if not frames[-1]:
                self._handle(ReplayEnded(replay, complete=True))
                return
            self._handle(BatchReplayed(replay, int.from_bytes(frames[-2], "big"), self._decoded(frames[-1])))
        log.warning("the engine answers no replay of its KV events", endpoint=self._source.replay_endpoint)
        self._handle(ReplayEnded(replay, complete=False))

    def _decoded(self, payload: bytes) -> EventBatch | None:
        try:
            return decode_batch(payload, salt_field=self._source.salt_field)
        except InvalidRequest as error:
            log.warning("KV events cannot be read", error=str(error))
            return None
