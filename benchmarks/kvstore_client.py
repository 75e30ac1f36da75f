"""A client for one kvstore as an engine has: the real put and get streams, and separate memory.

A block is made of slices of 64 KiB, one layer's KV of sixteen tokens of a model with eight KV heads of 128, so that
small blocks have few layers and large ones many.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import mmap
import os
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from moonpool.base.kv.keys import chain_root, namespace, pack_keys, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.rpc.channels import Channels
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.regions import SharedRegion
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

if TYPE_CHECKING:
    from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceAsyncStub

SLICE_BYTES = 64 << 10
BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
TINY = KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="bfloat16")
"""64 bytes: the smallest block there is, for stores of very many."""
_KEY_BYTES = 32
TIMEOUT_S = 300.0
POLL_S = 0.005
SETTLED = ("pending_writes", "durability_awaited_blocks", "put_transfers")
"""Gauges that are 0 once everything visible is durable."""


def layout_of(block_bytes: int) -> KVLayout:
    """The layout for blocks with `block_bytes`.

    Raises:
        ValueError: not a multiple of a slice.
    """
    if block_bytes <= 0 or block_bytes % SLICE_BYTES:
        raise ValueError(f"blocks are made of slices of {SLICE_BYTES} bytes, {block_bytes} is not a multiple")
    return KVLayout.uniform(block_bytes // SLICE_BYTES, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")


@functools.cache
def namespace_of(layout: KVLayout) -> bytes:
    """Of all benchmarks' KV in this layout."""
    return namespace(bytes(32), layout)


@functools.cache
def root_of(layout: KVLayout) -> bytes:
    """Parent of every chain's first block."""
    return chain_root(namespace_of(layout), "")


def hello(layout: KVLayout) -> kv_pb2.StreamHello:
    """First message on a stream with this KV."""
    instance = kv_pb2.Instance(id="bench", epoch=1, kind=kv_pb2.INSTANCE_KIND_PREFILL)
    return kv_pb2.StreamHello(sender=instance, namespace=namespace_of(layout), layout=layout.to_proto())


def chain(seed: object, blocks: int) -> list[bytes]:
    """Keys that differ from other seeds' keys, made quickly: a store does not check the hashes."""
    data = random.Random(repr(seed)).randbytes(blocks * _KEY_BYTES)
    return [data[at : at + _KEY_BYTES] for at in range(0, len(data), _KEY_BYTES)]


def parents(keys: Sequence[bytes], layout: KVLayout) -> list[bytes]:
    """The key before each of a chain."""
    return [root_of(layout), *keys[:-1]]


def split(total: int, largest: int) -> list[int]:
    """`total` in parts of `largest`; the last part is the rest."""
    return [min(largest, total - at) for at in range(0, total, largest)]


