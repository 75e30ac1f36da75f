"""Window blocks at prefill: a prompt holds a window, one block and the chunk in work; states lie at chosen borders."""

import pytest

from moonpool.engine.prefill.core import actions, events
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from tests.unit.engine.prefill.core.world import BT, LAYERS, World, staged


def needed(world: World) -> int:
    """Window blocks that somebody may still read."""
    manager = world.core.state.manager
    return manager.num_slots - manager.num_slots_available


def small(window: int, slots: int, stages: int = 1, *, states: bool = False) -> World:
    settings = {"windowed_layers": frozenset({1}), "window_blocks": window, "window_slots": slots}
    return World(staged(stages, num_blocks=40, recurrent=states, states_alone=states, **settings))


def most_needed(world: World) -> int:
    most = 0
    while world.ios:
        most = max(most, needed(world))
        world.finish_io(min(world.ios))
    return most


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("window", [1, 3])
def test_a_long_prompt_holds_its_window_one_block_and_the_chunks_in_work(window: int, stages: int, chunks: int) -> None:
    """Steps of 40 tokens: two blocks each, three with the prompt's end."""
    world = small(window, 40, stages)
    client = world.arrive(20 * BT + 5, held=0)
    assert most_needed(world) <= window + 1 + 2 * chunks
    assert client.end is not None
    world.check_rest()


def test_too_few_slots_make_chunks_shorter() -> None:
    world = small(2, 3)
    client = world.arrive(10 * BT)
    assert most_needed(world) == 3
    assert [end - start for start, end in client.counted] == [2 * BT, *[BT] * 8]
    world.check_rest()


def test_prompts_start_while_their_windows_fit() -> None:
    world = small(1, 9)
    clients = [world.arrive(3 * BT, family) for family in range(4)]
    started = [client for client in clients if world.core.started(client.arrive.id)]
    assert len(started) == 2
    most_needed(world)
    assert all(client.token is not None for client in clients)
    world.check_rest()


def test_states_lie_at_the_end_of_chunks_and_at_borders() -> None:
    """A second prompt leaves the first one's chain: the third one continues behind what the two share.

    Slots are too few for all blocks between.
    """
    world = small(1, 4, states=True)
    world.arrive(5 * BT + 1)
    assert most_needed(world) <= 2 + 2
    manager = world.core.state.manager
    found = manager.find(world.clients[1].arrive.request.keys)
    assert [index for index, block in enumerate(found) if not manager.is_partial(block)] == [2, 3, 4]
    world.check_rest()
    for number, cached in ((2, 0), (3, 2 * BT)):
        world.arrive(2 * BT + 8 + number)
        most_needed(world)
        told = world.clients[number].token
        assert told is not None
        assert told.cached_tokens == cached


def test_idle_slots_take_states_of_blocks_between() -> None:
    """Half of them: a prompt of another length finds more."""
    world = small(1, 12, states=True)
    world.arrive(2 * BT + 1)
    most_needed(world)
    manager = world.core.state.manager
    assert not any(map(manager.is_partial, manager.find(world.clients[1].arrive.request.keys)))
    world.arrive(BT + 8)
    most_needed(world)
    second = world.clients[2].token
    assert second is not None
    assert second.cached_tokens == BT
    world.check_rest()


def test_a_store_gets_the_state_at_the_border_of_what_it_held() -> None:
    world = small(1, 12, states=True)
    world.arrive(5 * BT + 1, copies=(events.WriteBackTarget("store", 1),))
    most_needed(world)
    stored = {index for action in world.done if hasattr(action, "windowed") for index in action.windowed}
    assert stored == {0, 4}
    world.check_rest()


def test_a_read_leaves_out_what_lies_behind_the_window() -> None:
    """Three layers with 1,024 bytes a block, of which one has a window of two blocks."""
    settings = staged(1, windowed_layers=frozenset({1}), window_blocks=2, window_slots=9, window_bytes=1024)
    assert [settings.moved_bytes(blocks) for blocks in (1, 2, 5)] == [3072, 6144, 5 * 2048 + 2 * 1024]
    assert staged(1).moved_bytes(5) == 5 * 3072


@pytest.mark.parametrize(("window", "slots", "blocks"), [(2, 4, 5), (4, 9, 12)])
def test_a_load_that_came_short_gives_its_window_blocks_back(window: int, slots: int, blocks: int) -> None:
    """The load's last blocks, and a slice behind them that was dropped, left fewer than a window: nothing went on.

    Nine slots are the fewest that a layout gives a pool with such a window and such steps.
    """
    world = small(window, slots)
    client = world.arrive(blocks * BT + 12, sources=(KVSource("store", blocks),))
    [load] = [io for io, action in world.ios.items() if isinstance(action, LoadBlocks)]
    for _ in range(LAYERS):
        world.load_layer(load)
    assert any(isinstance(action, actions.RunStep) for action in world.ios.values())
    world.end(load, LoadEnded(1, missing=1))
    world.settle()
    assert client.token is not None
    world.check_rest()
