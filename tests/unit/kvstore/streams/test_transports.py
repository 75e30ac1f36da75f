"""A store's streams over each connection, and connections that break or cannot be opened."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import FrameError, StreamBroken
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.pool import KVPool
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.transport.config import TRANSPORTS
from moonpool.base.transport.stream_spec import StreamSettings
from tests.unit.base.transport.pairs import NIXL, Cuttable, shared, transport_settings
from tests.unit.kvstore.helpers import BLOCK, LAYOUT, keys_of, slice_of
from tests.unit.kvstore.rig import KEYS, PARENTS, Rig, opened_put, rig

NAMES = ["local", "tcp", "tls", "grpc", NIXL]
FRAME = 2 * LAYOUT.slice_bytes(0)


@asynccontextmanager
async def storing(
    folder: Path, connection: str, *, dram_bytes: int = 64 * BLOCK, **options: Any
) -> AsyncIterator[tuple[Rig, Cuttable, KVPool]]:
    """A store, and an engine's pool with the blocks of KEYS."""
    pool = KVPool.create(LAYOUT, len(KEYS), [(0, LAYOUT.layers)])
    for index, key in enumerate(KEYS):
        for layer in range(LAYOUT.layers):
            data = memoryview(slice_of(key, layer))
            pool.write(layer, index, data, slice_hash(data))
    dialer = Cuttable(connection, folder, shared(pool), **options)
    async with rig(**transport_settings(connection, folder), dram_bytes=dram_bytes) as store:
        store.dialer = dialer
        yield store, dialer, pool
        await store.at_rest()
    pool.close()


@asynccontextmanager
async def writing(store: Rig) -> AsyncIterator[StoreWriter]:
    """In small frames, so that a put has many."""
    writer = StoreWriter(
        KVEndpoint(store.channels, store.address, store.hello(), LAYOUT, StreamSettings(store.dialer)),
        frame_bytes=FRAME,
    )
    try:
        yield writer
    finally:
        await writer.aclose()


def expected(count: int = len(KEYS)) -> list[bytes]:
    return [b"".join(slice_of(key, layer) for layer in range(LAYOUT.layers)) for key in KEYS[:count]]


@pytest.mark.parametrize("connection", NAMES)
async def test_blocks_come_back_as_they_were_put(sockets: Path, connection: str) -> None:
    async with storing(sockets, connection) as (store, dialer, pool), writing(store) as writer:
        assert (await store.put(KEYS[:2])) == (0, 2)  # whole with its opening, from memory that is no region
        outcome = await writer.put(KEYS, PARENTS[: len(KEYS)], "", pool.read, timeout_s=10)
        assert (outcome.present, outcome.stored, writer.transport) == (2, len(KEYS) - 2, connection)
        assert await store.read(KEYS) == expected()
        reader = store.reader()
        some: list[bytes] = []
        blocks = await reader.read(
            KEYS,
            layers=range(1, 2),
            heads=range(1),
            on_slice=lambda layer, index, data, value: some.append(bytes(data)),
            on_layer=lambda _: None,
            timeout_s=10,
        )
        assert (blocks, len(some), reader.transport) == (len(KEYS), len(KEYS), connection)
        memory = [bytearray(BLOCK) for _ in (*KEYS, "none")]

        def into(layer: int, index: int) -> memoryview:
            return memoryview(memory[index])[layer * LAYOUT.slice_bytes(0) :][: LAYOUT.slice_bytes(0)]

        layers: list[int] = []
        blocks = await reader.read(
            [*KEYS, keys_of(1, "none")[0]],
            layers=range(LAYOUT.layers),
            on_slice=lambda layer, index, data, value: some.append(bytes(data)),
            on_layer=layers.append,
            timeout_s=10,
            into=into,
        )
        assert (blocks, layers, [bytes(each) for each in memory[:blocks]]) == (len(KEYS), [0, 1, 2], expected())
        assert some[len(KEYS) :] == [slice_of(key, layer) for layer in range(LAYOUT.layers) for key in KEYS]
        await reader.aclose()
        assert (len(dialer.made), dialer.failures) == (0 if connection == "grpc" else 4, 0)
        assert writer.traffic.credits_out < store.service.config.window_bytes // 4


