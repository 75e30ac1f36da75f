"""Blocks of a decode instance that others read: its own promises come first."""

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import BlocksLent, LendBlocks, ReturnBlocks
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config


def held(world: World, blocks: int) -> tuple[BlockKey, ...]:
    """A sequence has ended and left its prompt's blocks; their keys."""
    number = world.go(prompt(blocks * BT, 1), 2)
    keys = tuple(world.sequences[number].keys())
    world.work()
    return keys


def lend(world: World, keys: tuple[BlockKey, ...]) -> int:
    [lent] = [action for action in world.post(LendBlocks(1, keys)) if isinstance(action, BlocksLent)]
    return len(lent.blocks)


def test_cached_blocks_are_lent_and_come_back() -> None:
    world = World(config(20))
    keys = held(world, 4)
    assert lend(world, keys) == 4
    assert world.core.blocks.num_used == 4
    world.post(ReturnBlocks(1))
    world.assert_at_rest()
    world.assert_reruns()


def test_what_was_promised_or_is_expected_to_be_needed_is_not_lent() -> None:
    """Seventeen of twenty blocks are promised, one more is for the answer: two of the four can be spared."""
    world = World(config(20, assumed_answer_tokens=1))
    keys = held(world, 4)
    number = world.reserve(prompt(17 * BT, 2), 2)
    assert number is not None
    assert lend(world, keys) == 2
    world.arrive(number)
    world.start(number)
    world.work()
    world.post(ReturnBlocks(1))
    world.assert_at_rest()


def test_blocks_of_a_running_sequence_are_lent_and_outlive_it() -> None:
    world = World(config(20))
    number = world.go(prompt(4 * BT, 1), 3 * BT)
    keys = tuple(world.sequences[number].keys())
    assert lend(world, keys) == 4
    world.work()
    assert world.core.blocks.num_used == 4
    world.post(ReturnBlocks(1))
    world.assert_at_rest()
