"""Values in a store that runs: both clients, sizes, misses, deletions, damage."""

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import DELETION_PORTION
from moonpool.base.errors import ConfigError
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import KEY_BYTES, BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.values import value_key, value_namespace
from moonpool.base.kv_transfer.store_writer import BlocksToPut, PutOutcome
from moonpool.client.kv import (
    MAX_VALUE_BYTES,
    AsyncKVClient,
    InvalidRequest,
    KVClient,
    TransferFailed,
    Unavailable,
)
from moonpool.client.kv.connection import KVConnection
from moonpool.v1 import kv_pb2
from moonpool.v1.kvstore_pb2 import FindRequest
from tests.unit.kvstore.rig import Rig, rig

NAME = "engine/model"
SIZES = [0, 1, 100, 4096, 70_000, 1 << 20, 3_000_000]


def data_of(nbytes: int, seed: int = 1) -> bytearray:
    return (bytearray(index * seed % 251 for index in range(1009)) * (nbytes // 1009 + 1))[:nbytes]


@asynccontextmanager
async def stored(**settings: Any) -> AsyncIterator[tuple[Rig, AsyncKVClient]]:
    """A store and a client of it; nothing is left in the store's hands in the end."""
    async with rig(**{"dram_bytes": 64 << 20} | settings) as store:
        async with AsyncKVClient(
            store.address, namespace=NAME, transports=settings.get("kv_transports", "grpc")
        ) as client:
            yield store, client
        await store.at_rest()


@pytest.mark.parametrize("transport", ["grpc", "local"])
async def test_values_of_many_sizes_come_back(transport: str, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KV_TRANSPORTS_DIR", str(sockets))
    values = {b"%d" % size: data_of(size) for size in SIZES}
    async with stored(kv_transports=transport, kv_transports_dir=sockets) as (_, client):
        assert await client.batch_put(values) == len(values)
        assert client.transport == transport
        assert await client.batch_get(list(values)) == list(values.values())
        for size in SIZES:
            buffer = bytearray(size)
            assert await client.get_into(b"%d" % size, buffer) == size
            assert buffer == values[b"%d" % size]
        larger = bytearray(b"\xee" * 5000)
        assert await client.get_into(b"4096", larger) == 4096
        assert larger[:4096] == values[b"4096"]


async def test_all_parts_of_a_call_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes five seconds."""
    now, given, usual_put = 100.0, list[float](), KVConnection.put

    async def put(self: KVConnection, layout: KVLayout, blocks: BlocksToPut, timeout_s: float) -> PutOutcome:
        nonlocal now
        given.append(timeout_s)
        now += 5.0
        return await usual_put(self, layout, blocks, 30.0)

    async with stored() as (_, client):
        assert await client.put(b"0", b"data")
        world.CURRENT.set(world.World(clock=world.Clock(monotonic=lambda: now)))
        monkeypatch.setattr(KVConnection, "put", put)
        with pytest.raises(TransferFailed, match="took too long"):
            await client.batch_put({b"%d" % size: data_of(size) for size in (100, 4096, 70_000)}, timeout_s=10.0)
        assert given == [10.0, 5.0]


async def test_more_sizes_at_once_than_streams_stay_open() -> None:
    async with stored() as (_, client):
        sizes = [64 << place for place in range(10)] + [(64 << place) - 10 for place in range(1, 11)]
        stored_each = await asyncio.gather(*(client.put(b"%d" % size, data_of(size)) for size in sizes))
        assert stored_each == [True] * len(sizes)
        found = await asyncio.gather(*(client.get_into(b"%d" % size, bytearray(size)) for size in sizes))
        assert found == sizes


async def test_a_batch_may_be_larger_than_the_stores_memory() -> None:
    value = bytes(32 << 20)
    async with stored(dram_bytes=80 << 20) as (_, client):
        assert await client.batch_put({b"1": value, b"2": value, b"3": value}) == 3
        assert await client.exists(b"3")


async def test_a_call_goes_on_while_another_one_learns_of_a_deletion() -> None:
    async with stored() as (store, client):
        await client.put(b"k", b"old")
        selection = kv_pb2.Selection(keys=value_key(value_namespace(NAME), "", b"k"))
        await store.stub.Forget(kv_pb2.ForgetRequest(deletions=[kv_pb2.Deletion(id="d", selection=selection)]))
        values = {b"%d" % place: data_of(64 << place) for place in range(14)}
        many, single = await asyncio.gather(client.batch_put(values), client.put(b"k", b"new"), return_exceptions=True)
        assert (many, type(single)) == (len(values), InvalidRequest)


async def test_several_threads_share_a_blocking_client() -> None:
    async with stored() as (store, _):
        with KVClient(store.address, namespace=NAME, transports="grpc") as client:

            def work(number: int) -> bool:
                key, data = b"%d" % number, data_of(50_000 + number, number)
                return client.put(key, data) and client.get(key) == data

            assert all(await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(1, 9))))
            await asyncio.to_thread(client.close)


async def test_a_value_under_a_key_stays_whatever_comes_later() -> None:
    async with stored() as (_, client):
        assert await client.put(b"k", b"first")
        assert not await client.put(b"k", b"other")
        assert not await client.put(b"k", data_of(70_000))  # of another size, so of another format
        assert await client.batch_put({b"k": data_of(70_000), b"new": data_of(70_000)}) == 1
        assert (await client.get(b"k"), await client.get(b"new")) == (bytearray(b"first"), data_of(70_000))
        assert await client.delete(b"k")
        assert await client.put(b"k", data_of(70_000))
        assert await client.get(b"k") == data_of(70_000)


async def test_those_that_are_there_are_read_around_those_that_are_not() -> None:
    async with stored() as (_, client):
        await client.batch_put({b"%d" % number: data_of(1000, number) for number in (1, 2, 4, 6)})
        keys = [b"%d" % number for number in range(8)]
        found = await client.batch_get([*keys, b"1"])
        assert [value is not None for value in found] == [number in (1, 2, 4, 6) for number in range(8)] + [True]
        assert found[6] == data_of(1000, 6)
        assert await client.batch_exists(keys) == [value is not None for value in found[:8]]
        assert await client.batch_delete([*keys, b"1"]) == 4
        assert await client.batch_get(keys) == [None] * 8


async def test_more_than_readers_may_keep_in_memory_comes_in_turns() -> None:
    async with stored(dram_bytes=1 << 20, lease_bytes=200_000) as (_, client):
        values = {b"%d" % number: data_of(65_536, number + 1) for number in range(8)}
        assert await client.batch_put(values) == 8
        assert await client.batch_get(list(values)) == list(values.values())


async def test_tenants_and_namespaces_do_not_meet() -> None:
    async with stored() as (store, client):
        await client.put(b"k", b"mine")
        for settings in ({"namespace": NAME, "tenant": "ann"}, {"namespace": "other"}):
            async with AsyncKVClient(store.address, transports="grpc", **settings) as other:  # type: ignore[arg-type]
                assert await other.get(b"k") is None
                assert not await other.delete(b"k")
        assert await client.get(b"k") == bytearray(b"mine")


async def test_a_damaged_value_is_a_miss_and_those_before_it_are_not() -> None:
    async with stored() as (store, client):
        values = {b"%d" % number: data_of(65_536, number + 1) for number in range(3)}
        await client.batch_put(values)
        key = value_key(value_namespace(NAME), "", b"1")
        block = store.service.store.tiers.dram.get(key)
        assert block is not None
        block.data[70] ^= 1
        assert await client.batch_get(list(values)) == [values[b"0"], None, values[b"2"]]
        assert await client.put(b"1", values[b"1"])  # the store has looked at it, and dropped it


async def test_values_are_there_after_a_restart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data_dir": tmp_path, "ssd_bytes": 8 << 20}
    async with stored(**settings) as (store, client):
        await client.batch_put({b"k": data_of(70_000), b"gone": b"x"})
        await store.durable()
        assert await client.delete(b"gone")
    async with stored(**settings) as (_, client):
        assert await client.get(b"k") == data_of(70_000)
        assert not await client.exists(b"gone")


@pytest.mark.parametrize(
    "selection",
    [kv_pb2.Selection(tenants=[""]), kv_pb2.Selection(keys=value_key(value_namespace(NAME), "", b"k"))],
    ids=["tenant", "key"],
)
async def test_after_an_operators_deletion_values_can_be_put_again(selection: kv_pb2.Selection) -> None:
    async with stored() as (store, client):
        await client.put(b"k", b"old")
        await store.stub.Forget(kv_pb2.ForgetRequest(deletions=[kv_pb2.Deletion(id="d", selection=selection)]))
        assert not await client.exists(b"k")
        with pytest.raises(InvalidRequest, match="older than a deletion"):  # it may have been made before
            await client.put(b"k", b"old")
        assert await client.put(b"k", b"new")
        async with AsyncKVClient(store.address, namespace=NAME, transports="grpc") as later:
            assert await later.put(b"k2", b"new")


async def test_others_have_turns_while_a_store_looks_through_many_deleted_keys() -> None:
    keys = frozenset(BlockKey(number.to_bytes(KEY_BYTES, "big")) for number in range(3 * DELETION_PORTION))
    own = value_key(value_namespace(NAME), "", b"k")
    async with rig() as store:
        deletions = store.service.store.writes.deletions
        deletions.add("blocks", KVSelection(keys=keys))
        deletions.add("value", KVSelection(keys=frozenset([own])))
        deletions.add("all", KVSelection(tenants=frozenset([""])))
        for asked, found in ((b"", ["all", "value"]), (own, ["all"])):
            asking, turns = asyncio.ensure_future(store.service.servicer.Find(FindRequest(keys=asked), None)), 0
            while not asking.done():
                await asyncio.sleep(0)
                turns += 1
            assert asking.result().deletions == found
            assert (turns > 3) == (not asked)


@pytest.mark.parametrize(
    ("key", "buffer", "field"),
    [
        (b"", bytearray(4), "key"),
        (b"k", bytearray(4), "buffer"),
        (b"k", bytes(5), "buffer"),
        (b"k", memoryview(bytearray(10))[::2], "buffer"),
    ],
)
async def test_what_cannot_be_used_is_named(key: bytes, buffer: Any, field: str) -> None:
    async with stored() as (_, client):
        await client.put(b"k", b"12345")
        with pytest.raises(InvalidRequest) as caught:
            await client.get_into(key, buffer)
        assert caught.value.field == field
        with pytest.raises(InvalidRequest, match="data: is not a buffer of bytes"):
            await client.put(b"object", object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transports: must be some of grpc, local, tcp"):
        AsyncKVClient("127.0.0.1:1", namespace=NAME, transports="lokal")


async def test_a_buffer_may_be_larger_than_any_value() -> None:
    async with stored() as (_, client):
        await client.put(b"k", b"12345")
        with mmap.mmap(-1, MAX_VALUE_BYTES + 1) as buffer:
            assert await client.get_into(b"k", buffer) == 5
            assert buffer[:5] == b"12345"


async def test_a_question_that_takes_too_long_fails_as_a_transfer_does() -> None:
    async with stored() as (store, client):
        await client.put(b"k", b"12345")
        async with store.service.servicer.deletions.turn:
            with pytest.raises(TransferFailed):
                await client.delete(b"k", timeout_s=0.01)


async def test_a_store_that_is_not_there() -> None:
    async with AsyncKVClient("127.0.0.1:1", namespace=NAME) as client:
        with pytest.raises(Unavailable):
            await client.put(b"k", b"v")
