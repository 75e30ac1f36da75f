"""The client's half of carried calls: a channel whose calls share one stream (ADR 93).

Calls that take one request are carried once the server has opened the stream; before, and where a server does not
know the stream, each call is a call of its own. If the connection breaks, all calls on the stream fail, as all calls of
a connection do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc
import grpc.aio

from moonpool.base.errors import InvalidRequest
from moonpool.base.rpc import messages
from moonpool.base.rpc.carried_calls import FRAME_BYTES, FRAME_PARTS, WINDOW, weight
from moonpool.base.rpc.errors import DETAIL_KEY
from moonpool.base.rpc.wrapped_channel import WrappedChannel
from moonpool.base.telemetry.logs import get_logger
from moonpool.v1 import calls_pb2

log = get_logger(__name__)
CARRY = "/moonpool.v1.CallsService/Carry"
CARRIED_AFTER = 4
"""Calls of a channel before the stream is opened: a command with a few calls needs none."""
MAX_CARRIED_BYTES = 128 << 10
"""Largest request that is carried: a larger one would hold up the others."""
RETRY_S = 1.0
"""Seconds until the stream is opened again after a break."""
RETRY_UNKNOWN_S = 60.0
"""The same, at a server that does not know the stream: an older version, which may be replaced."""
PLAIN = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Calls that are always calls of their own: signs of life."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_NO_METADATA = grpc.aio.Metadata()
Status = tuple[grpc.StatusCode, str, bytes]


class CarryingChannel(WrappedChannel):
    """A channel that carries calls; the rest is the channel's own."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Take over a channel, which has carried nothing yet."""
        super().__init__(channel)
        self._carrier = _CallCarrier(
            channel.stream_stream(
                CARRY,
                request_serializer=calls_pb2.CarryRequest.SerializeToString,
                response_deserializer=messages.deserializer(calls_pb2.CarryResponse),
            )
        )

    async def close(self, grace: float | None = None) -> None:
        """Begin no more calls; calls that run get `grace` seconds."""
        await self._carrier.close(grace)
        await self._channel.close(grace)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._carried(method, self._channel.unary_unary(method, *args, **kwargs), *args[:2], **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._carried(method, self._channel.unary_stream(method, *args, **kwargs), *args[:2], **kwargs)

    def _carried(
        self,
        method: str,
        plain: Callable[..., Any],
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """Return what begins a call of a method, carried if possible, with the arguments of gRPC's own."""
        if method.startswith(PLAIN):
            return plain
        carrier, serialize, deserialize = self._carrier, request_serializer or bytes, response_deserializer or bytes

        def begin(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, Any]] | None = None,
            **more: Any,
        ) -> Any:
            if carrier.ready() and not more:
                data = serialize(request)
                if len(data) <= MAX_CARRIED_BYTES:
                    return carrier.begin(method, data, timeout, metadata or (), deserialize)
            return plain(request, timeout=timeout, metadata=metadata, **more)

        return begin


