"""Long-lived streams between two processes: the client half, the server half, and the streams open at a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from moonpool.errors import (
    DeadlineExceeded,
    FrameError,
    InvalidRequest,
    Mismatch,
    MoonpoolError,
    StreamBroken,
    Unavailable,
)
from moonpool.kv.pool import BytesLike
from moonpool.rpc.errors import from_rpc_error
from moonpool.rpc.messages import PayloadMessage
from moonpool.telemetry.logs import get_logger
from moonpool.transport.base import BorrowedBuffer, FilledBuffer, ReceiveBuffer, ReceivedPayload
from moonpool.transport.connection import TransportConnection
from moonpool.transport.flow_control import StreamTraffic
from moonpool.transport.framing import OneShotAnswer, OneShotMessage, open_session_answer
from moonpool.transport.grpc import MAX_MESSAGES, STALL_S, SendQueue
from moonpool.transport.handshake import AcceptedConnection, TransportListener
from moonpool.v1 import kv_pb2

log = get_logger(__name__)


Req = TypeVar("Req", bound=Message)


Res = TypeVar("Res", bound=Message)


Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


CONNECT_TIMEOUT_S = 5.0


CONNECTION_GRACE_S = 0.2
"""When a lane ends, its call is given so long to tell why, before the lane alone counts as broken."""


_NO_PAYLOAD = memoryview(b"")


class ClientStream(Generic[Req, Res]):
    """One call. Subclasses say what messages mean. However it ends, it is broken then, and everything on it has failed.

    After `use_lane` messages go over the lane and come from there; the call stays open beside it.

    Attributes:
        name: Who is at the other end and what for; begins error messages.
        outbox: Messages on their way to the peer.
        error: What broke the stream.
        heard_at: When the last message came, on the event loop's clock.
        lane: What is used beside the call.
        lane_error: What broke the lane, when the call had no other reason to end.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
        hello: Req,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        stall_s: float = STALL_S,
        max_messages: int = MAX_MESSAGES,
        spawn: Spawn = lambda work: asyncio.get_running_loop().create_task(work),
    ) -> None:
        """Starts nothing yet.

        Args:
            name: Who is at the other end and what for.
            connect: Starts the call.
            hello: First message sent.
            connect_timeout_s: Longest time from the start of the call to the peer's welcome.
            stall_s: Longest time one write may take before the stream counts as broken.
            max_messages: Messages that may wait to be written.
            spawn: Starts tasks; their owner waits for them in the end.
        """
        self.name = name
        self.outbox = SendQueue(max_messages=max_messages)
        self.error: Exception | None = None
        self.heard_at = 0.0
        self.lane: TransportConnection[Res] | None = None
        self._ending = False
        self.lane_error: Exception | None = None
        self._connect = connect
        self._hello = hello
        self._connect_timeout_s = connect_timeout_s
        self._stall_s = stall_s
        self._spawn = spawn
        self._ready = asyncio.Event()
        self._broken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None

    def on_message(self, message: Res, payload: Any) -> None:
        """Handles a message; what it raises breaks the stream. The first must be the welcome, where there is one.

        Its payload is a memoryview, or `Landed` where `place` has said so.
        """
        raise NotImplementedError

    def place(self, message: Res, nbytes: int) -> ReceiveBuffer | None:
        """Where a payload of so many bytes is to land; None: it comes with its message."""
        return None

    def on_broken(self, error: Exception) -> None:
        """The stream has broken; called once."""

    def failure(self, error: MoonpoolError) -> Exception:
        """What breaks the stream when the call ended with `error`."""
        if isinstance(error, Mismatch) and not self._ready.is_set():
            return error
        return StreamBroken(f"{self.name}: {error}")

    def begin(self) -> None:
        """Starts the call, its reader and its writer; the hello goes first."""
        call = self._call = self._connect()
        self.outbox.post(self._hello)
        self._tasks = [
            self._spawn(self._guard(lambda: self._read(call))),
            self._spawn(self._guard(lambda: self.outbox.drain(self._write, stall_s=self._stall_s))),
        ]

    def use_lane(self, lane: TransportConnection[Res]) -> None:
        """Sends and receives over a lane from now on, which the stream owns. Only the hello may have been sent."""
        self.lane = lane
        self.outbox.hold(self.break_, lane.start)
        self._tasks.append(self._spawn(self._guard(lambda: self._read_lane(lane))))
        if self.error is not None:
            lane.close(self.error)

    @property
    def ending(self) -> bool:
        """The lane has ended, so that the stream is about to break."""
        return self._ending or (self.lane is not None and self.lane.closed)

    def ready(self) -> None:
        """The welcome has come; to be called by `on_message`."""
        self._ready.set()

    async def start(self) -> None:
        """`begin`, then waits for the welcome.

        Raises:
            StreamBroken: It did not come in time, or the call ended.
            Exception: What `failure` made of the call's end.
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
        """Waits until the stream breaks, and raises what broke it."""
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
        self.outbox.close(error)
        self.on_broken(error)
        self._ready.set()
        self._broken.set()
        if self.lane is not None:
            self.lane.close(error)
        if self._call is not None:
            self._call.cancel()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def aclose(self) -> None:
        """Breaks the stream and waits for its tasks. Idempotent."""
        self.break_(StreamBroken(f"{self.name}: closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """However the reader or the writer ends, the stream is broken then."""
        name = self.name
        try:
            await work()  # made here: a task that is cancelled before it has begun would leave a coroutine behind
            self.break_(StreamBroken(f"{name}: ended"))
        except asyncio.CancelledError:
            # Ours, after a break; or gRPC's, which raises it when the peer ended the call with CANCELLED.
            self.break_(StreamBroken(f"{name}: cancelled by the peer"))
        except grpc.aio.AioRpcError as failure:
            self.break_(self.failure(from_rpc_error(failure)))
        except asyncio.InvalidStateError:
            return  # gRPC's answer to a write on a call that has ended; the reader says why it has
        except Exception as failure:
            if not isinstance(failure, MoonpoolError):
                log.exception("stream failed", stream=name)
            self.break_(StreamBroken(f"{name}: {failure!s}" if str(failure) else f"{name}: {failure!r}"))

    async def _read(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            received = await call.read()
            self.heard_at = loop.time()
            if received is grpc.aio.EOF:
                raise StreamBroken("ended by the peer")
            if received is None:  # gRPC logs what a deserialiser raises, and goes on with None
                raise StreamBroken("a message could not be decoded")
            if isinstance(received, PayloadMessage):
                await self._take(cast("Res", received.message), received.payload)
            else:
                self.on_message(cast("Res", received), _NO_PAYLOAD)

    async def _take(self, message: Res, payload: Any) -> None:
        """A call of its own: what it holds of the reader's memory must not stay until the next message."""
        assert isinstance(payload, memoryview), "received payloads are views"
        landing = self.place(message, payload.nbytes)
        self.on_message(message, await landing.taken(payload) if landing else payload)

    async def _write(self, message: Any) -> None:
        lane = self.lane
        if lane is None:
            assert self._call is not None, "nothing is written before the call has begun"
            await self._call.write(message)
            return
        try:
            await lane.write(message)
        except MoonpoolError as error:
            await self._lane_ended(error)

    async def _read_lane(self, lane: TransportConnection[Res]) -> None:
        loop = asyncio.get_running_loop()

        def take(message: Res, payload: ReceivedPayload) -> None:
            self.heard_at = loop.time()
            self.on_message(message, payload)

        await self._lane_ended(await lane.run(take, self.place))

    async def _lane_ended(self, error: Exception) -> NoReturn:
        self._ending = True
        await asyncio.sleep(CONNECTION_GRACE_S)  # the call may end too and say more; then this task is cancelled
        self.lane_error = error
        raise StreamBroken(f"its lane ended: {error}") from error


