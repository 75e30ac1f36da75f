"""One long-lived stream with many channels. It connects with the first channel, and again after a break.

Messages have a `oneof message` with at least `hello` on the way up and `welcome` on the way down; `credit` on the way
down lets frames go up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any, Generic, TypeVar

from moonpool.base.errors import StreamBroken, TransferFailed
from moonpool.base.transport.async_utils import Deadlines
from moonpool.base.transport.client_stream import Req, Res
from moonpool.base.transport.flow_control import ByteCredits, StreamTraffic
from moonpool.base.transport.mux_channel import ChannelHandler, MuxChannel, MuxConnection, ReceiveInto
from moonpool.base.transport.payloads import own_memory
from moonpool.base.transport.stream_spec import StreamSpec

T = TypeVar("T")


class MuxStream(Generic[Req, Res]):
    """A stream that connects when the first channel opens, and connects again after a break.

    Attributes:
        deadlines: the channels' owners' deadlines.
    """

    def __init__(self, spec: StreamSpec[Req, Res]) -> None:
        assert (spec.credit is None) == (spec.window_bytes == 0), "a window needs messages that give it"
        self.spec = spec
        self.deadlines = Deadlines()
        self._connection: MuxConnection[Req, Res] | None = None
        self._attempt: asyncio.Task[MuxConnection[Req, Res]] | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._closed = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def channels(self) -> int:
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
        """End the stream and all channels. Idempotent."""
        self._closed = True
        if self._connection is not None:
            self._connection.break_(StreamBroken(f"{self.spec.name}: closed"))
        if self._attempt is not None:
            self._attempt.cancel()
        self.deadlines.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `aclose` waits for."""
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
        """End the stream; open channels fail. Idempotent."""
        await self._stream.aclose()
