"""Blocks that other instances read: who gets them, how many, and that they come back."""

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import BlockLending, BlocksLent, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.block_manager import BlockManager


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


def pool(blocks: int = 16, keys: int = 6) -> tuple[BlockManager, BlockLending, list[int]]:
    """A pool of which some blocks are cached, in the order of their keys."""
    manager = BlockManager(blocks)
    held = manager.allocate(keys)
    for number, block in enumerate(held):
        manager.register(block, key(number))
    manager.release(held)
    return manager, BlockLending(manager), held


def test_the_leading_blocks_that_are_here() -> None:
    manager, lending, held = pool()
    wanted = key(0), key(1), key(9), key(2)
    assert lending.handle(LendBlocks(1, wanted), 16) == [BlocksLent(1, tuple(held[:2]))]
    assert (sorted(lending), manager.num_used, manager.num_cached) == (sorted(held[:2]), 2, 4)
    assert lending.handle(ReturnBlocks(1), 16) == []
    assert (list(lending), manager.num_used, manager.num_cached) == ([], 0, 6)
    manager.check_invariants()


def test_a_part_of_the_pool_at_most() -> None:
    """A quarter of sixteen, however many read each; who asks for more gets the beginning."""
    manager, lending, held = pool()
    keys = tuple(map(key, range(6)))
    assert lending.handle(LendBlocks(1, keys[:3]), 16) == [BlocksLent(1, tuple(held[:3]))]
    assert lending.handle(LendBlocks(2, keys), 16) == [BlocksLent(2, tuple(held[:4]))]
    assert lending.handle(LendBlocks(3, keys[1:]), 16) == [BlocksLent(3, tuple(held[1:4]))]
    assert lending.handle(LendBlocks(4, keys[4:]), 16) == [BlocksLent(4, ())]
    for number in (4, 2):
        lending.handle(ReturnBlocks(number), 16)
    assert lending.handle(LendBlocks(5, keys[4:]), 16) == [BlocksLent(5, ())], "four are lent still"
    lending.handle(ReturnBlocks(3), 16)
    assert lending.handle(LendBlocks(6, keys[4:]), 16) == [BlocksLent(6, (held[4],))]
    assert list(lending) == [*held[:3], held[4]]
    manager.check_invariants()


def test_only_what_can_be_spared() -> None:
    """Blocks that somebody uses cost nothing; cached ones are missing to others as long as they are lent."""
    manager, lending, held = pool()
    manager.acquire(held[:1])
    assert lending.handle(LendBlocks(1, tuple(map(key, range(3)))), 1) == [BlocksLent(1, tuple(held[:2]))]


def test_damaged_blocks_are_found_no_more() -> None:
    manager, lending, held = pool()
    lending.handle(LendBlocks(1, (key(0), key(1))), 16)
    lending.handle(ReturnBlocks(1, (key(1),)), 16)
    assert manager.match([key(0), key(1)]) == held[:1]
    manager.check_invariants()
