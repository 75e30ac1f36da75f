"""Framed messages over a non-blocking stream socket: TCP, or the unix socket of the shared-memory transport."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.base.errors import FrameError, StreamBroken
from moonpool.base.kv.iovec import new_bytes
from moonpool.base.rpc.messages import MESSAGE_BYTES
from moonpool.base.transport.framing import LENGTH_PREFIX
from moonpool.v1 import kv_pb2

M = TypeVar("M", bound=Message)
MAX_DESCRIPTORS = 64
MAX_OPEN_BYTES = 16 << 10
BUFFER_BYTES = 64 << 10
"""Shorter messages are received together with what comes next."""
MAX_PARTS = 512


class PeerLeftSilently(StreamBroken):
    """The peer has left without a word."""


class FramedSocket:
    """A connected stream socket with one reader and one writer. Owns the socket.

    Until `watch` the coroutines that shake hands read; from then on `peek`, `skip` and `fill`, which take what is there
    and never wait.

    Attributes:
        error: given to `close`.
        received_bytes: so far.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._drained = False  # empty at the last look
        self._watcher: Callable[[], None] | None = None
        self._waits: dict[asyncio.Future[None], None] = {}
        self.error: Exception | None = None
        self.received_bytes = 0

    @property
    def raw_socket(self) -> socket.socket:
        """For looks at the connection."""
        return self._sock

    async def secure(self) -> None:
        """Make the connection secure, if the transport is; to be called before any byte is sent or received.

        Raises:
            PermissionDenied: The peer must not use the transport.
            StreamBroken: The connection broke.
        """

    @property
    def has_more(self) -> bool:
        """Whether received bytes are waiting."""
        return self._begin < self._end

    def watch(self, readable: Callable[[], None]) -> None:
        """Call `readable` whenever there is something to be received, until `unwatch`."""
        if self.error is None and self._watcher is None:
            self._watcher = readable
            self._loop.add_reader(self._fd, self._ready)

    def unwatch(self) -> None:
        """The opposite of `watch`. Idempotent."""
        if self._watcher is not None:
            self._watcher = None
            if self.error is None:
                self._loop.remove_reader(self._fd)

    def peek(self, nbytes: int) -> memoryview | None:
        """The next bytes, at most `BUFFER_BYTES`; the same bytes come again until `skip`. None: no bytes are there yet.

        Raises:
            StreamBroken: The peer has closed the other end, or the connection broke.
            Exception: The error given to `close`.
        """
        while self._end - self._begin < nbytes:
            if (self._drained and self.error is None) or not self._more():
                return None
        return self._buffer[self._begin : self._begin + nbytes]

    def skip(self, nbytes: int) -> None:
        """Pass over bytes that were peeked at."""
        self._begin += nbytes

    def fill(self, targets: list[memoryview]) -> list[memoryview] | None:
        """Receive next bytes into targets, one after the other; return the unfilled rest of the targets.

        None: no bytes are there, and new bytes call the watcher. Raises as `peek`.
        """
        if self._begin == self._end and len(targets) == 1 and targets[0].nbytes < BUFFER_BYTES:
            self._more()
        if self._begin < self._end:
            return remaining_parts(targets, self._from_buffer(targets[0]))
        count = self._received(self._sock.recvmsg_into, targets[:MAX_PARTS])
        return remaining_parts(targets, count) if count else None

    def send_now(self, parts: Sequence[memoryview | bytes]) -> list[memoryview]:
        """Send what the system takes at once; return the rest. Raises as `send`."""
        if self.error is not None:
            raise self.error
        if len(parts) == 1 and (whole := self._sent_whole(parts[0])) is not None:
            return whole
        left = [view for part in parts if (view := memoryview(part)).nbytes]
        nbytes = sum([view.nbytes for view in left])
        while nbytes:
            try:
                sent = self._sock.sendmsg(left if len(left) <= MAX_PARTS else left[:MAX_PARTS])
            except (BlockingIOError, InterruptedError):
                return left
            except OSError as error:
                raise self._failure(error) from error
            nbytes -= sent
            left = remaining_parts(left, sent) if nbytes else []
        return left

    def _sent_whole(self, data: memoryview | bytes) -> list[memoryview] | None:
        """Send one part, the usual case; return the rest, or None if the system took no byte."""
        try:
            sent = self._sock.send(data)
        except OSError:  # the next try raises the error
            return None
        return [] if sent == len(data) else [memoryview(data)[sent:]]

    async def send(self, parts: Sequence[memoryview | bytes]) -> None:
        """Return when the system has taken all parts: their memory is free then. To be called by one task at a time.

        Raises:
            StreamBroken: The connection broke.
            Exception: The error given to `close`.
        """
        left = self.send_now(parts)
        while left:
            await self._wait(self._loop.add_writer, self._loop.remove_writer)
            left = self.send_now(left)

    async def receive_message(self, cls: type[M], most: int = MESSAGE_BYTES) -> M:
        """The next message, at most so many bytes long, without a payload.

        Raises:
            FrameError: The bytes are no message.
            StreamBroken: As `peek`.
        """
        return _parse_message(cls, await self._after(await self._receive(LENGTH_PREFIX.size), most))

    async def receive_opening(self, fds: list[int]) -> kv_pb2.TransportOpen:
        """A connection's first message; descriptors with the message go to `fds`. Raises as `receive_message`."""
        while True:
            await self._wait(self._loop.add_reader, self._loop.remove_reader)
            try:
                data, found, _, _ = socket.recv_fds(self._sock, LENGTH_PREFIX.size, MAX_DESCRIPTORS)
                break
            except (BlockingIOError, InterruptedError):  # a part of a record came
                continue
            except OSError as error:
                raise self._failure(error) from error
        fds += found
        if not data:
            raise PeerLeftSilently("the peer has closed its end")
        if len(data) < LENGTH_PREFIX.size:
            raise StreamBroken("the peer has closed its end")
        return _parse_message(kv_pb2.TransportOpen, await self._after(data, MAX_OPEN_BYTES))

    async def _after(self, lengths: bytes, most: int) -> bytes:
        size, follow = LENGTH_PREFIX.unpack(lengths)
        if size > most or follow:
            raise FrameError(f"a message of {size} bytes with {follow} bytes of payload")
        return await self._receive(size)

    async def _receive(self, nbytes: int) -> bytes:
        """The next bytes; while hands are shaken."""
        data = new_bytes(nbytes)
        left: list[memoryview] = [data] if nbytes else []
        while left:
            if (found := self.fill(left)) is None:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                self._drained = False
            else:
                left = found
        return bytes(data)

    def send_message(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a first, short message with descriptors; raise StreamBroken if the system takes only a part."""
        text = message.SerializeToString()
        data = LENGTH_PREFIX.pack(len(text), 0) + text
        try:
            sent = self._send_first(data, fds)
        except OSError as error:
            raise self._failure(error) from error
        if sent != len(data):
            raise StreamBroken("a short message was not taken at once")

    def _send_first(self, data: bytes, fds: Sequence[int]) -> int:
        return socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)

    def taken_over(self) -> socket.socket:
        """Hand the socket over to a new owner, which closes the socket in the end; do not use this object any more.

        Raises:
            FrameError: unrequested bytes have come; the socket is closed then.
        """
        if self.has_more:
            error = FrameError("the peer speaks without being asked")
            self.close(error)
            raise error
        return self._sock

    def close(self, error: Exception) -> None:
        """Close the socket; waiting callers get `error`. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            self._loop.call_soon(watcher)  # the watcher meets the error
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        for future in self._waits:
            if not future.done():
                future.set_exception(error)
        self._sock.close()

    def _ready(self) -> None:
        self._drained = False
        if self._watcher is not None:
            self._watcher()

    def _from_buffer(self, data: memoryview) -> int:
        """Move bytes that have been received already; return their number."""
        count = min(self._end - self._begin, data.nbytes)
        data[:count] = self._buffer[self._begin : self._begin + count]
        self._begin += count
        return count

    def _more(self) -> bool:
        """Receive something into the buffer; False if no bytes are there."""
        kept = self._end - self._begin
        if self._begin:
            if kept:
                self._buffer[:kept] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, kept
        room = self._buffer[kept:] if kept else self._buffer
        count = self._received(self._sock.recv_into, room)
        self._end += count
        self._drained = count < room.nbytes  # there was no more
        return count > 0

    def _received(self, receive: Callable[[Any], Any], where: Any) -> int:
        """Number of bytes that `receive` has received, 0 if none are there."""
        if self.error is not None:
            raise self.error
        if self._drained:
            return 0
        try:
            answer = receive(where)
        except (BlockingIOError, InterruptedError):
            self._drained = True
            return 0
        except OSError as error:
            raise self._failure(error) from error
        count: int = answer if isinstance(answer, int) else answer[0]
        if not count:
            raise StreamBroken("the peer has closed its end")
        self.received_bytes += count
        return count

    async def _wait(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        """Until the socket can be read or written."""
        if self.error is not None:
            raise self.error
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits[future] = None
        add(self._fd, _wake, future)
        try:
            await future
        finally:
            self._waits.pop(future, None)
            if self.error is None:
                remove(self._fd)

    def _failure(self, error: OSError) -> Exception:
        return self.error or StreamBroken(error.strerror or repr(error))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def remaining_parts(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of parts after their first bytes."""
    for index, part in enumerate(parts):
        if sent < part.nbytes:
            return [part[sent:], *parts[index + 1 :]]
        sent -= part.nbytes
    return []


def _parse_message(cls: type[M], data: bytes) -> M:
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise FrameError(f"malformed {cls.__name__}: {error}") from error
