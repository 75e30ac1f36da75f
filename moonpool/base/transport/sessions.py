"""Many channels on one long-lived stream: multiplexing, reconnection, and a process's clients by peer.

A stream connects with the first channel, and again with the first channel after a break. Messages have a `oneof
message` with at least `hello` on the way up and `welcome` on the way down; `credit` on the way down lets frames go up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message

from moonpool.base.errors import MoonpoolError, StreamBroken, TransferFailed
from moonpool.base.rpc.channels import Metadata, StreamCall
from moonpool.base.rpc.messages import Payload, payload_bytes
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.async_utils import Deadlines
from moonpool.base.transport.base import BorrowedBuffer, PendingPayload, ReceiveBuffer, ReceivedPayload, own_memory
from moonpool.base.transport.flow_control import TO_DECODE, ByteCredits, CreditReturn, EgressLink, StreamTraffic
from moonpool.base.transport.handshake import TransportDialer
from moonpool.base.transport.registry import transport_name
from moonpool.base.transport.send_queue import STALL_S
from moonpool.base.transport.streams import CONNECT_TIMEOUT_S, ClientStream, Req, Res, Spawn
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
ResIn = TypeVar("ResIn", bound=Message, contravariant=True)
ResAny = TypeVar("ResAny", bound=Message)
ReceiveInto = Callable[[ResAny, int], ReceiveBuffer | None]
IN_FLIGHT_BYTES = 4 << 20
"""Most payload bytes per channel that a connection holds at once."""
LINGER_S = 0.005
"""Seconds for which the last credits wait for a message to travel with."""
SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a process opens KV streams to other processes.

    Attributes:
        dialer: opens the connection that the peer offers; None: streams stay on gRPC.
        link: the process's way out, on which frames wait for their slots; None: frames do not wait.
        connect_timeout_s: longest time from the call's start to the peer's welcome.
        stall_s: longest write, before the stream counts as broken.
        silence_s: longest silence from a peer that owes an answer, before the stream counts as broken.
        metadata: metadata for the call, such as an API key.
    """

    dialer: TransportDialer | None = None
    link: EgressLink | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    stall_s: float = STALL_S
    silence_s: float = SILENCE_S
    metadata: Metadata = ()


DEFAULT_OPTIONS = StreamSettings()


@dataclass(frozen=True, slots=True)
class StreamSpec(Generic[Req, Res]):
    """One kind of stream to one peer.

    Attributes:
        name: the peer and the purpose; begins error messages.
        connect: starts the call.
        hello: first message sent.
        channel_of: key of the channel that a message belongs to; None: no channel.
        answers: class for the peer's messages. window_bytes: payload bytes that the peer may be ahead in sending; 0:
            the peer sends no payloads.
        credit: wraps a Credit for the peer; needed with a window.
        priority: the frames' priority on the link.
        options: how the stream opens.
    """

    name: str
    connect: Callable[[], StreamCall]
    hello: Req
    channel_of: Callable[[Res], Hashable]
    answers: type[Res]
    window_bytes: int = 0
    credit: Callable[[kv_pb2.Credit], Req] | None = None
    priority: int = TO_DECODE
    options: StreamSettings = DEFAULT_OPTIONS


