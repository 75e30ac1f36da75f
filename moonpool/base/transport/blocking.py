"""The blocking path: one-shot messages on the caller's thread, without an event loop in between.

The caller polls for the answer for a short time before sleeping: a store answers within tens of microseconds, and
waking up takes as long. On a machine with one processor the caller sleeps at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from moonpool.base.errors import FrameError, MoonpoolError, StreamBroken, TransferFailed
from moonpool.base.kv.iovec import BytesLike, Iovec
from moonpool.base.rpc.channels import StreamCall
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.base import ConnectionEnd
from moonpool.base.transport.client_stream import ClientStream, Req, Res
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.framed_socket import BUFFER_BYTES, MAX_PARTS, remaining_parts
from moonpool.base.transport.framing import (
    LENGTH_PREFIX,
    ONE_SHOT_BYTES,
    ONE_SHOT_FLAG,
    OneShotMessage,
    PayloadExtent,
    decode_one_shot,
)
from moonpool.base.transport.regions import RemoteRegion, SharedRegion
from moonpool.base.transport.registry import transport_name
from moonpool.v1 import kv_pb2

SPIN_S = 200e-6
"""How long to look for an answer before the thread sleeps, if this process has more than one processor."""
MAX_SLEEP_S = 3600.0
"""At once: a caller's deadline may be infinite."""


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


class BlockingConnection:
    """The client's end of a connection that takes one-shot messages.

    Attributes:
        name: "local", "tcp" or "tls".
        own: our regions that the store may read.
        error: why the connection has ended.
    """

    def __init__(self, end: ConnectionEnd, *, spin_s: float | None = None) -> None:
        """Take over a connection with only the handshake done."""
        self.name = end.name
        self.own = end.own
        self.error: Exception | None = None
        self._spin_s = spin_s if spin_s is not None else SPIN_S if _processors() > 1 else 0.0
        self._readable = end.readable
        self._sock: socket.socket = end.sock.taken_over()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._numbers = 0
        self._pulled = 0  # payloads out of regions that the store has not been told about
        self._used = threading.Lock()
        self._deadline = 0.0

    def begin(self, timeout_s: float) -> bool:
        """Begin an exchange; use the connection in `with` then. False if the connection has ended, or is in use."""
        if self.error is not None or not self._used.acquire(blocking=False):
            return False
        if self.error is not None:  # since a moment ago; the ending thread may have left the rest to this thread
            self._used.release()
            self._release()
            return False
        self._deadline = time.monotonic() + timeout_s
        return True

    def __enter__(self) -> None:
        """An exchange that was begun. An exception inside ends the connection: the place in a message is unknown."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.error is None:  # the caller's own: the other's frames hold the caller's memory
            self.error = StreamBroken(str(error) or "a call was given up")
        self._used.release()
        if self.error is not None:
            self._release()

    def retire(self) -> bool:
        """End the connection unless in use; return whether the connection has ended."""
        if self.begin(0.0):
            with self:
                self.error = StreamBroken("it was needed no longer")
        return self.error is not None

    def close(self, error: Exception) -> None:
        """End the connection, from any thread: an exchange that is under way fails. Idempotent."""
        if self.error is None:
            self.error = error
        with contextlib.suppress(OSError):  # closed, or the peer is gone
            self._sock.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        """Close everything; if an exchange is under way, the exchange's end closes."""
        if not self._used.acquire(blocking=False):
            return
        self._sock.close()
        for region in self._readable.values():
            region.close()
        self._used.release()

    def ask(
        self,
        kind: int,
        blocks: int,
        keys: bytes,
        numbers: Sequence[int] = (),
        extents: Sequence[PayloadExtent] = (),
        rest: bytes = b"",
        payload: Iterable[Sequence[memoryview]] = (),
        follow: int = 0,
    ) -> int:
        """Send a message with a new number, which is returned; `follow` bytes of payload follow.

        Each payload piece is sent as soon as given.
        """
        self._numbers = number = self._numbers + 1
        message = OneShotMessage(kind, number, blocks, keys, numbers, extents, 0, self._pulled, rest)
        self._pulled = 0
        if not follow:
            self._send_short(message.encoded())
            return number
        left = [memoryview(message.encoded(follow))]
        for parts in payload:
            self._send([*left, *parts])
            left = []
        return number

    def _send_short(self, data: bytes) -> None:
        try:
            sent = self._sock.send(data)
        except OSError:  # a retry raises the error
            sent = 0
        if sent < len(data):
            self._send([memoryview(data)[sent:]])

    def _send(self, left: list[memoryview]) -> None:
        while left:
            try:
                sent = self._sock.sendmsg(left if len(left) <= MAX_PARTS else left[:MAX_PARTS])
            except (BlockingIOError, InterruptedError):
                self._sleep(select.POLLOUT)
            except OSError as error:
                raise self._broken(error.strerror or repr(error)) from error
            else:
                left = remaining_parts(left, sent)

    def answer(self, number: int) -> tuple[OneShotMessage, int]:
        """The next message, and the number of payload bytes that follow.

        Raises:
            FrameError: The message is not a one-shot message, or does not answer this number.
            StreamBroken: The connection has ended.
            TransferFailed: No message came in time.
        """
        self._await(LENGTH_PREFIX.size)
        size, follow = LENGTH_PREFIX.unpack_from(self._buffer, self._begin)
        whole = LENGTH_PREFIX.size + (size & ~ONE_SHOT_FLAG)
        if not size & ONE_SHOT_FLAG or whole > BUFFER_BYTES or follow > ONE_SHOT_BYTES:
            raise FrameError(f"a message of {whole} bytes with {follow} bytes of payload is no one-shot message")
        self._await(whole)
        begin = self._begin
        self._begin += whole
        message = decode_one_shot(bytes(self._buffer[begin + LENGTH_PREFIX.size : begin + whole]))
        if message.number != number:
            raise FrameError(f"number {message.number} is answered, {number} asked")
        return message, follow

    def shown(self, message: OneShotMessage) -> BytesLike:
        """A payload in place in a region; to be copied, verified, and reported by `pulled`.

        Raises:
            FrameError: There are no such bytes.
        """
        parts = []
        for place in message.extents:
            region = self._readable.get(place.region)
            if region is None or isinstance(region, RemoteRegion):
                raise FrameError(f"there is no region {place.region} to be read")
            parts.append(region.part(place.offset, place.length))
        return parts[0] if len(parts) == 1 else Iovec(parts)

    def pulled(self) -> None:
        """Note that a payload has been read out of a region; the next message tells the store."""
        self._pulled += 1

    def fill(self, target: memoryview) -> None:
        """Receive the next payload bytes behind the message. Raises as `answer`."""
        count = min(self._end - self._begin, target.nbytes)
        target[:count] = self._buffer[self._begin : self._begin + count]
        self._begin += count
        while count < target.nbytes:
            count += self._receive(target[count:])

    def _await(self, nbytes: int) -> None:
        """Receive until `nbytes` untaken bytes are there; at most `BUFFER_BYTES`."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin + nbytes > BUFFER_BYTES:
            kept = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, len(kept)
            self._buffer[: self._end] = kept
        while self._end - self._begin < nbytes:
            self._end += self._receive(self._buffer[self._end :] if self._end else self._buffer)

    def _receive(self, room: memoryview) -> int:
        """Receive something; return how many bytes."""
        receive, now = self._sock.recv_into, time.monotonic
        begin = now()
        if begin > self._deadline:  # something may always be there
            raise _timed_out()
        spin_until = begin + self._spin_s
        while True:
            try:
                count = receive(room)
            except (BlockingIOError, InterruptedError):
                if now() >= spin_until:
                    self._sleep(select.POLLIN)
            except OSError as error:
                raise self._broken(error.strerror or repr(error)) from error
            else:
                if not count:
                    raise self._broken("the peer has closed its end")
                return count

    def _sleep(self, events: int) -> None:
        """Until something may have happened, for the caller to look; raises TransferFailed after the deadline."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise _timed_out()
        poll = select.poll()
        poll.register(self._sock, events)
        poll.poll(min(left_s, MAX_SLEEP_S) * 1e3)

    def _broken(self, why: str) -> StreamBroken:
        return StreamBroken(str(self.error or why))


