"""A channel: one transfer's messages on a stream that many share; and the connection that carries the channels."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message

from moonpool.base.errors import MoonpoolError, StreamBroken, TransferFailed
from moonpool.base.rpc.messages import Payload, payload_bytes
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.client_stream import ClientStream, Req, Res, Spawn
from moonpool.base.transport.flow_control import ByteCredits, CreditReturn, StreamTraffic
from moonpool.base.transport.payloads import BorrowedBuffer, PendingPayload, ReceiveBuffer, ReceivedPayload
from moonpool.base.transport.registry import transport_name
from moonpool.base.transport.stream_spec import StreamSpec
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
ResIn = TypeVar("ResIn", bound=Message, contravariant=True)
ResAny = TypeVar("ResAny", bound=Message)
ReceiveInto = Callable[[ResAny, int], ReceiveBuffer | None]
IN_FLIGHT_BYTES = 4 << 20
"""Most payload bytes per channel that a connection holds at once."""
LINGER_S = 0.005
"""Seconds for which the last credits wait for a message to travel with."""


class MuxChannel(Generic[Req, Res]):
    """One channel on a stream; ended by `close`, by a failure of the handler, or with the stream."""

    def __init__(
        self,
        connection: MuxConnection[Req, Res],
        key: Hashable,
        handler: ChannelHandler[Res],
        receive_into: ReceiveInto[Res],
    ) -> None:
        self.key = key
        self.error: Exception | None = None
        self._connection = connection
        self._handler = handler
        self._receive_into = receive_into

    @property
    def welcome(self) -> kv_pb2.StreamWelcome:
        """The peer's first message, which identifies the peer."""
        assert self._connection.welcome is not None, "a channel exists only after the handshake"
        return self._connection.welcome

    def post(self, message: Req) -> None:
        """Send a small message without waiting.

        Raises:
            StreamBroken: The stream has ended.
        """
        self._connection.send_queue.post(message)

    async def send(self, frames: Iterable[tuple[Req, Payload]], *, timeout_s: float) -> None:
        """Send frames in their order: wait for credits, for the link, for room, and queue their bytes.

        On a transport beside gRPC, several frames are under way at once, without a wait for the peer after each. When
        `send` returns or raises, the payloads' memory is unreferenced. A frame that was not sent used no credits.

        Args:
            frames: the message with each frame's header, and the frame's bytes; taken when they can be sent.
            timeout_s: longest time of each wait.

        Raises:
            StreamBroken: the stream has ended.
            TransferFailed: a wait took too long.
            Exception: the error that ended the channel, or an exception of `frames`.
        """
        send_queue, under_way, ahead = self._connection.send_queue, deque[PendingPayload](), 0
        try:
            for message, payload in frames:
                held = await self.begin(message, payload, timeout_s)
                if held is None:
                    continue
                under_way.append(held)
                ahead += held.nbytes
                while under_way and (ahead >= IN_FLIGHT_BYTES or under_way[0].done.done()):
                    first = under_way.popleft()
                    ahead -= first.nbytes
                    await send_queue.done_with(first, timeout_s)
            while under_way:
                await send_queue.done_with(under_way.popleft(), timeout_s)
        finally:
            await send_queue.abandon(under_way)

    async def begin(self, message: Req, payload: Payload, timeout_s: float) -> PendingPayload | None:
        """Send one frame. Give the result to `done_with` or `abandon`: before, the frame's memory is not free."""
        self.check()
        size = payload_bytes(payload)
        connection = self._connection
        if not connection.credits.take(size):
            await connection.credits.acquire(size, timeout_s=timeout_s)
        try:
            if connection.has_egress:
                await connection.egress_slot(size, timeout_s)
            self.check()
        except BaseException:
            connection.credits.grant(size)
            raise
        unsent = functools.partial(connection.credits.grant, size)
        return await connection.send_queue.begin(message, payload, timeout_s=timeout_s, unsent=unsent)

    async def done_with(self, held: PendingPayload | None, timeout_s: float) -> None:
        """Wait until a frame from `begin` has left; raises as `send`."""
        if held is not None:
            await self._connection.send_queue.done_with(held, timeout_s)

    async def abandon(self, held: PendingPayload | None) -> None:
        """Give up a frame from `begin` that has not left; the frame's memory is free then."""
        if held is not None and not held.done.done():
            await self._connection.send_queue.abandon([held])

    def take_credit(self) -> int:
        """Credit for the peer, in bytes. The caller's next message must carry this credit."""
        return self._connection.take_credit()

    def check(self) -> None:
        """Raise the error that ended the channel, if the channel has ended."""
        if self.error is not None:
            raise self.error

    def suspect(self, since: float) -> None:
        """As MuxStream.suspect, for the channel's own connection."""
        self._connection.give_up_if_silent(since)

    def close(self) -> None:
        """Forget the channel: later messages for the channel are dropped. The peer is not told. Idempotent."""
        self._connection.forget(self)
        if self.error is None:
            self.error = StreamBroken("the channel is closed")

    def receive_into(self, message: Res, nbytes: int) -> ReceiveBuffer | None:
        """The memory for a payload; for the connection."""
        try:
            return self._receive_into(message, nbytes)
        except Exception as error:  # as in `deliver`
            self.fail(error)
            return None

    def deliver(self, message: Res, payload: ReceivedPayload) -> None:
        """Hand a message to the handler; for the connection."""
        try:
            self._handler.on_message(message, payload)
        except Exception as error:  # the handler's owner gets the error; other channels go on
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the channel with `error` and tell the handler; for the connection and for handlers."""
        self._connection.forget(self)
        if self.error is None:
            self.error = error
            self._handler.on_broken(error)


class ChannelHandler(Protocol[ResIn]):
    """A channel's owner, which gets the channel's messages. Called by the reader: must be quick, and must not wait."""

    def on_message(self, message: ResIn, payload: Any) -> None:
        """Take a channel's message. An exception ends this channel only.

        The payload is a memoryview, which you may keep, or a `FilledBuffer` if the channel gave a `ReceiveBuffer`.
        """

    def on_broken(self, error: Exception) -> None:
        """The channel has ended, by StreamBroken or by an exception in `on_message`. No call follows."""


class MuxConnection(ClientStream[Req, Res]):
    """One call with all channels. If the call breaks, every channel fails."""

    def __init__(self, spec: StreamSpec[Req, Res], spawn: Spawn) -> None:
        """Does not connect yet. `spawn` starts tasks; the owner of `spawn` waits for their end."""
        super().__init__(
            spec.name,
            spec.connect,
            _hello(spec),
            connect_timeout_s=spec.options.connect_timeout_s,
            stall_s=spec.options.stall_s,
            spawn=spawn,
        )
        self.channels: dict[Hashable, MuxChannel[Req, Res]] = {}
        self.welcome: kv_pb2.StreamWelcome | None = None
        self.credits = ByteCredits(0)
        self._spec = spec
        self._returns = CreditReturn(spec.window_bytes)
        self._lingering: asyncio.TimerHandle | None = None
        self._passed_over = False

    async def start(self) -> None:
        """Start the call, shake hands, and open the transport that the peer offers."""
        await super().start()
        await self._open_connection()
        self._give_back(self._spec.window_bytes)

    @property
    def outgrown(self) -> bool:
        """Whether an unused connection stayed on gRPC after a failure, and another transport may be tried again."""
        spec, welcome = self._spec, self.welcome
        if not self._passed_over or self.channels or welcome is None or spec.options.dialer is None:
            return False
        return asyncio.get_running_loop().time() >= spec.options.dialer.retry_at(welcome.receiver.epoch)

    async def _open_connection(self) -> None:
        spec, welcome = self._spec, self.welcome
        assert welcome is not None, "the handshake is over"
        if spec.options.dialer is None or not welcome.HasField("transport"):
            return
        epoch = welcome.receiver.epoch
        # After a failure, streams to this peer stay on gRPC for a while (ADR 25).
        self._passed_over = asyncio.get_running_loop().time() < spec.options.dialer.retry_at(epoch)
        if self._passed_over:
            return
        try:
            connection = await spec.options.dialer.dial(
                welcome.transport, epoch, spec.answers, spec.window_bytes, self.send_queue.post
            )
        except (MoonpoolError, OSError, TimeoutError) as error:
            # The call is open and can carry everything: the stream lives on.
            self._passed_over = True
            spec.options.dialer.failed(spec.name, transport_name(welcome.transport.kind), epoch, error)
            return
        log.info("transport opened", stream=spec.name, transport=connection.name)
        self.use_connection(connection)

    @property
    def traffic(self) -> StreamTraffic:
        return StreamTraffic(self.credits.out, self._returns.pending, len(self.send_queue))

    @property
    def has_egress(self) -> bool:
        """Frames wait for slots."""
        return self._spec.options.link is not None

    async def egress_slot(self, size: int, timeout_s: float) -> None:
        """Wait for a slot on the link, if there is one."""
        spec = self._spec
        if spec.options.link is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await spec.options.link.slot(size, spec.priority)
        except TimeoutError:
            raise TransferFailed(f"{spec.name}: no slot on the link within {timeout_s:g} s") from None

    def give_up_if_silent(self, since: float) -> None:
        """Break the connection if the peer was silent for too long; only the time after `since` counts."""
        silent_s = asyncio.get_running_loop().time() - max(self.heard_at, since)
        if silent_s >= self._spec.options.silence_s:
            self.break_(StreamBroken(f"{self._spec.name}: nothing heard for {silent_s:.1f} s"))

    def forget(self, channel: MuxChannel[Req, Res]) -> None:
        """Remove a channel. After the last channel, all credits go back to the peer, unless another channel begins."""
        if self.channels.get(channel.key) is channel:
            del self.channels[channel.key]
        if not self.channels and self.error is None and self._returns.pending and self._lingering is None:
            # Not at once: credits travel with the next message, if one comes soon (ADR 37).
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._idle)

    def take_credit(self) -> int:
        """All credit for the peer, in bytes; the caller sends this credit."""
        return self._returns.flush()

    @property
    def is_good(self) -> bool:
        """Whether new channels should use this connection."""
        return self.error is None and not self.ending and not (self._passed_over and self.outgrown)

    def receive_into(self, message: Res, nbytes: int) -> ReceiveBuffer | None:
        """The memory that the message's channel gives for a payload."""
        channel = self.channels.get(self._spec.channel_of(message))
        return channel.receive_into(message, nbytes) if channel is not None else None

    def on_message(self, message: Res, payload: ReceivedPayload) -> None:
        """Hand a message to the channel, and credits back to the peer."""
        assert not isinstance(payload, BorrowedBuffer), "nothing is lent to a client"
        received = cast("Any", message)
        kind = received.WhichOneof("message")
        if credit_bytes := getattr(received, "credit_bytes", 0):  # not every stream's messages have the field
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
            channel = self.channels.get(self._spec.channel_of(message))
            if channel is not None:
                channel.deliver(message, payload)
        if payload.nbytes and self._spec.credit is not None:
            # Also for frames of channels that have ended or failed: their credits are used up all the same.
            self._give_back(self._returns.consumed(payload.nbytes, idle=not self.channels))

    def on_broken(self, error: Exception) -> None:
        spec, welcome = self._spec, self.welcome
        if self.connection_error is not None and spec.options.dialer is not None and welcome is not None:
            spec.options.dialer.failed(spec.name, self.transport, welcome.receiver.epoch, self.connection_error)
        self.credits.close(error)
        if self._lingering is not None:
            self._lingering.cancel()
        for channel in list(self.channels.values()):
            channel.fail(error)

    def _idle(self) -> None:
        self._lingering = None
        if not self.channels and self.error is None:
            with contextlib.suppress(StreamBroken):  # the writer has ended and the connection is about to
                self._give_back(self._returns.flush())

    def _give_back(self, nbytes: int) -> None:
        if nbytes and self._spec.credit is not None:
            self.send_queue.post(self._spec.credit(kv_pb2.Credit(bytes=nbytes)))


def _hello(spec: StreamSpec[Req, Res]) -> Req:
    """The hello with the transports that this side can use now."""
    if spec.options.dialer is None:
        return spec.hello
    message: Any = type(spec.hello)()
    message.CopyFrom(spec.hello)
    spec.options.dialer.fill(message.hello)
    return cast("Req", message)
