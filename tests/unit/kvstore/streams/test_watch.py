"""Watching keys: snapshots, changes, slow watchers."""

import asyncio

import pytest

from moonpool.base.cluster import HeldKeys
from moonpool.base.cluster.kv_events import KVEventJournal
from moonpool.base.errors import Overloaded, Unavailable
from moonpool.base.kv.blocks import PARTS
from moonpool.base.kv.keys import BlockKey, unpack_keys
from tests.unit.kvstore.helpers import in_part, keys_of

KEYS = keys_of(6)
A, B, C = KEYS[:3]


class Watched:
    """A set of keys and its journal."""

    def __init__(self, **limits: int) -> None:
        self.keys: dict[BlockKey, None] = {}
        self.journal = KVEventJournal(HeldKeys(PARTS, lambda number: in_part(self.keys, number)), 7, **limits)

    def change(self, stored: list[BlockKey], removed: list[BlockKey]) -> None:
        for key in stored:
            self.keys[key] = None
        for key in removed:
            del self.keys[key]
        self.journal.changed(stored, removed)


async def replayed(watched: Watched, after: int, epoch: int = 7) -> list[int] | None:
    """Numbers that a watcher gets which knows the ones up to `after`; None for a snapshot."""
    events = watched.journal.watch(epoch, after)
    numbers: list[int] = []
    while not numbers or numbers[-1] < watched.journal.sequence:
        message = await anext(events)
        if message.snapshot_begin:
            await events.aclose()
            return None
        numbers.append(message.sequence)
    await events.aclose()
    return numbers


async def test_a_watcher_gets_a_snapshot_and_then_changes() -> None:
    watched = Watched()
    watched.change([A, B], [])
    watched.change([C], [A])
    events = watched.journal.watch(0, 0)
    first = await anext(events)
    assert (first.snapshot_begin, first.snapshot_end, first.sequence) == (True, True, 1)
    assert set(unpack_keys(first.stored_keys)) == {B, C}
    watched.change([A], [])
    watched.change([], [A])
    watched.change([], [B])
    second = await anext(events)
    assert (second.sequence, second.snapshot_begin) == (2, False)
    assert unpack_keys(second.stored_keys) == []
    assert set(unpack_keys(second.removed_keys)) == {A, B}
    assert watched.journal.watchers == 1
    await events.aclose()
    assert watched.journal.watchers == 0


async def test_an_empty_store_has_an_empty_snapshot() -> None:
    first = await anext(Watched().journal.watch(0, 0))
    assert (first.snapshot_begin, first.snapshot_end, first.sequence, first.stored_keys) == (True, True, 0, b"")


async def test_a_large_snapshot_comes_in_pages() -> None:
    watched = Watched(keys_per_page=4)
    watched.change(KEYS, [])
    events = watched.journal.watch(0, 0)
    pages = [await anext(events), await anext(events)]
    assert [(p.sequence, p.snapshot_begin, p.snapshot_end) for p in pages] == [(1, True, False), (1, False, True)]
    told = [unpack_keys(page.stored_keys) for page in pages]
    assert [len(keys) for keys in told] == [4, len(KEYS) - 4]
    assert {*told[0], *told[1]} == set(KEYS)


async def test_a_watcher_that_knows_the_epoch_gets_what_it_missed() -> None:
    watched = Watched(journal_messages=2)
    for key in KEYS[:4]:
        watched.change([key], [])
        await asyncio.sleep(0)
    for epoch, after, told in ((7, 2, [3, 4]), (7, 3, [4]), (7, 1, None), (7, 5, None), (8, 4, None)):
        assert await replayed(watched, after, epoch) == told


async def test_the_journal_is_bounded_in_bytes_too() -> None:
    watched = Watched(journal_bytes=100)
    for keys in (KEYS[:1], KEYS[1:2], KEYS[2:3], KEYS[3:]):
        watched.change(keys, [])
        await asyncio.sleep(0)
    assert await replayed(watched, 2) is None
    assert await replayed(watched, 3) == [4]
    for key in KEYS[:4]:
        watched.change([], [key])
        await asyncio.sleep(0)
    assert await replayed(watched, 4) is None
    assert await replayed(watched, 5) == [6, 7, 8]


async def test_watchers_are_bounded() -> None:
    watched = Watched(max_watchers=1)
    first, second = watched.journal.watch(0, 0), watched.journal.watch(0, 0)
    await anext(first)
    with pytest.raises(Overloaded, match="too many watchers"):
        await anext(second)
    await first.aclose()
    assert (await anext(watched.journal.watch(0, 0))).snapshot_end


async def test_a_slow_watcher_is_cut_off() -> None:
    watched = Watched(journal_messages=2)
    events = watched.journal.watch(0, 0)
    await anext(events)
    for key in KEYS[:3]:
        watched.change([key], [])
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="too slow"):
        await anext(events)
    assert watched.journal.watchers == 0


async def test_closing_ends_the_watching() -> None:
    watched = Watched()
    events = watched.journal.watch(0, 0)
    await anext(events)
    coming = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    watched.journal.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await coming
