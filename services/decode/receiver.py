"""Receives KV: one object per stream from a prefill process, writing slices where they belong.

Owns the check of every frame (stream, transfer, generation, checksum, sizes, once only) before a byte of it is written.
Knows nothing of what happens to a sequence afterwards: `arrived` and `end` are told.
"""

import time
from collections.abc import Callable

from moonpool.errors import FrameError, InvalidRequest, StreamBroken, TransferFailed
from moonpool.kv.frames import split_run
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import KVPool
from moonpool.streams.outbox import Outbox
from moonpool.streams.receiving import FrameReceiver
from moonpool.streams.transfer import InboundTransfer, TransferState
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.seats import Seat, Seats

log = get_logger(__name__)


class Receiver:
    """One stream's receiving end.

    Args:
        sender: who sends.
        instance: who we are.
        seats: whose KV may come.
        pool: where it goes.
        arrived: told when all KV of a seat has come.
        end: ends a seat, with the reason; answers on this stream.
        on_change: blocks were bound.
    """

    def __init__(
        self,
        sender: kv_pb2.Instance,
        instance: kv_pb2.Instance,
        seats: Seats,
        pool: KVPool,
        arrived: Callable[[Seat], None],
        end: Callable[[Seat, str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.outbox = Outbox()
        self.received_bytes = 0
        self.stray_frames = 0
        self._sender = sender
        self._instance = instance
        self._seats = seats
        self._pool = pool
        self._layout: KVLayout = pool.layout
        self._arrived = arrived
        self._end = end
        self._on_change = on_change
        self._credits = FrameReceiver()
        self._receiving: set[int] = set()  # transfers that were opened here and have no verdict

    @property
    def credits_kept(self) -> int:
        """Bytes taken and not handed back to the sender."""
        return self._credits.kept

    def welcome(self) -> None:
        """Answers the hello."""
        self.outbox.post(decode_pb2.ReceiveKVResponse(welcome=self._credits.welcome(self._instance)))

    def take(self, message: decode_pb2.ReceiveKVRequest, payload: memoryview) -> None:
        """Takes one message.

        Raises:
            InvalidRequest: it has no business here; the stream cannot go on.
            StreamBroken: the sender reads nothing of what it is told.
        """
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open)
            case "frame":
                self._frame(message.frame, payload)
            case "close":
                self._close(message.close)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def verdict(self, transfer: InboundTransfer) -> None:
        """Tells the sender how a transfer has ended."""
        self._answer(
            transfer.transfer_id,
            transfer.generation,
            complete=transfer.state is TransferState.COMPLETE,
            reason=transfer.reason,
        )
        self._receiving.discard(transfer.transfer_id)
        credit = None if self._receiving else self._credits.idle()
        if credit is not None:
            self._post(decode_pb2.ReceiveKVResponse(credit=credit))

    def broken(self) -> None:
        """The stream has ended: what it had not brought whole will not come."""
        self.outbox.close(StreamBroken("the sender's stream ended"))
        for seat in self._seats:
            if seat.source is self:
                seat.source = None
                if not seat.complete:
                    self._end(seat, "the sender's stream broke")

    def _open(self, message: decode_pb2.TransferOpen) -> None:
        seat = self._seats.get(message.transfer_id, message.generation)
        if message.decode_incarnation != self._instance.incarnation:
            self._answer(
                message.transfer_id,
                message.generation,
                complete=False,
                reason="promised by an earlier life of this instance",
            )
            return
        if seat is None:
            self._answer(message.transfer_id, message.generation, complete=False, reason="no such transfer (any more)")
            return
        try:
            self._seats.bind(seat, time.monotonic())
        except TransferFailed as error:
            self._answer(message.transfer_id, message.generation, complete=False, reason=str(error))
            return
        seat.source = self
        self._receiving.add(message.transfer_id)
        self._on_change()
        if seat.complete:
            self._complete(seat)

    def _frame(self, header: kv_pb2.FrameHeader, payload: memoryview) -> None:
        self.received_bytes += payload.nbytes
        seat = self._seats.get(header.session, header.generation)
        if seat is None or seat.source is not self or seat.transfer.state is not TransferState.RECEIVING:
            # Its transfer has ended here while it was on its way, and its blocks may be somebody else's by now.
            self.stray_frames += 1
        else:
            self._write(seat, header, payload)
        credit = self._credits.consumed(payload.nbytes, idle=not self._receiving)
        if credit is not None:
            self.outbox.post(decode_pb2.ReceiveKVResponse(credit=credit))

    def _write(self, seat: Seat, header: kv_pb2.FrameHeader, payload: memoryview) -> None:
        try:
            for run, data, hashes in seat.transfer.opener.open(header, payload):
                seat.transfer.accept(run, time.monotonic())
                for (index, _, piece), value in zip(split_run(run, data, self._layout), hashes, strict=True):
                    self._pool.write(run.layer, seat.block_table[index], piece, value)
        except (FrameError, TransferFailed) as error:
            log.warning("bad frame", sender=self._sender.id, request=seat.arrival.request_id, reason=str(error))
            if seat.complete:  # nothing is missing, so what was wrong came on top of it: the KV itself is whole
                self._complete(seat)
            else:
                self._end(seat, str(error))
            return
        if seat.complete:
            self._complete(seat)

    def _complete(self, seat: Seat) -> None:
        self._seats.completed(seat)
        self.verdict(seat.transfer)
        self._arrived(seat)

    def _close(self, message: decode_pb2.TransferClose) -> None:
        seat = self._seats.get(message.transfer_id, message.generation)
        if seat is None or seat.source is not self or seat.transfer.done:
            return
        self._end(
            seat, "the sender gave up" if message.aborted else f"closed with {seat.transfer.missing()} slices missing"
        )

    def _answer(self, transfer_id: int, generation: int, *, complete: bool, reason: str) -> None:
        status = decode_pb2.TRANSFER_STATUS_COMPLETE if complete else decode_pb2.TRANSFER_STATUS_FAILED
        verdict = decode_pb2.TransferVerdict(
            transfer_id=transfer_id, generation=generation, status=status, reason=reason
        )
        self._post(decode_pb2.ReceiveKVResponse(verdict=verdict))

    def _post(self, answer: decode_pb2.ReceiveKVResponse) -> None:
        try:
            self.outbox.post(answer)
        except StreamBroken:
            return  # the sender learns of it by the stream's end
