"""A client for one kvstore as an engine has: the real put and get streams, and separate memory."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.kvstore_shape import Memory, hello, parents
from moonpool.base.kv.keys import pack_keys, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.rpc.channels import Channels
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.v1 import kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

if TYPE_CHECKING:
    from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceAsyncStub

TIMEOUT_S = 300.0
POLL_S = 0.005
SETTLED = ("pending_writes", "durability_awaited_blocks", "put_transfers")
"""Gauges that are 0 once everything visible is durable."""


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
        """Stores a chain; returns once all blocks are VISIBLE.

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
        """Reads a chain into the memory.

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
        """Returns once everything that was put is durable.

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


async def some_at_once(jobs: Iterable[Callable[[], Awaitable[None]]], at_once: int) -> None:
    """Runs jobs in order, `at_once` at a time."""
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