class Memory:
    """Memory that blocks are sent from and read into, like an engine's pool; used in a circle.

    Attributes:
        source: every slice is different.
        target: as large or larger, all touched.
    """

    def __init__(self, source_bytes: int, target_bytes: int = 0) -> None:
        self._fd = os.memfd_create("benchmark", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)
        os.truncate(self._fd, source_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.source = memoryview(mmap.mmap(self._fd, source_bytes))
        self.target = memoryview(bytearray(b"\1") * max(source_bytes, target_bytes))
        for number, at in enumerate(range(0, source_bytes, SLICE_BYTES)):
            size = min(SLICE_BYTES, source_bytes - at)
            self.source[at : at + size] = ((number + 1).to_bytes(4, "little") * (size // 4 + 1))[:size]

    def shared(self) -> list[SharedRegion]:
        """The source, for stores to read on a local transport."""
        return [SharedRegion(self._fd, self.source)]

    def clear_target(self) -> None:
        """Overwrite the target, so that `differs` sees only what is read from now on."""
        self.target[:] = bytes(self.target.nbytes)

    def at(self, place: int, nbytes: int, memory: memoryview) -> int:
        """Offset of piece number `place` with `nbytes` in `memory`."""
        return place % (memory.nbytes // nbytes) * nbytes

    def differs(self, places: int, nbytes: int) -> int:
        """How many of the first `places` pieces with `nbytes` differ between `target` and `source`."""
        wrong = 0
        for place in range(places):
            at = self.at(place, nbytes, self.source)
            into = self.at(place, nbytes, self.target)
            wrong += self.source[at : at + nbytes] != self.target[into : into + nbytes]
        return wrong


class IncompleteError(RuntimeError):
    """A chain was moved in part only."""


@dataclasses.dataclass(slots=True)
class StoreClient:
    """Puts and gets chains with one layout. Block number `i` of a chain lies at place `first + i` of the memory."""

    writer: StoreWriter
    reader: BlockReader
    stub: "KVStoreServiceAsyncStub"
    layout: KVLayout
    memory: Memory

    async def put(self, keys: Sequence[bytes], first: int = 0) -> None:
        """Store a chain; return once all blocks are VISIBLE.

        Raises:
            IncompleteError: the store held some blocks already, or refused the put.
        """
        size, source, slice_bytes = self.layout.block_bytes, self.memory.source, self.layout.slice_bytes(0)
        places = [self.memory.at(first + index, size, source) for index in range(len(keys))]

        def read(layer: int, index: int) -> tuple[memoryview, int]:
            at = places[index] + layer * slice_bytes
            data = source[at : at + slice_bytes]
            return data, slice_hash(data)

        outcome = await self.writer.put(keys, parents(keys, self.layout), "", read, timeout_s=TIMEOUT_S)
        if outcome.stored != len(keys):
            raise IncompleteError(f"the store took {outcome.stored} of {len(keys)} blocks")

    async def get(
        self, keys: Sequence[bytes], first: int = 0, on_layer: Callable[[int], None] = lambda layer: None
    ) -> None:
        """Read a chain into the memory.

        Raises:
            IncompleteError: the store does not hold all blocks.
        """
        size, target, slice_bytes = self.layout.block_bytes, self.memory.target, self.layout.slice_bytes(0)
        places = [self.memory.at(first + index, size, target) for index in range(len(keys))]

        def into(layer: int, index: int) -> memoryview:
            at = places[index] + layer * slice_bytes
            return target[at : at + slice_bytes]

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            """The slice lies where it was to land."""

        layers = range(self.layout.layers)
        blocks = await self.reader.read(
            keys, layers=layers, on_slice=take, on_layer=on_layer, timeout_s=TIMEOUT_S, into=into
        )
        if blocks != len(keys):
            raise IncompleteError(f"the store has {blocks} of {len(keys)} blocks")

    async def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are there."""
        request = kvstore_pb2.MatchPrefixRequest(keys=pack_keys(keys))
        response = await self.stub.MatchPrefix(request, timeout=TIMEOUT_S)
        return int(response.blocks)

    async def gauges(self) -> dict[str, float]:
        """All gauges of the store."""
        stats = await self.stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest(), timeout=TIMEOUT_S)
        return {gauge.name: gauge.value for gauge in stats.gauges}

    async def durable(self) -> None:
        """Return once everything that was put is durable.

        Raises:
            TimeoutError: longer than `TIMEOUT_S`.
            RuntimeError: a batch failed.
            KeyError: the store has no such gauge.
        """
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                now = await self.gauges()
                if now["blocks_not_durable_total"] or now["failed_batches_total"]:
                    raise RuntimeError("the store could not make all blocks durable")
                if not any(now[name] for name in SETTLED):
                    return
                await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def connected(
    address: str, layout: KVLayout, memory: Memory, transport: str | None = None
) -> AsyncIterator[StoreClient]:
    """A client of the store at `address`, over a transport; default: what MOONPOOL_KV_TRANSPORTS names, or local."""
    config = TransportConfig() if transport is None else TransportConfig(kv_transports=transport)
    transports = TransportDialer(open_transports(config), memory.shared)
    async with Channels() as channels:
        writer = StoreWriter(KVEndpoint(channels, address, hello(layout), layout, StreamSettings(transports)))
        reader = BlockReader(KVEndpoint(channels, address, hello(layout), layout, StreamSettings(transports)))
        try:
            yield StoreClient(writer, reader, KVStoreServiceStub(channels.get(address)), layout, memory)
        finally:
            await writer.aclose()
            await reader.aclose()


async def some_at_once(calls: Iterable[Callable[[], Awaitable[None]]], at_once: int) -> None:
    """Run calls in order, `at_once` at a time."""
    waiting = iter(calls)

    async def worker() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
