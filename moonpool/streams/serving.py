"""The server half of a long-lived stream: hello, messages and answers in order, limits, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

from google.protobuf.message import Message

from moonpool.errors import DeadlineExceeded, FrameError, InvalidRequest, MoonpoolError, StreamBroken, Unavailable
from moonpool.kv.scattered import Bytes
from moonpool.rpc.wire import PayloadMessage
from moonpool.streams.calling import LANE_GRACE_S
from moonpool.streams.credits import Traffic
from moonpool.streams.lanes.brief import Answer, Brief, otherwise
from moonpool.streams.lanes.inbound import Came
from moonpool.streams.lanes.landing import Landed, Landing, Lent
from moonpool.streams.lanes.lane import Lane
from moonpool.streams.lanes.listening import LaneServer, Opened
from moonpool.streams.outbox import Outbox
from moonpool.v1 import kv_pb2

HELLO_TIMEOUT_S = 10.0
MAX_STREAM_TASKS = 1024
MAX_UNSENT = 1024

_NO_PAYLOAD = memoryview(b"")

Req = TypeVar("Req", bound=Message)
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
        lanes: LaneServer | None = None,
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
        self.outbox = Outbox()
        self.silent = False
        self._lent: Lent | None = None
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
        self._lane: Lane[Req] | None = None

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

    def on_brief(self, message: Brief, payload: Bytes) -> Iterable[Answer]:
        """Answers a brief message; nothing, or a MoonpoolError before the first answer, where that takes a session.

        Its payload is lent. What it raises that is no MoonpoolError ends the stream.
        """
        return ()

    def place(self, message: Req, nbytes: int) -> Landing | None:
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
    def traffic(self) -> Traffic:
        """What is under way."""
        return Traffic(unsent=len(self.outbox))

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

    def _attach(self, opened: Opened, cls: type[Req]) -> None:
        """The peer has taken the offer: everything goes over the lane from now on."""
        lane = self._lane = Lane(
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

    async def _receive_on(self, lane: Lane[Req]) -> None:
        def take(message: Req, payload: Came) -> None:
            if isinstance(payload, Landed):
                payload.tell()
            elif isinstance(payload, Lent):
                self._borrow(message, payload)
            else:
                self.on_message(message, payload)
            self._check_unsent(lane)

        def brief(message: Brief, payload: Bytes) -> int:
            if message.kind != self.brief_kind:
                raise FrameError(f"a brief message of kind {message.kind} has no place on this stream")
            nbytes = self._answer(message, payload)
            self._check_unsent(lane)
            return nbytes

        taken = lane.run(take, self.place, lend=self.borrows, brief=None if self.brief_kind is None else brief)
        await self._lane_ended(await taken)

    def _answer(self, message: Brief, payload: Bytes) -> int:
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
            self.outbox.answer(otherwise(message.number))
        return nbytes

    def _check_unsent(self, lane: Lane[Req]) -> None:
        if len(self.outbox) > self._max_unsent:
            lane.pause()
            self._group.create_task(self._resume(lane))

    async def _resume(self, lane: Lane[Req]) -> None:
        await self.room()
        lane.resume()

    def _borrow(self, message: Req, payload: Lent) -> None:
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
        await asyncio.sleep(LANE_GRACE_S)  # a peer that has left ends its call too, and this task with it
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
