"""Long-lived streams between two processes: the client half, the server half, and the streams open at a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar, cast

from google.protobuf.message import Message

from moonpool.base.errors import (
    DeadlineExceeded,
    FrameError,
    InvalidRequest,
    Mismatch,
    MoonpoolError,
    StreamBroken,
    Unavailable,
)
from moonpool.base.kv.pool import BytesLike
from moonpool.base.rpc.channels import StreamCall
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.base import (
    BorrowedBuffer,
    Connection,
    ConnectionEnd,
    FilledBuffer,
    ReceiveBuffer,
    ReceiveCallbacks,
    ReceivedPayload,
    ZeroCopyConnection,
)
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.framing import OneShotAnswer, OneShotMessage, otherwise_answer
from moonpool.base.transport.grpc import GrpcConnection
from moonpool.base.transport.handshake import TransportListener
from moonpool.base.transport.send_queue import MAX_MESSAGES, STALL_S, SendQueue
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
CONNECT_TIMEOUT_S = 5.0
CONNECTION_GRACE_S = 0.2
"""Seconds that a call gets to give the reason, after the connection beside the call has ended."""
_NO_PAYLOAD = memoryview(b"")


class ClientStream(Generic[Req, Res]):
    """One call. Subclasses say what messages mean. Any end breaks the stream, and everything on the stream has failed.

    After `use_connection` messages go over another connection and come from there; the call stays open beside the
    connection.

    Attributes:
        name: The peer and the purpose; begins error messages.
        send_queue: Messages on their way to the peer.
        error: the error that broke the stream.
        heard_at: time of the last message, on the event loop's clock.
        connection: carries the messages: the call, or the connection of `use_connection`.
        connection_error: the error that broke the connection beside the call, if the call gave no other reason.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], StreamCall],
        hello: Req,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        stall_s: float = STALL_S,
        max_messages: int = MAX_MESSAGES,
        spawn: Spawn = lambda work: asyncio.get_running_loop().create_task(work),
    ) -> None:
        """Starts nothing yet.

        Args:
            name: the peer and the purpose.
            connect: starts the call.
            hello: first message sent.
            connect_timeout_s: longest time from the start of the call to the peer's welcome.
            stall_s: longest write, before the stream counts as broken.
            max_messages: most messages that wait to be written.
            spawn: starts tasks; the owner of `spawn` waits for their end.
        """
        self.name = name
        self.send_queue = SendQueue(max_messages=max_messages)
        self.error: Exception | None = None
        self.heard_at = 0.0
        self.connection: Connection[Res] | None = None
        self.connection_error: Exception | None = None
        self._ending = False
        self._connect = connect
        self._hello = hello
        self._connect_timeout_s = connect_timeout_s
        self._stall_s = stall_s
        self._spawn = spawn
        self._ready = asyncio.Event()
        self._broken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: GrpcConnection[Res] | None = None

    def on_message(self, message: Res, payload: Any) -> None:
        """Handles a message; an exception breaks the stream. The first message is the welcome, if the stream has one.

        The payload is a memoryview, or a `FilledBuffer` if `receive_into` gave a buffer.
        """
        raise NotImplementedError

    def receive_into(self, message: Res, nbytes: int) -> ReceiveBuffer | None:
        """Where a payload of so many bytes is to land; None: the payload comes with the message."""
        return None

    def on_broken(self, error: Exception) -> None:
        """The stream has broken; called once."""

    def failure(self, error: MoonpoolError) -> Exception:
        """The stream's error after the call has ended with `error`."""
        if isinstance(error, Mismatch) and not self._ready.is_set():
            return error
        return StreamBroken(f"{self.name}: {error}")

    def begin(self) -> None:
        """Starts the call, the reader and the writer; the hello goes first."""
        call = self._call = self.connection = GrpcConnection(self._connect())
        self.send_queue.post(self._hello)
        self._tasks = [
            self._spawn(self._guard(lambda: self._read(call))),
            self._spawn(self._guard(lambda: self.send_queue.drain(self._write, stall_s=self._stall_s))),
        ]

    def use_connection(self, connection: ZeroCopyConnection[Res]) -> None:
        """Sends and receives over a connection from now on; the stream owns the connection.

        Call this before any message but the hello is sent. The call stays open: if call or connection ends, the stream
        breaks.
        """
        self.connection = connection
        self.send_queue.hold(self.break_, connection.start)
        self._tasks.append(self._spawn(self._guard(lambda: self._read(connection))))
        if self.error is not None:
            connection.close(self.error)

    @property
    def transport(self) -> str:
        """Name of the transport that carries the messages; "" before the call begins."""
        return "" if self.connection is None else self.connection.name

    @property
    def ending(self) -> bool:
        """Whether the connection has ended, and the stream is about to break."""
        return self._ending or (self.connection is not None and self.connection.closed)

    def ready(self) -> None:
        """The welcome has arrived; for `on_message`."""
        self._ready.set()

    async def start(self) -> None:
        """`begin`, then waits for the welcome.

        Raises:
            StreamBroken: no welcome came in time, or the call ended.
            Exception: the result of `failure` for the call's end.
        """
        self.begin()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise StreamBroken(f"{self.name}: no welcome within {self._connect_timeout_s:g} s") from None
        if self.error is not None:
            raise self.error

    async def broken(self) -> None:
        """Waits until the stream breaks, and raises the error."""
        await self._broken.wait()
        assert self.error is not None
        raise self.error

    async def ended(self) -> None:
        """Waits until the stream breaks."""
        await self._broken.wait()

    def break_(self, error: Exception) -> None:
        """Ends the call with `error`. Only the first time counts."""
        if self.error is not None:
            return
        self.error = error
        self.send_queue.close(error)
        self.on_broken(error)
        self._ready.set()
        self._broken.set()
        for connection in (self.connection, self._call):
            if connection is not None:
                connection.close(error)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def aclose(self) -> None:
        """Breaks the stream and waits for all tasks. Idempotent."""
        self.break_(StreamBroken(f"{self.name}: closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """However the reader or the writer ends, the stream is broken then."""
        name = self.name
        try:
            await work()  # made here: a task cancelled before beginning would leave a coroutine behind
            self.break_(StreamBroken(f"{name}: ended"))
        except asyncio.CancelledError:
            # Ours, after a break; or gRPC's, which gRPC raises if the peer ended the call with CANCELLED.
            self.break_(StreamBroken(f"{name}: cancelled by the peer"))
        except asyncio.InvalidStateError:
            return  # gRPC's answer to a write on a call that has ended; the reader tells why
        except Exception as failure:
            if not isinstance(failure, MoonpoolError):
                log.exception("stream failed", stream=name)
            self.break_(StreamBroken(f"{name}: {failure!s}" if str(failure) else f"{name}: {failure!r}"))

    async def _read(self, connection: Connection[Res]) -> None:
        loop = asyncio.get_running_loop()

        def take(message: Res, payload: ReceivedPayload) -> None:
            self.heard_at = loop.time()
            self.on_message(message, payload)

        await self._connection_ended(connection, await connection.run(ReceiveCallbacks(take, self.receive_into)))

    async def _write(self, message: Any) -> None:
        connection = self.connection
        assert connection is not None, "nothing is written before the call has begun"
        try:
            await connection.write(message)
        except MoonpoolError as error:
            await self._connection_ended(connection, error)

    async def _connection_ended(self, connection: Connection[Res], error: Exception) -> NoReturn:
        if connection is self._call:
            self.break_(self.failure(error if isinstance(error, MoonpoolError) else StreamBroken(repr(error))))
        else:
            self._ending = True
            await asyncio.sleep(CONNECTION_GRACE_S)  # the call may end too and say more; then this task is cancelled
            self.connection_error = error
        raise StreamBroken(f"its connection ended: {error}") from error


HELLO_TIMEOUT_S = 10.0
MAX_STREAM_TASKS = 1024
MAX_UNSENT = 1024
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
        """Starts nothing yet.

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
        """Checks the first message and posts the answer. An exception refuses the stream."""
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
        """Handles a message; an exception ends the stream.

        Args:
            message: the peer's message.
            payload: the bytes beside the message: a memoryview, or a borrowed buffer if the stream borrows.
        """
        raise NotImplementedError

    def on_one_shot(self, message: OneShotMessage, payload: BytesLike) -> Iterable[OneShotAnswer]:
        """Answers a one-shot message. No answer, or a MoonpoolError before the first answer: a channel is needed.

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
        """Releases everything: the stream is over. Called once or more, if the hello was accepted."""

    def on_closing(self) -> None:
        """The service ends all streams: this stream at once, unless a subclass calls `finish` instead."""
        raise Unavailable("the service is shutting down")

    async def room(self) -> None:
        """Waits while too many answers are unread: a peer that reads no answers is not read either."""
        if len(self.send_queue) > self._max_unsent:
            await self.send_queue.at_most(self._max_unsent // 2)

    async def write_answers(self, write: Write) -> None:
        """Writes answers, until none is left after `finish`."""
        await self.send_queue.drain(write)

    def finish(self) -> None:
        """Lets `write_answers` return after the waiting answers."""
        self.send_queue.finish()

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way."""
        return StreamTraffic(unsent=len(self.send_queue))

    @property
    def tasks(self) -> int:
        """Channels' tasks that run beside the stream."""
        return self._tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a channel's work beside the stream; an exception ends the stream.

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
        """Sends a small message; ends the stream if the peer does not read."""
        try:
            self.send_queue.post(message)
        except StreamBroken as error:
            self.send_queue.close(error)

    async def run(self, requests: AsyncIterator[Req] | AsyncIterator[PayloadMessage[Req]], write: Write) -> None:
        """Runs the stream from the first message to the end.

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
        """Writes to the connection that the peer has taken; before that, to the call."""

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
        """Returns how many bytes the answers have."""
        answered, nbytes = False, 0
        try:
            for answer in self.on_one_shot(message, payload):
                self.send_queue.answer(answer)
                answered = True
                nbytes += sum([piece.nbytes for piece in answer.pieces])
        except MoonpoolError as error:
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


class OpenStreams:
    """Set of streams of any kind, each while `running`.

    Attributes:
        quiet: set while there are no streams.
    """

    def __init__(self) -> None:
        self._open: dict[object, None] = {}
        self.quiet = asyncio.Event()
        self.quiet.set()

    def __len__(self) -> int:
        """Number of open streams."""
        return len(self._open)

    @property
    def kv(self) -> list[ServerStream[Any]]:
        """Those that carry KV."""
        return [stream for stream in self._open if isinstance(stream, ServerStream)]

    @property
    def traffic(self) -> StreamTraffic:
        """Traffic under way on all KV streams."""
        return sum((stream.traffic for stream in self.kv), StreamTraffic())

    @contextmanager
    def running(self, stream: object) -> Iterator[None]:
        """Context manager around a stream's run."""
        self._open[stream] = None
        self.quiet.clear()
        try:
            yield
        finally:
            del self._open[stream]
            if not self._open:
                self.quiet.set()
