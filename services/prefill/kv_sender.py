"""Sends a prompt's KV to decode, layer by layer, while the next layers are being computed; each slice once."""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

from moonpool.cost import SpeedTracker
from moonpool.errors import Mismatch, TransferFailed
from moonpool.kv.frames import Slice
from moonpool.kv.layout import KVLayout
from moonpool.streams.peers import Peers
from moonpool.streams.transfer_client import OutboundTransfer, TransferSender
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import kv_pb2

MERGE_BYTES = 128 << 10
"""Slices of several layers leave in one batch until they make so many bytes: a message costs about 150 us."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive blocks of one layer that are whole. `step`: the step that made them, None for a prefix."""

    layer: int
    first: int
    end: int
    step: int | None


class KVSender:
    """Sends one prompt's KV to a decode instance.

    Waiting slices are positions only, at most layers times chunks: the bytes stay in the pool until they are sent.

    Args:
        request_id: for the spans.
        target: the transfer at the decode instance.
        num_tokens: length of the prompt.
        layout: arrangement of the KV.
        block_table: the prompt's blocks, read when slices are sent.
        read: `(layer, block)` -> slice of the pool and its hash.
        senders: the streams to decode instances.
        tracker: learns the speed of sending.
        spans: where sending is recorded.
    """

    def __init__(
        self,
        request_id: str,
        target: kv_pb2.TransferTarget,
        num_tokens: int,
        layout: KVLayout,
        block_table: Callable[[], Sequence[int]],
        read: Callable[[int, int], tuple[memoryview, int]],
        senders: Peers[TransferSender],
        tracker: SpeedTracker,
        spans: Recorder,
    ) -> None:
        self._request_id = request_id
        self._target = target
        self._num_tokens = num_tokens
        self._num_blocks = layout.blocks_for(num_tokens)
        self._layout = layout
        self._block_table = block_table
        self._read = read
        self._senders = senders
        self._tracker = tracker
        self._spans = spans
        # Per layer one bit for each block handed over; blocks that decode holds already count as handed over.
        self._handed = [(1 << target.held_blocks) - 1] * layout.layers
        self._pending: collections.deque[_Piece] = collections.deque()
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._finished = False
        self._transfer: OutboundTransfer | None = None
        self.sent_bytes = 0

    def add(self, layer: int, first: int, end: int, step: int | None = None) -> None:
        """Queues blocks [first, end) of a layer, which must not change any more; those queued before are skipped."""
        todo = ((1 << end) - 1) & ~((1 << first) - 1) & ~self._handed[layer]
        self._handed[layer] |= todo
        while todo:
            begin = (todo & -todo).bit_length() - 1
            length = (~(todo >> begin) & ((todo >> begin) + 1)).bit_length() - 1
            self._pending.append(_Piece(layer, begin, begin + length, step))
            todo &= ~(((1 << length) - 1) << begin)
            self._quiet.clear()
        self._wake.set()

    def finish(self) -> None:
        """Everything has been added."""
        whole = (1 << self._num_blocks) - 1
        assert all(handed == whole for handed in self._handed), "a slice was never handed over"
        self._finished = True
        self._wake.set()

    async def quiet(self) -> None:
        """Waits until everything added so far was sent; the deadlines are those of `stream`."""
        await self._quiet.wait()

    async def stream(self) -> None:
        """Opens the transfer and sends what is added, until everything has been. Reads no block once it has ended.

        Raises:
            TransferFailed: decode refused the transfer, or did not take it in time.
            StreamBroken: the stream to decode ended, or decode cannot be reached.
        """
        sender = await self._senders.get(self._target.decode)
        try:
            transfer = self._transfer = await sender.open(self._target)
        except Mismatch as error:  # decode was restarted: another placement can succeed
            raise TransferFailed(f"{self._target.decode.id} does not take the transfer: {error}") from error
        while self._pending or not self._finished:
            while self._pending:
                await self._send(transfer, self._take())
            self._quiet.set()
            if not self._finished:
                self._wake.clear()
                await self._wake.wait()
        transfer.close(aborted=False)

    async def verdict(self, timeout_s: float) -> None:
        """Waits until decode confirms the transfer; raises as `OutboundTransfer.verdict`."""
        assert self._transfer is not None
        await self._transfer.verdict(timeout_s)

    def abandon(self) -> None:
        """Aborts the transfer. Without effect after the verdict."""
        if self._transfer is not None:
            self._transfer.close(aborted=True)
            self._transfer.release()
        self._pending.clear()
        self._quiet.set()

    def _take(self) -> list[_Piece]:
        """The next batch to send: one layer's pieces, and more layers while they are small."""
        batch, size = [self._pending.popleft()], 0
        while self._pending:
            size += (batch[-1].end - batch[-1].first) * self._layout.slice_bytes
            if self._pending[0].layer != batch[-1].layer and size >= MERGE_BYTES:
                break
            batch.append(self._pending.popleft())
        return batch

    async def _send(self, transfer: OutboundTransfer, batch: list[_Piece]) -> None:
        start_ns = time.monotonic_ns()
        table, layout = self._block_table(), self._layout
        slices: list[Slice] = []
        for piece in batch:
            for index in range(piece.first, piece.end):
                data, value = self._read(piece.layer, table[index])
                slices.append(Slice(piece.layer, index, data, layout.valid_tokens(self._num_tokens, index), value))
        nbytes = await transfer.send(slices)
        end_ns = time.monotonic_ns()
        self.sent_bytes += nbytes
        self._tracker.observe_transfer(nbytes, (end_ns - start_ns) / 1e9)
        for layer, step in dict.fromkeys((piece.layer, piece.step) for piece in batch):
            blocks = sum(piece.end - piece.first for piece in batch if (piece.layer, piece.step) == (layer, step))
            size = blocks * layout.slice_bytes
            self._spans.add("kv.send", start_ns, end_ns, request=self._request_id, step=step, layer=layer, bytes=size)
