"""Bytes over a non-blocking socket: parts sent as they lie in memory, and received where they shall lie."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.errors import FrameError, StreamBroken
from moonpool.rpc.limits import MESSAGE_BYTES
from moonpool.v1 import kv_pb2

M = TypeVar("M", bound=Message)

LENGTHS = struct.Struct("<II")
"""Before each message: its bytes, and those of the payload that follow it."""
MAX_DESCRIPTORS = 64
MAX_OPEN_BYTES = 4096

BUFFER_BYTES = 64 << 10
"""What is shorter is received together with what comes behind it."""
TURN_BYTES = 1 << 20
"""After so many bytes that were there at once, others get a turn of the event loop."""
_MAX_PARTS = 512
_new_bytes = ctypes.pythonapi.PyByteArray_FromStringAndSize
"""Bytes that are not zeros first: all of them are received."""
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


class NothingSaid(StreamBroken):
    """The peer has left without a word."""


class LaneSocket:
    """A connected stream socket with one reader and one writer. Owns it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._turn = 0
        self._waits: set[asyncio.Future[None]] = set()
        self._error: Exception | None = None

    @property
    def has_more(self) -> bool:
        """Something has been received that nobody has asked for yet."""
        return self._begin < self._end

    async def receive(self, nbytes: int) -> memoryview:
        """The next bytes, in memory of their own.

        Raises:
            StreamBroken: The peer has closed its end, or the connection broke.
            Exception: The error given to `close`.
        """
        data = memoryview(_new_bytes(None, nbytes))
        await self.receive_into(data)
        return data

    async def receive_into(self, data: memoryview) -> None:
        """Fills `data` with the next bytes; raises as `receive`."""
        at = self._from_buffer(data)
        while at < data.nbytes:
            if data.nbytes - at >= BUFFER_BYTES:
                at += await self._receive_some(data[at:])
            else:
                self._begin, self._end = 0, await self._receive_some(self._buffer)
                at += self._from_buffer(data[at:])

    async def receive_onto(self, targets: Sequence[memoryview], live: Callable[[], bool]) -> bool:
        """Fills targets with the next bytes, one after the other; drops the rest, and says False, once not `live`.

        Raises as `receive`.
        """
        left = list(targets)
        while left:
            if not live():
                await self.receive(sum(target.nbytes for target in left))
                return False
            if self._begin < self._end:
                left = _behind(left, self._from_buffer(left[0]))
                continue
            try:
                count, _, _, _ = self._sock.recvmsg_into(left[:_MAX_PARTS])
            except (BlockingIOError, InterruptedError):
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError as error:
                raise self._failure(error) from error
            if not count:
                raise StreamBroken("the peer has closed its end")
            left = _behind(left, count)
        return True

    async def send(self, parts: Sequence[memoryview | bytes]) -> None:
        """Returns when the system has taken all parts: their memory is free then. To be called by one task at a time.

        Raises:
            StreamBroken: The connection broke.
            Exception: The error given to `close`.
        """
        left = [view for part in parts if (view := memoryview(part)).nbytes]
        while left:
            try:
                sent = self._sock.sendmsg(left[:_MAX_PARTS])
            except (BlockingIOError, InterruptedError):
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
                continue
            except OSError as error:
                raise self._failure(error) from error
            left = _behind(left, sent)

    async def receive_message(self, cls: type[M], most: int = MESSAGE_BYTES) -> M:
        """The next message, of at most so many bytes, without a payload.

        Raises:
            FrameError: It is not one.
            StreamBroken: As `receive`.
        """
        return _parsed(cls, await self._after(await self.receive(LENGTHS.size), most))

    async def receive_opening(self, fds: list[int]) -> kv_pb2.LaneOpen:
        """A connection's first message; the descriptors that came with it go to `fds`. Raises as `receive_message`."""
        await self._wait(self._loop.add_reader, self._loop.remove_reader)
        try:
            data, found, _, _ = socket.recv_fds(self._sock, LENGTHS.size, MAX_DESCRIPTORS)
        except OSError as error:
            raise self._failure(error) from error
        fds += found
        if not data:
            raise NothingSaid("the peer has closed its end")
        if len(data) < LENGTHS.size:
            raise StreamBroken("the peer has closed its end")
        return _parsed(kv_pb2.LaneOpen, await self._after(data, MAX_OPEN_BYTES))

    async def _after(self, lengths: bytes | memoryview, most: int) -> bytes:
        size, follow = LENGTHS.unpack(lengths)
        if size > most or follow:
            raise FrameError(f"a message of {size} bytes with {follow} bytes of payload")
        return bytes(await self.receive(size))

    def send_message(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a first, short message with descriptors; raises StreamBroken if it is not taken at once."""
        text = message.SerializeToString()
        data = LENGTHS.pack(len(text), 0) + text
        try:
            sent = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
        except OSError as error:
            raise self._failure(error) from error
        if sent != len(data):
            raise StreamBroken("a short message was not taken at once")

    def close(self, error: Exception) -> None:
        """Closes it; who waits gets `error`. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        for future in self._waits:
            if not future.done():
                future.set_exception(error)
        self._sock.close()

    def _from_buffer(self, data: memoryview) -> int:
        """Moves what has been received already; returns the number of bytes."""
        count = min(self._end - self._begin, data.nbytes)
        data[:count] = self._buffer[self._begin : self._begin + count]
        self._begin += count
        return count

    async def _receive_some(self, data: memoryview) -> int:
        if self._turn >= TURN_BYTES:
            self._turn = 0
            await asyncio.sleep(0)
        while True:
            try:
                count = self._sock.recv_into(data)
            except (BlockingIOError, InterruptedError):
                self._turn = 0
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError as error:
                raise self._failure(error) from error
            if not count:
                raise StreamBroken("the peer has closed its end")
            self._turn += count
            return count

    async def _wait(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        """Until the socket can be read or written."""
        if self._error is not None:
            raise self._error
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits.add(future)
        add(self._fd, _wake, future)
        try:
            await future
        finally:
            self._waits.discard(future)
            if self._error is None:
                remove(self._fd)

    def _failure(self, error: OSError) -> Exception:
        return self._error or StreamBroken(error.strerror or repr(error))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _behind(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of parts after their first bytes."""
    for index, part in enumerate(parts):
        if sent < part.nbytes:
            return [part[sent:], *parts[index + 1 :]]
        sent -= part.nbytes
    return []


def _parsed(cls: type[M], data: bytes) -> M:
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise FrameError(f"malformed {cls.__name__}: {error}") from error
