"""Client end of a long-lived multiplexed stream: many sessions on one bidirectional call between two processes.

It connects with the first session, and again with the first one after the stream broke. Messages have a
`oneof message` with at least `hello` on the way up and `welcome` on the way down; `credit` on the way down lets frames
go up, and on the way up lets them come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

import grpc.aio

from moonpool.errors import StreamBroken, TransferFailed
from moonpool.streams.calling import CONNECT_TIMEOUT_S, Req, Res
from moonpool.streams.credits import ByteCredits, Traffic
from moonpool.streams.deadlines import Deadlines
from moonpool.streams.lanes.dialing import LaneDialer
from moonpool.streams.lanes.settings import GRPC
from moonpool.streams.link import TO_DECODE, Link
from moonpool.streams.mux_connection import Connection, MuxSession, Place, SessionHandler, StreamSpec, nowhere
from moonpool.streams.outbox import STALL_S
from moonpool.v1 import kv_pb2

__all__ = ["CONNECT_TIMEOUT_S", "MuxSession", "MuxStream", "SessionHandler", "StreamClient"]

T = TypeVar("T")

SILENCE_S = 10.0


class MuxStream(Generic[Req, Res]):
    """A stream that connects when the first session opens, and again when one opens after it broke.

    Attributes:
        deadlines: of what uses it.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
        hello: Req,
        session_of: Callable[[Res], Hashable],
        answers: type[Res],
        *,
        lanes: LaneDialer | None = None,
        link: Link | None = None,
        priority: int = TO_DECODE,
        window_bytes: int = 0,
        credit: Callable[[kv_pb2.Credit], Req] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        stall_s: float = STALL_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Connects nothing yet. Arguments as for StreamSpec."""
        assert (credit is None) == (window_bytes == 0), "a window needs messages that give it"
        self.spec = StreamSpec(
            name,
            connect,
            hello,
            session_of,
            link,
            priority,
            window_bytes,
            credit,
            connect_timeout_s,
            stall_s,
            silence_s,
            lanes,
            answers,
        )
        self.deadlines = Deadlines()
        self._connection: Connection[Req, Res] | None = None
        self._attempt: asyncio.Task[Connection[Req, Res]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def name(self) -> str:
        """Who is at the other end and what for."""
        return self.spec.name

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._connection.sessions) if self._connection is not None else 0

    @property
    def tasks(self) -> int:
        """Readers and writers of connections; none after `aclose`."""
        return len(self._tasks)

    @property
    def connected(self) -> bool:
        """The stream stands, as far as this side knows."""
        return self._connection is not None and self._connection.error is None

    @property
    def lane(self) -> str:
        """How the standing connection carries messages: a lane's name, or "grpc"; "" without a connection."""
        if self._connection is None or not self.connected:
            return ""
        return GRPC if self._connection.lane is None else self._connection.lane.name

    @property
    def credits(self) -> ByteCredits | None:
        """Credits of the standing connection."""
        return self._connection.credits if self._connection is not None and self.connected else None

    @property
    def traffic(self) -> Traffic:
        """What is under way on the standing connection; a broken one has none."""
        return self._connection.traffic if self._connection is not None and self.connected else Traffic()

    async def open(
        self, key: Hashable, handler: SessionHandler[Res], place: Place[Res] = nowhere
    ) -> MuxSession[Req, Res]:
        """Opens a session on this side, connecting first where necessary. The caller tells the peer of it.

        Args:
            key: The session's.
            handler: Gets its messages.
            place: Says where the payload of one of them, of so many bytes, is to land when it comes on a lane.

        Raises:
            Mismatch: The peer does not take what the hello offers.
            StreamBroken: The peer cannot be reached, or the stream is closed.
            TransferFailed: A session with this key is open.
        """
        connection = self._connection
        if connection is None or not connection.is_good:
            connection = await self._connected()
        if key in connection.sessions:
            raise TransferFailed(f"{self.spec.name}: session {key} is open already")
        session = MuxSession(connection, key, handler, place)
        connection.sessions[key] = session
        return session

    def suspect(self, since: float) -> None:
        """To be called when a wait for the peer was in vain: a stream on which it has long been silent is given up.

        So a peer that hangs, or whose end of the stream got lost, does not keep later sessions from a new stream.

        Args:
            since: When the wait began, on the event loop's clock.
        """
        if self._connection is not None:
            self._connection.give_up_if_silent(since)

    async def aclose(self) -> None:
        """Ends the stream and all its sessions. Idempotent."""
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
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here; the task that waits raises it

    async def _connected(self) -> Connection[Req, Res]:
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
            # One attempt for all that wait; a cancelled one leaves it to the others.
            connection = await asyncio.shield(attempt)
        except asyncio.CancelledError:
            if self._closed and attempt.cancelled():
                raise StreamBroken(f"{self.spec.name}: closed") from None
            raise
        if connection.error is not None:
            raise connection.error
        return connection

    async def _attempt_once(self) -> Connection[Req, Res]:
        connection = Connection(self.spec, self._spawn)
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
    """What the clients of one stream have in common; their sessions are reads, puts or transfers under way."""

    def __init__(self, stream: MuxStream[Req, Res]) -> None:
        self._stream = stream

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return self._stream.sessions

    @property
    def lane(self) -> str:
        """How messages travel: the name of a lane, or "grpc"; "" without a connection."""
        return self._stream.lane

    @property
    def traffic(self) -> Traffic:
        """What is under way on the stream."""
        return self._stream.traffic

    async def aclose(self) -> None:
        """Ends the stream; open sessions fail. Idempotent."""
        await self._stream.aclose()