HELLO_TIMEOUT_S = 10.0


MAX_STREAM_TASKS = 1024


MAX_UNSENT = 1024


Write = Callable[[Any], Awaitable[None]]


class ServerContext(Protocol):
    """The part of grpc.aio's servicer context that a stream needs."""

    @property
    def bare_write(self) -> Write:
        """Sends one message; not to be cancelled."""
        ...


class ServerStream(Generic[Req]):
    """One stream of one peer. Subclasses say what messages mean.

    Messages have a `oneof message` with `hello`, which comes first and only once. Payloads come beside them.

    Attributes:
        outbox: answers on their way to the peer.
        silent: whether the stream ended because nothing came for `silence_s`.
        borrows: payloads that lie in a region of the peer are lent: `on_message` copies what it needs of them before
            it verifies that, and keeps nothing else (`lent`, `give_back`).
        brief_kind: brief messages of this kind are taken on lanes, any other ends the stream; None: none are.
    """

    borrows = False
    brief_kind: int | None = None

    def __init__(
        self,
        closing: asyncio.Event,
        *,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        silence_s: float | None = None,
        quiet_s: float | None = None,
        max_unsent: int = MAX_UNSENT,
        lanes: TransportListener | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            closing: Set when the service ends its streams.
            hello_timeout_s: Longest wait for the hello.
            silence_s: Longest wait between messages; None for any.
            quiet_s: After so long without a message `is_there` is asked; None for never.
            max_unsent: Answers that may wait for the peer before nothing more is taken from it.
            lanes: Offers lanes beside the call; None to stay on gRPC.
        """
        self.outbox = SendQueue()
        self.silent = False
        self._lent: BorrowedBuffer | None = None
        self._closing = closing
        self._hello_timeout_s = hello_timeout_s
        self._silence_s = silence_s
        self._quiet_s = quiet_s
        self._heard_at = 0.0
        self._max_unsent = max_unsent
        self._group: asyncio.TaskGroup
        self._tasks = 0
        self._finishing = False
        self._lanes = lanes
        self._offered: kv_pb2.Lane | None = None
        self._lane: TransportConnection[Req] | None = None

    async def on_hello(self, message: Req) -> None:
        """Checks the first message and posts the answer; what it raises refuses the stream."""
        raise NotImplementedError

    def offer_lane(self, message: Req) -> kv_pb2.Lane | None:
        """The lane to be offered in the welcome, on which the peer may go on; None for none.

        Args:
            message: With the peer's hello.
        """
        if self._lanes is not None:
            hello = cast("Any", message).hello
            self._offered = self._lanes.offer(hello, lambda opened: self._attach(opened, type(message)))
            if self._offered is not None:
                self._offered.brief = self.brief_kind is not None
        return self._offered

    def on_message(self, message: Req, payload: Any) -> None:
        """Handles a message; what it raises ends the stream.

        Args:
            message: The peer's.
            payload: Its bytes: a memoryview, or any `Bytes` where the stream borrows.
        """
        raise NotImplementedError

    def on_brief(self, message: OneShotMessage, payload: BytesLike) -> Iterable[OneShotAnswer]:
        """Answers a brief message; nothing, or a MoonpoolError before the first answer, where that takes a session.

        Its payload is lent. What it raises that is no MoonpoolError ends the stream.
        """
        return ()

    def place(self, message: Req, nbytes: int) -> ReceiveBuffer | None:
        """Where a payload of so many bytes is to land; None: it comes with its message."""
        return None

    async def is_there(self) -> bool:
        """Nothing came for `quiet_s`: whether the peer lives all the same. If not, the stream ends as silent."""
        return True

    def end(self) -> None:
        """The stream is over: releases everything it holds. Called once or more, after a hello that was taken."""

    def on_closing(self) -> None:
        """The service ends its streams: this one at once, unless a subclass calls `finish` instead."""
        raise Unavailable("the service is shutting down")

    async def room(self) -> None:
        """Waits while too many answers were not taken: a peer that does not read is not read either."""
        if len(self.outbox) > self._max_unsent:
            await self.outbox.at_most(self._max_unsent // 2)

    async def write_answers(self, write: Write) -> None:
        """Writes answers until there are none after `finish`."""
        await self.outbox.drain(write)

    def finish(self) -> None:
        """Lets `write_answers` return when everything that waits has been written."""
        self.outbox.finish()

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way."""
        return StreamTraffic(unsent=len(self.outbox))

    @property
    def tasks(self) -> int:
        """Sessions' tasks that run beside the stream."""
        return self._tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a session's work beside the stream; what it raises ends the stream.

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

    def post(self, message: Message) -> None:
        """Sends a small message; a peer that reads none of them ends its stream."""
        try:
            self.outbox.post(message)
        except StreamBroken as error:
            self.outbox.close(error)

    async def run(self, requests: AsyncIterator[Req] | AsyncIterator[PayloadMessage[Req]], context: object) -> None:
        """The whole life of the stream.

        Args:
            requests: The peer's messages; beside their payloads where the class carries one.
            context: Of the call; a ServerContext.

        Raises:
            InvalidRequest: the first message is no hello.
            DeadlineExceeded: no hello came in time, or nothing for `silence_s`, or for `quiet_s` and it is not there.
            Unavailable: the service is closing.
            StreamBroken: the peer reads nothing.
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
                self._group.create_task(self._write(cast("ServerContext", context)))
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
            self.outbox.close(ended)
            if self._lanes is not None and self._offered is not None:
                self._lanes.withdraw(self._offered.token)
            if self._lane is not None:
                self._lane.close(ended)

    async def _receive(self, requests: AsyncIterator[Any]) -> None:
        if self._silence_s is None:
            async for item in requests:
                await self.room()
                await self._handle(*_parts(item))
                del item  # else its memory stays while the next message is copied into other, colder memory
            return
        loop = asyncio.get_running_loop()
        while (item := await self._next(requests, self._silence_s, "nothing was heard")) is not None:
            self._heard_at = loop.time()
            await self.room()
            await self._handle(*_parts(item))

    async def _handle(self, message: Req, payload: memoryview) -> None:
        landing = self.place(message, payload.nbytes) if payload.nbytes else None
        if landing is None:
            self.on_message(message, payload)
        else:
            (await landing.taken(payload)).tell()

    async def _next(self, requests: AsyncIterator[Any], timeout_s: float, what: str) -> Any:
        """The next message, None when there are no more."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(requests, None)
        except TimeoutError:
            self.silent = True
            raise DeadlineExceeded(f"{what} for {timeout_s:g} s") from None

    async def _write(self, context: ServerContext) -> None:
        await self.write_answers(context.bare_write if self._lanes is None else self._writing(context.bare_write))
        if self._closing.is_set():
            raise Unavailable("the service is shutting down")
        if not self._finishing:
            raise StreamBroken("the peer does not read its answers")

    def _writing(self, bare_write: Write) -> Write:
        """The lane's write once there is a lane; before that the call's."""

        async def write(message: Any) -> None:
            if self._lane is None:
                await bare_write(message)
                return
            try:
                await self._lane.write(message)
            except MoonpoolError as error:
                await self._lane_ended(error)

        return write

    def _attach(self, opened: AcceptedConnection, cls: type[Req]) -> None:
        """The peer has taken the offer: everything goes over the lane from now on."""
        lane = self._lane = TransportConnection(
            opened.name,
            opened.sock,
            cls,
            readable=opened.readable,
            lent=opened.lent,
            acknowledge=self.post,
        )
        self.outbox.hold(lane.close, lane.start)
        receiving = self._receive_on(lane)
        try:
            self._group.create_task(receiving)
        except RuntimeError:  # the stream is ending already
            receiving.close()
            raise StreamBroken("the stream has ended") from None

    async def _receive_on(self, lane: TransportConnection[Req]) -> None:
        def take(message: Req, payload: ReceivedPayload) -> None:
            if isinstance(payload, FilledBuffer):
                payload.tell()
            elif isinstance(payload, BorrowedBuffer):
                self._borrow(message, payload)
            else:
                self.on_message(message, payload)
            self._check_unsent(lane)

        def brief(message: OneShotMessage, payload: BytesLike) -> int:
            if message.kind != self.brief_kind:
                raise FrameError(f"a brief message of kind {message.kind} has no place on this stream")
            nbytes = self._answer(message, payload)
            self._check_unsent(lane)
            return nbytes

        taken = lane.run(take, self.place, lend=self.borrows, brief=None if self.brief_kind is None else brief)
        await self._lane_ended(await taken)

    def _answer(self, message: OneShotMessage, payload: BytesLike) -> int:
        """Returns how many bytes the answers have."""
        answered, nbytes = False, 0
        try:
            for answer in self.on_brief(message, payload):
                self.outbox.answer(answer)
                answered = True
                nbytes += sum([piece.nbytes for piece in answer.pieces])
        except MoonpoolError as error:
            if answered:
                self.outbox.close(error)
        if not answered:
            self.outbox.answer(open_session_answer(message.number))
        return nbytes

    def _check_unsent(self, lane: TransportConnection[Req]) -> None:
        if len(self.outbox) > self._max_unsent:
            lane.pause()
            self._group.create_task(self._resume(lane))

    async def _resume(self, lane: TransportConnection[Req]) -> None:
        await self.room()
        lane.resume()

    def _borrow(self, message: Req, payload: BorrowedBuffer) -> None:
        self._lent = payload
        try:
            self.on_message(message, payload.data)
        finally:
            self.give_back()

    @property
    def lent(self) -> bool:
        """The payload of the message that is being handled is lent."""
        return self._lent is not None

    def give_back(self) -> None:
        """What was lent is needed no more: the peer hears so with the next answer. Idempotent."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.give_back()

    async def _lane_ended(self, error: Exception) -> NoReturn:
        await asyncio.sleep(CONNECTION_GRACE_S)  # a peer that has left ends its call too, and this task with it
        raise StreamBroken(f"the lane ended: {error}") from error

    async def _watch_closing(self) -> None:
        await self._closing.wait()
        self.on_closing()

    async def _watch_silence(self, quiet_s: float) -> None:
        loop = asyncio.get_running_loop()
        looked_at = self._heard_at
        while True:
            left_s = max(self._heard_at, looked_at) + quiet_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
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
    """Streams of any kind, each for as long as it is `running`.

    Attributes:
        quiet: set while there are none.
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
        """What is under way on all of them."""
        return sum((stream.traffic for stream in self.kv), StreamTraffic())

    @contextmanager
    def running(self, stream: object) -> Iterator[None]:
        """Around the life of a stream."""
        self._open[stream] = None
        self.quiet.clear()
        try:
            yield
        finally:
            del self._open[stream]
            if not self._open:
                self.quiet.set()
