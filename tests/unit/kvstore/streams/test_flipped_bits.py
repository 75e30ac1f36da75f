"""A bit that flips between the process that computed KV and the one that receives it is a miss, never an answer."""

import contextlib
from pathlib import Path

import pytest

from moonpool.base.errors import TransferFailed
from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.frames import DamagedSliceError
from moonpool.base.kv.keys import slice_hash
from moonpool.kvstore.ssd.records import BadRecordError
from tests.unit.kvstore.helpers import FORMAT, LAYOUT, Driven, data_of, keys_of, open_ssd, slice_of
from tests.unit.kvstore.invariants import check
from tests.unit.kvstore.rig import PARENTS, Rig, rig

KEYS = keys_of(3)
A, B, C = KEYS


def flip(store: Rig, at: int = 5) -> None:
    """Flips a bit of B in DRAM."""
    block = store.service.store.tiers.dram.get(B)
    assert isinstance(block, DramBlock)
    block.data[at] ^= 1


@pytest.mark.parametrize("lands", [False, True])
async def test_a_flip_in_dram_is_found_by_the_reader_and_the_block_is_dropped(lands: bool) -> None:
    spare = memoryview(bytearray(LAYOUT.slice_bytes(0)))
    async with rig() as store:
        await store.put(KEYS)
        flip(store)
        reader = store.reader()
        with pytest.raises(DamagedSliceError):
            await reader.read(
                KEYS,
                layers=range(3),
                on_slice=print,
                on_layer=print,
                timeout_s=10,
                into=(lambda layer, index: spare) if lands else None,
            )
        await store.until("damaged_blocks_total", 1)
        await reader.aclose()
        await store.at_rest()
        assert await store.read(KEYS) == [data_of(A)]
        assert await store.put(KEYS) == (2, 1)
        assert await store.read(KEYS) == [data_of(key) for key in KEYS]
        await store.at_rest()


@pytest.mark.parametrize("together_bytes", [0, 1 << 20])
async def test_a_flip_that_is_found_where_heads_are_cut_out_costs_the_block(together_bytes: int) -> None:
    """A reader of some heads gets nothing of the damaged slice: the store itself must forget it."""
    async with rig(together_bytes=together_bytes) as store:
        await store.put(KEYS)
        flip(store)
        reader = store.reader()

        async def read() -> int:
            return await reader.read(
                KEYS, layers=range(3), heads=range(1), on_slice=lambda *_: None, on_layer=lambda _: None, timeout_s=10
            )

        with contextlib.suppress(TransferFailed):
            assert await read() == 0
        await store.until("damaged_blocks_total", 1)
        assert await read() == 1
        await reader.aclose()
        await store.at_rest()


def test_a_flip_in_dram_before_the_write_to_ssd_is_found_when_it_is_read(tmp_path: Path) -> None:
    with contextlib.closing(open_ssd(tmp_path)) as ssd:
        driven = Driven(ssd)
        driven.put([B])
        block = driven.store.tiers.dram.get(B)
        assert block is not None
        block.data[5] ^= 1
        driven.flush()
        assert driven.durable == [(B,)]
        reader, out = ssd.reader(B), memoryview(bytearray(LAYOUT.slice_bytes(0)))
        with pytest.raises(BadRecordError):
            reader.read_layers(0, out)
        reader.read_layers(1, out)
        assert out == slice_of(B, 1)
        reader.release()


async def test_a_flip_at_the_writer_is_refused_by_the_store() -> None:
    async with rig() as store:
        writer = store.writer()

        def read(layer: int, index: int) -> tuple[memoryview, int]:
            data = bytearray(slice_of(KEYS[index], layer))
            value = slice_hash(data)
            data[7] ^= index  # blocks 1 and on have changed since they were computed
            return memoryview(data), value

        with pytest.raises(Exception, match="wrong hash"):
            await writer.put(KEYS, PARENTS[:3], "", read, timeout_s=10)
        await writer.aclose()
        await store.at_rest()
        assert await store.read([B, C]) == []


async def test_a_block_that_is_intact_is_not_dropped_on_a_reader_s_word() -> None:
    async with rig() as store:
        await store.put(KEYS)
        store.service.store.reads.suspect(B)
        assert await store.read(KEYS) == [data_of(key) for key in KEYS]
        assert store.gauges()["damaged_blocks_total"] == 0
        await store.at_rest()


async def test_a_damaged_block_that_is_held_serves_nobody_and_goes_with_its_last_hold() -> None:
    async with rig() as store:
        await store.put(KEYS)
        block_store = store.service.store
        lease = block_store.reads.open([B], FORMAT, promote=True)
        flip(store)
        block_store.reads.suspect(B)
        assert await store.read(KEYS) == [data_of(A)]
        block_store.reads.close(lease)
        assert B not in block_store.tiers
        check(block_store)
