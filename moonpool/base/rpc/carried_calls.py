"""The server's half of carried calls: calls of all services, on one stream of a client (ADR 93).

A call that is carried costs no HTTP/2 stream, no thread and no system call of its own: what the calls have to say in
one turn of the event loop is one message. The methods are the same, with the same limits and the same gate for callers.
"""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.rpc.errors import DETAIL_KEY
from moonpool.base.rpc.messages import MESSAGE_BYTES
from moonpool.base.rpc.stream_writes import MessageSource
from moonpool.base.telemetry.logs import get_logger
from moonpool.v1 import calls_pb2

log = get_logger(__name__)
WINDOW = 64
"""Messages of a call, by their weight, that the client has not read; then the method's next write waits."""
WEIGHT_BYTES = 4 << 10
"""A message counts once more for so many bytes."""
FRAME_BYTES = 256 << 10
FRAME_PARTS = 1024
"""Bounds of what one message gathers: beyond, the rest is the next message. Servers take no message of more parts."""
MAX_FRAMES = 64
"""Messages that wait for a client that does not read: beyond, the client is not read, and its calls' writes wait."""
MAX_MESSAGE_BYTES = MESSAGE_BYTES - 1024
"""Longest message that fits with what is around."""


def weight(message: bytes) -> int:
    """What a message takes of the call's window."""
    return 1 + len(message) // WEIGHT_BYTES


@dataclass(frozen=True, slots=True)
class CarriedMethod:
    """A method that takes one request.

    Attributes:
        behavior: takes the encoded request and the call's context; errors end as `context.abort`.
        serialize: encodes an answer.
        streams: the method writes its answers by the context; else it returns the answer.
    """

    behavior: Callable[[bytes, Any], Awaitable[Any]]
    serialize: Callable[[Any], bytes]
    streams: bool


class CarriedCalls:
    """CallsService: carries calls of the server's other services."""

    def __init__(self, methods: Mapping[str, CarriedMethod]) -> None:
        """`methods` by their full names, "/package.Service/Method"."""
        self._methods = methods
        self._closing = False
        self._carriers: dict[_Carrier, None] = {}

    async def Carry(self, requests: AsyncIterator[calls_pb2.CarryRequest], context: Any) -> None:
        if self._closing:
            raise Unavailable("the server is closing")
        carrier = _Carrier(self._methods, context)
        self._carriers[carrier] = None
        try:
            await carrier.run(requests)
        finally:
            del self._carriers[carrier]

    def close(self) -> None:
        """Refuse new calls; a stream ends with its last call."""
        self._closing = True
        for carrier in self._carriers:
            carrier.close()


