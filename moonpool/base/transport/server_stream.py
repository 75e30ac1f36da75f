"""The server half of a long-lived stream between two processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, NoReturn, cast

from google.protobuf.message import Message

from moonpool.base.errors import (
    DeadlineExceeded,
    FrameError,
    InvalidRequest,
    MoonpoolError,
    StreamBroken,
    Unavailable,
)
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.base.transport.base import ConnectionEnd
from moonpool.base.transport.client_stream import CONNECTION_GRACE_S, Req
from moonpool.base.transport.connection import Connection, ReceiveCallbacks, ZeroCopyConnection
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.framing import OneShotAnswer, OneShotMessage, otherwise_answer
from moonpool.base.transport.listener import TransportListener
from moonpool.base.transport.payloads import BorrowedBuffer, FilledBuffer, ReceiveBuffer, ReceivedPayload
from moonpool.base.transport.send_queue import SendQueue
from moonpool.v1 import kv_pb2

HELLO_TIMEOUT_S = 10.0
MAX_STREAM_TASKS = 1024
MAX_UNSENT = 1024
_NO_PAYLOAD = memoryview(b"")
Write = Callable[[Any], Awaitable[None]]


class ServerStream(Generic[Req]):
    """One stream from one peer. Subclasses say what messages mean.

    Messages have a `oneof message` with `hello`, which comes first and only once. Payloads come beside them.

    Attributes:
        send_queue: answers on their way to the peer.
        silent: whether the stream ended because no message came for `silence_s`.
        borrows: payloads in a peer's region are borrowed: `on_message` copies the wanted bytes, verifies the copy, and
            keeps no other reference (`borrowed`, `return_buffer`).
        one_shot_kind: kind of one-shot messages that the stream takes; another kind ends the stream. None: the stream
            takes no one-shot messages.
    """

    borrows = False
    one_shot_kind: int | None = None

    def __init__(
        self,
        closing: asyncio.Event,
        *,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        silence_s: float | None = None,
        quiet_s: float | None = None,
        max_unsent: int = MAX_UNSENT,
        listener: TransportListener | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            closing: set when the service ends all streams.
            hello_timeout_s: longest wait for the hello.
            silence_s: longest wait between messages; None: no limit.
            quiet_s: seconds without a message after which `is_there` is called; None: never.
            max_unsent: most answers that wait for the peer; beyond, no message from the peer is read.
            listener: offers transports beside the call; None: the stream stays on gRPC.
        """
        self.send_queue = SendQueue()
        self.silent = False
        self._borrowed: BorrowedBuffer | None = None
        self._closing = closing
        self._hello_timeout_s = hello_timeout_s
        self._silence_s = silence_s
        self._quiet_s = quiet_s
        self._heard_at = 0.0
        self._max_unsent = max_unsent
        self._group: asyncio.TaskGroup
        self._tasks = 0
        self._finishing = False
        self._listener = listener
        self._offered: kv_pb2.TransportOffer | None = None
        self._connection: ZeroCopyConnection[Req] | None = None

    async def on_hello(self, message: Req) -> None:
        """Check the first message and post the answer. An exception refuses the stream."""
        raise NotImplementedError

    def offer_transport(self, message: Req) -> kv_pb2.TransportOffer | None:
        """The transport that the welcome offers to the peer; None: no offer.

        Args:
            message: the message with the peer's hello.
        """
        if self._listener is not None:
            one_shot, hello = self.one_shot_kind is not None, cast("Any", message).hello
            self._offered = self._listener.offer(hello, lambda end: self._attach(end, type(message)), one_shot=one_shot)
        return self._offered

    def on_message(self, message: Req, payload: Any) -> None:
        """Handle a message; an exception ends the stream.

        Args:
            message: the peer's message.
            payload: the bytes beside the message: a memoryview, or a borrowed buffer if the stream borrows.
        """
        raise NotImplementedError

    def on_one_shot(self, message: OneShotMessage, payload: BytesLike) -> Iterable[OneShotAnswer]:
        """Answer a one-shot message. No answer, or a MoonpoolError before the first answer: a channel is needed.

        The payload is borrowed. Any other error ends the stream.
        """
        return ()

    def receive_into(self, message: Req, nbytes: int) -> ReceiveBuffer | None:
        """Where a payload of so many bytes is to land; None: the payload comes with the message."""
        return None

    async def is_there(self) -> bool:
        """Whether the peer lives, after `quiet_s` without a message. If not, the stream ends as silent."""
        return True

    def end(self) -> None:
        """Release everything: the stream is over. Called once or more, if the hello was accepted."""

    def on_closing(self) -> None:
        """The service ends all streams: this stream at once, unless a subclass calls `finish` instead."""
        raise Unavailable("the service is shutting down")

    async def room(self) -> None:
        """Wait while too many answers are unread: a peer that reads no answers is not read either."""
        if len(self.send_queue) > self._max_unsent:
            await self.send_queue.at_most(self._max_unsent // 2)

    async def write_answers(self, write: Write) -> None:
        """Write answers, until none is left after `finish`."""
        await self.send_queue.drain(write)

    def finish(self) -> None:
        """Let `write_answers` return after the waiting answers."""
        self.send_queue.finish()

    @property
    def traffic(self) -> StreamTraffic:
        return StreamTraffic(unsent=len(self.send_queue))

    @property
    def tasks(self) -> int:
        """Channels' tasks that run beside the stream."""
        return self._tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a channel's work beside the stream; an exception ends the stream.

        Raises:
            Unavailable: too many run already.
        """
        if self._tasks >= MAX_STREAM_TASKS:
            work.close()
            raise Unavailable(f"{self._tasks} channels are under way on this stream")
        self._tasks += 1
        task = self._group.create_task(work)
        task.add_done_callback(self._one_done)
        return task

    def post(self, message: Message) -> None:
        """Send a small message; end the stream if the peer does not read."""
        try:
            self.send_queue.post(message)
        except StreamBroken as error:
            self.send_queue.close(error)

    async def run(self, requests: AsyncIterator[Req] | AsyncIterator[PayloadMessage[Req]], write: Write) -> None:
        """Run the stream from the first message to the end.

        Args:
            requests: The peer's messages; with their payloads beside, if the class carries a payload.
            write: Sends one message; is never cancelled (`moonpool.base.rpc.stream_writes.bare_write`).

        Raises:
            InvalidRequest: the first message is no hello.
            DeadlineExceeded: no hello came in time; or no message for `silence_s`, or for `quiet_s` from a dead peer.
            Unavailable: the service is closing.
            StreamBroken: the peer does not read.
        """
        first = await self._next(requests, self._hello_timeout_s, "no hello came")
        if first is None:
            return
        message, _ = _parts(first)
        if message.WhichOneof("message") != "hello":
            raise InvalidRequest("hello", "must be the first message of the stream")
        await self.on_hello(message)
        self._heard_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._write(write))
                watching = [self._group.create_task(self._watch_closing())]
                if self._quiet_s is not None:
                    watching.append(self._group.create_task(self._watch_silence(self._quiet_s)))
                await self._receive(requests)
                self.end()
                for task in watching:
                    task.cancel()
                self._finishing = True
                self.finish()  # what was answered already still goes out
        finally:
            ended = StreamBroken("the stream has ended")
            self.end()
            self.send_queue.close(ended)
            if self._listener is not None and self._offered is not None:
                self._listener.withdraw(self._offered.token)
            if self._connection is not None:
                self._connection.close(ended)

    async def _receive(self, requests: AsyncIterator[Any]) -> None:
        loop = asyncio.get_running_loop()
        if self._silence_s is None:
            async for item in requests:
                self._heard_at = loop.time()
                await self.room()
                await self._handle(*_parts(item))
                del item  # else the item's memory stays while the next message is copied into other, colder memory
            return
        while (item := await self._next(requests, self._silence_s, "nothing was heard")) is not None:
            self._heard_at = loop.time()
            await self.room()
            await self._handle(*_parts(item))

    async def _handle(self, message: Req, payload: memoryview) -> None:
        buffer = self.receive_into(message, payload.nbytes) if payload.nbytes else None
        if buffer is None:
            self.on_message(message, payload)
        else:
            (await buffer.receive(payload)).report()

    async def _next(self, requests: AsyncIterator[Any], timeout_s: float, what: str) -> Any:
        """The next message, None when there are no more."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(requests, None)
        except TimeoutError:
            self.silent = True
            raise DeadlineExceeded(f"{what} for {timeout_s:g} s") from None

    async def _write(self, write: Write) -> None:
        await self.write_answers(write if self._listener is None else self._writing(write))
        if self._closing.is_set():
            raise Unavailable("the service is shutting down")
        if not self._finishing:
            raise StreamBroken("the peer does not read its answers")

    def _writing(self, bare_write: Write) -> Write:
        """Write to the connection that the peer has taken; before that, to the call."""

        async def write(message: Any) -> None:
            if self._connection is None:
                await bare_write(message)
                return
            try:
                await self._connection.write(message)
            except MoonpoolError as error:
                await self._connection_ended(error)

        return write

    def _attach(self, end: ConnectionEnd, cls: type[Req]) -> None:
        """The peer has taken the offer: everything goes over the connection from now on."""
        connection = self._connection = end.open(cls, self.post)
        self.send_queue.hold(connection.close, connection.start)
        receiving = self._receive_on(connection)
        try:
            self._group.create_task(receiving)
        except RuntimeError:  # the stream is ending already
            receiving.close()
            raise StreamBroken("the stream has ended") from None

    async def _receive_on(self, connection: Connection[Req]) -> None:
        def take(message: Req, payload: ReceivedPayload) -> None:
            if isinstance(payload, FilledBuffer):
                payload.report()
            elif isinstance(payload, BorrowedBuffer):
                self._borrow(message, payload)
            else:
                self.on_message(message, payload)
            self._check_unsent(connection)

        def on_one_shot(message: OneShotMessage, payload: BytesLike) -> int:
            if message.kind != self.one_shot_kind:
                raise FrameError(f"a one-shot message of kind {message.kind} has no place on this stream")
            nbytes = self._answer(message, payload)
            self._check_unsent(connection)
            return nbytes

        takes_one_shot = self.one_shot_kind is not None
        callbacks = ReceiveCallbacks(take, self.receive_into, self.borrows, on_one_shot if takes_one_shot else None)
        await self._connection_ended(await connection.run(callbacks))

    def _answer(self, message: OneShotMessage, payload: BytesLike) -> int:
        """Return how many bytes the answers have."""
        answered, nbytes = False, 0
        try:
            for answer in self.on_one_shot(message, payload):
                self.send_queue.answer(answer)
                answered = True
                nbytes += sum([piece.nbytes for piece in answer.pieces])
        except MoonpoolError as error:
            # A part of the answer is out: the client cannot be sent to a channel any more.
            if answered:
                self.send_queue.close(error)
        if not answered:
            self.send_queue.answer(otherwise_answer(message.number))
        return nbytes

    def _check_unsent(self, connection: Connection[Req]) -> None:
        if len(self.send_queue) > self._max_unsent:
            connection.pause()
            self._group.create_task(self._resume(connection))

    async def _resume(self, connection: Connection[Req]) -> None:
        await self.room()
        connection.resume()

    def _borrow(self, message: Req, payload: BorrowedBuffer) -> None:
        self._borrowed = payload
        try:
            self.on_message(message, payload.data)
        finally:
            self.return_buffer()

    @property
    def borrowed(self) -> bool:
        """Whether the payload of the message being handled is borrowed."""
        return self._borrowed is not None

    def return_buffer(self) -> None:
        """The borrowed payload is needed no more: the peer is told with the next answer. Idempotent."""
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            borrowed.return_buffer()

    async def _connection_ended(self, error: Exception) -> NoReturn:
        await asyncio.sleep(CONNECTION_GRACE_S)  # a leaving peer ends the peer's call too, and this task with the call
        raise StreamBroken(f"the connection ended: {error}") from error

    async def _watch_closing(self) -> None:
        await self._closing.wait()
        self.on_closing()

    async def _watch_silence(self, quiet_s: float) -> None:
        loop = asyncio.get_running_loop()
        looked_at = self._heard_at
        while True:
            left_s = max(self._heard_at, looked_at) + quiet_s - loop.time()
            if left_s > 0:
                due = loop.time() + left_s
                await asyncio.sleep(left_s)
                self._heard_at += max(0.0, loop.time() - due)  # this process did not run, and could hear no peer
                continue
            heard_at = self._heard_at
            there = await self.is_there()
            looked_at = loop.time()
            if not there and self._heard_at == heard_at:
                self.silent = True
                raise DeadlineExceeded(f"nothing was heard for {looked_at - heard_at:.2g} s, and it does not answer")

    def _one_done(self, _: object) -> None:
        self._tasks -= 1


def _parts(item: Req | PayloadMessage[Req]) -> tuple[Req, memoryview]:
    if isinstance(item, PayloadMessage):
        payload = item.payload
        return item.message, payload if isinstance(payload, memoryview) else _NO_PAYLOAD
    return item, _NO_PAYLOAD
