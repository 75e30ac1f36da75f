"""What a decode core learns from its steps."""

import pytest

from tests.unit.decode.core.sequence import BT, prompt
from tests.unit.decode.core.world import World, config


def test_a_step_lasts_until_its_end_is_heard_of() -> None:
    """The engine computes for a millisecond; tokens wait eight, and that is what is promised."""
    world = World(config(64))
    world.go(prompt(BT), answer=40)
    before = world.core.tracker.speeds
    for _ in range(30):
        world.now += 0.008
        world.step()
    learnt = world.core.tracker.speeds
    assert before.decode_base_s < 0.003
    one_s = learnt.decode_base_s + learnt.decode_per_sequence_s + learnt.decode_per_context_token_s * (BT + 30)
    assert one_s == pytest.approx(0.008, rel=0.05)


def test_without_time_the_engines_own_seconds_count() -> None:
    world = World(config(64))
    world.go(prompt(BT), answer=40)
    before = world.core.tracker.speeds
    for _ in range(20):
        world.step()
    assert world.core.tracker.speeds.decode_base_s == pytest.approx(before.decode_base_s, rel=0.2)


def test_a_step_that_is_overdue_tells_before_it_is_over() -> None:
    world = World(config(64))
    world.go(prompt(BT), answer=40)
    for _ in range(20):
        world.now += 0.008
        world.step()
    planner, learnt = world.core.planner, world.core.tracker.speeds
    assert planner.speeds(world.now + 0.008) == learnt
    told = planner.speeds(world.now + 0.8)
    assert told.decode_base_s == pytest.approx(100 * learnt.decode_base_s, rel=0.1)
    assert told.prefill_base_s == learnt.prefill_base_s
    assert world.core.tracker.speeds == learnt, "nothing was learnt from it yet"
