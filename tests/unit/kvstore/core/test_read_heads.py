"""Reading a part of the heads, as a tensor-parallel rank does, over a real server and the real client."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.kv.frames import FrameOpener, SliceRun, pack_frames, split_run
from moonpool.base.kv.keys import BlockKey, pack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.layouts import uniform_like
from tests.slices import hashed, slice_to_send
from tests.unit.kvstore.helpers import RECORD, keys_of, slice_of
from tests.unit.kvstore.rig import Rig, rig

WIDE = KVLayout.uniform(layers=3, kv_heads=4, head_dim=4, block_size=16, dtype="float32")
SCALED = uniform_like(WIDE, dtype="int8")
LARGE = KVLayout.uniform(layers=1, kv_heads=4, head_dim=128, block_size=64, dtype="float32")  # heads of 64 KiB
NAMESPACE = b"n" * 32
ALL = range(3)
HEADS = [range(begin, end) for begin in range(4) for end in range(begin + 1, 5)]
KEYS = keys_of(5)
BLOCK = WIDE.block_bytes


def hello(layout: KVLayout) -> kv_pb2.StreamHello:
    return kv_pb2.StreamHello(namespace=NAMESPACE, layout=layout.to_proto())


def part_of(key: BlockKey, layer: int, heads: range, layout: KVLayout = WIDE) -> bytes:
    return slice_of(key, layer, layout)[heads.start * layout.share_bytes(0) : heads.stop * layout.share_bytes(0)]


async def put(store: Rig, keys: Sequence[BlockKey], layout: KVLayout = WIDE) -> None:
    writer = StoreWriter(KVEndpoint(store.channels, store.address, hello(layout), layout))
    parents = [BlockKey(bytes(32)), *keys][: len(keys)]
    try:
        await writer.put(
            keys, parents, "", hashed(lambda layer, index: slice_of(keys[index], layer, layout)), timeout_s=10
        )
    finally:
        await writer.aclose()


async def read(reader: BlockReader, heads: range | None, layers: range = ALL, blocks: int = 5) -> list[bytes]:
    """The leading blocks' parts, layer after layer."""
    out: dict[int, bytes] = {}

    def take(layer: int, index: int, data: memoryview, value: int) -> None:
        out[index] = out.get(index, b"") + data

    count = await reader.read(
        KEYS[:blocks], layers=layers, heads=heads, on_slice=take, on_layer=lambda _: None, timeout_s=10
    )
    return [out[index] for index in range(count)]


async def check(reader: BlockReader, heads: range, layers: range = ALL) -> None:
    wanted = [b"".join(part_of(key, layer, heads) for layer in layers) for key in KEYS]
    assert await read(reader, heads, layers) == wanted


def reader_of(store: Rig, layout: KVLayout = WIDE) -> BlockReader:
    return BlockReader(KVEndpoint(store.channels, store.address, hello(layout), layout))


async def opened(store: Rig, layout: KVLayout, credit_bytes: int = 0, **fields: Any) -> Any:
    """A raw stream with one transfer."""
    call = store.open_stream("Get")
    await call.write(kvstore_pb2.GetRequest(hello=hello(layout)))
    assert (await call.read()).message.HasField("welcome")
    opening: dict[str, Any] = {
        "transfer": 1,
        "keys": pack_keys(KEYS),
        "layer_end": layout.layers,
        "head_end": layout.head_shares,
    }
    message = kv_pb2.ReadOpen(**opening | fields)
    await call.write(kvstore_pb2.GetRequest(open=message, credit_bytes=credit_bytes))
    return call


async def received(call: Any, opener: FrameOpener) -> list[list[tuple[SliceRun, bytes]]]:
    """Runs of each frame until the transfer's end."""
    frames = []
    while not (answer := await call.read()).message.HasField("done"):
        runs = opener.open(answer.message.frame, answer.payload)
        frames.append([(run, bytes(data)) for run, data, _ in runs])
    return frames


