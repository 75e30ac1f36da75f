"""Publishes KV events as vLLM does: a PUB socket, and a ROUTER socket that replays the last batches."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio

from moonpool.base import world
from moonpool.base.errors import ConfigError
from moonpool.interop.kv_events.events import EngineEvent, EventBatch, write_batch

NUMBER_BYTES = 8
KEPT_BATCHES = 10_000
"""Batches that a replay can give, as many as vLLM keeps."""
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class EventPublisher:
    """One publisher's sockets and its last batches.

    Attributes:
        endpoint, replay_endpoint: where clients connect; "" = no replay.
        topic: the first frame of each batch.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str, topic: str) -> None:
        """Bind the sockets. Raises ConfigError if an endpoint is taken."""
        self._sent = context.socket(zmq.PUB)
        self._sent.setsockopt(zmq.SNDHWM, KEPT_BATCHES)
        self._replays = context.socket(zmq.ROUTER) if replay_endpoint else None
        self.topic = topic
        self.endpoint = _bind(self._sent, endpoint)
        self.replay_endpoint = _bind(self._replays, replay_endpoint) if self._replays is not None else ""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._next = 0

    async def publish(self, events: Sequence[EngineEvent]) -> None:
        payload = msgspec.msgpack.encode(write_batch(EventBatch(world.unix_time(), tuple(events))))
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        await self._sent.send_multipart([self.topic.encode(), number.to_bytes(NUMBER_BYTES, "big"), payload])

    async def answer_replays(self) -> None:
        """Answer questions for batches from a number on, until cancelled."""
        socket, topic = self._replays, self.topic.encode()
        while socket is not None:
            client, *_, start = await socket.recv_multipart()
            if len(start) != NUMBER_BYTES:
                continue
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    await socket.send_multipart([client, b"", topic, number.to_bytes(NUMBER_BYTES, "big"), payload])
            await socket.send_multipart([client, b"", topic, END_OF_REPLAY, b""])

    def close(self) -> None:
        self._sent.close(linger=0)
        if self._replays is not None:
            self._replays.close(linger=0)


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError("endpoint", f"{endpoint}: {error}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


@asynccontextmanager
async def publishing(
    context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str = "", topic: str = ""
) -> AsyncIterator[EventPublisher]:
    """A publisher that answers replays, while the body runs."""
    publisher = EventPublisher(context, endpoint, replay_endpoint, topic)
    replaying = asyncio.create_task(publisher.answer_replays())
    try:
        yield publisher
    finally:
        replaying.cancel()
        await asyncio.wait([replaying])
        publisher.close()
