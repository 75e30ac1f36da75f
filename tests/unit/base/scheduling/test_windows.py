"""Blocks that lack the slices of layers with a window: behind which block a chain may be continued."""

import random

import pytest

from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey, window_key
from moonpool.base.kv.layout import NO_SLOT
from moonpool.base.scheduling.block_lending import BlockLending, LendBlocks
from moonpool.base.scheduling.block_manager import BlockManager, MoveSlots, OutOfBlocks
from tests.unit.base.scheduling.helpers import key


def chain(number: int, blocks: int) -> list[BlockKey]:
    return [key(1000 * number + index) for index in range(blocks)]


@pytest.mark.parametrize("seed", range(30))
def test_a_match_is_the_longest_that_can_be_continued(seed: int) -> None:
    """Random windows, chains that lack slices here and there, evictions and roles, beside a search of all borders."""
    rng = random.Random(seed)
    window, length = rng.randint(0, 5), rng.randint(1, 14)
    slots = rng.choice([6, 12, 24])
    manager = BlockManager(24, window, slots if window else 0)
    lacking: set[BlockKey] = set()
    for _ in range(60):
        keys = chain(rng.randrange(3), length)[: rng.randint(1, length)]
        held = manager.match(keys)
        past = rng.randint(0, len(held))
        manager.acquire(held, past)
        missing = len(keys) - len(held)
        if manager.can_allocate(missing):
            fresh = manager.allocate(missing)
            partial = max(missing - manager.num_slots_available, rng.randint(0, missing)) if window else 0
            manager.give_slots(fresh[partial:])
            for index, block in enumerate(fresh):
                key = keys[len(held) + index]
                before = manager.find([key])
                if manager.register(block, key):
                    (lacking.add if index < partial else lacking.discard)(key)
                else:
                    assert before
            passed = rng.randint(past, len(held) + partial)
            held += fresh
            manager.pass_windows(held[past:passed], rng.sample(held, len(held) // 2))
            manager.check_invariants()
            back = rng.randint(past, passed)
            manager.need_windows(held[back:passed])
            past = back
        manager.check_invariants()
        manager.release(held, past)
        manager.check_invariants()
        if rng.random() < 0.2:  # another role goes on with the pool
            former, manager = manager, BlockManager(24, window, slots if window else 0)
            manager.take_over(former)
            manager.check_invariants()
        told = set(manager.keys())
        lacking |= {key for key in told if window and window_key(key) not in told}
        there = {key for key in told if manager.find([key])}
        assert told == there | ({window_key(key) for key in there - lacking} if window else set())
        for number in range(3):
            asked = chain(number, length)
            found = next((end for end, key in enumerate(asked) if key not in there), length)

            gone = frozenset(lacking)

            def is_whole(first: int, end: int, asked: list[BlockKey] = asked, gone: frozenset[BlockKey] = gone) -> bool:
                return not gone.intersection(asked[max(0, first) : end])

            assert len(manager.find(asked)) == found
            assert len(manager.match(asked)) == max(n for n in range(found + 1) if is_whole(n - window, n))
            assert len(manager.match_whole(asked)) == max(n for n in range(found + 1) if is_whole(0, n))
            total = rng.randint(length, length + 3)
            received = max(n for n in range(found + 1) if is_whole(total - window, n))
            assert len(manager.match_behind(asked, total)) == received


def test_a_whole_block_takes_the_key_from_one_that_lacks_slices() -> None:
    """The key is held all the time; who refers to the other block keeps it."""
    manager = BlockManager(3, 1, 3)
    [lacking, whole, again] = manager.allocate(3)
    manager.give_slots([whole])
    assert manager.register(lacking, key(1))
    assert manager.take_events() == KeyChanges((key(1),), ())
    assert not manager.register(again, key(1)), "no better than the other"
    assert manager.match([key(1)]) == []
    assert manager.register(whole, key(1))
    assert manager.take_events() == KeyChanges((window_key(key(1)),), ())
    assert manager.match([key(1)]) == [whole]
    manager.release([lacking, again])
    assert (manager.num_free, manager.num_cached) == (2, 0)
    manager.check_invariants()


def test_slots_that_all_have_passed_are_taken_first_then_those_longest_unused() -> None:
    """A lost window is told to others; places where a chain is continued keep theirs longer."""
    manager = BlockManager(16, 1, 4)
    cached, used = manager.allocate(2), manager.allocate(4)
    for index, block in enumerate((*cached, *used[:2])):
        manager.give_slots([block])
        manager.register(block, key(index))
    manager.release(cached)
    manager.take_events()
    assert manager.num_slots_available == 2
    manager.pass_windows(used[:2], kept=used[:1])
    assert manager.num_slots_available == 4
    with pytest.raises(OutOfBlocks):
        manager.give_slots(manager.allocate(2) + used[2:] + manager.allocate(1))
    lost: list[bytes] = []
    for block in (used[2], used[3], *manager.allocate(2)):
        manager.give_slots([block])
        lost += manager.take_events().removed
        manager.check_invariants()
    assert lost == [window_key(key(index)) for index in (3, 0, 1, 2)]
    assert manager.match([key(0)]) == []
    assert manager.find([key(0)]) == cached[:1]


def test_a_block_without_key_loses_its_slot_when_all_have_passed() -> None:
    manager = BlockManager(3, 1, 1)
    [block, other] = manager.allocate(2)
    manager.give_slots([block])
    manager.acquire([block])
    assert manager.take_slot_moves() == [MoveSlots(((block, 0),))]
    manager.pass_windows([block])
    assert manager.num_slots_available == 0, "another still reads there"
    manager.release([block])
    assert manager.num_slots_available == 1
    manager.give_slots([other])
    assert manager.take_slot_moves() == [MoveSlots(((block, NO_SLOT), (other, 0)))]
    manager.release([block], 1)
    manager.check_invariants()


def test_others_read_whole_blocks_only() -> None:
    manager = BlockManager(8, 1, 8)
    blocks = manager.allocate(4)
    manager.give_slots([*blocks[:2], blocks[3]])
    for index, block in enumerate(blocks):
        manager.register(block, key(index))
    keys = tuple(key(index) for index in range(4))
    assert manager.match(keys) == blocks
    [lent] = BlockLending(manager).handle(LendBlocks(1, keys), spare=8)
    assert lent.blocks == tuple(blocks[:2])
