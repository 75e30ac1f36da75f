"""One connection of a multiplexed stream: its sessions, each with a handler that gets its messages, and its credits.

`MuxStream` (mux.py) decides when to connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc.aio
from google.protobuf.message import Message

from moonpool.errors import MoonpoolError, StreamBroken, TransferFailed
from moonpool.rpc.wire import Payload, payload_bytes
from moonpool.streams.calling import ClientStream, Req, Res, Spawn
from moonpool.streams.credits import ByteCredits, CreditReturn, Traffic
from moonpool.streams.lanes.dialing import LaneDialer
from moonpool.streams.lanes.held import Held
from moonpool.streams.lanes.inbound import Came
from moonpool.streams.lanes.landing import Landing, Lent
from moonpool.streams.lanes.settings import lane_name
from moonpool.streams.link import Link
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

log = get_logger(__name__)

ResIn = TypeVar("ResIn", bound=Message, contravariant=True)
ResAny = TypeVar("ResAny", bound=Message)
Place = Callable[[ResAny, int], Landing | None]

UNDER_WAY_BYTES = 4 << 20
"""Payloads of one session that a lane may have at once."""
LINGER_S = 0.005
"""How long the last credits to be handed back wait for a message to travel with."""


@dataclass(slots=True)
class StreamSpec(Generic[Req, Res]):
    """What makes a stream this stream.

    Attributes:
        name: Who is at the other end and what for; begins error messages.
        connect: Starts the call.
        hello: First message sent.
        session_of: Key of the session a message belongs to; None for none.
        link: The process' way out; frames wait for their slots on it.
        priority: Of frames on the link.
        window_bytes: Payload bytes the peer may be ahead in sending; 0 when the peer sends no payloads.
        credit: Wraps a Credit for the peer; needed with a window.
        connect_timeout_s: Longest time from the start of the call to the peer's welcome.
        stall_s: Longest time one write may take before the stream counts as broken.
        silence_s: The peer is suspect when nothing was heard of it for so long while something was expected.
        lanes: Opens the lanes that the peer offers; None to stay on gRPC.
        answers: Class of the peer's messages, for lanes.
    """

    name: str
    connect: Callable[[], grpc.aio.StreamStreamCall[Any, Any]]
    hello: Req
    session_of: Callable[[Res], Hashable]
    link: Link | None
    priority: int
    window_bytes: int
    credit: Callable[[kv_pb2.Credit], Req] | None
    connect_timeout_s: float
    stall_s: float
    silence_s: float
    lanes: LaneDialer | None
    answers: type[Res]


def nowhere(message: Message, nbytes: int) -> None:
    """Payloads get memory of their own."""


class SessionHandler(Protocol[ResIn]):
    """What a session's owner does with what comes. Called from the reader: must be quick and must not wait."""

    def on_message(self, message: ResIn, payload: Any) -> None:
        """A message of the session. What it raises ends this session only.

        The payload is a memoryview, which may be kept; or Landed, where the session has said where it is to land.
        """

    def on_broken(self, error: Exception) -> None:
        """The session has ended: StreamBroken, or what `on_message` raised. Nothing comes after it."""


