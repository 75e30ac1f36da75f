"""Blocks that lack the slices of layers with a window: behind which block a chain may be continued."""

import random

import pytest

from moonpool.kv.blocks import KeyChanges
from moonpool.kv.keys import BlockKey, window_key
from moonpool.scheduling.block_manager import BlockLending, BlockManager, LendBlocks
from tests.unit.scheduling.helpers import key


def chain(number: int, blocks: int) -> list[BlockKey]:
    return [key(1000 * number + index) for index in range(blocks)]


@pytest.mark.parametrize("seed", range(30))
def test_a_match_is_the_longest_that_can_be_continued(seed: int) -> None:
    """Random windows, chains that lack slices here and there, and evictions, beside a search of all borders."""
    rng = random.Random(seed)
    window, length = rng.randint(0, 5), rng.randint(1, 14)
    manager = BlockManager(24, window)
    lacking: set[BlockKey] = set()
    for _ in range(60):
        keys = chain(rng.randrange(3), length)[: rng.randint(1, length)]
        held = manager.match(keys)
        manager.acquire(held)
        missing = len(keys) - len(held)
        if manager.can_allocate(missing):
            fresh = manager.allocate(missing)
            partial = rng.randint(0, missing) if window else 0
            manager.drop_windows(fresh[:partial])
            for index, block in enumerate(fresh):
                its = keys[len(held) + index]
                before = manager.find([its])
                if manager.register(block, its):
                    (lacking.add if index < partial else lacking.discard)(its)
                else:
                    assert before
            held += fresh
        manager.release(held)
        manager.check_invariants()
        told = set(manager.keys())
        there = {its for its in told if manager.find([its])}
        assert told == there | ({window_key(its) for its in there - lacking} if window else set())
        for number in range(3):
            asked = chain(number, length)
            found = next((end for end, one in enumerate(asked) if one not in there), length)

            def is_whole(first: int, end: int, asked: list[BlockKey] = asked) -> bool:
                return not lacking.intersection(asked[max(0, first) : end])

            assert len(manager.find(asked)) == found
            assert len(manager.match(asked)) == max(n for n in range(found + 1) if is_whole(n - window, n))
            assert len(manager.match_whole(asked)) == max(n for n in range(found + 1) if is_whole(0, n))
            total = rng.randint(length, length + 3)
            received = max(n for n in range(found + 1) if is_whole(total - window, n))
            assert len(manager.match_behind(asked, total)) == received


def test_a_whole_block_takes_the_key_from_one_that_lacks_slices() -> None:
    """The key is held all the time; who refers to the other block keeps it."""
    manager = BlockManager(3, 1)
    [lacking, whole, again] = manager.allocate(3)
    manager.drop_windows([lacking, again])
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
    assert not manager.is_partial(manager.allocate(1)[0]), "what it lacked is forgotten"


def test_others_read_whole_blocks_only() -> None:
    manager = BlockManager(8, 1)
    blocks = manager.allocate(4)
    manager.drop_windows(blocks[2:3])
    for index, block in enumerate(blocks):
        manager.register(block, key(index))
    keys = tuple(key(index) for index in range(4))
    assert manager.match(keys) == blocks
    [lent] = BlockLending(manager).handle(LendBlocks(1, keys), spare=8)
    assert lent.blocks == tuple(blocks[:2])
