"""Watchers against a plain set of keys: a follower, in any rhythm, ends with exactly what is here."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.cluster import HeldKeys
from moonpool.base.cluster.kv_events import KVEventJournal
from moonpool.base.errors import Unavailable
from moonpool.base.kv.blocks import PARTS
from moonpool.base.kv.keys import BlockKey, unpack_keys
from moonpool.kvstore.core.tiered_store import StoreListener
from moonpool.v1 import kv_pb2
from tests.examples import examples
from tests.unit.kvstore.helpers import BLOCK, RECORD, Driven, held, in_part, keys_of, open_ssd

KEYS = keys_of(6)
EPOCH = 7

STEP = st.one_of(
    st.tuples(st.just("flip"), st.sets(st.integers(0, 5), min_size=1, max_size=3)),
    st.tuples(st.just("turn"), st.none()),
    st.tuples(st.just("hear"), st.tuples(st.integers(0, 1), st.integers(1, 4))),
    st.tuples(st.just("leave"), st.integers(0, 1)),
)


class Follower:
    """A watcher: what it believes, and where it is."""

    def __init__(self, journal: KVEventJournal) -> None:
        self.journal = journal
        self.keys: set[BlockKey] = set()
        self.cold: set[BlockKey] = set()
        self.epoch, self.sequence = 0, 0
        self.whole = False  # it has seen the end of a snapshot
        self.stream: AsyncGenerator[kv_pb2.KVEvents, None] | None = None
        self.coming: asyncio.Future[kv_pb2.KVEvents] | None = None
        self.cut_off = 0

    async def hear(self, messages: int) -> None:
        """Takes so many messages, or as many as there are."""
        for _ in range(messages):
            if self.stream is None:
                self.stream = self.journal.watch(self.epoch if self.whole else 0, self.sequence)
            if self.coming is None:
                self.coming = asyncio.ensure_future(anext(self.stream))
            for _ in range(4):
                await asyncio.sleep(0)
            if not self.coming.done():
                return
            coming, self.coming = self.coming, None
            if isinstance(coming.exception(), Unavailable):
                self.stream = None
                self.cut_off += 1
            else:
                self.take(coming.result())

    def take(self, message: kv_pb2.KVEvents) -> None:
        if message.snapshot_begin:
            self.keys.clear()
            self.cold.clear()
            self.whole = False
        elif self.whole:
            assert message.sequence == self.sequence + 1
        stored, removed = unpack_keys(message.stored_keys), unpack_keys(message.removed_keys)
        cooled = unpack_keys(message.cooled_keys)
        assert not set(stored) & set(removed)
        self.keys |= set(stored)
        self.keys -= set(removed)
        assert not self.whole or set(cooled) <= self.keys  # else they may be in a page that comes
        self.cold = (self.cold - set(stored) - set(removed)) | set(cooled)
        self.sequence, self.epoch = message.sequence, EPOCH
        self.whole = self.whole or message.snapshot_end

    async def leave(self) -> None:
        if self.coming is not None:
            self.coming.cancel()
            await asyncio.wait({self.coming})
            if not self.coming.cancelled() and self.coming.exception() is None:
                self.take(self.coming.result())
        if self.stream is not None:
            await self.stream.aclose()
        self.stream = self.coming = None


async def follow(steps: list[Any], keys_per_page: int = 4096) -> int:
    here: dict[BlockKey, None] = {}
    history: dict[int, set[BlockKey]] = {}
    held = HeldKeys(PARTS, lambda number: in_part(here, number))
    journal = KVEventJournal(held, EPOCH, journal_messages=2, keys_per_page=keys_per_page)
    followers = [Follower(journal), Follower(journal)]

    def check() -> None:
        history[journal.sequence] = set(here)
        for each in followers:
            if each.whole and each.sequence in history:
                assert each.keys == history[each.sequence]

    for kind, what in steps:
        if kind == "flip":
            stored = [KEYS[i] for i in sorted(what) if KEYS[i] not in here]
            removed = [KEYS[i] for i in sorted(what) if KEYS[i] in here]
            for key in removed:
                del here[key]
            here.update(dict.fromkeys(stored))
            journal.changed(stored, removed)
            continue
        if kind == "turn":
            await asyncio.sleep(0)
        elif kind == "hear":
            await followers[what[0]].hear(what[1])
        else:
            await followers[what].leave()
        await asyncio.sleep(0)
        check()
    await asyncio.sleep(0)
    for each in followers:
        await each.hear(20)
        assert each.whole
        assert each.keys == set(here)
        assert each.sequence == journal.sequence
        await each.leave()
    assert journal.watchers == 0
    return sum(each.cut_off for each in followers)


@settings(max_examples=examples(60))
@given(st.lists(STEP, max_size=30))
def test_a_follower_knows_what_is_here_and_nothing_that_was_removed(steps: list[Any]) -> None:
    asyncio.run(follow(steps, keys_per_page=1))  # so that changes come between the pages


def test_what_comes_and_goes_during_a_snapshot_is_told_rightly() -> None:
    """In the order of the pages, before and behind the one that was taken last."""
    order = sorted(range(6), key=lambda i: KEYS[i])
    hear: Any = ("hear", (0, 1))
    steps: list[Any] = [("flip", set(order[:5])), hear, hear]
    steps += [("flip", {order[0]}), hear, ("flip", {order[0], order[5]}), ("flip", {order[4]}), hear, hear]
    assert asyncio.run(follow(steps, keys_per_page=1)) == 0


def test_a_slow_one_is_cut_off_and_comes_back_by_replay_or_snapshot() -> None:
    flips: list[Any] = [("flip", {number % 6}) for number in range(12)]
    slow: list[Any] = [("hear", (0, 1))]
    for flip in flips[:4]:
        slow += [flip, ("turn", None)]
    assert asyncio.run(follow([*slow, ("hear", (0, 3)), *flips[4:]])) >= 1


@pytest.mark.parametrize("seed", [1, 4, 6])
async def test_blocks_that_move_between_the_tiers_are_not_missed(tmp_path: Path, seed: int) -> None:
    """Blocks are promoted, evicted, carried over and reclaimed while slow watchers take their snapshots."""
    dice = random.Random(seed)
    keys = keys_of(40, f"moves-{seed}")
    ssd = open_ssd(tmp_path, 16 * RECORD, 4 * RECORD)

    class Watched(StoreListener):
        def changed(
            self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()
        ) -> None:
            journal.changed(stored, removed, cooled)

    driven = Driven(ssd, dram_bytes=6 * BLOCK, listener=Watched())
    tiers = driven.store.tiers
    journal = KVEventJournal(HeldKeys(PARTS, tiers.part, tiers.cold), EPOCH, journal_messages=64, keys_per_page=2)
    followers = [Follower(journal) for _ in range(3)]
    snapshots = 0
    for _ in range(150):
        some = dice.sample(keys, 2)
        if dice.random() < 0.5:
            driven.flush(some)
        elif dice.random() < 0.5:
            driven.read(some, promote=True)
        else:
            tiers.touch(some)  # worth carrying over
        for each in followers:
            await each.hear(dice.randrange(3))
            if each.whole and dice.random() < 0.2:
                await each.leave()
                each.whole = False
                snapshots += 1
    assert (snapshots > 10, ssd.carried_bytes > 0, driven.store.reads.promotions > 0) == (True, True, True)
    for each in followers:
        await each.hear(200)
        assert (each.whole, each.keys) == (True, held(driven.store))
        assert each.cold == set(tiers.cold(each.keys))
        await each.leave()
    ssd.close()


async def test_no_turn_of_the_loop_lists_more_than_a_page_and_a_part() -> None:
    keys = keys_of(5000)
    parts = [in_part(keys, number) for number in range(PARTS)]
    listed, turns = 0, [0]

    def part(number: int) -> list[BlockKey]:
        nonlocal listed
        listed += len(parts[number])
        return parts[number]

    async def count_turns() -> None:
        while True:
            turns.append(listed)
            await asyncio.sleep(0)

    most = 100 + max(map(len, parts))
    counting = asyncio.ensure_future(count_turns())
    told: list[BlockKey] = []
    pages = 0
    journal = KVEventJournal(HeldKeys(PARTS, part), EPOCH, keys_per_page=100)
    async for page in journal.watch(0, 0):  # never waits, as if the watcher were quick
        told += unpack_keys(page.stored_keys)
        pages += 1
        assert len(page.stored_keys) <= 100 * 32
        assert listed - len(told) < most
        if page.snapshot_end:
            break
    counting.cancel()
    assert (pages >= 50, sorted(told)) == (True, sorted(keys))
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert 0 < max(steps) < most
