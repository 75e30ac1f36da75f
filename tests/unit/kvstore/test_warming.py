"""Warming reads the newest blocks first and lets other tasks run; sessions' blocks are read when ordered."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.reuse_stats import ReuseSample
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.kvstore.operations import StoreOperations
from moonpool.kvstore.prefetch import Prefetcher
from moonpool.kvstore.ssd.tier import SsdTier
from tests.unit.kvstore.helpers import BLOCK, OTHER_FORMAT, RECORD, Driven, block_of, data_of, keys_of, open_ssd
from tests.unit.kvstore.invariants import check

KEYS = keys_of(48)
STEP = 5


def put(ssd: SsdTier, keys: list[BlockKey], other: bool = False) -> None:
    plan = ssd.plan([block_of(key, "", OTHER_FORMAT) if other else block_of(key) for key in keys])
    ssd.commit(plan)
    ssd.committed(plan)


@contextmanager
def filled(path: Path) -> Iterator[SsdTier]:
    """Segments of eight; every third block is dead."""
    ssd = open_ssd(path, 1 << 20, 8 * RECORD)
    for at in range(0, len(KEYS), 8):
        put(ssd, KEYS[at : at + 8])
    for key in KEYS[::3]:
        reader = ssd.reader(key)
        ssd.drop(reader)
        reader.release()
    yield ssd
    ssd.close()


LIVE = [key for number, key in enumerate(KEYS) if number % 3]


@contextmanager
def warming(driven: Driven) -> Iterator[StoreOperations]:
    pool = ThreadPoolExecutor(2)
    yield StoreOperations(driven.store, pool, ByteCredits(1 << 20), ReuseSample(), 0, lambda: 0.0, STEP)
    pool.shutdown()
    check(driven.store)


@pytest.mark.parametrize("step", [1, 5, 8, 1000])
def test_a_step_looks_at_no_more_blocks_than_asked(tmp_path: Path, step: int) -> None:
    with filled(tmp_path) as ssd:
        steps = [list(keys) for keys in ssd.catalogue.newest_first(step)]
        assert [key for keys in steps for key in keys] == LIVE[::-1]
        assert max(map(len, steps)) <= step
        assert len(steps) * step >= len(KEYS), "dead blocks count as looked at"


def test_blocks_may_come_and_go_between_steps(tmp_path: Path) -> None:
    with filled(tmp_path) as ssd:
        steps = ssd.catalogue.newest_first(8)
        found = list(next(steps))
        put(ssd, KEYS[:1])
        reader = ssd.reader(LIVE[0])
        ssd.drop(reader)
        reader.release()
        for keys in steps:
            found += keys
        assert found == LIVE[:0:-1]


async def test_other_tasks_run_after_each_step(tmp_path: Path) -> None:
    with filled(tmp_path) as ssd:
        driven = Driven(ssd)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        with warming(driven) as store:
            assert await store.warm(0) == (len(LIVE), len(LIVE) * BLOCK)
            task = asyncio.ensure_future(others())
            assert await store.warm(0) == (0, 0)  # all blocks are looked at, none is read
            task.cancel()
        assert turns >= len(KEYS) // STEP
        assert driven.read(LIVE) == [data_of(key) for key in LIVE]


async def test_the_newest_come_first_and_only_as_many_as_there_is_room_for(tmp_path: Path) -> None:
    with filled(tmp_path) as ssd:
        put(ssd, KEYS[:1], other=True)
        driven = Driven(ssd, dram_bytes=8 * BLOCK)
        with warming(driven) as store:
            assert await store.warm(3 * BLOCK) == (3, 3 * BLOCK)
            assert set(driven.store.tiers.dram) == {KEYS[0], *LIVE[-2:]}
            assert (await store.warm(0))[0] == 5
            assert set(driven.store.tiers.dram) == {KEYS[0], *LIVE[-7:]}
            assert driven.removed == []


def wanted(keys: list[BlockKey], session: bytes = b"s") -> SessionHint:
    """What the conductor says of a session with these blocks."""
    return SessionHint(session, keys[-1], 10.0, told=True)


async def test_a_sessions_blocks_come_in_order_and_no_faster_than_allowed(tmp_path: Path) -> None:
    with filled(tmp_path) as ssd:
        driven, pauses = Driven(ssd), list[float]()

        async def pause(seconds: float) -> None:
            pauses.append(seconds)

        with warming(driven) as store:
            prefetcher = Prefetcher(store, 2 * BLOCK, pause)
            prefetcher.told(wanted(LIVE[:4]), LIVE[:4])
            prefetcher.told(wanted(LIVE[4:6], b"t"), LIVE[4:6])
            assert len(prefetcher) == 2
            await prefetcher.fetch()
        assert list(driven.stored) == LIVE[:6]
        assert (prefetcher.blocks, prefetcher.cancelled, pauses) == (6, 0, [2.0, 1.0])
        assert len(driven.store.tiers.dram.policy) == 2


async def test_a_later_word_on_the_session_cancels_its_blocks(tmp_path: Path) -> None:
    with filled(tmp_path) as ssd:
        driven = Driven(ssd)
        with warming(driven) as store:
            prefetcher = Prefetcher(store)
            prefetcher.told(wanted(LIVE[:4]), LIVE[:4])
            prefetcher.told(SessionHint(b"s", LIVE[3], ended=True), ())
            assert (len(prefetcher), prefetcher.cancelled) == (0, 1)
            prefetcher.told(wanted(LIVE[4:6], b"t"), LIVE[4:6])
            await prefetcher.fetch()
        assert driven.stored == LIVE[4:6]


async def test_a_sessions_blocks_take_the_place_of_others(tmp_path: Path) -> None:
    with filled(tmp_path) as ssd:
        driven = Driven(ssd, dram_bytes=4 * BLOCK)
        with warming(driven) as store:
            assert await store.warm(0) == (4, 4 * BLOCK)
            prefetcher = Prefetcher(store)
            prefetcher.told(wanted(LIVE[:3]), LIVE[:3])
            await prefetcher.fetch()
        assert set(LIVE[:3]) <= set(driven.store.tiers.dram)
        assert prefetcher.blocks == 3
