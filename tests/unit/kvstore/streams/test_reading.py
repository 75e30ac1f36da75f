"""Leases read through threads from a real SSD tier."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.kvstore.core.tiered_store import StoreListener
from moonpool.kvstore.layer_reader import LayerReader, LostBlock
from tests.unit.kvstore.helpers import FORMAT, LAYOUT, RECORD, Driven, data_of, keys_of, open_ssd
from tests.unit.kvstore.invariants import check

KEYS = keys_of(6)
A, B, C = KEYS[:3]


class Reading:
    """Walks a lease and keeps what came."""

    def __init__(self, driven: Driven, **settings: int) -> None:
        self.driven = driven
        self.pool = ThreadPoolExecutor(2)
        self.ahead = ByteCredits(1 << 20)
        self.settings = settings
        self.order: list[list[tuple[int, int]]] = []
        self.lost: list[int] = []

    async def all(self, keys: list[BlockKey], layers: range = range(3), *, promote: bool = False) -> list[bytes]:
        lease = self.driven.store.reads.open(keys, FORMAT, promote=promote)
        reader = LayerReader(self.driven.store.reads, lease, layers, self.pool, self.ahead, **self.settings)
        out: dict[int, bytes] = {}
        blocks = lease.blocks
        async for group in reader.groups():
            if isinstance(group, LostBlock):
                self.lost.append(group.block)
                blocks = group.block
                continue
            self.order.append([(cell.layer, cell.block) for cell in group])
            for cell in group:
                out[cell.block] = out.get(cell.block, b"") + cell.data
        reader.close()
        reader.close()
        self.pool.shutdown()
        assert self.ahead.available == 1 << 20
        return [out[index] for index in range(blocks)]


async def test_reading_is_layer_major_in_groups() -> None:
    driven = Driven()
    driven.store.writes.close(driven.put(KEYS[:3]))
    reading = Reading(driven, group_bytes=2 * LAYOUT.slice_bytes(0))
    assert await reading.all(KEYS, range(1, 3)) == [data_of(key)[LAYOUT.slice_bytes(0) :] for key in KEYS[:3]]
    assert reading.order == [[(1, 0), (1, 1)], [(1, 2), (2, 0)], [(2, 1), (2, 2)]]
    check(driven.store)


async def test_a_large_layer_does_not_wait_for_the_next() -> None:
    driven = Driven()
    driven.store.writes.close(driven.put(KEYS[:2]))
    reading = Reading(driven, group_bytes=1 << 20, layer_break_bytes=LAYOUT.slice_bytes(0))
    await reading.all(KEYS[:2])
    assert reading.order == [[(0, 0), (0, 1)], [(1, 0), (1, 1)], [(2, 0), (2, 1)]]


@pytest.mark.parametrize("promote", [False, True])
async def test_cold_blocks_are_read_in_threads(tmp_path: Path, promote: bool) -> None:
    first = Driven(open_ssd(tmp_path))
    first.flush(KEYS[:4])
    assert first.store.tiers.ssd is not None
    first.store.tiers.ssd.close()
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    driven.store.writes.close(driven.put([KEYS[4]]))
    driven.flush()
    reading = Reading(driven, group_bytes=2 * LAYOUT.slice_bytes(0))
    assert await reading.all(KEYS[:5], promote=promote) == [data_of(key) for key in KEYS[:5]]
    assert [cell for group in reading.order for cell in group] == [
        (layer, block) for layer in range(3) for block in range(5)
    ]
    assert set(driven.store.tiers.dram) == (set(KEYS[:5]) if promote else {KEYS[4]})
    check(driven.store)
    ssd.close()


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_bad_slice_ends_the_prefix_before_its_block(tmp_path: Path, layer: int) -> None:
    first = Driven(open_ssd(tmp_path))
    first.flush(KEYS[:4])
    assert first.store.tiers.ssd is not None
    first.store.tiers.ssd.close()
    segment = next((tmp_path / "segments").iterdir())
    data = bytearray(segment.read_bytes())
    data[2 * RECORD + 4096 + layer * LAYOUT.slice_bytes(0)] ^= 1
    segment.write_bytes(data)
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    reading = Reading(driven, group_bytes=4 * LAYOUT.slice_bytes(0))
    assert await reading.all(KEYS[:4], promote=True) == [data_of(A), data_of(B)]
    assert reading.lost == [2]
    assert driven.removed == [C]
    assert {A, B} <= set(driven.store.tiers.dram)
    assert C not in driven.store.tiers
    check(driven.store)
    ssd.close()


async def test_a_reader_that_leaves_gives_everything_back(tmp_path: Path) -> None:
    first = Driven(open_ssd(tmp_path))
    first.flush(KEYS[:4])
    assert first.store.tiers.ssd is not None
    first.store.tiers.ssd.close()
    ssd = open_ssd(tmp_path)
    closed = asyncio.Event()

    class Closing(StoreListener):
        def transfers_changed(self) -> None:
            if not driven.store.reads.leases:
                closed.set()

    driven = Driven(ssd, listener=Closing())
    pool = ThreadPoolExecutor(1)
    ahead = ByteCredits(1 << 20)
    lease = driven.store.reads.open(KEYS[:4], FORMAT, promote=True)
    reader = LayerReader(driven.store.reads, lease, range(3), pool, ahead, group_bytes=LAYOUT.slice_bytes(0))
    groups = reader.groups()
    await anext(groups)
    reader.close()
    async with asyncio.timeout(60):
        await closed.wait()
    assert (driven.store.reads.leases, ahead.available) == (0, 1 << 20)
    check(driven.store)
    pool.shutdown()
    ssd.close()
