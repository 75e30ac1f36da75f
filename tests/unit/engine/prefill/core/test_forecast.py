"""What is being loaded for one prompt is neither computed nor loaded for another one, as long as that is quicker."""

from dataclasses import replace

from moonpool.engine.prefill.core import events
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded

from .world import BT, SETTINGS, SPEEDS, Client, World

STORE = (KVSource("store", 3),)
FAR = replace(SPEEDS, load_bytes_per_s=5e6)
"""A block's three layers take 0.6 ms to load, and 16 ms to compute."""


def loading(blocks: int = 3) -> tuple[World, LoadBlocks]:
    """A prompt of which so many blocks are being loaded."""
    world = World(replace(SETTINGS, num_blocks=100, max_num_batched_tokens=40 * BT), FAR)
    world.arrive(blocks * BT + 8, sources=(KVSource("store", blocks),))
    return world, next(action for action in world.done if isinstance(action, LoadBlocks))


def counted(client: Client) -> int:
    return sum(end - begin for begin, end in client.counted)


def test_a_prompt_that_begins_with_what_is_loaded_waits_for_it() -> None:
    world, load = loading()
    second, other = world.arrive(4 * BT), world.arrive(BT, 1)
    assert [chunk.id for step in world.steps.values() for chunk in step.order.chunks] == [3], (
        "who waits holds up nobody"
    )
    world.load_all(load.io)
    world.settle()
    assert (counted(second), counted(other)) == (BT, BT)
    assert world.done.count(load) == 1
    world.check_rest()


def test_a_load_that_is_late_is_not_waited_for() -> None:
    world, load = loading()
    second = world.arrive(4 * BT)
    assert not world.steps
    world.pass_time(1.0)
    (step,) = world.steps.values()
    assert [(chunk.id, chunk.start, chunk.end) for chunk in step.order.chunks] == [(2, 0, 4 * BT)]
    world.end(load.io, LoadEnded(0, failed=True))
    world.settle()
    assert counted(second) == 4 * BT
    world.check_rest()


def test_a_short_beginning_is_computed_sooner_than_a_long_load_ends() -> None:
    world, _ = loading(blocks=40)
    world.arrive(BT + 8, sources=())
    assert world.core.state.requests[2].spec.keys == world.core.state.requests[1].spec.keys[:1]
    assert [chunk.id for step in world.steps.values() for chunk in step.order.chunks] == [2]


def test_when_the_one_that_loads_leaves_the_next_one_goes_on() -> None:
    world, load = loading()
    second = world.arrive(4 * BT, sources=STORE)
    assert [action for action in world.done if isinstance(action, LoadBlocks)] == [load]
    world.post(events.CancelPrefill(1))
    loads = [action for action in world.done if isinstance(action, LoadBlocks)]
    assert [(action.id, len(action.blocks)) for action in loads] == [(1, 3), (2, 3)]
    world.end(load.io, LoadEnded(0, failed=True))
    world.load_all(loads[-1].io)
    world.settle()
    assert counted(second) == BT
    world.check_rest()


def test_what_is_being_computed_for_a_prompt_is_not_loaded_for_the_next_one() -> None:
    """A store has a part of it only: who loads that computes the rest once more."""
    world = World(replace(SETTINGS, num_blocks=100, max_num_batched_tokens=4 * BT))
    first = world.arrive(8 * BT + 8)
    second = world.arrive(8 * BT + 9, sources=(KVSource("store", 2),))
    world.settle()
    assert (counted(first), counted(second)) == (8 * BT + 8, 9)
    assert not [action for action in world.done if isinstance(action, LoadBlocks)]
    world.check_rest()


def test_when_the_one_that_computes_leaves_the_next_one_loads_what_is_stored() -> None:
    world = World(replace(SETTINGS, num_blocks=100, max_num_batched_tokens=4 * BT))
    world.arrive(8 * BT + 8)
    second = world.arrive(8 * BT + 9, sources=(KVSource("store", 2),))
    world.post(events.CancelPrefill(1))
    world.settle()
    loads = [action for action in world.done if isinstance(action, LoadBlocks)]
    assert [(action.id, len(action.blocks)) for action in loads] == [(2, 2)]
    assert counted(second) == 6 * BT + 9
    world.check_rest()


def test_who_goes_before_the_one_that_computes_loads_for_itself() -> None:
    world = World(replace(SETTINGS, num_blocks=100, max_num_batched_tokens=4 * BT))
    world.arrive(8 * BT + 8)
    world.arrive(8 * BT + 9, sources=(KVSource("store", 2),), priority=-1)
    assert [action.id for action in world.done if isinstance(action, LoadBlocks)] == [2]
    world.settle()
    world.check_rest()
