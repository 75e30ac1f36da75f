"""Sends prompts' KV to decode instances over transfers."""

import time
from collections import Counter
from collections.abc import Callable

from moonpool.engine.handle import Engine
from moonpool.errors import Mismatch, TransferFailed
from moonpool.kv.frames import Slice
from moonpool.streams.credits import Traffic
from moonpool.streams.peers import Peers
from moonpool.streams.transfer_client import OutboundTransfer, TransferSender
from moonpool.telemetry.spans import Recorder
from services.prefill.core.actions import Piece
from services.prefill.core.events import Done, SlicesSent
from services.prefill.requests import Request


class Sending:
    """Does what the core wants of transfers.

    Args:
        engine: the KV is read from its pool.
        open_sender: makes the client of the decode instance at an address.
        spans: where sending is recorded.
    """

    def __init__(self, engine: Engine, open_sender: Callable[[str], TransferSender], spans: Recorder) -> None:
        self._pool = engine.pool
        self._layout = engine.layout
        self._peers = Peers(open_sender)
        self._spans = spans
        self._transfers: dict[int, OutboundTransfer] = {}

    @property
    def sessions(self) -> int:
        """Open transfers."""
        return self._peers.sessions

    @property
    def traffic(self) -> Traffic:
        """Credits and messages of the streams to all decode instances."""
        return self._peers.traffic

    async def aclose(self) -> None:
        """Closes all streams."""
        await self._peers.aclose()

    async def open(self, request: Request) -> Done:
        """Opens a request's transfer.

        Raises:
            TransferFailed: decode refused the transfer.
            StreamBroken: decode cannot be reached.
        """
        assert request.target is not None
        sender = await self._peers.get(request.target.decode)
        try:
            self._transfers[request.number] = await sender.open(request.target, request.forgotten)
        except Mismatch as error:  # decode was restarted: another placement can succeed
            raise TransferFailed(f"{request.target.decode.id} does not take the transfer: {error}") from error
        request.lane = sender.lane
        return Done()

    async def send(self, request: Request, pieces: tuple[Piece, ...]) -> SlicesSent:
        """Sends slices; when it returns or raises, their memory is free.

        Raises:
            TransferFailed: decode has given the transfer up, or does not take it in time.
            StreamBroken: the stream to decode ended.
        """
        start_ns = time.monotonic_ns()
        num_tokens = len(request.incoming.token_ids)
        slices = [item for piece in pieces for item in self._slices(piece, num_tokens)]
        nbytes = await self._transfers[request.number].send(slices)
        end_ns = time.monotonic_ns()
        self._record(request, pieces, start_ns, end_ns)
        return SlicesSent(nbytes, (end_ns - start_ns) / 1e9)

    def close(self, number: int, *, aborted: bool) -> None:
        """Nothing more comes on a request's transfer. Aborted: it is given up, also while its verdict is awaited."""
        transfer = self._transfers.get(number)
        if transfer is not None:
            transfer.close(aborted)
        if transfer is not None and aborted:
            transfer.release()
            del self._transfers[number]

    async def verdict(self, request: Request, timeout_s: float) -> Done:
        """Waits until decode confirms the transfer; raises as `OutboundTransfer.verdict`."""
        await self._transfers[request.number].verdict(timeout_s)
        del self._transfers[request.number]
        return Done()

    def _slices(self, piece: Piece, num_tokens: int) -> list[Slice]:
        slices = []
        for index, block in enumerate(piece.blocks, piece.first):
            data, value = self._pool.read(piece.layer, block)
            valid_tokens = self._layout.valid_tokens(num_tokens, index)
            slices.append(Slice(piece.layer, index, data, valid_tokens, value))
        return slices

    def _record(self, request: Request, pieces: tuple[Piece, ...], start_ns: int, end_ns: int) -> None:
        blocks: Counter[tuple[int, int | None]] = Counter()
        for piece in pieces:
            blocks[piece.layer, piece.step] += len(piece.blocks)
        for (layer, step), count in blocks.items():
            size = count * self._layout.slice_bytes
            self._spans.add("kv.send", start_ns, end_ns, request=request.request_id, step=step, layer=layer, bytes=size)