@pytest.mark.parametrize("heads", HEADS)
async def test_each_range_of_heads_from_dram(heads: range) -> None:
    async with rig() as store:
        await put(store, KEYS)
        reader = reader_of(store)
        for layers in (ALL, range(1, 2)):
            await check(reader, heads, layers)
        await reader.aclose()
        await store.at_rest()


@pytest.mark.parametrize("together", [True, False])
async def test_what_is_asked_for_is_sent_and_no_more(together: bool) -> None:
    async with rig() as store:
        await put(store, KEYS)
        size = len(KEYS) * 3 * 2 * WIDE.share_bytes(0)  # credits for exactly that
        call = await opened(store, WIDE, size, head_begin=1, head_end=3, takes_frame=together)
        answer = await call.read()
        assert answer.message.opened.blocks == 5
        if together:
            runs = FrameOpener(WIDE, range(1, 3), KEYS).open(answer.message.opened.frame, answer.payload)
            frames = [[(run, bytes(data)) for run, data, _ in runs]]
            assert store.gauges()["get_transfers"] == 0
        else:
            frames = await received(call, FrameOpener(WIDE, range(1, 3), KEYS))
        ((first, second, third),) = frames
        for layer, (run, data) in enumerate((first, second, third)):
            assert run == SliceRun(layer, 0, 5, 1, 3, 16)
            for index, _, piece in split_run(run, memoryview(data), WIDE):
                assert piece == part_of(KEYS[index], layer, range(1, 3))
        call.cancel()
        await store.at_rest()


async def test_frames_of_some_heads_are_filled_too() -> None:
    """Sixteen blocks' whole slices are four frames; a fourth of their heads is one, and read in one go."""
    keys = keys_of(16)
    async with rig(dram_bytes=16 * LARGE.block_bytes) as store:
        await put(store, keys, LARGE)
        call = await opened(store, LARGE, 1 << 20, keys=pack_keys(keys), head_begin=2, head_end=3)
        assert (await call.read()).message.opened.blocks == 16
        (((run, data),),) = await received(call, FrameOpener(LARGE, range(2, 3), keys))
        assert run == SliceRun(0, 0, 16, 2, 3, 64)
        assert data == b"".join(part_of(key, 0, range(2, 3), LARGE) for key in keys)
        call.cancel()
        await store.at_rest()


async def test_parts_larger_than_a_frame_come_in_several() -> None:
    """Two of three heads of 768 KiB: one in each frame."""
    layout = KVLayout.uniform(layers=1, kv_heads=3, head_dim=1536, block_size=64, dtype="float32")
    async with rig(dram_bytes=layout.block_bytes) as store:
        await put(store, KEYS[:1], layout)
        call = await opened(store, layout, 2 * layout.share_bytes(0), head_begin=1, takes_frame=True)
        assert not (await call.read()).message.opened.HasField("frame")
        frames = await received(call, FrameOpener(layout, range(1, 3), KEYS))
        assert [[run for run, _ in runs] for runs in frames] == [[], [SliceRun(0, 0, 1, 1, 3, 64)]]
        call.cancel()
        reader = reader_of(store, layout)
        assert await read(reader, range(1, 3), range(1), blocks=1) == [part_of(KEYS[0], 0, range(1, 3), layout)]
        await reader.aclose()
        await store.at_rest()


@pytest.mark.parametrize("heads", HEADS)
async def test_each_range_of_heads_from_the_disk_brings_whole_blocks_into_dram(tmp_path: Path, heads: range) -> None:
    async with rig(tmp_path) as store:
        await put(store, KEYS)
    async with rig(tmp_path) as store:
        reader = reader_of(store)
        await check(reader, heads, range(1, 3))  # not all layers were read: nothing stays
        await reader.aclose()
        await store.at_rest()
        assert store.gauges()["dram_blocks"] == 0
        reader = reader_of(store)
        await check(reader, heads)
        await reader.aclose()
        await store.at_rest()
        assert (store.gauges()["dram_blocks"], store.gauges()["ssd_hits_total"]) == (5, 10)
        reader = reader_of(store)
        await check(reader, range(4))
        await reader.aclose()
        await store.at_rest()
        assert (store.gauges()["dram_blocks"], store.gauges()["ssd_hits_total"]) == (5, 10)


