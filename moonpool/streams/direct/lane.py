"""A lane on the thread of who calls: brief messages, one exchange at a time.

Who has asked looks for the answer again and again for a short time before it sleeps: a store needs some tens of
microseconds, and to be woken takes as long. On a machine with one processor it sleeps at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from moonpool.errors import FrameError, StreamBroken, TransferFailed
from moonpool.kv.scattered import Bytes, Scattered
from moonpool.streams.lanes.brief import BRIEF, BRIEF_BYTES, Brief, Place, decoded
from moonpool.streams.lanes.dialing import LaneEnd
from moonpool.streams.lanes.sockets import BUFFER_BYTES, LENGTHS, MAX_PARTS, behind

SPIN_S = 200e-6
"""How long an answer is looked for before the thread sleeps, where this process has more than one processor."""
MAX_SLEEP_S = 3600.0
"""At once: a caller's deadline may be infinite."""


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


class DirectLane:
    """The client's end of a lane that takes brief messages.

    Attributes:
        name: "local" or "tcp".
        own: regions of ours that the store may read.
        error: why it has ended.
    """

    def __init__(self, end: LaneEnd, *, spin_s: float | None = None) -> None:
        """Takes over a lane on which nothing but the handshake has been said."""
        self.name = end.name
        self.own = end.own
        self.error: Exception | None = None
        self._spin_s = spin_s if spin_s is not None else SPIN_S if _processors() > 1 else 0.0
        self._readable = end.readable
        self._sock: socket.socket = end.sock.taken_over()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._numbers = 0
        self._pulled = 0  # payloads out of regions of which the store has not been told
        self._used = threading.Lock()
        self._deadline = 0.0

    def begin(self, timeout_s: float) -> bool:
        """Begins an exchange, which `with` the lane must then be around; False when it has ended, or is in use."""
        if self.error is not None or not self._used.acquire(blocking=False):
            return False
        if self.error is not None:  # since a moment ago; who ended it may have left the rest to this thread
            self._used.release()
            self._release()
            return False
        self._deadline = time.monotonic() + timeout_s
        return True

    def __enter__(self) -> None:
        """An exchange that was begun. What is raised in it ends the lane: nobody knows where in a message it is."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.error is None:  # one of its own: the other's frames hold the caller's memory
            self.error = StreamBroken(str(error) or "a call was given up")
        self._used.release()
        if self.error is not None:
            self._release()

    def retire(self) -> bool:
        """Ends it unless it is in use; whether it has ended."""
        if self.begin(0.0):
            with self:
                self.error = StreamBroken("it was needed no longer")
        return self.error is not None

    def close(self, error: Exception) -> None:
        """Ends it, from any thread: an exchange that is under way fails. Idempotent."""
        if self.error is None:
            self.error = error
        with contextlib.suppress(OSError):  # it is closed, or the peer is gone
            self._sock.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        """Closes what it has, unless an exchange is under way, whose end does it then."""
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
        extents: Sequence[Place] = (),
        rest: bytes = b"",
        payload: Iterable[Sequence[memoryview]] = (),
        follow: int = 0,
    ) -> int:
        """Sends a message, with a number of its own, which is returned; `follow` bytes of payload follow it.

        They are sent piece by piece, each as soon as it is given.
        """
        self._numbers = number = self._numbers + 1
        message = Brief(kind, number, blocks, keys, numbers, extents, 0, self._pulled, rest)
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
        except OSError:  # tried again, it says what it is
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
                left = behind(left, sent)

    def answer(self, number: int) -> tuple[Brief, int]:
        """The next message, and the bytes of payload that follow it.

        Raises:
            FrameError: It is no brief message, or does not answer this number.
            StreamBroken: The lane has ended.
            TransferFailed: It did not come in time.
        """
        self._await(LENGTHS.size)
        size, follow = LENGTHS.unpack_from(self._buffer, self._begin)
        whole = LENGTHS.size + (size & ~BRIEF)
        if not size & BRIEF or whole > BUFFER_BYTES or follow > BRIEF_BYTES:
            raise FrameError(f"a message of {whole} bytes with {follow} bytes of payload is no brief one")
        self._await(whole)
        begin = self._begin
        self._begin += whole
        message = decoded(bytes(self._buffer[begin + LENGTHS.size : begin + whole]))
        if message.number != number:
            raise FrameError(f"number {message.number} is answered, {number} asked")
        return message, follow

    def shown(self, message: Brief) -> Bytes:
        """A payload where it lies in a region; to be copied, verified, and told of by `pulled`.

        Raises:
            FrameError: There are no such bytes.
        """
        parts = []
        for place in message.extents:
            region = self._readable.get(place.region)
            if region is None:
                raise FrameError(f"there is no region {place.region} to be read")
            parts.append(region.part(place.offset, place.length))
        return parts[0] if len(parts) == 1 else Scattered(parts)

    def pulled(self) -> None:
        """One payload has been read out of a region; the store hears of it with the next message."""
        self._pulled += 1

    def fill(self, target: memoryview) -> None:
        """Receives the next bytes of a payload that follows its message. Raises as `answer`."""
        count = min(self._end - self._begin, target.nbytes)
        target[:count] = self._buffer[self._begin : self._begin + count]
        self._begin += count
        while count < target.nbytes:
            count += self._receive(target[count:])

    def _await(self, nbytes: int) -> None:
        """Receives until so many bytes are there that nobody has taken; at most `BUFFER_BYTES`."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin + nbytes > BUFFER_BYTES:
            kept = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, len(kept)
            self._buffer[: self._end] = kept
        while self._end - self._begin < nbytes:
            self._end += self._receive(self._buffer[self._end :] if self._end else self._buffer)

    def _receive(self, room: memoryview) -> int:
        """Receives something; returns how many bytes."""
        receive, now = self._sock.recv_into, time.monotonic
        begin = now()
        if begin > self._deadline:  # something may always be there
            raise _late()
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
            raise _late()
        poll = select.poll()
        poll.register(self._sock, events)
        poll.poll(min(left_s, MAX_SLEEP_S) * 1e3)

    def _broken(self, why: str) -> StreamBroken:
        return StreamBroken(str(self.error or why))


def _late() -> TransferFailed:
    return TransferFailed("the store did not answer in time")