class ChannelHandler(Protocol[ResIn]):
    """A channel's owner, which gets the channel's messages. Called by the reader: must be quick, and must not wait."""

    def on_message(self, message: ResIn, payload: Any) -> None:
        """Take a channel's message. An exception ends this channel only.

        The payload is a memoryview, which you may keep, or a `FilledBuffer` if the channel gave a `ReceiveBuffer`.
        """

    def on_broken(self, error: Exception) -> None:
        """The channel has ended, by StreamBroken or by an exception in `on_message`. No call follows."""


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
        """Sends a small message without waiting.

        Raises:
            StreamBroken: The stream has ended.
        """
        self._connection.send_queue.post(message)

    async def send(self, frames: Iterable[tuple[Req, Payload]], *, timeout_s: float) -> None:
        """Sends frames in their order: waits for credits, for the link, for room, and queues their bytes.

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
        """Hands a message to the handler; for the connection."""
        try:
            self._handler.on_message(message, payload)
        except Exception as error:  # the handler's owner gets the error; other channels go on
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the channel with `error` and tells the handler; for the connection and for handlers."""
        self._connection.forget(self)
        if self.error is None:
            self.error = error
            self._handler.on_broken(error)


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
        """Starts the call, shakes hands, and opens the transport that the peer offers."""
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
        self._passed_over = asyncio.get_running_loop().time() < spec.options.dialer.retry_at(epoch)
        if self._passed_over:
            return
        try:
            connection = await spec.options.dialer.dial(
                welcome.transport, epoch, spec.answers, spec.window_bytes, self.send_queue.post
            )
        except (MoonpoolError, OSError, TimeoutError) as error:
            self._passed_over = True
            spec.options.dialer.failed(spec.name, transport_name(welcome.transport.kind), epoch, error)
            return
        log.info("transport opened", stream=spec.name, transport=connection.name)
        self.use_connection(connection)

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way."""
        return StreamTraffic(self.credits.out, self._returns.pending, len(self.send_queue))

    @property
    def has_egress(self) -> bool:
        """Frames wait for slots."""
        return self._spec.options.link is not None

    async def egress_slot(self, size: int, timeout_s: float) -> None:
        """Waits for a slot on the link, if there is one."""
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
        """Fails every channel."""
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


T = TypeVar("T")


class MuxStream(Generic[Req, Res]):
    """A stream that connects when the first channel opens, and connects again after a break.

    Attributes:
        deadlines: the channels' owners' deadlines.
    """

    def __init__(self, spec: StreamSpec[Req, Res]) -> None:
        """Does not connect yet."""
        assert (spec.credit is None) == (spec.window_bytes == 0), "a window needs messages that give it"
        self.spec = spec
        self.deadlines = Deadlines()
        self._connection: MuxConnection[Req, Res] | None = None
        self._attempt: asyncio.Task[MuxConnection[Req, Res]] | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """The peer and the purpose."""
        return self.spec.name

    @property
    def channels(self) -> int:
        """Number of open channels."""
        return len(self._connection.channels) if self._connection is not None else 0

    @property
    def tasks(self) -> int:
        """Readers and writers of connections; none after `aclose`."""
        return len(self._tasks)

    @property
    def connected(self) -> bool:
        """Whether the stream is connected, as far as this side knows."""
        return self._connection is not None and self._connection.error is None

    @property
    def transport(self) -> str:
        """Name of the transport that carries the messages, "grpc" included; "" without a connection."""
        return self._connection.transport if self._connection is not None and self.connected else ""

    @property
    def credits(self) -> ByteCredits | None:
        """The standing connection's credits."""
        return self._connection.credits if self._connection is not None and self.connected else None

    @property
    def traffic(self) -> StreamTraffic:
        """Credits and messages under way; none without a connection."""
        return self._connection.traffic if self._connection is not None and self.connected else StreamTraffic()

    async def open(
        self, key: Hashable, handler: ChannelHandler[Res], receive_into: ReceiveInto[Res] = own_memory
    ) -> MuxChannel[Req, Res]:
        """Open a channel on this side, and connect first if needed. The caller tells the peer.

        Args:
            key: the channel's key.
            handler: gets the channel's messages.
            receive_into: Gives the memory for a message's payload of so many bytes, on a transport beside gRPC.

        Raises:
            Mismatch: The peer does not take what the hello offers.
            StreamBroken: The peer cannot be reached, or the stream is closed.
            TransferFailed: A channel with this key is open.
        """
        connection = self._connection
        if connection is None or not connection.is_good:
            connection = await self._connected()
        if key in connection.channels:
            raise TransferFailed(f"{self.spec.name}: channel {key} is open already")
        channel = MuxChannel(connection, key, handler, receive_into)
        connection.channels[key] = channel
        return channel

    def suspect(self, since: float) -> None:
        """Call this after a wait for the peer timed out. If the peer was silent for too long, the stream breaks.

        Later channels then get a new stream, even if the peer hangs or has lost the stream's other end.

        Args:
            since: start of the wait, on the event loop's clock.
        """
        if self._connection is not None:
            self._connection.give_up_if_silent(since)

    async def aclose(self) -> None:
        """Ends the stream and all channels. Idempotent."""
        self._closed = True
        if self._connection is not None:
            self._connection.break_(StreamBroken(f"{self.spec.name}: closed"))
        if self._attempt is not None:
            self._attempt.cancel()
        self.deadlines.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that `aclose` waits for."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            task.exception()  # retrieved here; the waiting task raises it

    async def _connected(self) -> MuxConnection[Req, Res]:
        if self._closed:
            raise StreamBroken(f"{self.spec.name}: closed")
        standing = self._connection
        if standing is not None and standing.ending:
            await standing.ended()
        if standing is not None and standing.is_good:
            return standing
        if self._attempt is None or self._attempt.done():
            self._attempt = self._spawn(self._attempt_once())
        attempt = self._attempt
        try:
            # One attempt for all that wait; a cancelled task leaves the attempt to the others.
            connection = await asyncio.shield(attempt)
        except asyncio.CancelledError:
            if self._closed and attempt.cancelled():
                raise StreamBroken(f"{self.spec.name}: closed") from None
            raise
        if connection.error is not None:
            raise connection.error
        return connection

    async def _attempt_once(self) -> MuxConnection[Req, Res]:
        connection = MuxConnection(self.spec, self._spawn)
        try:
            await connection.start()
        except BaseException as error:
            connection.break_(error if isinstance(error, Exception) else StreamBroken(f"{self.spec.name}: given up"))
            raise
        if self._connection is not None:
            self._connection.break_(StreamBroken(f"{self.spec.name}: replaced"))
        self._connection = connection
        return connection


