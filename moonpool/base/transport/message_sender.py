"""The sending half of a connection over a socket: payloads are sent from where they lie."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.errors import StreamBroken
from moonpool.base.transport.connection import OutgoingItem, UnsentRest
from moonpool.base.transport.fault_injection import CONNECTION_BROKEN, ConnectionBreaker
from moonpool.base.transport.framed_socket import FramedSocket
from moonpool.base.transport.framing import (
    LENGTH_PREFIX,
    OneShotAnswer,
)
from moonpool.base.transport.payloads import PendingPayload
from moonpool.base.transport.region_payloads import PlacedPayloads
from moonpool.v1 import kv_pb2


class MessageSender:
    """A connection's sending half."""

    def __init__(
        self,
        sock: FramedSocket,
        placed: PlacedPayloads,
        take_reads: Callable[[], int],
        breaks: ConnectionBreaker | None,
    ) -> None:
        """Take the socket; payloads in regions; reads to report; injected faults."""
        self._sock = sock
        self._placed = placed
        self._take_reads = take_reads
        self._breaks = breaks
        self._unsent: list[PendingPayload] = []  # their sending failed; they fail when the connection is closed

    def start(self, item: OutgoingItem) -> UnsentRest | None:
        """Send what the system takes at once; the rest must be given to `finish` before anything else."""
        held = item if isinstance(item, PendingPayload) else None
        try:
            if isinstance(item, OneShotAnswer):
                return self._start_answer(item)
            if isinstance(item, kv_pb2.TransportFrame):
                return self._send(item, [], None)
            if held is None:
                data = item if isinstance(item, bytes) else item.SerializeToString()  # type: ignore[union-attr]
                return self._send(self._frame(data), [], None)
            self._break_if_injected()
            return self._start_held(held)
        except Exception as error:  # the next writer meets the error
            if held is not None:
                self._unsent.append(held)
            return UnsentRest([], held, error)

    async def finish(self, unsent: UnsentRest) -> None:
        """Send what was left. Not to be cancelled.

        Raises:
            StreamBroken: The connection has ended.
        """
        if unsent.error is not None:
            raise unsent.error
        try:
            await self._sock.send(unsent.parts)
        except BaseException:
            if unsent.held is not None:
                self._unsent.append(unsent.held)
            raise
        if unsent.held is not None:
            unsent.held.finish()

    def fail(self, error: Exception) -> None:
        """Payloads that are still held fail with `error`."""
        self._placed.fail(error)
        for held in self._unsent:
            held.fail(error)
        self._unsent.clear()

    def _frame(self, data: bytes) -> kv_pb2.TransportFrame:
        """Around a message; reports what was read on the way."""
        reads = self._take_reads()
        return kv_pb2.TransportFrame(message=data, pulled=reads) if reads else kv_pb2.TransportFrame(message=data)

    def _start_held(self, item: PendingPayload) -> UnsentRest | None:
        frame = self._frame(item.message.SerializeToString())
        # A store's memory is never mapped by others: it copies to memory that the reader lends (ADR 25).
        place = self._placed.copy(item.parts, item.nbytes)
        if place is not None:
            frame.extents.add(**place._asdict())
            unsent = self._send(frame, [], None)
            item.finish()  # the mailbox holds a copy
            return unsent
        rest = self._placed.point_to(item, frame)
        if rest is not None:
            return self._send(frame, rest, None)
        unsent = self._send(frame, item.parts, item)
        if unsent is None:
            item.finish()
        return unsent

    def _send(
        self, frame: kv_pb2.TransportFrame, parts: list[memoryview], held: PendingPayload | None
    ) -> UnsentRest | None:
        data = frame.SerializeToString()
        left = self._sock.send_now([LENGTH_PREFIX.pack(len(data), sum(part.nbytes for part in parts)) + data, *parts])
        return UnsentRest(left, held) if left else None

    def _break_if_injected(self) -> None:
        if self._breaks is not None and self._breaks():
            self._sock.close(StreamBroken(CONNECTION_BROKEN))

    def _start_answer(self, item: OneShotAnswer) -> UnsentRest | None:
        message, pieces = item
        nbytes = sum([piece.nbytes for piece in pieces])
        self._break_if_injected()
        place = self._placed.copy(pieces, nbytes)
        follow = nbytes if place is None else 0
        left = self._sock.send_now([message.encoded(follow, place), *(pieces if follow else ())])
        return UnsentRest(left) if left else None