class _Carrier:
    """One client's stream of calls."""

    def __init__(self, methods: Mapping[str, CarriedMethod], context: Any) -> None:
        self.context = context
        self._methods = methods
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, _CarriedContext] = {}
        self._frames = [calls_pb2.CarryResponse()]
        """Messages to write; the last grows."""
        self._frame_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._fed: dict[_CarriedContext, None] = {}
        """Calls that have messages to take."""
        self.room = asyncio.Event()
        """Set while few messages wait for the client."""
        self.room.set()
        self._closing = False
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self, requests: AsyncIterator[calls_pb2.CarryRequest]) -> None:
        """Serve until the client leaves, or until the last call after `close`."""
        await self.context.bare_write(calls_pb2.CarryResponse())
        reading, writing = self._loop.create_task(self._read(requests)), self._loop.create_task(self._write())
        try:
            await asyncio.wait((reading, writing, self._over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for call in list(self._calls.values()):
                call.task.cancel()
            reading.cancel()
            if self._over.done() and not writing.done():
                self._wake_writer()
            else:
                writing.cancel()
            ended = await asyncio.gather(
                reading, writing, *[call.task for call in self._calls.values()], return_exceptions=True
            )
        if isinstance(ended[0], Exception):
            raise ended[0]

    def close(self) -> None:
        """Refuse new calls, and end with the last."""
        self._closing = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._closing and not self._calls and not self._over.done():
            self._over.set_result(None)

    # --- from the client --------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[calls_pb2.CarryRequest]) -> None:
        async for request in requests:
            if len(request.begun) + len(request.read) + len(request.cancelled) > FRAME_PARTS:
                raise InvalidRequest("", f"a message has more than {FRAME_PARTS} parts")
            for begun in request.begun:
                self._begin(begun)
            for read in request.read:
                if (call := self._calls.get(read.call)) is not None:
                    call.was_read(read.messages)
            for number in request.cancelled:
                if (call := self._calls.get(number)) is not None:
                    call.left()
            await self.room.wait()

    def _begin(self, begun: calls_pb2.CallBegin) -> None:
        number, method = begun.call, self._methods.get(begun.method)
        if self._closing:
            self._refuse(number, grpc.StatusCode.UNAVAILABLE, "the server is closing")
        elif method is None:
            self._refuse(number, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        elif number in self._calls:
            self._refuse(number, grpc.StatusCode.INVALID_ARGUMENT, f"call {number} runs already")
        else:
            self._calls[number] = _CarriedContext(self, method, begun)

    def _refuse(self, number: int, code: grpc.StatusCode, text: str) -> None:
        self.post(number, None, calls_pb2.CallEnd(code=code.value[0], text=text))

    def ended(self, number: int) -> None:
        """A call is over."""
        del self._calls[number]
        self._end_if_idle()

    # --- to the client ----------------------------------------------------------------------------------------------

    def post(self, number: int, message: bytes | None, end: calls_pb2.CallEnd | None) -> None:
        """Send a call's message, its end, or both, with all that is sent in this turn of the loop."""
        nbytes = len(message) if message is not None else 0
        if self._frame_bytes and (
            self._frame_bytes + nbytes > FRAME_BYTES or len(self._frames[-1].parts) >= FRAME_PARTS
        ):
            self._frames.append(calls_pb2.CarryResponse())
            self._frame_bytes = 0
            if len(self._frames) > MAX_FRAMES:
                self.room.clear()
        self._frames[-1].parts.add(call=number, message=message, end=end)
        self._frame_bytes += nbytes + 1
        self._wake_writer()

    def has_messages(self, call: _CarriedContext) -> None:
        """A call has messages, which are taken when the next message is made."""
        self._fed[call] = None
        self._wake_writer()

    async def _write(self) -> None:
        write = self.context.bare_write
        while True:
            while self._frame_bytes or self._fed:
                fed, self._fed = self._fed, {}
                for call in fed:
                    call.take()
                frames, self._frames, self._frame_bytes = self._frames, [calls_pb2.CarryResponse()], 0
                for frame in frames:
                    if frame.parts:
                        await write(frame)
                self.room.set()
            if self._over.done():
                return
            self._wake = self._loop.create_future()
            await self._wake

    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _CarriedContext:
    """A carried call, as its method sees the call: what gRPC's context has of what our methods use."""

    def __init__(self, carrier: _Carrier, method: CarriedMethod, begun: calls_pb2.CallBegin) -> None:
        self._carrier = carrier
        self._method = method
        self._number = begun.call
        self._metadata = tuple([(pair.key, pair.value) for pair in begun.metadata])
        self._unread = 0
        self._room: asyncio.Future[None] | None = None
        self._source: MessageSource[Any] | None = None
        self._fed: asyncio.Future[None] | None = None
        self._status: tuple[grpc.StatusCode, str, bytes] = grpc.StatusCode.OK, "", b""
        self._left = False
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + begun.timeout_s if begun.timeout_s else None
        self.task = loop.create_task(self._run(begun.request))
        self._timer = loop.call_at(self._deadline, self.left) if self._deadline is not None else None
        self.task.add_done_callback(self._done)

    def left(self) -> None:
        """Nobody waits for the answer any more."""
        self._left = True
        self.task.cancel()

    def was_read(self, messages: int) -> None:
        """The client has read messages of so much weight."""
        self._unread = max(0, self._unread - messages)
        if self._source is not None:
            self._carrier.has_messages(self)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _run(self, request: bytes) -> None:
        message: bytes | None = None
        try:
            answer = await self._method.behavior(request, self)
            if not self._method.streams:
                message = self._encoded(answer)
        except grpc.aio.AbortError:
            message = None
        self._end(message)

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if task.cancelled():
            if not self._left:
                self._status = grpc.StatusCode.CANCELLED, "the server has cancelled the call", b""
                self._end(None)
        elif (defect := task.exception()) is not None:
            log.error("a carried call failed", exc_info=defect)
            self._status = grpc.StatusCode.INTERNAL, "internal error; the service's log tells more", b""
            self._end(None)
        self._carrier.ended(self._number)

    def _end(self, message: bytes | None) -> None:
        code, text, detail = self._status
        self._carrier.post(self._number, message, calls_pb2.CallEnd(code=code.value[0], text=text, detail=detail))

    def _encoded(self, message: Any) -> bytes:
        data = self._method.serialize(message)
        if len(data) > MAX_MESSAGE_BYTES:
            text = f"Sent message larger than max ({len(data)} vs. {MAX_MESSAGE_BYTES})"
            self._status = grpc.StatusCode.RESOURCE_EXHAUSTED, text, b""
            raise grpc.aio.AbortError(text)
        return data

    # --- for the method ---------------------------------------------------------------------------------------------

    async def write(self, message: Any) -> None:
        """Send a message; wait first while the client has many unread."""
        data = self._encoded(message)
        while self._unread >= WINDOW:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        await self._carrier.room.wait()
        self._send(data)

    @property
    def bare_write(self) -> Callable[[Any], Awaitable[None]]:
        """As `write`: a write of a carried call is never half done."""
        return self.write

    async def feed(self, source: MessageSource[Any]) -> None:
        """Send what a source gives, until its end. Messages are taken when they are sent; as `write_all`."""
        self._source, self._fed = source, asyncio.get_running_loop().create_future()
        source.listen(lambda: self._carrier.has_messages(self))
        try:
            await self._fed
        finally:
            self._source = None

    def take(self) -> None:
        """Take messages of the source: those for which the client has room."""
        source, fed = self._source, self._fed
        if source is None or fed is None or fed.done():
            return
        try:
            while self._unread < WINDOW:
                message = source.take()
                if message is None:
                    if source.over():
                        fed.set_result(None)
                    return
                self._send(self._encoded(message))
        except Exception as error:
            fed.set_exception(error)

    def _send(self, data: bytes) -> None:
        self._unread += weight(data)
        self._carrier.post(self._number, data, None)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call with a status."""
        detail = next((value for key, value in trailing_metadata if key == DETAIL_KEY), b"")
        self._status = code, details, detail
        raise grpc.aio.AbortError(details)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call back with this context when the call is over."""
        self.task.add_done_callback(lambda _: callback(self))

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    def peer(self) -> str:
        return str(self._carrier.context.peer())

    def auth_context(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._carrier.context.auth_context()
        return found