class StreamClient(Generic[Req, Res]):
    """Base class for clients that use one stream. Channels are reads, puts or transfers."""

    def __init__(self, stream: MuxStream[Req, Res]) -> None:
        self._stream = stream

    @property
    def channels(self) -> int:
        """Number of open channels."""
        return self._stream.channels

    @property
    def transport(self) -> str:
        """Name of the transport that carries the messages, "grpc" included; "" without a connection."""
        return self._stream.transport

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way on the stream."""
        return self._stream.traffic

    async def aclose(self) -> None:
        """Ends the stream; open channels fail. Idempotent."""
        await self._stream.aclose()


class PeerClient(Protocol):
    """The client for one peer, for `PeerClients`; see `StreamClient`."""

    @property
    def channels(self) -> int:
        """Open channels."""
        ...

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way on the stream."""
        ...

    async def aclose(self) -> None:
        """Ends the stream. Idempotent."""
        ...


C = TypeVar("C", bound=PeerClient)


@dataclass(slots=True)
class _PeerEntry(Generic[C]):
    client: C
    quiet_until: float = 0.0
    quiet_epoch: int = 0


class PeerClients(Generic[C]):
    """A process's clients for one kind of stream.

    A peer is an id at an address. The epoch does not matter here: clients connect again after a restart, and
    channels check which epoch they speak to.
    """

    def __init__(self, open_client: Callable[[str], C], *, max_peers: int = 64) -> None:
        """`open_client` makes the client for an address; beyond `max_peers`, idle clients are closed, oldest first."""
        self._open_client = open_client
        self._max_peers = max_peers
        self._peers: OrderedDict[tuple[str, str], _PeerEntry[C]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def channels(self) -> int:
        """Open channels with all peers."""
        return sum(peer.client.channels for peer in self._peers.values())

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way on the streams to all peers."""
        return sum((peer.client.traffic for peer in self._peers.values()), StreamTraffic())

    async def get(self, instance: kv_pb2.Instance) -> C:
        """The client for a peer. Open a channel before anything else is awaited."""
        key = (instance.id, instance.address)
        while (peer := self._peers.get(key)) is None:
            removed = self._take_idle(instance.id)
            for client in removed:
                await client.aclose()
            if not removed:
                peer = self._peers[key] = _PeerEntry(self._open_client(instance.address))
        self._peers.move_to_end(key)
        return peer.client

    def pause(self, instance: kv_pb2.Instance, until: float) -> None:
        """Leave a peer that has failed alone until a time on the caller's clock, or until the peer has restarted."""
        peer = self._peers.get((instance.id, instance.address))
        if peer is not None:
            peer.quiet_until, peer.quiet_epoch = until, instance.epoch

    def paused(self, instance: kv_pb2.Instance, now: float) -> bool:
        """Whether a peer is left alone now."""
        peer = self._peers.get((instance.id, instance.address))
        return peer is not None and peer.quiet_until > now and peer.quiet_epoch == instance.epoch

    async def aclose(self) -> None:
        """Closes all clients. Idempotent."""
        while self._peers:
            await self._peers.popitem()[1].client.aclose()

    def _take_idle(self, instance_id: str) -> list[C]:
        """Take out the clients to close before a peer is added: the peer's at other addresses, then the oldest.

        Only idle clients are taken. The caller closes them afterwards: closing waits, and a client may become busy.
        """
        idle = [key for key, peer in self._peers.items() if not peer.client.channels]
        idle.sort(key=lambda key: key[0] != instance_id)
        moved = sum(key[0] == instance_id for key in idle)
        excess = len(self._peers) + 1 - self._max_peers
        return [self._peers.pop(key).client for key in idle[: max(moved, excess)]]
