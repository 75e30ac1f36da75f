"""Moves KV blocks into and out of the pool: prefix loads, replication and transfers to decode instances."""

import asyncio
import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import check_instance
from moonpool.base.errors import InvalidRequest, Mismatch, MoonpoolError, TransferFailed
from moonpool.base.kv.frames import DamagedSliceError, Slice
from moonpool.base.kv.keys import BlockKey, unpack_keys
from moonpool.base.kv.pool import PoolTarget
from moonpool.base.kv_transfer.prefix_reader import (
    FROM_DECODE,
    FROM_PREFILL,
    FROM_STORE,
    PrefixLost,
    ReadMethod,
)
from moonpool.base.kv_transfer.sender import OutboundTransfer, TransferSender
from moonpool.base.kv_transfer.stored_parts import PrefixReader, WindowLost
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.spans import Recorder
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.peer_clients import PeerClients
from moonpool.engine.interface import Engine
from moonpool.engine.prefill.core.actions import LayerBlocks, LoadBlocks, ReadReplica
from moonpool.engine.prefill.core.events import IoDone, LoadEnded, ReplicateBlocks, SlicesSent, StopReplicating
from moonpool.engine.prefill.live_requests import SOURCE_KINDS, LivePrefill, kv_source
from moonpool.v1 import conductor_pb2, kv_pb2

log = get_logger(__name__)
MAX_REPLICA_BLOCKS = 1 << 15
"""Most keys in one order."""
READ_METHODS: Mapping[kv_pb2.InstanceKind.ValueType, ReadMethod] = {
    kv_pb2.INSTANCE_KIND_KVSTORE: FROM_STORE,
    kv_pb2.INSTANCE_KIND_PREFILL: FROM_PREFILL,
    kv_pb2.INSTANCE_KIND_DECODE: FROM_DECODE,
}
"""The method that reads each kind of source."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRead:
    """Blocks to be read into the pool.

    Attributes:
        source: instance to read from.
        keys: the blocks' keys, consecutive in a chain.
        blocks: pool blocks to write to.
        timeout_s: longest time for the whole read, seconds.
        tenant: the KV's owner.
        request: the request's id, for logs and spans.
        came: called with the number of tokens read, begin and end in seconds on `time.monotonic()`.
    """

    source: kv_pb2.Instance
    keys: Sequence[BlockKey]
    blocks: Sequence[int]
    timeout_s: float
    tenant: str
    request: str
    came: Callable[[int, float, float], None] = lambda *_: None

    @classmethod
    def of_request(cls, order: LoadBlocks, request: LivePrefill) -> "BlockRead":
        """Return a prompt's prefix."""
        keys = request.incoming.spec.keys[order.first : order.first + len(order.blocks)]
        source, whose = request.sources[order.source].instance, (request.incoming.spec.tenant, request.request_id)
        return cls(source, keys, order.blocks, order.timeout_s, *whose, request.note_load)


