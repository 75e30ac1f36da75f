"""Get streams over a real server: layers, credits, holds, misses."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.kv.frames import FrameOpener, split_run
from moonpool.base.kv.keys import pack_keys
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.kvstore.helpers import BLOCK, LAYOUT, OTHER_FORMAT, data_of, keys_of
from tests.unit.kvstore.rig import (
    KEYS,
    opened_get,
    rig,
)

A, B, C, D = KEYS[:4]


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": b"x"},
        {"layer_end": 4},
        {"layer_begin": 3},
        {"head_end": 3},
        {"head_begin": 2},
        {"keys": bytes(32 * 16385)},
    ],
)
async def test_an_impossible_read_ends_its_transfer_only(fields: dict[str, Any]) -> None:
    async with rig() as store:
        await store.put(KEYS)
        call = await opened_get(store)
        assert (await call.read()).message.opened.blocks == 8
        opening: dict[str, Any] = {"transfer": 2, "keys": pack_keys(KEYS), "layer_end": 3, "head_end": 2}
        await call.write(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(**opening | fields)))
        opened = (await call.read()).message.opened
        assert (opened.transfer, opened.blocks) == (2, 0)
        assert (await call.read()).message.done.transfer == 2
        await call.write(kvstore_pb2.GetRequest(credit=kv_pb2.Credit(bytes=1 << 20)))
        frame = (await call.read()).message.frame
        assert (frame.transfer, len(frame.runs)) == (1, 3)
        call.cancel()
        await store.at_rest()


async def test_a_read_opened_twice_is_ended_and_others_go_on() -> None:
    async with rig() as store:
        await store.put(KEYS)
        call = await opened_get(store)
        opening: dict[str, Any] = {"keys": pack_keys(KEYS), "layer_end": 3, "head_end": 2}
        for transfer in (2, 1):
            await call.write(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(transfer=transfer, **opening)))
        answers = [(await call.read()).message for _ in range(4)]
        assert [each.opened.blocks for each in answers if each.HasField("opened")] == [8, 8, 0]
        assert answers[-1].done.transfer == 1
        await call.write(kvstore_pb2.GetRequest(credit=kv_pb2.Credit(bytes=1 << 20)))
        assert (await call.read()).message.frame.transfer == 2
        call.cancel()
        await store.at_rest()


async def test_readers_keep_only_their_share_of_dram() -> None:
    async with rig(dram_bytes=8 * BLOCK, lease_bytes=3 * BLOCK) as store:
        await store.put(KEYS)
        call = await opened_get(store)
        assert (await call.read()).message.opened.blocks == 3
        assert store.gauges()["dram_leased_bytes"] == 3 * BLOCK
        more = await opened_get(store, keys=pack_keys(KEYS[3:]))
        assert (await more.read()).message.opened.blocks == 0  # a miss: leases may keep no more
        assert await store.read(KEYS[3:]) == [data_of(key) for key in KEYS[3:]]  # a small read keeps nothing
        more.cancel()
        assert await store.put(keys_of(5, "more")) == (0, 5)
        call.cancel()
        await store.at_rest()


async def test_a_reader_without_credits_gets_nothing_and_is_given_up() -> None:
    async with rig(transfer_timeout_s=0.5) as store:  # in which the put before it has to be done, too
        await store.put(KEYS[:3])
        call = await opened_get(store)
        assert (await call.read()).message.opened.blocks == 3
        assert (await call.read()).message.HasField("done")
        call.cancel()
        await store.at_rest()


async def test_a_small_read_is_answered_in_one_message_where_nothing_is_to_wait_for(tmp_path: Path) -> None:
    async with rig(tmp_path) as store:
        await store.put([A, B])
        await store.durable()
        call = await opened_get(store, takes_frame=True)  # no credits yet: piece by piece
        response = (await call.read()).message
        assert (response.opened.blocks, response.opened.HasField("frame")) == (2, False)
        await call.write(kvstore_pb2.GetRequest(credit=kv_pb2.Credit(bytes=1 << 20)))
        while not (await call.read()).message.HasField("done"):
            pass
        opening = kv_pb2.ReadOpen(transfer=2, keys=pack_keys(KEYS[:3]), layer_end=3, head_end=2, takes_frame=True)
        await call.write(kvstore_pb2.GetRequest(open=opening, credit_bytes=2 * BLOCK))
        received = await call.read()
        assert received.message.opened.blocks == 2
        runs = FrameOpener(LAYOUT, keys=[A, B]).open(received.message.opened.frame, received.payload)
        data = {(run.layer, index): bytes(part) for run, d, _ in runs for index, _, part in split_run(run, d, LAYOUT)}
        for index, key in enumerate([A, B]):
            assert b"".join(data[layer, index] for layer in range(3)) == data_of(key)
        assert store.gauges()["get_transfers"] == 0
        call.cancel()
        await store.at_rest()
    async with rig(tmp_path) as store:  # from the disk: layer by layer
        call = await opened_get(store, takes_frame=True)
        response = (await call.read()).message
        assert (response.opened.blocks, response.opened.HasField("frame")) == (2, False)
        call.cancel()
        await store.at_rest()


async def test_a_reader_holds_its_blocks_until_it_leaves() -> None:
    async with rig(dram_bytes=2 * BLOCK, room_timeout_s=10) as store:
        await store.put([A, B])
        call = await opened_get(store)
        assert (await call.read()).message.opened.blocks == 2
        assert store.gauges()["dram_held_bytes"] == 2 * BLOCK
        writing = asyncio.ensure_future(store.put([C]))
        await call.write(kvstore_pb2.GetRequest(close=kv_pb2.ReadClose(transfer=1)))
        assert await writing == (0, 1)
        call.cancel()
        await store.at_rest()


async def test_many_reads_share_a_stream(tmp_path: Path) -> None:
    async with rig(tmp_path, read_ahead_bytes=1) as store:
        await store.put(KEYS)
    async with rig(tmp_path, read_ahead_bytes=1, dram_bytes=2 * BLOCK) as store:
        reader = store.reader()

        async def read_one(count: int) -> list[bytes]:
            out: dict[int, bytes] = {}

            def take(layer: int, index: int, data: memoryview, value: int) -> None:
                out[index] = out.get(index, b"") + data

            blocks = await reader.read(
                KEYS[:count], layers=range(3), on_slice=take, on_layer=lambda _: None, timeout_s=10
            )
            return [out[index] for index in range(blocks)]

        counts = [8, 1, 5, 8, 3, 8]
        for count, blocks in zip(counts, await asyncio.gather(*map(read_one, counts)), strict=True):
            assert blocks == [data_of(key) for key in KEYS[:count]]
        await reader.aclose()
        await store.at_rest()


async def test_another_namespace_is_a_miss() -> None:
    async with rig() as store:
        await store.put([A])
        assert await store.read([A], block_format=OTHER_FORMAT) == []
        assert await store.read([B, A]) == []