class MuxSession(Generic[Req, Res]):
    """One session on a stream; ended by `close`, by its handler's failure, or with the stream."""

    def __init__(
        self, connection: Connection[Req, Res], key: Hashable, handler: SessionHandler[Res], place: Place[Res]
    ) -> None:
        self.key = key
        self.error: Exception | None = None
        self._connection = connection
        self._handler = handler
        self._place = place

    @property
    def welcome(self) -> kv_pb2.StreamWelcome:
        """What the peer said of itself when the stream began."""
        assert self._connection.welcome is not None, "a session exists only after the handshake"
        return self._connection.welcome

    def post(self, message: Req) -> None:
        """Sends a small message without waiting.

        Raises:
            StreamBroken: The stream has ended.
        """
        self._connection.outbox.post(message)

    async def send(self, frames: Iterable[tuple[Req, Payload]], *, timeout_s: float) -> None:
        """Sends frames in their order: waits for credits, for the link, for room, and queues their bytes.

        On a lane some are under way at once, so that the peer is not waited for after each. When it returns or raises,
        nothing refers to the payloads' memory any more. A frame that was not sent used no credits.

        Args:
            frames: The message around each frame's header, and the frame's bytes; taken as they can be sent.
            timeout_s: Longest time of each wait.

        Raises:
            StreamBroken: The stream has ended.
            TransferFailed: A wait took too long.
            Exception: The session has ended; whatever ended it. Or whatever `frames` raises.
        """
        outbox, under_way, ahead = self._connection.outbox, deque[Held](), 0
        try:
            for message, payload in frames:
                held = await self.begin(message, payload, timeout_s)
                if held is None:
                    continue
                under_way.append(held)
                ahead += held.nbytes
                while under_way and (ahead >= UNDER_WAY_BYTES or under_way[0].done.done()):
                    first = under_way.popleft()
                    ahead -= first.nbytes
                    await outbox.done_with(first, timeout_s)
            while under_way:
                await outbox.done_with(under_way.popleft(), timeout_s)
        finally:
            await outbox.abandon(under_way)

    async def begin(self, message: Req, payload: Payload, timeout_s: float) -> Held | None:
        """As `send` of one frame, but its memory is free only after `done_with`, or `abandon`, of what it returns."""
        self.check()
        size = payload_bytes(payload)
        connection = self._connection
        if not connection.credits.take(size):
            await connection.credits.acquire(size, timeout_s=timeout_s)
        try:
            if connection.has_link:
                await connection.link_slot(size, timeout_s)
            self.check()
        except BaseException:
            connection.credits.grant(size)
            raise
        unsent = functools.partial(connection.credits.grant, size)
        return await connection.outbox.begin(message, payload, timeout_s=timeout_s, unsent=unsent)

    async def done_with(self, held: Held | None, timeout_s: float) -> None:
        """Waits until what `begin` returned is done with; raises as `send`."""
        if held is not None:
            await self._connection.outbox.done_with(held, timeout_s)

    async def abandon(self, held: Held | None) -> None:
        """Gives up what `begin` returned, if it is not done with; its memory is free then."""
        if held is not None and not held.done.done():
            await self._connection.outbox.abandon([held])

    def take_credit(self) -> int:
        """Bytes to be handed back to the peer with the message that is sent next, which must say so."""
        return self._connection.take_credit()

    def check(self) -> None:
        """Raises whatever ended the session, if it has ended."""
        if self.error is not None:
            raise self.error

    def suspect(self, since: float) -> None:
        """As MuxStream.suspect, for the session's own connection."""
        self._connection.give_up_if_silent(since)

    def close(self) -> None:
        """Forgets the session: what still comes for it is dropped. Tells the peer nothing. Idempotent."""
        self._connection.forget(self)
        if self.error is None:
            self.error = StreamBroken("the session is closed")

    def place(self, message: Res, nbytes: int) -> Landing | None:
        """Where a payload is to land; for the connection."""
        try:
            return self._place(message, nbytes)
        except Exception as error:  # as in `deliver`
            self.fail(error)
            return None

    def deliver(self, message: Res, payload: Came) -> None:
        """Hands a message to the handler; for the connection."""
        try:
            self._handler.on_message(message, payload)
        except Exception as error:  # the handler's owner learns of it; other sessions go on
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the session with `error` and tells the handler; for the connection and for handlers."""
        self._connection.forget(self)
        if self.error is None:
            self.error = error
            self._handler.on_broken(error)


class Connection(ClientStream[Req, Res]):
    """One call: from its start until it breaks, for whatever reason; then every session on it has failed."""

    def __init__(self, spec: StreamSpec[Req, Res], spawn: Spawn) -> None:
        """Starts nothing yet; `spawn` starts tasks that somebody waits for in the end."""
        super().__init__(
            spec.name,
            spec.connect,
            _hello(spec),
            connect_timeout_s=spec.connect_timeout_s,
            stall_s=spec.stall_s,
            spawn=spawn,
        )
        self.sessions: dict[Hashable, MuxSession[Req, Res]] = {}
        self.welcome: kv_pb2.StreamWelcome | None = None
        self.credits = ByteCredits(0)
        self._spec = spec
        self._returns = CreditReturn(spec.window_bytes)
        self._lingering: asyncio.TimerHandle | None = None
        self._passed_over = False

    async def start(self) -> None:
        """Starts the call, shakes hands, and opens the lane that the peer offers."""
        await super().start()
        await self._open_lane()
        self._give_back(self._spec.window_bytes)

    @property
    def outgrown(self) -> bool:
        """It did without a lane that could be tried again by now, and is not in use."""
        spec, welcome = self._spec, self.welcome
        if not self._passed_over or self.sessions or welcome is None or spec.lanes is None:
            return False
        return asyncio.get_running_loop().time() >= spec.lanes.retry_at(welcome.receiver.incarnation)

    async def _open_lane(self) -> None:
        spec, welcome = self._spec, self.welcome
        assert welcome is not None, "the handshake is over"
        if spec.lanes is None or not welcome.HasField("lane"):
            return
        incarnation = welcome.receiver.incarnation
        self._passed_over = asyncio.get_running_loop().time() < spec.lanes.retry_at(incarnation)
        if self._passed_over:
            return
        try:
            lane = await spec.lanes.dial(welcome.lane, incarnation, spec.answers, spec.window_bytes, self.outbox.post)
        except (MoonpoolError, OSError, TimeoutError) as error:
            self._passed_over = True
            spec.lanes.failed(spec.name, lane_name(welcome.lane.kind), incarnation, error)
            return
        log.info("lane opened", stream=spec.name, lane=lane.name)
        self.use_lane(lane)

    @property
    def traffic(self) -> Traffic:
        """What is under way."""
        return Traffic(self.credits.out, self._returns.pending, len(self.outbox))

    @property
    def has_link(self) -> bool:
        """Frames wait for slots."""
        return self._spec.link is not None

    async def link_slot(self, size: int, timeout_s: float) -> None:
        """Waits for a slot on the link, if there is one."""
        spec = self._spec
        if spec.link is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await spec.link.slot(size, spec.priority)
        except TimeoutError:
            raise TransferFailed(f"{spec.name}: no slot on the link within {timeout_s:g} s") from None

    def give_up_if_silent(self, since: float) -> None:
        """Breaks when nothing was heard of the peer for long; only the time after `since` counts."""
        silent_s = asyncio.get_running_loop().time() - max(self.heard_at, since)
        if silent_s >= self._spec.silence_s:
            self.break_(StreamBroken(f"{self._spec.name}: nothing heard for {silent_s:.1f} s"))

    def forget(self, session: MuxSession[Req, Res]) -> None:
        """Removes a session; with the last one, all credits go back to the peer, unless another comes soon."""
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
        if not self.sessions and self.error is None and self._returns.pending and self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._idle)

    def take_credit(self) -> int:
        """All bytes that were to be handed back; the caller tells the peer."""
        return self._returns.flush()

    @property
    def is_good(self) -> bool:
        """It stands, and another one would not be better."""
        return self.error is None and not self.ending and not (self._passed_over and self.outgrown)

    def place(self, message: Res, nbytes: int) -> Landing | None:
        """Where its session wants a payload."""
        session = self.sessions.get(self._spec.session_of(message))
        return session.place(message, nbytes) if session is not None else None

    def on_message(self, message: Res, payload: Came) -> None:
        """Hands a message to its session, and credits back to the peer."""
        assert not isinstance(payload, Lent), "nothing is lent to a client"
        received = cast("Any", message)
        kind = received.WhichOneof("message")
        if credit_bytes := getattr(received, "credit_bytes", 0):  # not every stream's messages have it
            self.credits.grant(credit_bytes)
        if self.welcome is None:
            if kind != "welcome":
                raise StreamBroken(f"the first message is {kind}, not a welcome")
            self.welcome = received.welcome
            self.credits.grant(received.welcome.credit_bytes)
            self.ready()
        elif kind == "credit":
            self.credits.grant(received.credit.bytes)
        else:
            session = self.sessions.get(self._spec.session_of(message))
            if session is not None:
                session.deliver(message, payload)
        if payload.nbytes and self._spec.credit is not None:
            # Also for frames of sessions that have ended or failed: their credits are used up all the same.
            self._give_back(self._returns.consumed(payload.nbytes, idle=not self.sessions))

    def on_broken(self, error: Exception) -> None:
        """Fails every session."""
        spec, welcome = self._spec, self.welcome
        if self.lane_error is not None and self.lane is not None and spec.lanes is not None and welcome is not None:
            spec.lanes.failed(spec.name, self.lane.name, welcome.receiver.incarnation, self.lane_error)
        self.credits.close(error)
        if self._lingering is not None:
            self._lingering.cancel()
        for session in list(self.sessions.values()):
            session.fail(error)

    def _idle(self) -> None:
        self._lingering = None
        if not self.sessions and self.error is None:
            with contextlib.suppress(StreamBroken):  # the writer has ended and the connection is about to
                self._give_back(self._returns.flush())

    def _give_back(self, nbytes: int) -> None:
        if nbytes and self._spec.credit is not None:
            self.outbox.post(self._spec.credit(kv_pb2.Credit(bytes=nbytes)))


def _hello(spec: StreamSpec[Req, Res]) -> Req:
    """The hello with the lanes that this side can use now."""
    if spec.lanes is None:
        return spec.hello
    message: Any = type(spec.hello)()
    message.CopyFrom(spec.hello)
    spec.lanes.fill(message.hello)
    return cast("Req", message)