class EmulatedLoadPace:
    """Delays layers until emulated hardware would have loaded them.

    Args:
        seconds: time for loading all layers, at equal distances; 0 = no delay.
        layers: the model's layers.
        on_layer: called for each layer, in order.
    """

    def __init__(self, seconds: float, layers: int, on_layer: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._layer_s = seconds / layers
        self._on_layer = on_layer
        self._held: deque[int] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()

    def came(self, layer: int) -> None:
        """Note that a layer is in the pool."""
        self._held.append(layer)
        self._quiet.clear()
        if self._timer is None:
            self._go_on()

    async def over(self) -> None:
        """Wait until no layer is delayed."""
        await self._quiet.wait()

    def close(self) -> None:
        """Stop: `on_layer` is not called any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = None
        while self._held:
            due = self._began + (self._held[0] + 1) * self._layer_s
            if self._layer_s and due > self._loop.time():
                self._timer = self._loop.call_at(due, self._go_on)
                return
            self._on_layer(self._held.popleft())
        self._quiet.set()


class BlockLoader:
    """Reads KV from kvstores and other instances into the pool.

    Args:
        engine: owner of the pool that KV is written to.
        open_reader: makes an instance's client, given the address and the reading method.
        spans: where loading is recorded.
        emulated_s: seconds that emulated hardware takes to load a number of bytes; None = not emulated.
    """

    def __init__(
        self,
        engine: Engine,
        open_reader: Callable[[str, ReadMethod], PrefixReader],
        spans: Recorder,
        emulated_s: Callable[[int], float] | None = None,
    ) -> None:
        self._emulated_s = emulated_s
        self._pool = engine.pool
        self._layout = engine.layout
        self._peers = {kind: PeerClients(partial(_open, open_reader, method)) for kind, method in READ_METHODS.items()}
        self._spans = spans

    @property
    def open_reads(self) -> int:
        """Reads in flight."""
        return sum(peers.channels for peers in self._peers.values())

    @property
    def traffic(self) -> StreamTraffic:
        """Credits and messages of the streams from all sources."""
        return sum((peers.traffic for peers in self._peers.values()), StreamTraffic())

    async def aclose(self) -> None:
        """Close all streams."""
        for peers in self._peers.values():
            await peers.aclose()

    async def load(self, read: BlockRead, on_layer: Callable[[int], None]) -> LoadEnded:
        """Read blocks. No writes follow the return.

        Args:
            read: what to read, and where to.
            on_layer: called for each layer, in order, once all the layer's blocks have arrived.
        """
        source, wanted = read.source, len(read.blocks)
        began = world.monotonic()
        try:
            reader = await self._peers[source.kind].get(source)
            emulated = EmulatedLoadPace(self._load_s(wanted), self._layout.layers, on_layer)
            try:
                loaded = await self._read(reader, read, emulated.came)
                await emulated.over()
            finally:
                emulated.close()
            ended = world.monotonic()
            read.came(loaded * self._layout.block_size, began, ended)
            return LoadEnded(loaded, loaded if loaded < wanted else None, seconds=ended - began)
        except PrefixLost as lost:
            log.info("prefix lost while loading", source=source.id, request=read.request, reason=str(lost))
            return LoadEnded(0, lost.blocks)
        except WindowLost as lost:
            log.info("window lost while loading", source=source.id, request=read.request, reason=str(lost))
            return LoadEnded(0, lost.block, windowed=True)
        except DamagedSliceError as damaged:
            log.warning("damaged slice while loading", source=source.id, request=read.request, reason=str(damaged))
            return LoadEnded(0)
        except MoonpoolError as error:
            log.warning("load failed", source=source.id, request=read.request, reason=str(error))
            return LoadEnded(0, failed=True)

    def _load_s(self, blocks: int) -> float:
        return self._emulated_s(blocks * self._layout.block_bytes) if self._emulated_s is not None else 0.0

    async def _read(self, reader: PrefixReader, read: BlockRead, on_layer: Callable[[int], None]) -> int:
        """Read from one source; return how many leading blocks the source had. Raises as `read_prefix`."""
        counts, last_ns = [0] * self._layout.layers, world.monotonic_ns()
        target = PoolTarget(self._pool, read.blocks)

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            target.take(layer, index, data, value)
            counts[layer] += 1

        def layer_done(layer: int) -> None:
            nonlocal last_ns
            now_ns = world.monotonic_ns()
            size = counts[layer] * self._layout.slice_bytes(layer)
            self._spans.add("kv.load", last_ns, now_ns, request=read.request, layer=layer, bytes=size)
            last_ns = now_ns
            on_layer(layer)

        return await reader.read_prefix(
            read.keys,
            on_slice=take,
            into=target.into,
            on_layer=layer_done,
            timeout_s=read.timeout_s,
            tenant=read.tenant,
        )


def _open(open_reader: Callable[[str, ReadMethod], PrefixReader], method: ReadMethod, address: str) -> PrefixReader:
    return open_reader(address, method)


class KVSender:
    """Sends KV to decode instances: opens, fills and closes transfers.

    Args:
        engine: owner of the pool that KV is read from.
        open_sender: makes a decode instance's client, given the address.
        spans: where sending is recorded.
    """

    def __init__(self, engine: Engine, open_sender: Callable[[str], TransferSender], spans: Recorder) -> None:
        self._pool = engine.pool
        self._layout = engine.layout
        self._peers = PeerClients(open_sender)
        self._spans = spans
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
        return SlicesSent(nbytes, (end_ns - start_ns) / 1e9)

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
