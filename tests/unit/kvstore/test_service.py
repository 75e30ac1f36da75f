"""A whole store over a real server and the real clients: what was put is read, also after a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest, Mismatch, Unavailable
from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.keys import pack_keys, unpack_keys
from moonpool.base.kv.layout import KVLayout, LayerKV
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.layouts import GROUPED
from tests.unit.kvstore.helpers import BLOCK, LAYOUT, RECORD, data_of, slice_of
from tests.unit.kvstore.recorded import write_folder
from tests.unit.kvstore.rig import KEYS, Rig, failure, frames_of, opened_put, rig

A, B, C, D = KEYS[:4]


async def test_what_was_put_is_read_layer_by_layer(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        assert await store.put(KEYS[:5]) == (0, 5)
        assert await store.put(KEYS[:6]) == (5, 1)
        assert await store.read(KEYS) == [data_of(key) for key in KEYS[:6]]
        assert await store.read(KEYS[:2], range(1, 2)) == [slice_of(key, 1) for key in KEYS[:2]]
        assert (await store.stub.MatchPrefix(kvstore_pb2.MatchPrefixRequest(keys=pack_keys(KEYS)))).blocks == 6
        await store.durable()
        await store.at_rest()
        assert store.gauges()["ssd_blocks"] == 6
    async with rig(tmp_path) as store:
        assert store.gauges()["dram_blocks"] == 0
        assert await store.read(KEYS) == [data_of(key) for key in KEYS[:6]]
        await store.at_rest()
        assert (store.gauges()["dram_blocks"], store.gauges()["ssd_hits_total"]) == (6, 6)
        assert await store.put(KEYS[:6]) == (6, 0)


@pytest.mark.parametrize("together_bytes", [0, 1 << 20])
async def test_blocks_of_groups_of_layers_are_put_read_and_kept(tmp_path: Path, together_bytes: int) -> None:
    """Beside blocks of another layout, whole or in part, from memory and from the disk of a store that started anew."""
    grouped = BlockFormat(b"g" * 32, GROUPED)
    kinds = LayerKV(1, 4, "bfloat16"), LayerKV(1, 2, "bfloat16", "window", 20)
    deep = BlockFormat(b"d" * 32, KVLayout.of_layers(16, kinds * 75))
    expected = [data_of(key, GROUPED) for key in KEYS[:5]]

    async def check(store: Rig) -> None:
        assert await store.read(KEYS[:6], range(4), grouped) == expected
        assert await store.read(KEYS[:2], range(1, 3), grouped) == [
            slice_of(key, 1, GROUPED) + slice_of(key, 2, GROUPED) for key in KEYS[:2]
        ]
        second = [slice_of(key, 1, GROUPED)[1024:] + slice_of(key, 2, GROUPED)[512:] for key in KEYS[:2]]
        assert await store.read(KEYS[:2], range(1, 3), grouped, heads=range(1, 2)) == second
        assert await store.read(KEYS[5:7]) == [data_of(key) for key in KEYS[5:7]]
        assert await store.read(KEYS[7:], range(150), deep) == [data_of(KEYS[7], deep.layout)]

    async with rig(tmp_path, together_bytes=together_bytes) as store:
        assert await store.put(KEYS[:5], block_format=grouped) == (0, 5)
        assert await store.put(KEYS[5:7]) == (0, 2)
        assert await store.put(KEYS[7:], block_format=deep) == (0, 1)
        await check(store)
        await store.durable()
    async with rig(tmp_path, together_bytes=together_bytes) as store:
        assert store.gauges()["ssd_blocks"] == 8
        await check(store)
        await store.at_rest()


async def test_a_folder_of_the_program_before_groups_is_read_as_it_is(tmp_path: Path) -> None:
    write_folder(tmp_path)
    index = (tmp_path / "index" / "data.mdb").read_bytes()
    async with rig(tmp_path) as store:
        assert (store.gauges()["ssd_blocks"], store.gauges()["ssd_indexed"]) == (1, 1)
        assert await store.read([A]) == [data_of(A)]
    assert (tmp_path / "index" / "data.mdb").read_bytes() == index


async def test_a_store_on_two_disks_takes_what_is_reused_and_what_its_writer_waits_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data_dir": [tmp_path / "a", tmp_path / "b"], "ssd_admission": "reused"}
    async with rig(**settings) as store:
        await store.put(KEYS[:3])
        await store.durable()
        gauges = store.gauges()
        assert (gauges["ssd_blocks"], gauges["ssd_refused_blocks_total"], gauges["ssd_disks_out"]) == (0, 3, 0)
        assert gauges["ssd_refused_bytes_total"] == 3 * BLOCK
        assert gauges["ssd_capacity_bytes"] == 2 << 20
        assert await store.read([A]) == [data_of(A)]
        call, _ = await opened_put(store, [D], durable=True)
        await store.send(call, [D])
        await store.until("ssd_blocks", 2)
        call.cancel()
        await store.at_rest()
    async with rig(**settings | {"data_dir": [tmp_path / "b", tmp_path / "a"]}) as store:
        assert [await store.read([key]) for key in KEYS[:4]] == [[data_of(A)], [], [], [data_of(D)]]


async def test_memory_beside_the_budget_goes_back_at_rest() -> None:
    """Nobody needs to put the next block."""
    async with rig(dram_bytes=4 << 20) as store:
        arena = store.service.store.tiers.dram.arena
        views = [arena.allocate(1 << 20, ahead=False) for _ in range(8)]
        assert arena.resident_bytes == 8 << 20 > arena.limit
        views.clear()
        await asyncio.sleep(0)
        assert arena.resident_bytes <= arena.limit


async def test_closing_makes_visible_blocks_durable(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        await store.put(KEYS[:3])
    async with rig(tmp_path) as store:
        assert await store.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]


async def test_a_store_without_a_disk() -> None:
    async with rig(dram_bytes=2 * BLOCK) as store:
        for key in KEYS[:3]:
            await store.put([key])
        assert [len(await store.read([key])) for key in KEYS[:3]] == [0, 1, 1]
        await store.at_rest()
        assert (store.gauges()["dram_evictions_total"], "ssd_blocks" in store.gauges()) == (1, False)


async def test_a_corrupted_block_is_a_miss_and_watchers_hear_of_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        await store.put(KEYS[:3])
    segment = next((tmp_path / "segments").iterdir())
    data = bytearray(segment.read_bytes())
    data[RECORD + 4096 + 5] ^= 4
    segment.write_bytes(data)
    async with rig(tmp_path) as store:
        watch = store.stub.Watch(kvstore_pb2.WatchRequest())
        first = await watch.read()
        assert (first.epoch, first.events.snapshot_begin, first.events.snapshot_end) == (9, True, True)
        assert set(unpack_keys(first.events.stored_keys)) == set(KEYS[:3])
        assert set(unpack_keys(first.events.cooled_keys)) == set(KEYS[:3])
        assert await store.read(KEYS[:3]) == [data_of(A)]
        change = await watch.read()
        assert (change.events.sequence, unpack_keys(change.events.removed_keys)) == (1, [B])
        assert store.gauges()["bad_blocks_total"] == 1
        await store.put(KEYS[:3])
        told = [await watch.read() for _ in range(2)]
        stored = [unpack_keys(each.events.stored_keys) for each in told]
        assert stored == [[A], [B]], "the one was brought into DRAM, the other is written anew"
        assert await store.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]
        watch.cancel()
        await store.durable()
        await store.at_rest()


@pytest.mark.parametrize("method", ["Put", "Get"])
async def test_a_stream_must_begin_with_a_proper_hello(method: str) -> None:
    async with rig() as store:
        wrong_layout = kv_pb2.StreamHello(namespace=b"n" * 32, layout=kv_pb2.KVLayout(layers=1))
        request = getattr(kvstore_pb2, f"{method}Request")
        for message, kind in (
            (request(), InvalidRequest),
            (request(hello=kv_pb2.StreamHello(layout=LAYOUT.to_proto())), Mismatch),
            (request(hello=wrong_layout), Mismatch),
        ):
            call = store.open_stream(method)
            await call.write(PayloadMessage(message) if method == "Put" else message)
            assert isinstance(await failure(call), kind)
        await store.at_rest()


async def test_a_watcher_resumes_where_it_was() -> None:
    async with rig() as store:
        await store.put([A])
        await store.put([B])
        watch = store.stub.Watch(kvstore_pb2.WatchRequest(epoch=9, after_sequence=1))
        message = await watch.read()
        assert (message.events.sequence, unpack_keys(message.events.stored_keys)) == (2, [B])
        watch.cancel()
        await store.at_rest()


async def test_stats_tell_what_is_held() -> None:
    async with rig() as store:
        await store.put([A, B])
        answer = await store.stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest())
        assert answer.instance.id == "kvstore-0"
        gauges = {gauge.name: gauge.value for gauge in answer.gauges}
        assert (gauges["dram_blocks"], gauges["dram_bytes"], gauges["blocks_put_total"]) == (2, 2 * BLOCK, 2)


async def test_closing_ends_streams_but_not_before_their_transfers() -> None:
    async with rig() as store:
        call = await opened_put(store, [A])
        watch = store.stub.Watch(kvstore_pb2.WatchRequest())
        await watch.read()
        finishing = asyncio.ensure_future(store.service.finish())
        for header, pieces in frames_of([A]):
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
        assert list((await call.read()).ack.blocks) == [0]
        assert not finishing.done()
        await call.write(PayloadMessage(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=1))))
        await finishing
        assert isinstance(await failure(call), Unavailable)
        assert isinstance(await failure(watch), Unavailable)
        await store.at_rest()
