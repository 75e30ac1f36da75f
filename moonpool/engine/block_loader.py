"""Reads KV blocks from kvstores and other instances into the pool; for prefill and decode."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, MoonpoolError
from moonpool.base.kv.frames import DamagedSliceError
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.pool import PoolTarget
from moonpool.base.kv_transfer.prefix_reader import (
    FROM_DECODE,
    FROM_PREFILL,
    FROM_STORE,
    PrefixLost,
    ReadMethod,
)
from moonpool.base.kv_transfer.stored_parts import PrefixReader, WindowLost
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.spans import Recorder
from moonpool.base.telemetry.trace_context import traceparent
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.peer_clients import PeerClients
from moonpool.engine.histograms import KVSTORE, PEER, EngineHistograms
from moonpool.engine.interface import Engine
from moonpool.engine.request import IncomingRequest
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from moonpool.v1 import kv_pb2, prefill_pb2

log = get_logger(__name__)
NoteLoad = Callable[[int, float, float], None]
"""Notes tokens that were loaded; begin and end in seconds of `time.monotonic()`."""
SOURCE_KINDS = (kv_pb2.INSTANCE_KIND_KVSTORE, kv_pb2.INSTANCE_KIND_PREFILL, kv_pb2.INSTANCE_KIND_DECODE)
"""Kinds of instances that a prefix is loaded from."""
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
    came: NoteLoad = lambda *_: None

    @classmethod
    def of_prompt(cls, order: LoadBlocks, incoming: IncomingRequest, source: kv_pb2.Instance, came: NoteLoad) -> Self:
        """Return the read of a prompt's prefix."""
        keys = incoming.spec.keys[order.first : order.first + len(order.blocks)]
        whose = incoming.spec.tenant, incoming.request_id
        return cls(source, keys, order.blocks, order.timeout_s, *whose, came)


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
        histograms: where the seconds of loads are observed.
        emulated_s: seconds that emulated hardware takes to load a number of bytes; None = not emulated.
    """

    def __init__(
        self,
        engine: Engine,
        open_reader: Callable[[str, ReadMethod], PrefixReader],
        spans: Recorder,
        histograms: EngineHistograms,
        emulated_s: Callable[[int], float] | None = None,
    ) -> None:
        self._emulated_s = emulated_s
        self._pool = engine.pool
        self._layout = engine.layout
        self._peers = {kind: PeerClients(partial(_open, open_reader, method)) for kind, method in READ_METHODS.items()}
        self._spans = spans
        self._histograms = histograms

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
            kind = KVSTORE if source.kind == kv_pb2.INSTANCE_KIND_KVSTORE else PEER
            self._histograms.load_s.labels(kind).observe(ended - began)
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

        known = traceparent.set(self._spans.traceparent_of(read.request))
        try:
            return await reader.read_prefix(
                read.keys,
                on_slice=take,
                into=target.into,
                on_layer=layer_done,
                timeout_s=read.timeout_s,
                tenant=read.tenant,
            )
        finally:
            traceparent.reset(known)


def _open(open_reader: Callable[[str, ReadMethod], PrefixReader], method: ReadMethod, address: str) -> PrefixReader:
    return open_reader(address, method)


def kv_source(instance: kv_pb2.Instance, blocks: int) -> KVSource:
    """Return an instance as a source. A restarted instance is a new source: past failures do not count."""
    peer = instance.kind != kv_pb2.INSTANCE_KIND_KVSTORE
    return KVSource(f"{instance.id} {instance.epoch}", blocks, peer)


def check_source_kind(field: str, source: prefill_pb2.PrefixSource) -> None:
    """Raise InvalidRequest, naming the field, if a prefix is not loaded from instances of this kind."""
    if source.instance.kind not in SOURCE_KINDS:
        raise InvalidRequest(f"{field}.instance.kind", "must be kvstore, prefill or decode")
