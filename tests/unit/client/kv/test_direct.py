"""The blocking client: what goes over direct connections, and what happens if they end or cannot be opened."""

import asyncio
import errno
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Buffer

from moonpool.base import world
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.blocking import BlockingReader, BlockingWriter
from moonpool.base.kv_transfer.store_writer import BlocksToPut, PutOutcome
from moonpool.base.transport.regions import SharedMemory
from moonpool.client.kv import InvalidRequest, KVClient, Unavailable, blocking_connection
from moonpool.client.kv.blocking_connection import REOPEN_AFTER_S
from moonpool.client.kv.connection import KVConnection
from moonpool.v1 import kv_pb2
from tests.unit.client.kv.test_values import NAME, SIZES, data_of
from tests.unit.kvstore.rig import Rig, rig

USUAL, DIRECT = 2, 2
"""Streams of each size."""


@asynccontextmanager
async def stored(folder: Path, transport: str) -> AsyncIterator[Rig]:
    async with rig(kv_transports=transport, kv_transports_dir=folder, dram_bytes=64 << 20) as store:
        yield store
        await store.at_rest()


async def with_client(store: Rig, transport: str, work: Callable[[KVClient], None], **options: Any) -> None:
    """Works with a client in a thread of its own."""

    def run() -> None:
        with KVClient(store.address, namespace=NAME, transports=transport, **options) as client:
            work(client)

    await asyncio.to_thread(run)