class _CallCarrier:
    """The stream to one server, which is opened again after a break."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._calls: dict[int, CarriedCall] = {}
        self._number = 0
        self._asked = 0
        self._running: asyncio.Task[None] | None = None
        self._open = self._closed = False
        self._retry_at = 0.0
        self._pending = calls_pb2.CarryRequest()
        self._frames = [self._pending]
        self._pending_bytes = self._pending_parts = 0
        self._wake: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None

    def ready(self) -> bool:
        """Whether calls can be carried now; if not, perhaps soon."""
        if self._open:
            return True
        self._asked += 1
        if self._asked > CARRIED_AFTER and self._running is None and not self._closed:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._retry_at:
                self._running = loop.create_task(self._run(loop))
        return False

    def begin(
        self,
        method: str,
        request: bytes,
        timeout: float | None,
        metadata: Sequence[tuple[str, Any]],
        deserialize: Callable[[bytes], Any],
    ) -> CarriedCall:
        """Begin a call."""
        self._number += 1
        number = self._number
        call = self._calls[number] = CarriedCall(self, number, timeout, deserialize)
        frame = self._frame(len(request) + 1)
        begun = frame.begun.add(call=number, method=method, request=request, timeout_s=timeout or 0.0)
        for key, value in metadata:
            begun.metadata.add(key=key, value=value)
        return call

    def was_read(self, number: int, count: int) -> None:
        """Messages of a call have been read, of so much weight."""
        self._frame(1).read.add(call=number, messages=count)

    def cancel(self, number: int) -> None:
        """Nobody waits for a call any more."""
        if self._calls.pop(number, None) is not None and self._open:
            self._frame(1).cancelled.append(number)
        self._tell_idle()

    async def close(self, grace: float | None) -> None:
        """Begin no more calls; the stream ends with its last call, or after `grace` seconds."""
        self._closed, self._open = True, self._open and bool(grace)
        if self._calls and grace:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._idle,), timeout=grace)
        self._open = False
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _tell_idle(self) -> None:
        if self._idle is not None and not self._calls and not self._idle.done():
            self._idle.set_result(None)

    def _frame(self, nbytes: int) -> calls_pb2.CarryRequest:
        """The message that is written next, with room for so many bytes; the writer is woken."""
        full = self._pending_bytes + nbytes > FRAME_BYTES or self._pending_parts >= FRAME_PARTS
        if self._pending_bytes and full:
            self._pending = calls_pb2.CarryRequest()
            self._frames.append(self._pending)
            self._pending_bytes = self._pending_parts = 0
        self._pending_bytes += nbytes
        self._pending_parts += 1
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        return self._pending

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The stream from its beginning to its end, however it ends."""
        status: Status = grpc.StatusCode.UNAVAILABLE, "the server carries no more calls", b""
        retry_s, writing, call = RETRY_S, None, self._connect()
        try:
            if await call.read() is grpc.aio.EOF:
                return
            self._open = not self._closed
            writing = loop.create_task(self._write(call, loop))
            while (response := await call.read()) is not grpc.aio.EOF:
                if response is None:
                    raise InvalidRequest("", "malformed")
                for part in response.parts:
                    if (carried := self._calls.get(part.call)) is not None:
                        carried.take(part)
        except grpc.aio.AioRpcError as error:
            status = error.code(), error.details() or error.code().name, b""
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                retry_s = RETRY_UNKNOWN_S
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED, "", b""
        except Exception as defect:
            log.error("carried calls have failed", exc_info=defect)
        finally:
            self._open = False
            if writing is not None:
                writing.cancel()
            call.cancel()
            self._retry_at = loop.time() + retry_s
            self._running, self._wake = None, None
            self._pending, self._pending_bytes = calls_pb2.CarryRequest(), 0
            self._pending_parts = 0
            self._frames = [self._pending]
            calls, self._calls = self._calls, {}
            for carried in calls.values():
                carried.finish(status, locally=self._closed)
            self._tell_idle()

    async def _write(self, call: Any, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):  # the reader tells why
            while True:
                while self._pending_bytes:
                    frames, self._pending, self._pending_bytes = self._frames, calls_pb2.CarryRequest(), 0
                    self._pending_parts = 0
                    self._frames = [self._pending]
                    for frame in frames:
                        await call.write(frame)
                self._wake = loop.create_future()
                await self._wake

    def ended(self, number: int) -> None:
        """The server has ended a call."""
        self._calls.pop(number, None)
        self._tell_idle()


class CarriedCall:
    """A carried call, as its caller sees the call: as gRPC's call, as far as `ClientCall` and the SDK use it."""

    def __init__(
        self, carrier: _CallCarrier, number: int, timeout: float | None, deserialize: Callable[[bytes], Any]
    ) -> None:
        self._carrier = carrier
        self._number = number
        self._deserialize = deserialize
        self._messages: deque[bytes] = deque()
        self._read = 0
        self._status: Status | None = None
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._late)

    def take(self, part: calls_pb2.CallPart) -> None:
        """A part of the answer has come."""
        if part.HasField("message"):
            self._messages.append(part.message)
        if part.HasField("end"):
            end = part.end
            self._carrier.ended(self._number)
            self.finish((_CODES.get(end.code, grpc.StatusCode.UNKNOWN), end.text, end.detail))
        else:
            self._wake()

    def finish(self, status: Status, *, locally: bool = False) -> None:
        """The call is over; `locally`: by this side's doing."""
        if self._status is None:
            self._status, self._cancelled = status, locally
            if self._timer is not None:
                self._timer.cancel()
            self._wake()

    def cancel(self) -> bool:
        """Cancel the call; return False if the call has ended already."""
        if self._status is not None:
            return False
        self._messages.clear()
        self.finish((grpc.StatusCode.CANCELLED, "Locally cancelled by application!", b""), locally=True)
        self._carrier.cancel(self._number)
        return True

    def _late(self) -> None:
        self._messages.clear()
        self.finish((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", b""))
        self._carrier.cancel(self._number)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        """The only answer, once the call has ended well."""
        while self._status is None:
            await self._changed()
        self._check()
        return self._decoded(self._messages.popleft()) if self._messages else None

    async def read(self) -> Any:
        """Return the next message; gRPC's EOF after the last."""
        while not self._messages:
            if self._status is not None:
                self._check()
                return grpc.aio.EOF
            await self._changed()
        data = self._messages.popleft()
        self._read += weight(data)
        if self._read >= WINDOW // 2 and self._status is None:
            self._carrier.was_read(self._number, self._read)
            self._read = 0
        return self._decoded(data)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def _changed(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _decoded(self, data: bytes) -> Any:
        try:
            return self._deserialize(data)
        except Exception:  # as gRPC has it: None in the message's place
            log.exception("an answer cannot be decoded")
            return None

    def _check(self) -> None:
        """Raise how the call has ended, unless well."""
        assert self._status is not None, "the call goes on"
        code, text, detail = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            trailing = grpc.aio.Metadata((DETAIL_KEY, detail)) if detail else _NO_METADATA
            raise grpc.aio.AioRpcError(code, _NO_METADATA, trailing, details=text)
