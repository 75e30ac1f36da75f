"""The client half of a long-lived stream between two processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NoReturn, TypeVar

from google.protobuf.message import Message

from moonpool.base.errors import (
    Mismatch,
    MoonpoolError,
    StreamBroken,
)
from moonpool.base.rpc.channels import StreamCall
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.connection import Connection, ReceiveCallbacks, ZeroCopyConnection
from moonpool.base.transport.grpc import GrpcConnection
from moonpool.base.transport.payloads import ReceiveBuffer, ReceivedPayload
from moonpool.base.transport.send_queue import MAX_MESSAGES, STALL_S, SendQueue

log = get_logger(__name__)
Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
CONNECT_TIMEOUT_S = 5.0
CONNECTION_GRACE_S = 0.2
"""Seconds that a call gets to give the reason, after the connection beside the call has ended."""


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
        """Start nothing yet.

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
        """Handle a message; an exception breaks the stream. The first message is the welcome, if the stream has one.

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
        """Start the call, the reader and the writer; the hello goes first."""
        call = self._call = self.connection = GrpcConnection(self._connect())
        self.send_queue.post(self._hello)
        self._tasks = [
            self._spawn(self._guard(lambda: self._read(call))),
            self._spawn(self._guard(lambda: self.send_queue.drain(self._write, stall_s=self._stall_s))),
        ]

    def use_connection(self, connection: ZeroCopyConnection[Res]) -> None:
        """Send and receive over a connection from now on; the stream owns the connection.

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
        """Wait until the stream breaks, and raise the error."""
        await self._broken.wait()
        assert self.error is not None
        raise self.error

    async def ended(self) -> None:
        await self._broken.wait()

    def break_(self, error: Exception) -> None:
        """End the call with `error`. Only the first time counts."""
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
        """Break the stream and wait for all tasks. Idempotent."""
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