@pytest.fixture(autouse=True)
def folder(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONPOOL_KV_TRANSPORTS_DIR", str(sockets))
    return sockets


@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_values_of_many_sizes_come_back(transport: str, folder: Path) -> None:
    """The first call of each kind and size goes over a stream, further small ones over direct connections."""
    largest = (4 << 20) + 1

    def work(client: KVClient) -> None:
        client.memory[:] = data_of(client.memory.nbytes, 3)
        for size in (*SIZES, largest):
            keys = [b"%d-%d" % (size, number) for number in range(3)]
            contents: list[Buffer] = [data_of(size), client.memory[100 : 100 + size], bytes(size)]
            values = dict(zip(keys, contents, strict=True))
            assert client.put(keys[0], contents[0])
            assert not client.put(keys[0], contents[1])
            assert client.batch_put(values) == 2
            for key, value in values.items():
                assert client.get(key) == value
                buffer = bytearray(size + 10)
                assert client.get_into(key, buffer) == size
                assert buffer[:size] == value
            found = client.batch_get([*keys, b"none", keys[0]])
            assert found == [*map(bytes, contents), None, bytes(contents[0])]
            assert client.exists(keys[1])
            assert client.batch_delete(keys) == 3
            assert [client.get(key) for key in keys] == [None] * 3
        assert client.transport == transport

    async with stored(folder, transport) as store:
        await with_client(store, transport, work, memory_bytes=8 << 20)
        counts = store.service.listener.opened
        direct, usual = DIRECT * len(SIZES), USUAL * len({*SIZES, largest})
        assert usual + direct <= counts[transport] <= usual + direct + 2 * DIRECT  # buffers are of other sizes


async def test_more_sizes_than_direct_connections_stay_open(folder: Path) -> None:
    sizes = [64 << place for place in range(10)] + [(64 << place) - 10 for place in range(1, 11)]

    def work(client: KVClient) -> None:
        for turn, size in enumerate([*sizes, *sizes[:2]]):
            for number in range(2):
                key = b"%d-%d" % (turn, number)
                assert client.put(key, data_of(size))
                assert client.get_into(key, bytearray(size)) == size

    async with stored(folder, "local") as store:
        await with_client(store, "local", work)


async def test_several_threads_share_a_client(folder: Path) -> None:
    async with stored(folder, "local") as store:

        def all_threads(client: KVClient) -> None:
            def put_and_get(number: int) -> bool:
                data = data_of(50_000, number + 1)
                keys = [b"%d-%d" % (number, turn) for turn in range(20)]
                return all(client.put(key, data) and client.get(key) == data for key in keys)

            async def run() -> list[bool]:
                return await asyncio.gather(*(asyncio.to_thread(put_and_get, number) for number in range(4)))

            assert all(asyncio.run(run()))

        await with_client(store, "local", all_threads)


async def test_after_an_operators_deletion_values_can_be_put_again(folder: Path) -> None:
    async with stored(folder, "local") as store:
        loop = asyncio.get_running_loop()

        async def forget() -> None:
            deletion = kv_pb2.Deletion(id="d", selection=kv_pb2.Selection(tenants=[""]))
            await store.stub.Forget(kv_pb2.ForgetRequest(deletions=[deletion]))

        def work(client: KVClient) -> None:
            for key in (b"1", b"2"):
                assert client.put(key, b"old")
            asyncio.run_coroutine_threadsafe(forget(), loop).result(10)
            assert client.get(b"1") is None
            with pytest.raises(InvalidRequest, match="older than a deletion"):
                client.put(b"1", b"old")
            assert client.put(b"1", b"new")
            assert client.get(b"1") == bytearray(b"new")

        await with_client(store, "local", work)


async def test_a_damaged_value_is_a_miss_and_the_store_drops_it(folder: Path) -> None:
    async with stored(folder, "local") as store:

        def work(client: KVClient) -> None:
            values = {b"%d" % number: data_of(65_536, number + 1) for number in range(3)}
            assert client.batch_put(values) == 3
            assert client.batch_get(list(values)) == list(values.values())
            dram = store.service.store.tiers.dram
            block = next(block for block in dram.values() if block.data == values[b"1"])
            block.data[70] ^= 1
            assert client.batch_get(list(values)) == [values[b"0"], None, values[b"2"]]
            assert client.put(b"1", values[b"1"])
            assert client.get(b"1") == values[b"1"]

        await with_client(store, "local", work)


@pytest.mark.parametrize("transport", ["local", "tcp"])
async def test_a_store_that_ends_is_unavailable_and_not_waited_for(transport: str, folder: Path) -> None:
    async with stored(folder, transport) as store:
        loop = asyncio.get_running_loop()

        def work(client: KVClient) -> None:
            for key in (b"1", b"2"):
                assert client.put(key, b"data")
                assert client.get(key) == bytearray(b"data")
            asyncio.run_coroutine_threadsafe(store.service.finish(), loop).result(10)
            with pytest.raises(Unavailable):
                client.put(b"3", b"data")
            with pytest.raises(Unavailable):
                client.get(b"1")

        await with_client(store, transport, work)


async def test_a_closed_client_says_so(folder: Path) -> None:
    async with stored(folder, "local") as store:
        clients: list[KVClient] = []

        def work(client: KVClient) -> None:
            clients.append(client)
            for key in (b"1", b"2"):
                assert client.put(key, b"data")

        await with_client(store, "local", work)
        with pytest.raises(RuntimeError, match="closed"):
            clients[0].put(b"3", b"data")
        clients[0].close()


async def test_a_put_that_was_taken_has_not_failed_because_no_direct_lane_could_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(nbytes: int) -> SharedMemory:
        raise OSError(errno.EMFILE, "too many open files")

    def work(client: KVClient) -> None:
        monkeypatch.setattr(blocking_connection, "SharedMemory", no_memory)
        for key in (b"1", b"2"):
            assert client.put(key, b"data")
            assert client.get(key) == bytearray(b"data")

    async with stored(folder, "local") as store:
        await with_client(store, "local", work)
        assert store.service.listener.opened["local"] == USUAL + 1


async def test_transports_that_break_each_time_are_not_opened_each_time(folder: Path) -> None:
    now = 100.0
    async with stored(folder, "local") as store:

        def work(client: KVClient) -> None:
            def breaks(key: bytes) -> None:
                assert client.put(key, data_of(65_536))
                assert client.get(key) == data_of(65_536)
                (block,) = store.service.store.tiers.dram.values()
                block.data[70] ^= 1
                assert client.get(key) is None

            nonlocal now
            world.CURRENT.set(world.World(clock=world.Clock(monotonic=lambda: now)))
            breaks(b"1")
            for turn in range(3):
                now += REOPEN_AFTER_S - 1.0 if turn else 0.0
                breaks(b"%d" % turn)
            assert store.service.listener.opened["local"] == USUAL + DIRECT + 1

        await with_client(store, "local", work)


async def test_what_a_direct_lane_does_not_take_has_the_time_that_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each direct attempt takes two seconds; the ordinary transport gets the rest."""
    now, given = 50.0, list[float]()
    usual_put, usual_read = KVConnection.put, KVConnection.read
    direct_put, direct_read = BlockingWriter.put, BlockingReader.read

    def slow_put(self: BlockingWriter, *arguments: Any, **options: Any) -> PutOutcome | None:
        nonlocal now
        now += 2.0
        return direct_put(self, *arguments, **options)

    def slow_read(self: BlockingReader, *arguments: Any, **options: Any) -> int | None:
        nonlocal now
        now += 2.0
        return direct_read(self, *arguments, **options)

    async def put(self: KVConnection, layout: KVLayout, blocks: BlocksToPut, timeout_s: float) -> PutOutcome:
        given.append(timeout_s)
        return await usual_put(self, layout, blocks, timeout_s)

    async def read(self: KVConnection, *arguments: Any, timeout_s: float, **options: Any) -> int:
        given.append(timeout_s)
        return await usual_read(self, *arguments, timeout_s=timeout_s, **options)

    async with stored(folder, "local") as store:

        def work(client: KVClient) -> None:
            for key in (b"1", b"2"):
                assert client.put(key, b"data")
                assert client.get(key) == bytearray(b"data")
            assert client.put(b"large", bytes(5000))
            world.CURRENT.set(world.World(clock=world.Clock(monotonic=lambda: now)))
            monkeypatch.setattr(BlockingWriter, "put", slow_put)
            monkeypatch.setattr(BlockingReader, "read", slow_read)
            monkeypatch.setattr(KVConnection, "put", put)
            monkeypatch.setattr(KVConnection, "read", read)
            assert not client.put(b"large", b"data", timeout_s=20.0), "it is there in another format"
            for block in store.service.store.tiers.dram.values():
                block.data[1] ^= 1
            assert client.get(b"1", timeout_s=10.0) is None
            assert given[:2] == [18.0, 8.0]

        await with_client(store, "local", work)


async def test_a_client_that_is_dropped_without_close_ends_its_thread_and_its_streams(folder: Path) -> None:
    """Shared memory, usual and direct streams: none of them keeps the client."""

    def run() -> None:
        client = KVClient(store.address, namespace=NAME, transports="local", memory_bytes=4096)
        for key in (b"1", b"2"):
            assert client.put(key, b"data")
            assert client.get(key) == bytearray(b"data")
        assert store.service.listener.opened["local"] == USUAL + DIRECT
        (thread,) = [each for each in threading.enumerate() if each.name == "moonpool-client"]
        del client
        gc.collect()
        thread.join(60)
        assert not thread.is_alive()

    async with stored(folder, "local") as store:
        await asyncio.to_thread(run)
