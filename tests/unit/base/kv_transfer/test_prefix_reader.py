"""Reading from a store over real streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moonpool.base.errors import FrameError, InvalidRequest, StreamBroken, TransferFailed
from moonpool.base.kv.frames import DamagedSliceError, bind_all, frame_shape, pack_frames
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader, PrefixLost, PrefixRead, ReadPlan
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.base.transport.payloads import FilledBuffer
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.layouts import uniform_like
from tests.slices import slice_to_send
from tests.unit.base.kv_transfer.stored import KEYS, SLICE, WAIT_S, fill
from tests.unit.base.transport.fakes import HELLO, LAYOUT, STORE, FakeStore, content, served
from tests.unit.fakes.beside import Held

WIDE = uniform_like(LAYOUT, kv_heads=5)


@asynccontextmanager
async def reading(store: FakeStore, **options: Any) -> AsyncIterator[BlockReader]:
    async with served((STORE, store)) as (channels, address):
        reader = BlockReader(KVEndpoint(channels, address, HELLO, LAYOUT), **options)
        try:
            yield reader
            assert reader.channels == 0
        finally:
            await reader.aclose()


class Taken:
    """Takes what a read hands out."""

    def __init__(self) -> None:
        self.slices: dict[tuple[int, int], bytes] = {}
        self.layers: list[int] = []

    def on_slice(self, layer: int, index: int, data: memoryview, value: int) -> None:
        assert (layer, index) not in self.slices
        assert slice_hash(data) == value
        self.slices[layer, index] = bytes(data)

    def on_layer(self, layer: int) -> None:
        self.layers.append(layer)

    async def read(
        self,
        reader: BlockReader,
        blocks: int = 5,
        layers: range = range(3),
        heads: range | None = None,
        wait_s: float = WAIT_S,
    ) -> int:
        return await reader.read(
            KEYS[:blocks], layers=layers, heads=heads, on_slice=self.on_slice, on_layer=self.on_layer, timeout_s=wait_s
        )

    def check(self, blocks: int, layers: range = range(3), heads: range = range(2)) -> None:
        assert self.layers == list(layers)
        part = slice(heads.start * LAYOUT.share_bytes(0), heads.stop * LAYOUT.share_bytes(0))
        wanted = {(layer, index): bytes(content(layer, index)[part]) for layer in layers for index in range(blocks)}
        assert {cell: data for cell, data in self.slices.items() if cell[1] < blocks} == wanted


@pytest.mark.parametrize("frame_bytes", [SLICE // 2, SLICE, 3 * SLICE, 1 << 20])
@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
async def test_read(frame_bytes: int, layers: range) -> None:
    store = FakeStore(frame_bytes=frame_bytes)
    fill(store, 4)
    async with reading(store, window_bytes=4 * SLICE) as reader:
        taken = Taken()
        assert await taken.read(reader, layers=layers) == 4
        taken.check(4, layers)
        assert len(taken.slices) == 4 * len(layers)
        (writer,) = store.writers
        await store.until(lambda: 3 * SLICE < writer.credits.available <= 4 * SLICE)


@pytest.mark.parametrize("frame_bytes", [SLICE // 2, SLICE, 1 << 20])
@pytest.mark.parametrize("heads", [range(1), range(1, 2), range(2)])
async def test_read_some_heads(frame_bytes: int, heads: range) -> None:
    store = FakeStore(frame_bytes=frame_bytes)
    fill(store, 4)
    async with reading(store, window_bytes=4 * SLICE) as reader:
        taken = Taken()
        assert await taken.read(reader, heads=heads, layers=range(1, 3)) == 4
        taken.check(4, range(1, 3), heads)


@pytest.mark.parametrize("frame_bytes", [SLICE // 2, SLICE, 1 << 20])
@pytest.mark.parametrize("some", [False, True])
async def test_slices_land_where_their_reader_wants_them(frame_bytes: int, some: bool) -> None:
    store = FakeStore(frame_bytes=frame_bytes)
    fill(store, 4)
    memory = {(layer, index): memoryview(bytearray(SLICE)) for layer in range(3) for index in range(5)}
    if some:
        del memory[1, 2]
    async with reading(store, window_bytes=4 * SLICE) as reader:
        taken = Taken()

        def on_slice(layer: int, index: int, data: memoryview, value: int) -> None:
            taken.on_slice(layer, index, data, value)
            if (layer, index) in memory and data is not memory[layer, index]:
                memory[layer, index][:] = data  # it came in pieces, or beside one that must not land

        blocks = await reader.read(
            KEYS[:5],
            layers=range(3),
            on_slice=on_slice,
            on_layer=taken.on_layer,
            timeout_s=WAIT_S,
            into=lambda layer, index: memory.get((layer, index)),
        )
        assert blocks == 4
        taken.check(4)
        assert all(bytes(memory[cell]) == data for cell, data in taken.slices.items() if cell in memory)


@pytest.mark.parametrize("target_bytes", [1, 2 * WIDE.share_bytes(0), 1 << 20])
def test_some_heads_are_handed_out_together_however_they_come(target_bytes: int) -> None:
    data = memoryview(bytes(index % 251 for index in range(WIDE.slice_bytes(0))))
    heads = range(1, 4)
    part = data[WIDE.share_bytes(0) : 4 * WIDE.share_bytes(0)]
    taken = Taken()
    read = PrefixRead(WIDE, ReadPlan(KEYS[:2], range(2), heads, taken.on_slice, taken.on_layer))
    read.on_message(kvstore_pb2.GetResponse(opened=kv_pb2.ReadOpened(transfer=1, blocks=2)), memoryview(b""))
    slices = [
        slice_to_send(WIDE, layer, block, part, heads=heads, key=KEYS[block])
        for layer in range(2)
        for block in range(2)
    ]
    for header, pieces in pack_frames(1, 0, slices, WIDE, target_bytes):
        assert not read.finished.is_done
        read.on_message(kvstore_pb2.GetResponse(frame=header), memoryview(b"".join(pieces)))
    assert read.finished.is_done
    assert taken.slices == {(layer, block): bytes(part) for layer in range(2) for block in range(2)}
    assert taken.layers == [0, 1]


@pytest.mark.parametrize("layers", [range(3), range(2)], ids=["all of the read", "a frame of the read"])
def test_each_slice_that_lands_is_verified(layers: range) -> None:
    whole = range(LAYOUT.head_shares)
    shape = frame_shape(layers, 2, whole, LAYOUT.block_size)
    data = [bytes(content(*cell)) for cell in shape.cells]
    header = shape.header(1, 0, bind_all([slice_hash(part) for part in data], shape.bindings(KEYS[:2])))
    for bad, cell in enumerate(shape.cells):
        memory = {(layer, index): memoryview(bytearray(SLICE)) for layer in range(3) for index in range(2)}
        taken, filled = Taken(), list[FilledBuffer]()
        read = PrefixRead(LAYOUT, ReadPlan(KEYS[:2], range(3), whole, taken.on_slice, taken.on_layer, _at(memory)))
        opened = kv_pb2.ReadOpened(transfer=1, blocks=2)
        message = kvstore_pb2.GetResponse(frame=header)
        if len(layers) == LAYOUT.layers:
            opened.frame.CopyFrom(header)
            message = kvstore_pb2.GetResponse(opened=opened)
        else:
            read.on_message(kvstore_pb2.GetResponse(opened=opened), memoryview(b""))
        buffer = read.receive_into(message, len(data) * SLICE)
        assert buffer is not None
        damaged = bytes([data[bad][0] ^ 1]) + data[bad][1:]
        assert buffer.take(memoryview(b"".join([*data[:bad], damaged, *data[bad + 1 :]])), filled.append)
        with pytest.raises(DamagedSliceError):
            filled[0].report()
        assert read.damaged_key == KEYS[cell[1]]
        assert cell not in taken.slices
        assert not read.finished.is_done


def _at(memory: dict[tuple[int, int], memoryview]) -> Callable[[int, int], memoryview]:
    return lambda layer, index: memory[layer, index]


def test_nothing_lands_once_all_has_come() -> None:
    """A source that answers twice, or is not done when its reader leaves: what is in its memory then stays as it is."""
    memory = {(layer, index): memoryview(bytearray(SLICE)) for layer in range(3) for index in range(2)}
    data = [content(*cell) for cell in memory]
    taken = Taken()
    whole = range(LAYOUT.head_shares)
    read = PrefixRead(
        LAYOUT,
        ReadPlan(KEYS[:2], range(3), whole, taken.on_slice, taken.on_layer, lambda *cell: memory[cell]),
    )
    read.expect()
    shape = frame_shape(range(3), 2, whole, LAYOUT.block_size)
    header = shape.header(1, 0, bind_all([slice_hash(part) for part in data], shape.bindings(KEYS[:2])))
    answer = kvstore_pb2.GetResponse(opened=kv_pb2.ReadOpened(transfer=1, blocks=2, frame=header))
    buffer = read.receive_into(answer, 6 * SLICE)
    assert buffer is not None
    assert buffer.is_live()
    read.on_message(answer, memoryview(b"".join(data)))
    assert read.finished.is_done
    taken.check(2)
    with pytest.raises(FrameError, match="or twice"):
        read.receive_into(answer, 6 * SLICE)
    read.leave()
    assert not buffer.is_live()


@pytest.mark.parametrize(("asked", "sent"), [(range(1), range(1, 2)), (range(1, 2), range(2)), (range(1), range(2))])
async def test_heads_that_were_not_asked_for_end_the_read(asked: range, sent: range) -> None:
    store = FakeStore()
    store.heads = sent
    fill(store, 5)
    async with reading(store) as reader:
        with pytest.raises(FrameError, match="not expected"):
            await Taken().read(reader, heads=asked)
        store.heads = None
        taken = Taken()
        assert await taken.read(reader, heads=asked) == 5
        taken.check(5, heads=asked)
        assert store.calls == 1


@pytest.mark.parametrize("heads", [range(3), range(2, 3), range(-1, 1), range(0, 2, 2)])
async def test_heads_that_the_layout_lacks_are_refused_before_anything_is_sent(heads: range) -> None:
    store = FakeStore()
    async with reading(store) as reader:
        with pytest.raises(InvalidRequest, match="heads"):
            await Taken().read(reader, heads=heads)
        assert await Taken().read(reader, heads=range(1, 1)) == 0
        assert store.calls == 0


async def test_many_reads_at_once_share_the_window() -> None:
    store = FakeStore()
    fill(store, 5)
    async with reading(store, window_bytes=4 * SLICE) as reader:
        takers = [Taken() for _ in range(6)]
        counts = await asyncio.gather(*(taken.read(reader, blocks=index) for index, taken in enumerate(takers)))
        assert counts == [0, 1, 2, 3, 4, 5]
        for index, taken in enumerate(takers[1:], 1):
            taken.check(index)
        assert store.calls == 1


async def test_a_miss_and_nothing_asked() -> None:
    store = FakeStore()
    async with reading(store) as reader:
        taken = Taken()
        assert await taken.read(reader) == 0
        assert await taken.read(reader, layers=range(0)) == 0
        assert (taken.slices, taken.layers) == ({}, [])


async def test_a_block_missing_in_the_first_layer_makes_the_prefix_shorter() -> None:
    store = FakeStore()
    fill(store, 5)
    store.lost_at = (0, 2)
    async with reading(store) as reader:
        taken = Taken()
        assert await taken.read(reader) == 2
        taken.check(2)
        store.lost_at = (0, 0)
        assert await Taken().read(reader) == 0


async def test_a_block_missing_after_a_layer_was_handed_out() -> None:
    store = FakeStore()
    fill(store, 5)
    store.lost_at = (1, 3)
    async with reading(store) as reader:
        taken = Taken()
        with pytest.raises(PrefixLost) as caught:
            await taken.read(reader)
        assert caught.value.blocks == 3
        assert taken.layers == [0]
        await store.until(lambda: store.get_closes == [1])


async def test_a_corrupted_frame_fails_only_its_read() -> None:
    store = FakeStore()
    fill(store, 5)
    store.corrupt = True
    async with reading(store, window_bytes=4 * SLICE) as reader:
        for _ in range(5):  # more than the window, were the credits of bad frames lost
            with pytest.raises(FrameError, match="checksum"):
                await Taken().read(reader)
        store.corrupt = False
        taken = Taken()
        assert await taken.read(reader) == 5
        taken.check(5)
        assert store.calls == 1


async def test_a_callback_that_fails_ends_only_its_read() -> None:
    store = FakeStore()
    fill(store, 5)

    def refuse(layer: int, index: int, data: memoryview, value: int) -> None:
        raise RuntimeError("no room")

    async with reading(store) as reader:
        with pytest.raises(RuntimeError, match="no room"):
            await reader.read(KEYS, layers=range(3), on_slice=refuse, on_layer=lambda _: None, timeout_s=WAIT_S)
        assert await Taken().read(reader) == 5
        assert store.calls == 1


async def test_an_early_end_is_no_success() -> None:
    store = FakeStore()
    fill(store, 5)
    store.done_early = True
    async with reading(store) as reader:
        with pytest.raises(TransferFailed, match="15 slices missing"):
            await Taken().read(reader)


async def test_a_read_without_answers_times_out_and_is_closed() -> None:
    store = FakeStore()
    store.mute = True
    async with reading(store) as reader:
        with pytest.raises(TransferFailed, match="took"):
            await Taken().read(reader, wait_s=0.05)
        await store.until(lambda: store.get_closes == [1])


async def test_a_cancelled_read_hands_out_nothing_more() -> None:
    store = FakeStore(frame_bytes=SLICE)
    fill(store, 5)
    async with reading(store, window_bytes=2 * SLICE) as reader:
        started = asyncio.Event()
        seen: list[int] = []

        def on_slice(layer: int, index: int, data: memoryview, value: int) -> None:
            seen.append(index)
            started.set()

        read = asyncio.ensure_future(
            reader.read(KEYS, layers=range(3), on_slice=on_slice, on_layer=lambda _: None, timeout_s=WAIT_S)
        )
        await started.wait()
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        count = len(seen)
        taken = Taken()
        assert await taken.read(reader) == 5
        assert len(seen) == count
        assert store.calls == 1


async def test_a_broken_stream_fails_the_read_and_the_next_reconnects() -> None:
    store = FakeStore()
    fill(store, 5)
    store.mute = True
    async with reading(store) as reader:
        read = asyncio.ensure_future(Taken().read(reader))
        await store.until(lambda: store.calls == 1)
        store.break_now.set()
        with pytest.raises(StreamBroken):
            await read
        store.mute = False
        assert await Taken().read(reader) == 5
        assert store.calls == 2


async def test_nothing_is_taken_from_who_does_not_say_that_it_has_deleted_what_we_have() -> None:
    """Such a read fails; others of the same stream go on."""
    store, deleted = FakeStore(), {"ours": ["one"]}
    fill(store, 5)
    taken = Taken()
    async with reading(store, forgotten=lambda keys, tenant: deleted.get(tenant, [])) as reader:
        told = {"layers": range(3), "on_slice": taken.on_slice, "on_layer": taken.on_layer, "timeout_s": WAIT_S}
        with pytest.raises(TransferFailed, match="older than their deletion"):
            await reader.read(KEYS[:5], tenant="ours", **told)  # type: ignore[arg-type]
        assert taken.slices == {}
        assert await reader.read(KEYS[:5], tenant="theirs", **told) == 5  # type: ignore[arg-type]
        taken.check(5)


async def test_a_read_that_is_cancelled_ends_when_nothing_is_written_to_its_memory_any_more() -> None:
    """However often it is cancelled."""
    store, threads, memory = FakeStore(frame_bytes=SLICE), Held(), bytearray(SLICE)
    fill(store, 1)
    async with reading(store, offload=ThreadOffload(threads, least_bytes=1)) as reader:
        taken = Taken()
        read = asyncio.ensure_future(
            reader.read(
                KEYS[:1],
                layers=range(3),
                on_slice=taken.on_slice,
                on_layer=taken.on_layer,
                timeout_s=WAIT_S,
                into=lambda layer, index: memoryview(memory),
            )
        )
        await threads.came.wait()
        for _ in range(3):
            read.cancel()
            await asyncio.sleep(0)
            assert not read.done()
        threads.release()
        with pytest.raises(asyncio.CancelledError):
            await read
        assert (bytes(memory), taken.slices) == (bytes(content(0, 0)), {})
        threads.on = False
        assert await taken.read(reader, 1) == 1
