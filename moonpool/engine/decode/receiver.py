"""Receives KV: one object per stream from a prefill process.

Each frame is checked before the frame's slices are written.
"""

from collections.abc import Callable, Sequence

from moonpool.base.errors import FrameError, InvalidRequest, StreamBroken, TransferFailed
from moonpool.base.kv.frames import DamagedSliceError, SliceRun, split_run, whole_runs
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.kv_transfer.inbound_transfer import InboundTransfer, TransferState
from moonpool.base.kv_transfer.read_server import FrameReceiver
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.base.transport.payloads import ReceiveBuffer
from moonpool.base.transport.send_queue import SendQueue
from moonpool.engine.decode.executor import DecodeExecutor
from moonpool.engine.decode.live_requests import LiveRequest
from moonpool.v1 import decode_pb2, kv_pb2

log = get_logger(__name__)


class TransferReceiver:
    """One stream's receiving end.

    Args:
        sender: the prefill instance.
        instance: this instance.
        executor: has the requests.
        pool: KV is written there.
        forgotten: `(keys, tenant)` -> deletions of such blocks, carried out here.
        beside: where frames land that would keep the loop from dispatching steps.
    """

    def __init__(
        self,
        sender: kv_pb2.Instance,
        instance: kv_pb2.Instance,
        executor: DecodeExecutor,
        pool: KVPool,
        forgotten: Callable[[Sequence[BlockKey], str], Sequence[str]],
        beside: ThreadOffload,
    ) -> None:
        self.send_queue = SendQueue()
        self.received_bytes = 0
        self.stray_frames = 0
        self._sender = sender
        self._instance = instance
        self._executor = executor
        self._pool = pool
        self._forgotten = forgotten
        self._beside = beside
        self._layout: KVLayout = pool.layout
        self._credits = FrameReceiver()
        self._receiving: dict[int, LiveRequest] = {}  # by transfer id: opened on this stream, without a verdict

    @property
    def credits_kept(self) -> int:
        """Bytes taken and not handed back to the sender."""
        return self._credits.kept

    def welcome(self, transport: kv_pb2.TransportOffer | None) -> None:
        """Answer the hello, offering a transport if any."""
        self.send_queue.post(decode_pb2.ReceiveKVResponse(welcome=self._credits.welcome(self._instance, transport)))

    def take(self, message: decode_pb2.ReceiveKVRequest, payload: memoryview) -> None:
        """Take one message.

        Raises:
            InvalidRequest: a stream has no such message here; the stream cannot go on.
            StreamBroken: the sender does not read the answers.
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
        """Tell the sender how a transfer has ended."""
        self._answer(
            transfer.transfer_id,
            transfer.generation,
            complete=transfer.state is TransferState.COMPLETE,
            reason=transfer.reason,
            damaged_block=transfer.damaged_block,
        )
        self._receiving.pop(transfer.transfer_id, None)
        credit = None if self._receiving else self._credits.idle()
        if credit is not None:
            self._post(decode_pb2.ReceiveKVResponse(credit=credit))

    def broken(self) -> None:
        """End requests if their KV was incomplete at the stream's end."""
        self.send_queue.close(StreamBroken("the sender's stream ended"))
        for request in list(self._receiving.values()):
            self._executor.abort(request, "the sender's stream broke")

    def _open(self, message: decode_pb2.TransferOpen) -> None:
        request = self._executor.get(message.transfer_id, message.generation)
        if message.decode_epoch != self._instance.epoch:
            self._answer(
                message.transfer_id,
                message.generation,
                complete=False,
                reason="promised by an earlier life of this instance",
            )
            return
        if request is None:
            self._answer(message.transfer_id, message.generation, complete=False, reason="no such transfer (any more)")
            return
        known = self._forgotten(request.sequences[0].keys, request.incoming.spec.tenant)
        older = not set(known).issubset(message.forgotten)
        try:
            self._executor.open(request, self.verdict, older=older)
        except TransferFailed as error:
            self._answer(message.transfer_id, message.generation, complete=False, reason=str(error))
            return
        self._receiving[message.transfer_id] = request
        if request.complete:
            self._complete(request)

    def receive_into(self, message: decode_pb2.ReceiveKVRequest, nbytes: int) -> ReceiveBuffer | None:
        """Memory for a frame's payload: the transfer's blocks, which are not read before verification.

        None: not all slices in the frame are whole and expected; `take` handles such a frame.
        """
        if message.WhichOneof("message") != "frame":
            return None
        header = message.frame
        request, runs = self._wanted(header), whole_runs(header, nbytes, self._layout)
        if request is None or runs is None:
            return None
        try:
            for run, _ in runs:
                request.transfer.check(run)
        except (FrameError, TransferFailed):
            return None
        blocks = ((run.layer, run.first_block + at) for run, _ in runs for at in range(run.block_count))
        targets = [self._pool.slice(layer, request.table[index]) for layer, index in blocks]
        return ReceiveBuffer(
            targets,
            [value for _, hashes in runs for value in hashes],
            lambda: self._receives(request, header),
            lambda intact, error: self._landed(request, header, runs, nbytes, intact, error),
            self._beside,
            request.transfer.writing,
        )

    def _wanted(self, header: kv_pb2.FrameHeader) -> LiveRequest | None:
        """Return the request to which a frame's KV belongs.

        None after the transfer has ended, as the blocks may be another request's by now.
        """
        request = self._executor.get(header.transfer, header.generation)
        return request if header.transfer in self._receiving else None

    def _receives(self, request: LiveRequest, header: kv_pb2.FrameHeader) -> bool:
        return self._wanted(header) is request and request.transfer.state is TransferState.RECEIVING

    def _landed(
        self,
        request: LiveRequest,
        header: kv_pb2.FrameHeader,
        runs: list[tuple[SliceRun, list[int]]],
        nbytes: int,
        intact: int,
        error: Exception | None,
    ) -> None:
        """Note that a payload lies in the pool, unless the transfer has ended meanwhile."""
        there = request if self._receives(request, header) else None
        self._dealt_with(there, nbytes, lambda: self._accept(request, runs, intact, error))

    def _frame(self, header: kv_pb2.FrameHeader, payload: memoryview) -> None:
        request = self._wanted(header)
        self._dealt_with(request, payload.nbytes, lambda: self._write(request, header, payload))

    def _dealt_with(self, request: LiveRequest | None, nbytes: int, take: Callable[[], None]) -> None:
        """Take a frame, unless the transfer has ended, and return the frame's credits."""
        self.received_bytes += nbytes
        if request is None:
            self.stray_frames += 1
        else:
            self._take(request, take)
        credit = self._credits.consumed(nbytes, idle=not self._receiving)
        if credit is not None:
            self.send_queue.post(decode_pb2.ReceiveKVResponse(credit=credit))

    def _take(self, request: LiveRequest, take: Callable[[], None]) -> None:
        try:
            take()
            self._executor.transfer_progress(request)
        except (FrameError, TransferFailed) as error:
            if isinstance(error, DamagedSliceError):
                request.transfer.damaged_block = error.block
            log.warning("bad frame", sender=self._sender.id, request=request.request_id, reason=str(error))
            if request.complete:  # all slices had come before the bad one
                self._complete(request)
            else:
                self._executor.abort(request, str(error))
            return
        if request.complete:
            self._complete(request)

    def _write(self, request: LiveRequest | None, header: kv_pb2.FrameHeader, payload: memoryview) -> None:
        """Verify a frame's slices and write them into the pool."""
        assert request is not None, "frames of others are not taken"
        for run, data, hashes in request.transfer.opener.open(header, payload):
            request.transfer.accept(run)
            try:
                for (index, _, piece), value in zip(split_run(run, data, self._layout), hashes, strict=True):
                    self._pool.write(run.layer, request.table[index], piece, value)
            except Exception:
                request.transfer.distrust()
                raise

    def _accept(
        self, request: LiveRequest, runs: list[tuple[SliceRun, list[int]]], intact: int, error: Exception | None
    ) -> None:
        """Accept slices in the pool; the first `intact` are undamaged. Runs before a damaged run count as arrived."""
        if error is not None:
            raise TransferFailed(f"a defect: a frame could not be written: {error!r}") from error
        for run, hashes in runs:
            if intact < run.block_count:
                raise DamagedSliceError(run.layer, run.first_block + intact)
            intact -= run.block_count
            for index, value in enumerate(hashes, run.first_block):
                self._pool.set_hash(run.layer, request.table[index], value)
            request.transfer.accept(run)

    def _complete(self, request: LiveRequest) -> None:
        self.verdict(request.transfer)
        self._executor.transfer_complete(request)

    def _close(self, message: decode_pb2.TransferClose) -> None:
        request = self._executor.get(message.transfer_id, message.generation)
        if request is None or message.transfer_id not in self._receiving:
            return
        self._executor.abort(
            request,
            "the sender gave up" if message.aborted else f"closed with {request.transfer.missing()} slices missing",
        )

    def _answer(
        self, transfer_id: int, generation: int, *, complete: bool, reason: str, damaged_block: int | None = None
    ) -> None:
        status = decode_pb2.TRANSFER_STATUS_COMPLETE if complete else decode_pb2.TRANSFER_STATUS_FAILED
        verdict = decode_pb2.TransferVerdict(
            transfer_id=transfer_id,
            generation=generation,
            status=status,
            reason=reason,
            damaged_block=damaged_block,
        )
        self._post(decode_pb2.ReceiveKVResponse(verdict=verdict))

    def _post(self, answer: decode_pb2.ReceiveKVResponse) -> None:
        try:
            self.send_queue.post(answer)
        except StreamBroken:
            return  # the sender notices the end of the stream
