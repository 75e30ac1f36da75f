"""Window blocks at decode: a sequence holds its window and one block, a hybrid two states, however long it is."""

import pytest

from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import WAYS, World, config

WINDOWS = [(1, False), (3, False), (1, True)]


def needed(world: World) -> int:
    """Window blocks that somebody may still read."""
    return world.core.blocks.num_slots - world.core.blocks.num_slots_available


def small(window: int, *, states: bool, slots: int, **settings: object) -> World:
    windows = {"window_blocks": window, "window_slots": slots, "recurrent": states, "states_alone": states}
    return World(config(60, **windows, **settings))


@pytest.mark.parametrize(("window", "states"), WINDOWS)
def test_a_long_answer_holds_its_window_and_one_block(window: int, states: bool) -> None:
    world = small(window, states=states, slots=window + 1)
    world.go(prompt(6 * BT + 3), 12 * BT)
    while world.core.requests:
        world.step()
        assert needed(world) <= window + 1
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize(("window", "states"), WINDOWS)
def test_a_prompt_computed_here_holds_its_chunk_beside(window: int, states: bool) -> None:
    world = small(window, states=states, slots=60, chunked_prefill_size=2 * BT)
    number = world.reserve(prompt(9 * BT + 3), 3)
    assert number is not None
    world.compute(number)
    most = 0
    while world.core.requests:
        most = max(most, needed(world))
        world.step()
    assert most <= window + 1 + (2 if states else 3)
    world.assert_at_rest()


@pytest.mark.parametrize(("window", "states"), WINDOWS)
def test_a_store_gets_the_window_where_an_answer_ends(window: int, states: bool) -> None:
    """The next turn continues there; of the answer's other blocks, the store has the other layers alone."""
    world = small(window, states=states, slots=4 * window + 4)
    number = world.go(prompt(6 * BT + 3), 12 * BT, stores=1)
    answer = world.sequences[number]
    world.work()
    keys = answer.keys()
    stored = [world.stored[0, key] for key in keys]
    assert len(stored) == 18
    assert all(set(range(BT)) <= content.keys() for content in stored)
    assert [index for index in range(6, 18) if min(stored[index]) < 0] == list(range(18 - window, 18))
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("window", "states"), WINDOWS)
def test_too_few_slots_preempt(way: Preemption, window: int, states: bool) -> None:
    """Blocks there are enough of."""
    usual = {"preemption": way, "swap_blocks": 60, "chunked_prefill_size": BT, "assumed_answer_tokens": 1}
    world = small(window, states=states, slots=2 * window + 1, **usual)
    first = [world.go(prompt(BT // 2, seed), 6 * BT, total=8 * BT) for seed in (1, 2)]
    world.work()
    assert world.core.preempted.preemptions > 0
    assert all(len(world.answers[number]) == 6 * BT for number in first)
    assert world.core.blocks.num_free > 0
    world.assert_at_rest()
    world.assert_reruns()


def test_slots_are_promised_with_blocks() -> None:
    world = small(2, states=False, slots=5, assumed_answer_tokens=1)
    world.go(prompt(5 * BT + 1, 1), 4)
    assert world.reserve(prompt(5 * BT + 1, 2), 4) is None
    assert "window blocks" in world.refused[0].why
    world.work()
    held = world.reserve(prompt(5 * BT + 1, 2), 4)
    assert held is not None
    assert world.core.budget.promised_window_blocks == 3
    world.arrive(held)
    world.start(held)
    world.work()
    world.assert_at_rest()