def _timed_out() -> TransferFailed:
    return TransferFailed("the store did not answer in time")


log = get_logger(__name__)


class BlockingStream(ClientStream[Req, Res]):
    """One call and the call's direct connection. When either ends, both have.

    Attributes:
        direct: the connection, once open.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], StreamCall],
        hello: Req,
        dialer: TransportDialer,
        *,
        mailbox_bytes: int = 0,
        share: Sequence[SharedRegion] = (),
    ) -> None:
        """Does not connect yet.

        Args:
            name: The peer and the purpose.
            connect: Starts the call.
            hello: First message sent; says which transports this side can use.
            dialer: Opens the connection.
            mailbox_bytes: Size of the memory where the store may write payloads; 0 on a stream of puts.
            share: Memory that the store may read, besides the memory of `dialer`.
        """
        super().__init__(name, connect, hello)
        self.direct: BlockingConnection | None = None
        self._dialer = dialer
        self._mailbox_bytes = mailbox_bytes
        self._share = share
        self._welcome: kv_pb2.StreamWelcome | None = None

    async def open(self) -> BlockingConnection | None:
        """Open call and connection; None where that is not to be had."""
        try:
            await self.start()
            self.direct = await self._join()
        except MoonpoolError as error:
            log.warning("no direct connection", stream=self.name, error=str(error))
        except BaseException:
            self.break_(StreamBroken("given up"))
            raise
        if self.direct is None or self.error is not None:
            await self.aclose()
            if self.direct is not None and self.error is not None:
                self.direct.close(self.error)  # the call has ended meanwhile
            return None
        log.info("transport opened", stream=self.name, transport=self.direct.name)
        return self.direct

    async def _join(self) -> BlockingConnection | None:
        welcome = self._welcome
        assert welcome is not None, "the handshake is over"
        epoch, loop = welcome.receiver.epoch, asyncio.get_running_loop()
        if not welcome.transport.brief or loop.time() < self._dialer.retry_at(epoch):
            return None
        try:
            return BlockingConnection(
                await self._dialer.join(welcome.transport, epoch, self._mailbox_bytes, self._share)
            )
        except (MoonpoolError, OSError, TimeoutError) as error:
            self._dialer.failed(self.name, transport_name(welcome.transport.kind), epoch, error)
            return None

    def on_message(self, message: Res, payload: Any) -> None:
        """The welcome; no other message comes on the call."""
        received: Any = message
        if self._welcome is not None or received.WhichOneof("message") != "welcome":
            raise StreamBroken("something came that is not the welcome")
        self._welcome = received.welcome
        self.ready()

    def on_broken(self, error: Exception) -> None:
        """The connection ends with the call."""
        if self.direct is not None:
            self.direct.close(error)
