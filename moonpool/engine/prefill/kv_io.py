"""Moves KV blocks into and out of the pool: replication and transfers to decode instances."""

import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import check_instance
from moonpool.base.errors import InvalidRequest, Mismatch, MoonpoolError, TransferFailed
from moonpool.base.kv.frames import Slice
from moonpool.base.kv.keys import unpack_keys
from moonpool.base.kv_transfer.sender import OutboundTransfer, TransferSender
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.spans import Recorder
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.peer_clients import PeerClients
from moonpool.engine.block_loader import SOURCE_KINDS, BlockLoader, BlockRead, kv_source
from moonpool.engine.histograms import EngineHistograms
from moonpool.engine.interface import Engine
from moonpool.engine.prefill.core.actions import (
    LayerBlocks,
    ReadReplica,
)
from moonpool.engine.prefill.core.events import (
    IoDone,
    ReplicateBlocks,
    SlicesSent,
    StopReplicating,
)
from moonpool.engine.prefill.live_requests import LivePrefill
from moonpool.engine.scheduler.prefix_sources import LoadEnded
from moonpool.v1 import conductor_pb2, kv_pb2

log = get_logger(__name__)
MAX_REPLICA_BLOCKS = 1 << 15
"""Most keys in one order."""


class KVSender:
    """Sends KV to decode instances: opens, fills and closes transfers.

    Args:
        engine: owner of the pool that KV is read from.
        open_sender: makes a decode instance's client, given the address.
        spans: where sending is recorded.
        histograms: where the seconds of sends are observed.
    """

    def __init__(
        self,
        engine: Engine,
        open_sender: Callable[[str], TransferSender],
        spans: Recorder,
        histograms: EngineHistograms,
    ) -> None:
        self._pool = engine.pool
        self._layout = engine.layout
        self._peers = PeerClients(open_sender)
        self._spans = spans
        self._histograms = histograms
        self._transfers: dict[int, OutboundTransfer] = {}

    @property
    def open_transfers(self) -> int:
        """Transfers to decode instances that are not closed."""
        return self._peers.channels

    @property
    def traffic(self) -> StreamTraffic:
        """Credits and messages of the streams to all decode instances."""
        return self._peers.traffic

    async def aclose(self) -> None:
        """Close all streams."""
        await self._peers.aclose()

    async def open(self, request: LivePrefill) -> IoDone:
        """Open a request's transfer.

        Raises:
            TransferFailed: decode refused the transfer.
            StreamBroken: decode cannot be reached.
        """
        assert request.target is not None
        sender = await self._peers.get(request.target.decode)
        try:
            self._transfers[request.id] = await sender.open(request.target, request.forgotten)
        except Mismatch as error:  # decode was restarted: another placement can succeed
            raise TransferFailed(f"{request.target.decode.id} does not take the transfer: {error}") from error
        request.transport = sender.transport
        return IoDone()

    async def send(self, request: LivePrefill, pieces: tuple[LayerBlocks, ...]) -> SlicesSent:
        """Send slices. Their memory is not read after the return.

        Raises:
            TransferFailed: decode has given the transfer up, or does not take the slices in time.
            StreamBroken: the stream to decode ended.
        """
        start_ns = world.monotonic_ns()
        num_tokens = len(request.incoming.token_ids)
        slices = [item for piece in pieces for item in self._slices(piece, num_tokens)]
        nbytes = await self._transfers[request.id].send(slices)
        end_ns = world.monotonic_ns()
        self._record(request, pieces, start_ns, end_ns)
        seconds = (end_ns - start_ns) / 1e9
        self._histograms.send_s.observe(seconds)
        return SlicesSent(nbytes, seconds)

    def close(self, number: int, *, aborted: bool) -> None:
        """Close a request's transfer. `aborted`: not all slices were sent, or the verdict is not awaited any more."""
        transfer = self._transfers.get(number)
        if transfer is not None:
            transfer.close(aborted)
        if transfer is not None and aborted:
            transfer.release()
            del self._transfers[number]

    async def verdict(self, request: LivePrefill, timeout_s: float) -> IoDone:
        """Wait until decode confirms the transfer; raise as `OutboundTransfer.verdict`."""
        await self._transfers[request.id].verdict(timeout_s)
        del self._transfers[request.id]
        return IoDone()

    def _slices(self, piece: LayerBlocks, num_tokens: int) -> list[Slice]:
        slices = []
        for index, block in enumerate(piece.blocks, piece.first):
            data, value = self._pool.read(piece.layer, block)
            valid_tokens = self._layout.valid_tokens(num_tokens, index)
            slices.append(Slice(piece.layer, index, data, valid_tokens, value))
        return slices

    def _record(self, request: LivePrefill, pieces: tuple[LayerBlocks, ...], start_ns: int, end_ns: int) -> None:
        blocks: Counter[tuple[int, int | None]] = Counter()
        for piece in pieces:
            blocks[piece.layer, piece.step] += len(piece.blocks)
        for (layer, step), count in blocks.items():
            size = count * self._layout.slice_bytes(layer)
            self._spans.add("kv.send", start_ns, end_ns, request=request.request_id, step=step, layer=layer, bytes=size)


class ReplicationOrders:
    """Takes replication orders from the conductor, and reads the blocks that the scheduler wants.

    Args:
        loading: reads blocks.
        ask: tells the scheduler; raises its exceptions.
    """

    def __init__(self, loading: BlockLoader, ask: Callable[[ReplicateBlocks | StopReplicating], None]) -> None:
        self._loading = loading
        self._ask = ask
        self._numbers = itertools.count(1)
        self._orders: dict[int, tuple[ReplicateBlocks, kv_pb2.Instance]] = {}

    def order(self, message: conductor_pb2.ReplicateOrder) -> None:
        """Take an order; a wrong order is logged."""
        try:
            keys = unpack_keys(message.keys, max_keys=MAX_REPLICA_BLOCKS)
            if not keys:
                raise InvalidRequest("keys", "are missing")
            if message.cancel:
                self._ask(StopReplicating(keys[-1]))
                return
            check_instance(message.source, "source")
            if message.source.kind not in SOURCE_KINDS:
                raise InvalidRequest("source.kind", "must be kvstore, prefill or decode")
        except MoonpoolError as error:
            log.warning("order to copy blocks refused", error=str(error))
            return
        number = next(self._numbers)
        event = ReplicateBlocks(number, tuple(keys), kv_source(message.source, len(keys)), message.tenant)
        self._orders[number] = event, message.source
        try:
            self._ask(event)
        except Exception:  # an internal error ends the replication, not the instance
            log.exception("an order to copy blocks cannot be carried out", source=message.source.id)
            self.ended(number)

    def work(self, action: ReadReplica) -> Callable[[], Coroutine[Any, Any, LoadEnded]]:
        """Read the blocks."""
        event, source = self._orders[action.number]
        keys = event.keys[action.first :]
        read = BlockRead(source, keys, action.blocks, action.timeout_s, event.tenant, f"copy {action.number}")
        return partial(self._read, read)

    async def _read(self, read: BlockRead) -> LoadEnded:
        try:
            return await self._loading.load(read, _ignore_layer)
        except Exception:  # an internal error ends the replication, not the instance
            log.exception("a copy failed", source=read.source.id)
            return LoadEnded(0, failed=True)

    def ended(self, number: int) -> None:
        """Note that a replication has ended."""
        self._orders.pop(number, None)


def _ignore_layer(_: int) -> None:
    """Ignore a layer: a replication needs no report for single layers."""