async def test_some_heads_from_the_disk_without_memory_to_spare(tmp_path: Path) -> None:
    """DRAM has room for one block, the read-ahead for none: slices come one by one, and one block stays."""
    async with rig(tmp_path) as store:
        await put(store, KEYS)
    async with rig(tmp_path, dram_bytes=BLOCK, read_ahead_bytes=1) as store:
        reader = reader_of(store)
        await asyncio.gather(*(check(reader, heads) for heads in HEADS))
        await reader.aclose()
        await store.at_rest()
        assert store.gauges()["dram_blocks"] == 1


async def test_damage_in_heads_that_nobody_asked_for_is_a_miss_too(tmp_path: Path) -> None:
    """A slice is verified whole: what is wrong in it is found whoever reads."""
    async with rig(tmp_path) as store:
        await put(store, KEYS)
    segment = next((tmp_path / "segments").iterdir())
    data = bytearray(segment.read_bytes())
    at = data.index(part_of(KEYS[2], 0, range(3, 4)))
    assert at > RECORD
    data[at] ^= 1
    segment.write_bytes(data)
    async with rig(tmp_path) as store:
        reader = reader_of(store)
        assert await read(reader, range(2), range(1)) == [part_of(key, 0, range(2)) for key in KEYS[:2]]
        await reader.aclose()
        await store.at_rest()
        assert store.gauges()["bad_blocks_total"] == 1


async def test_ranks_write_and_read_their_own_heads() -> None:
    async with rig() as store:
        calls = []
        for heads in (range(1), range(1, 4)):
            call = store.open_stream("Put")
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(hello=hello(WIDE))))
            assert (await call.read()).HasField("welcome")
            opening = kvstore_pb2.PutOpen(
                transfer=1, keys=pack_keys(KEYS), layer_end=3, head_begin=heads.start, head_end=heads.stop
            )
            await call.write(PayloadMessage(kvstore_pb2.PutRequest(open=opening)))
            assert (await call.read()).HasField("opened")
            slices = [
                slice_to_send(WIDE, layer, index, part_of(key, layer, heads), heads=heads, key=key)
                for layer in ALL
                for index, key in enumerate(KEYS)
            ]
            for header, pieces in pack_frames(1, 0, slices, WIDE):
                await call.write(PayloadMessage(kvstore_pb2.PutRequest(frame=header), pieces))
            calls.append(call)
        while not (answer := await calls[1].read()).HasField("ack"):
            assert answer.HasField("credit")
        reader = reader_of(store)
        await asyncio.gather(check(reader, range(1)), check(reader, range(1, 4)), check(reader, range(4)))
        await reader.aclose()
        for call in calls:
            call.cancel()
        await store.at_rest()


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (WIDE, {"head_end": 0}),
        (WIDE, {"head_begin": 4}),
        (WIDE, {"head_begin": 3, "head_end": 2}),
        (WIDE, {"head_end": 5}),
        (WIDE, {"head_begin": (1 << 32) - 1, "head_end": (1 << 32) - 1}),
        (SCALED, {"head_end": 5}),
    ],
)
async def test_heads_that_cannot_be_read_are_a_miss(layout: KVLayout, fields: dict[str, int]) -> None:
    async with rig() as store:
        await put(store, KEYS, layout)
        call = await opened(store, layout, **fields)
        assert (await call.read()).message.opened.blocks == 0
        assert (await call.read()).message.HasField("done")
        call.cancel()
        await store.at_rest()


async def test_heads_with_scales_are_read_apart() -> None:
    async with rig() as store:
        await put(store, KEYS, SCALED)
        reader = reader_of(store, SCALED)
        for heads in (range(4), range(1), range(1, 3)):
            assert await read(reader, heads, range(1)) == [part_of(key, 0, heads, SCALED) for key in KEYS]
        await reader.aclose()
        await store.at_rest()
