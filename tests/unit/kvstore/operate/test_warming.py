"""Warming does not keep others waiting, however much there is."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.kv.keys import BlockKey
from moonpool.streams.credits import ByteCredits
from services.kvstore.operate.warming import Warmed, Warmer
from services.kvstore.ssd.tier import SsdTier
from tests.unit.kvstore.helpers import BLOCK, OTHER_FORMAT, RECORD, Driven, block_of, data_of, keys_of, open_ssd

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
def warming(driven: Driven) -> Iterator[Warmer]:
    pool = ThreadPoolExecutor(2)
    yield Warmer(driven.store, pool, ByteCredits(1 << 20))
    pool.shutdown()
    driven.store.check_invariants()


@pytest.mark.parametrize("step", [1, 5, 8, 1000])
def test_no_step_looks_at_more_than_its_bound(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path) as ssd:
        looked = 0
        lives = ssd._books.lives

        def counting(*place: object) -> bool:
            nonlocal looked
            looked += 1
            return lives(*place)  # type: ignore[arg-type]

        monkeypatch.setattr(ssd._books, "lives", counting)
        found: list[BlockKey] = []
        for keys in ssd.newest_first(step):
            assert len(keys) <= looked <= step
            found += keys
            looked = 0
        assert found == LIVE[::-1]


def test_blocks_may_come_and_go_between_steps(tmp_path: Path) -> None:
    with filled(tmp_path) as ssd:
        steps = ssd.newest_first(8)
        found = list(next(steps))
        put(ssd, KEYS[:1])
        reader = ssd.reader(LIVE[0])
        ssd.drop(reader)
        reader.release()
        for keys in steps:
            found += keys
        assert found == LIVE[:0:-1]


async def test_others_have_their_turn_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.operate.warming.STEP_BLOCKS", STEP)
    with filled(tmp_path) as ssd:
        driven = Driven(ssd)
        looked: list[int] = [0]
        find = ssd._books.lives

        def counting(*place: object) -> bool:
            looked[-1] += 1
            return find(*place)  # type: ignore[arg-type]

        monkeypatch.setattr(ssd._books, "lives", counting)

        async def turns() -> None:
            while True:
                looked.append(0)
                await asyncio.sleep(0)

        with warming(driven) as warmer:
            others = asyncio.ensure_future(turns())
            assert await warmer.warm(0) == Warmed(len(LIVE), len(LIVE) * BLOCK)
            first = sum(looked)
            assert await warmer.warm(0) == Warmed(0, 0)  # all of it is looked at again, and nothing is read
            others.cancel()
        assert max(looked) == STEP
        assert (first, sum(looked)) == (len(KEYS), 2 * len(KEYS))
        monkeypatch.undo()
        assert driven.read(LIVE) == [data_of(key) for key in LIVE]


async def test_the_newest_come_first_and_only_as_many_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.kvstore.operate.warming.STEP_BLOCKS", STEP)
    with filled(tmp_path) as ssd:
        put(ssd, KEYS[:1], other=True)
        driven = Driven(ssd, dram_bytes=8 * BLOCK)
        with warming(driven) as warmer:
            assert await warmer.warm(3 * BLOCK) == Warmed(3, 3 * BLOCK)
            assert set(driven.store.tiers.dram) == {KEYS[0], *LIVE[-2:]}
            assert (await warmer.warm(0)).blocks == 5
            assert set(driven.store.tiers.dram) == {KEYS[0], *LIVE[-7:]}
            assert driven.removed == []
