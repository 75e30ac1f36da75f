"""Rows of pictures in a real kvstore: what an instance writes, reads, and does not take."""

import asyncio
import gc
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.media import MediaItem
from moonpool.base.kv.picture_rows import row_keys, rows_layout
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.pictures.base import PictureRule
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.steps import ENCODER, PlacedPicture, SequenceSampling
from moonpool.engine import picture_rows
from moonpool.engine.picture_rows import PictureStores
from moonpool.engine.request import IncomingRequest, RequestRows
from moonpool.v1 import kv_pb2
from tests.unit.kvstore.rig import Rig, rig

ROWS, ROW_BYTES, MARK, MODEL = 150, 40, 7, b"m" * 32
"""Rows of a picture of `WIDTH` x 1 pixels: three blocks."""
DRAM = 1 << 20
BLOCK = rows_layout(ROW_BYTES).block_bytes


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other work to do is not a kvstore that is late."""
    monkeypatch.setattr(picture_rows, "READ_TIMEOUT_S", 30.0)


class OneRowEach(PictureRule):
    """A row for each pixel, between two marks that have none."""

    def __init__(self) -> None:
        self.mark, self.settings = MARK, ""

    def grid(self, width: int, height: int, detail: str = "") -> tuple[int, ...]:
        return width, height

    def tokens(self, grid: Sequence[int]) -> list[int]:
        return [1, *[MARK] * (grid[0] * grid[1]), 2]


def rows_of(digest: bytes) -> bytes:
    return random.Random(digest).randbytes(ROWS * ROW_BYTES)


def picture(number: int) -> MediaItem:
    return MediaItem(0, ROWS + 2, bytes([number]) * 32, b"file", ROWS, 1)


class Instance:
    """An engine instance's rows."""

    def __init__(self, stores: PictureStores, store: kv_pb2.Instance) -> None:
        self.stores, self._store = stores, store

    async def asks(
        self, item: MediaItem, tenant: str = "a", *, held: bool = True
    ) -> tuple[IncomingRequest, RequestRows]:
        """A request with a picture that the kvstore is believed to hold, or not."""
        spec = EngineRequest((), item.end, item.end, tenant=tenant, pictures=((item.begin, item.end),))
        tokens = array("i", [1] * item.end)
        incoming = IncomingRequest("r", tokens, BlockKey(bytes(32)), SequenceSampling(item.end), spec, media=(item,))
        asked = kv_pb2.MediaItem(digest=item.digest, rows_store=self._store, rows_held=held)
        found = await self.stores.added(incoming, [asked])
        assert found.rows is not None
        return found, found.rows

    async def encodes(self, item: MediaItem, tenant: str = "a", rows: bytes | None = None) -> None:
        """A picture is new: a step encodes it."""
        _, known = await self.asks(item, tenant, held=False)
        assert known.for_step([item]) == {item.digest: b""}
        rows = rows_of(item.digest) if rows is None else rows
        known.computed(0, [PlacedPicture(0, item.end, ENCODER, 1, item.digest, rows)])
        assert await self.stores.idle(30)

    async def reads(self, item: MediaItem, tenant: str = "a") -> bytes | None:
        """The rows with which a step begins; None if the picture is to be encoded."""
        found, known = await self.asks(item, tenant)
        told = known.for_step([item])[item.digest]
        assert bool(found.spec.pictures) == (not told), "what is read need not be encoded"
        return told or None

    async def has(self, item: MediaItem) -> bool:
        """Whether the engine's memory is taken to have a picture: a step is told nothing of its rows."""
        found, known = await self.asks(item)
        return not found.spec.pictures and not known.for_step([item])


@asynccontextmanager
async def instance(
    store: Rig, model: bytes = MODEL, forgotten: Sequence[str] = (), address: str = ""
) -> AsyncIterator[Instance]:
    def endpoint(address: str) -> KVEndpoint:
        return KVEndpoint(store.channels, address, kv_pb2.StreamHello(), rows_layout(ROW_BYTES))

    stores = PictureStores(model, OneRowEach(), ROW_BYTES, endpoint, lambda tenant: forgotten)
    run = asyncio.ensure_future(stores.run())
    await asyncio.sleep(0)
    try:
        yield Instance(stores, kv_pb2.Instance(id="kvstore-0", address=address or store.address, epoch=9))
    finally:
        run.cancel()
        await asyncio.wait({run})
        assert stores.waiting_bytes == 0


