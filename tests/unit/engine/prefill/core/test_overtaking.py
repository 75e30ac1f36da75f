"""A load that takes longer than computing is overtaken: both go on, and what comes first counts."""

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from tests.unit.engine.prefill.core.world import BT, SETTINGS, Client, World, staged

BLOCKS, TOKENS = 4, 4 * BT + 12
"""Blocks that are loaded, and tokens of the prompt."""
COMPUTE_S = 6.4
"""Of the loaded blocks; a step has two of them."""
LOAD_S = 0.6


def loading(blocks: int = 32, held: int | None = None) -> tuple[World, Client, int]:
    """A prompt whose leading blocks are being loaded, and do not come."""
    speeds = Speeds(prefill_per_token_s=0.1, load_bytes_per_s=BLOCKS * 3 * SETTINGS.slice_bytes / LOAD_S)
    world = World(staged(1, max_num_batched_tokens=2 * BT, num_blocks=blocks), speeds)
    client = world.arrive(TOKENS, sources=(KVSource("store", BLOCKS),), held=held)
    if held is not None:
        (opening,) = [io for io, action in world.ios.items() if isinstance(action, actions.OpenTransfer)]
        world.finish_io(opening)
    (io,) = [io for io, action in world.ios.items() if isinstance(action, LoadBlocks)]
    return world, client, io


def run_step(world: World) -> None:
    (step,) = world.steps
    world.run_step(step)


def figures(client: Client) -> tuple[int, int, int]:
    """Tokens loaded, computed, and computed although they were being loaded."""
    assert client.token is not None
    return client.token.loaded_tokens, client.token.computed_tokens, client.token.overtaken_tokens


@pytest.mark.parametrize("held", [None, 0])
def test_what_is_computed_first_counts_and_the_load_is_given_up(held: int | None) -> None:
    world, client, io = loading(held=held)
    world.pass_time(COMPUTE_S - 0.1)
    assert not world.steps
    world.pass_time(0.2)
    run_step(world)
    world.load_layer(io)
    run_step(world)
    assert io in world.cancelled
    world.settle()
    assert figures(client) == (0, TOKENS, BLOCKS * BT)
    assert world.core.loads.overtaken == 1
    world.check_rest()


@pytest.mark.parametrize("held", [None, 0])
def test_the_rest_comes_from_a_load_that_arrives_after_all(held: int | None) -> None:
    """What a step is computing then is computed."""
    world, client, io = loading(held=held)
    world.pass_time(COMPUTE_S)
    world.load_all(io)
    run_step(world)
    world.settle()
    computed = 2 * BT
    assert figures(client) == (BLOCKS * BT - computed, TOKENS - BLOCKS * BT + computed, computed)
    world.check_rest()


def test_a_load_that_fails_after_all_changes_nothing() -> None:
    world, client, io = loading()
    world.pass_time(COMPUTE_S)
    world.end(io, LoadEnded(1, missing=1))
    world.settle()
    assert figures(client) == (0, TOKENS, 0)
    assert client.token is not None
    assert [miss.block for miss in client.token.misses] == [1]
    world.check_rest()


def test_others_that_wait_make_the_load_worth_more_waiting() -> None:
    """Computing the blocks would delay the other prompt as long as this one."""
    world, _, io = loading()
    world.arrive(TOKENS, 1, sources=(KVSource("other store", BLOCKS),))
    world.pass_time(2 * COMPUTE_S - 0.1)
    assert not world.steps
    world.pass_time(0.2)
    assert world.core.loads.overtaken >= 1
    world.load_all(io)
    world.settle()
    world.check_rest()


def test_without_blocks_to_spare_a_load_is_waited_for() -> None:
    world, client, io = loading(blocks=BLOCKS + 3)
    world.pass_time(100.0)
    assert not world.steps
    world.load_all(io)
    world.settle()
    assert figures(client) == (BLOCKS * BT, TOKENS - BLOCKS * BT, 0)
    world.check_rest()


def test_a_prompt_that_leaves_leaves_both() -> None:
    world, client, io = loading()
    world.pass_time(COMPUTE_S)
    world.post(events.CancelPrefill(1))
    assert client.end is not None
    assert io in world.cancelled
    world.settle()
    world.check_rest()


def test_a_source_that_was_overtaken_is_known_to_be_slow() -> None:
    world, _, _ = loading()
    before = world.core.speeds(world.now).load_bytes_per_s
    world.pass_time(COMPUTE_S)
    world.run_step(next(iter(world.steps)))
    world.run_step(next(iter(world.steps)))
    assert world.core.speeds(world.now).load_bytes_per_s < before
    world.settle()


def test_a_step_that_follows_the_load_is_given_up() -> None:
    """Its first layer came, the next one does not."""
    world, client, io = loading()
    world.load_layer(io)
    (step,) = world.steps
    world.pass_time(100.0)
    assert world.steps[step].aborted
    world.run_step(step)
    world.settle()
    assert client.end is not None
    world.check_rest()
