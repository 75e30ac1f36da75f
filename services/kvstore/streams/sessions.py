"""What the store's two KV streams have in common: handshake, outbox, session tasks, and an end that leaves nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from moonpool.errors import DeadlineExceeded, InvalidRequest, Mismatch, StreamBroken, Unavailable
from moonpool.kv.blocks import BlockFormat
from moonpool.streams.credits import Traffic
from moonpool.streams.outbox import Outbox
from moonpool.streams.receiving import check_hello
from moonpool.v1 import kv_pb2

HELLO_TIMEOUT_S = 10.0
MAX_STREAM_TASKS = 1024
MAX_LAYERS = 4096
MAX_UNSENT = 1024
"""Answers that may wait for the peer to take them before nothing more is taken from it."""

Req = TypeVar("Req", bound=Message)


class ServerContext(Protocol):
    """The part of grpc.aio's servicer context that a stream needs."""

    def peer(self) -> str:
        """The peer's address, its port last."""
        ...

    def bare_write(self, message: Any) -> Awaitable[None]:
        """Sends one message; not to be cancelled."""
        ...


class KVStream(Generic[Req]):
    """One stream of one peer. Subclasses say what messages mean.

    Args:
        closing: set when the service ends its streams.
    """

    def __init__(self, closing: asyncio.Event) -> None:
        self.outbox = Outbox()
        self.format: BlockFormat
        self._closing = closing
        self._group: asyncio.TaskGroup
        self._tasks = 0
        self._finishing = False
        self._fewer = asyncio.Event()  # answers wait than before

    @property
    def tasks(self) -> int:
        """Tasks of sessions that run beside the stream."""
        return self._tasks

    @property
    def traffic(self) -> Traffic:
        """What is under way on the stream."""
        return Traffic(unsent=len(self.outbox))

    def welcome(self) -> Message:
        """The answer to the peer's hello."""
        raise NotImplementedError

    def on_message(self, message: Req, payload: memoryview) -> None:
        """Handles a message; what it raises ends the stream."""
        raise NotImplementedError

    def end(self) -> None:
        """The stream is over: every session goes."""
        raise NotImplementedError

    async def run(self, requests: AsyncIterator[tuple[Req, memoryview]], context: ServerContext) -> None:
        """The whole life of the stream.

        Raises:
            InvalidRequest: the first message is no hello.
            Mismatch: the store cannot keep the hello's layout.
            Unavailable: the service is closing.
            StreamBroken: the peer reads nothing.
        """
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first, _ = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineExceeded(f"no hello came within {HELLO_TIMEOUT_S:g} s") from None
        hello: kv_pb2.StreamHello | None = getattr(first, "hello", None)
        if hello is None or not first.HasField("hello"):
            raise InvalidRequest("hello", "must be the first message of the stream")
        layout = check_hello(hello)
        if layout.layers > MAX_LAYERS:
            raise Mismatch("layout.layers", f"at most {MAX_LAYERS} are kept, not {layout.layers}")
        self.format = BlockFormat(hello.namespace, layout)
        self.outbox.post(self.welcome())
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._drain(context))
                guard = self._group.create_task(self._watch_closing())
                async for message, payload in requests:
                    self.on_message(message, payload)
                    if len(self.outbox) > MAX_UNSENT:
                        await self._few_unsent()
                self.end()
                guard.cancel()
                self._finishing = True
                self.outbox.finish()  # what was answered already still goes out
        finally:
            self.end()
            self.outbox.close(StreamBroken("the stream has ended"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs a session's work beside the stream. What it raises ends the stream.

        Raises:
            Unavailable: too many run already.
        """
        if self._tasks >= MAX_STREAM_TASKS:
            work.close()
            raise Unavailable(f"{self._tasks} sessions are under way on this stream")
        self._tasks += 1
        task = self._group.create_task(work)
        task.add_done_callback(self._one_done)
        return task

    def _one_done(self, _: object) -> None:
        self._tasks -= 1

    async def _few_unsent(self) -> None:
        """Waits until the peer has taken most answers; one that takes none ends the stream (`Outbox.drain`)."""
        while len(self.outbox) > MAX_UNSENT // 2:
            self._fewer.clear()
            await self._fewer.wait()

    async def _drain(self, context: ServerContext) -> None:
        async def write(message: object) -> None:
            await context.bare_write(message)
            self._fewer.set()

        await self.outbox.drain(write)
        if not self._finishing:
            raise StreamBroken("the peer does not read its answers")

    async def _watch_closing(self) -> None:
        await self._closing.wait()
        raise Unavailable("the store is shutting down")

    def post(self, message: Message) -> None:
        """Sends a small message; a peer that reads none of them ends its stream."""
        try:
            self.outbox.post(message)
        except StreamBroken as error:
            self.outbox.close(error)
