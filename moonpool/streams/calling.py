"""The client half of a long-lived stream: one call, its reader and its writer, from the hello until it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from moonpool.errors import Mismatch, MoonpoolError, StreamBroken
from moonpool.rpc.errors import from_rpc_error
from moonpool.rpc.wire import PayloadMessage
from moonpool.streams.lanes.inbound import Came
from moonpool.streams.lanes.landing import Landing
from moonpool.streams.lanes.lane import Lane
from moonpool.streams.outbox import MAX_MESSAGES, STALL_S, Outbox
from moonpool.telemetry.logs import get_logger

log = get_logger(__name__)

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]

CONNECT_TIMEOUT_S = 5.0
LANE_GRACE_S = 0.2
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
        self.outbox = Outbox(max_messages=max_messages)
        self.error: Exception | None = None
        self.heard_at = 0.0
        self.lane: Lane[Res] | None = None
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

    def place(self, message: Res, nbytes: int) -> Landing | None:
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

    def use_lane(self, lane: Lane[Res]) -> None:
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

    async def _read_lane(self, lane: Lane[Res]) -> None:
        loop = asyncio.get_running_loop()

        def take(message: Res, payload: Came) -> None:
            self.heard_at = loop.time()
            self.on_message(message, payload)

        await self._lane_ended(await lane.run(take, self.place))

    async def _lane_ended(self, error: Exception) -> NoReturn:
        self._ending = True
        await asyncio.sleep(LANE_GRACE_S)  # the call may end too and say more; then this task is cancelled
        self.lane_error = error
        raise StreamBroken(f"its lane ended: {error}") from error