@pytest.mark.parametrize("connection", ["local", "tcp", "tls"])
async def test_a_connection_that_breaks_is_grpc_s_for_the_next_and_comes_back_later(
    sockets: Path, connection: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with storing(sockets, connection, retry_s=0.0) as (store, dialer, pool), writing(store) as writer:
        assert (await writer.put(KEYS[:2], PARENTS[:2], "", pool.read, timeout_s=10)).stored == 2
        late: list[int] = []

        def read(layer: int, index: int) -> tuple[memoryview, int]:
            if layer == 1:
                late.append(index)
                dialer.cut()
            return pool.read(layer, index + 2)

        with pytest.raises(StreamBroken, match="cut"):
            await writer.put(KEYS[2:], PARENTS[2 : len(KEYS)], "", read, timeout_s=10)
        assert late
        assert (await writer.put(KEYS, PARENTS[: len(KEYS)], "", pool.read, timeout_s=10)).present >= 2
        assert (writer.transport, len(dialer.made)) == (connection, 2), (
            "after retry_s, which is 0 here, it is tried again"
        )
        assert dialer.failures == 1
        assert sum("transport failed" in record.getMessage() for record in caplog.records) == 1
        assert await store.read(KEYS) == expected()


@pytest.mark.parametrize("connection", ["local", "tcp", "tls"])
async def test_until_it_may_be_tried_again_grpc_is_used(sockets: Path, connection: str) -> None:
    async with storing(sockets, connection) as (store, dialer, pool), writing(store) as writer:
        await writer.put(KEYS[:1], PARENTS[:1], "", pool.read, timeout_s=10)
        dialer.cut()
        for index, used in ((1, "grpc"), (2, "grpc")):
            with contextlib.suppress(StreamBroken):  # the first put may begin before the break is seen
                await writer.put(KEYS[:2], PARENTS[:2], "", pool.read, timeout_s=10)
            await writer.put(KEYS[: index + 1], PARENTS[: index + 1], "", pool.read, timeout_s=10)
            assert writer.transport == used
        assert len(dialer.made) == 1
        assert await store.read(KEYS[:3]) == expected(3)


async def test_a_connection_that_cannot_be_opened_is_told_once(sockets: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with storing(sockets, "local") as (store, dialer, pool), writing(store) as writer:
        os.unlink(store.service.listener.addresses["local"])
        assert (await writer.put(KEYS[:2], PARENTS[:2], "", pool.read, timeout_s=10)).stored == 2
        assert await store.read(KEYS[:2]) == expected(2)
        assert (writer.transport, dialer.failures) == ("grpc", 1)
        assert sum("transport failed" in record.getMessage() for record in caplog.records) == 1


async def test_a_put_that_is_cancelled_leaves_credits_and_connection_as_they_were(sockets: Path) -> None:
    async with storing(sockets, "local") as (store, dialer, pool), writing(store) as writer:
        began = asyncio.Event()

        def read(layer: int, index: int) -> tuple[memoryview, int]:
            began.set()
            return pool.read(layer, index)

        task = asyncio.ensure_future(writer.put(KEYS, PARENTS[: len(KEYS)], "", read, timeout_s=10))
        await began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert (await writer.put(KEYS, PARENTS[: len(KEYS)], "", pool.read, timeout_s=10)).stored <= len(KEYS)
        assert (writer.transport, len(dialer.made), dialer.failures) == ("local", 1, 0)
        assert await store.read(KEYS) == expected()


@pytest.mark.parametrize("connection", ["local", "tcp", "tls"])
async def test_what_changes_on_its_way_is_never_stored(sockets: Path, connection: str) -> None:
    """A pool's block that is overwritten before the store has pulled it: its hash is another one."""
    async with storing(sockets, connection) as (store, _, pool), writing(store) as writer:
        pool.slice(1, 3)[5] ^= 1
        with pytest.raises(FrameError, match="wrong hash"):
            await writer.put(KEYS, PARENTS[: len(KEYS)], "", pool.read, timeout_s=10)
        assert len(await store.read(KEYS)) <= 3


@pytest.mark.parametrize("scattered", [False, True])
async def test_what_waits_for_room_is_the_store_s_own_by_then(sockets: Path, scattered: bool) -> None:
    """The writer has its memory back at once, and may use it for other blocks."""
    table = [5, 2] if scattered else [0, 1]
    async with storing(sockets, "local", dram_bytes=3 * BLOCK) as (store, _, pool), writing(store) as writer:
        others = await opened_put(store, keys_of(2, "others"))
        await store.send(others, keys_of(2, "others"), layers=range(1))
        await store.until("dram_reserved_bytes", 2 * BLOCK)
        keys = [KEYS[index] for index in table]
        read = lambda layer, index: pool.read(layer, table[index])  # noqa: E731
        putting = asyncio.ensure_future(writer.put(keys, PARENTS[:2], "", read, timeout_s=10))
        await store.until("transfers_waiting_for_room", 1)
        for index in table:
            pool.slice(0, index)[:] = b"?" * LAYOUT.slice_bytes(0)
        others.cancel()
        assert (await putting).stored == 2
        assert writer.transport == "local"
        assert await store.read(keys) == [expected()[index] for index in table]


async def test_the_store_s_end_ends_its_connection_with_its_reason(sockets: Path) -> None:
    async with storing(sockets, "local") as (store, dialer, pool), writing(store) as writer:
        await writer.put(KEYS[:1], PARENTS[:1], "", pool.read, timeout_s=10)
        await store.service.finish()
        with pytest.raises(StreamBroken, match="shutting down"):
            await writer.put(KEYS, PARENTS[: len(KEYS)], "", pool.read, timeout_s=10)
        assert (dialer.failures, [connection.closed for connection in dialer.made]) == (0, [True])


OWN_TRANSPORTS = {
    "toy": "tests.unit.base.transport.toy:ToyTransport",
    "files": "tests.unit.base.transport.toy_files:FileTransport",
}


@pytest.mark.parametrize("name", OWN_TRANSPORTS)
async def test_a_transport_of_its_own_needs_a_class_and_an_entry(
    name: str, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV moves over a transport that no other code knows (docs/extend/kv_transport.md)."""
    monkeypatch.setitem(TRANSPORTS, name, OWN_TRANSPORTS[name])
    async with storing(sockets, name) as (store, dialer, pool), writing(store) as writer:
        outcome = await writer.put(KEYS, PARENTS[: len(KEYS)], "", pool.read, timeout_s=10)
        assert (outcome.stored, writer.transport) == (len(KEYS), name)
        assert await store.read(KEYS) == expected()
        assert dialer.count_open(name) >= 1
        assert dialer.failures == 0