async def test_another_instance_reads_what_one_has_encoded_and_nobody_else_does() -> None:
    one = picture(1)
    async with rig(dram_bytes=DRAM) as store:
        async with instance(store) as first:
            assert await first.reads(one) is None
            await first.encodes(one)
            assert (first.stores.stored_pictures, first.stores.missed_pictures) == (1, 1)
            assert await first.has(one)
            assert store.gauges()["picture_dram_bytes"] == 3 * BLOCK
        async with instance(store) as second:
            assert await second.reads(one) == rows_of(one.digest)
            assert await second.reads(one, tenant="b") is None
            assert await second.reads(picture(2)) is None
            assert (second.stores.read_pictures, second.stores.missed_pictures) == (1, 2)
        async with instance(store, b"n" * 32) as other_model:
            assert await other_model.reads(one) is None
        await store.at_rest()


async def test_damaged_and_missing_rows_are_encoded() -> None:
    one, keys = picture(1), row_keys(MODEL, "a", picture(1).digest, 3)
    async with rig(dram_bytes=DRAM) as store:
        for damaged in range(3):
            async with instance(store) as writer:
                await writer.encodes(one)
            block = store.service.store.tiers.dram[keys[damaged]]
            block.data[random.Random(damaged).randrange(64 * ROW_BYTES)] ^= 1
            async with instance(store) as reader:
                assert await reader.reads(one) is None
                assert reader.stores.missed_pictures == 1
                await store.until("damaged_blocks_total", damaged + 1)
        async with instance(store) as writer:
            await writer.encodes(one)
        assert store.service.store.delete_keys(keys[2:]).blocks == 1
        async with instance(store) as reader:
            assert await reader.reads(one) is None, "the last block has gone"
        await store.at_rest()


async def test_rows_of_another_size_are_not_taken_for_a_picture() -> None:
    one = picture(1)
    async with rig(dram_bytes=DRAM) as store:
        async with instance(store) as writer:
            await writer.encodes(one, rows=b"x" * 64 * ROW_BYTES)
        async with instance(store) as reader:
            assert await reader.reads(one) is None
        await store.at_rest()


async def test_rows_that_no_store_takes_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(dram_bytes=DRAM, picture_share=0) as store:
        async with instance(store) as writer:
            await writer.encodes(picture(1))
            await writer.encodes(picture(2))
            assert (writer.stores.stored_pictures, writer.stores.dropped_pictures) == (0, 2)
        async with instance(store, address="127.0.0.1:1") as writer:
            assert await writer.reads(picture(1)) is None
            await writer.encodes(picture(1))
            assert writer.stores.dropped_pictures == 1
        monkeypatch.setattr(picture_rows, "MAX_WAITING_BYTES", 1)
        async with instance(store) as writer:
            await writer.encodes(picture(3))
            assert writer.stores.dropped_pictures == 1
        await store.at_rest()


async def test_a_picture_that_is_too_large_for_a_store_keeps_no_other_from_it() -> None:
    async with rig(dram_bytes=DRAM) as store, instance(store) as writer:
        await writer.encodes(picture(1), rows=bytes(DRAM // 8))
        await writer.encodes(picture(2))
        assert (writer.stores.stored_pictures, writer.stores.dropped_pictures) == (1, 1)


async def test_what_is_in_the_engines_memory_is_not_read_until_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_rows, "HERE_BYTES", 2 * (ROWS + 2) * ROW_BYTES)
    async with rig(dram_bytes=DRAM) as store, instance(store) as one:
        for number in range(3):
            await one.encodes(picture(number))
        assert [await one.has(picture(number)) for number in range(3)] == [False, True, True]
        assert await one.reads(picture(0)) == rows_of(picture(0).digest)


async def test_rows_that_wait_for_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of prompts holds few rows: those of further pictures are encoded, until a step or an end gives room."""
    one, two = picture(1), picture(2)
    monkeypatch.setattr(picture_rows, "MAX_HELD_BYTES", ROWS * ROW_BYTES)
    async with rig(dram_bytes=DRAM) as store:
        async with instance(store) as writer:
            await writer.encodes(one)
            await writer.encodes(two)
        async with instance(store) as reader:
            for gone in (False, True):
                _, waits = await reader.asks(one)
                assert reader.stores.held_bytes == ROWS * ROW_BYTES
                assert await reader.reads(two) is None
                if not gone:
                    assert waits.for_step([one]) == {one.digest: rows_of(one.digest)}
                del waits, _
                gc.collect()
                assert reader.stores.held_bytes == 0
            assert await reader.reads(two) == rows_of(two.digest)
            assert await reader.reads(picture(3)) is None, "the store does not have it"
            assert (reader.stores.held_bytes, reader.stores.read_pictures, reader.stores.missed_pictures) == (0, 3, 1)
        await store.at_rest()
