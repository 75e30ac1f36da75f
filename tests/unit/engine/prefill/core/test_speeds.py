"""What a prefill core learns from its steps, and what it says of its queue while one runs."""

import pytest

from moonpool.base.scheduling.latency import Speeds, prefill_seconds
from moonpool.engine.prefill.core import events
from tests.unit.engine.prefill.core.world import BT, World, staged

TOLD = Speeds(prefill_base_s=0.001, prefill_per_token_s=1e-3)


def served(seconds: float) -> World:
    """Twenty rounds of two prompts that share a step, which takes so long."""
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=4 * BT), TOLD)
    for family in range(0, 40, 2):
        world.arrive(BT + 3, family)
        world.arrive(BT + 5, family + 1)
        while world.steps:
            world.now += seconds
            world.run_step(min(world.steps))
        world.settle()
    return world


def test_steps_that_prompts_share_teach_and_last_until_they_are_heard_of() -> None:
    """The first prompt is alone in its step, the second follows: each takes 0.1 s, not as the engine says 0.01 s."""
    learnt = served(0.1).core.state.tracker.speeds
    assert prefill_seconds(learnt, BT + 4, 0) == pytest.approx(0.1, rel=0.1)


def test_pictures_have_a_speed_of_their_own() -> None:
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=64 * BT), TOLD)
    tracker = world.core.state.tracker
    for family in range(30):
        world.arrive(2 * BT, family)
        (io,) = world.steps
        world.now += 0.02 + 0.7
        while world.can_compute(io):
            world.compute_layer(io)
        world.end_step(io, pictures=(35, 0.7))
        world.settle()
    assert tracker.speeds.encode_per_token_s == pytest.approx(0.02)
    assert prefill_seconds(tracker.speeds, 2 * BT, 0) == pytest.approx(0.02, rel=0.3), "0.72 s with pictures"


def test_reading_encoded_pictures_has_a_speed_of_its_own() -> None:
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=64 * BT), TOLD)
    world.arrive(BT)
    assert world.core.state.tracker.speeds.rows_per_token_s == 0.0
    for family in range(1, 30):
        world.arrive(BT, family, rows=(35, 0.07))
    assert world.core.state.tracker.speeds.rows_per_token_s == pytest.approx(0.002)


def test_a_step_that_runs_is_partly_done() -> None:
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=4 * BT), TOLD)
    world.arrive(2 * BT)
    world.arrive(2 * BT, 1)
    one_s = prefill_seconds(TOLD, 2 * BT, 0)
    both_s = one_s + 2 * BT * TOLD.prefill_per_token_s
    assert world.core.drain_seconds() == pytest.approx(both_s)
    assert world.core.drain_seconds(world.now + 0.5 * one_s) == pytest.approx(both_s - 0.5 * one_s)
    assert world.core.drain_seconds(world.now + 100.0) == pytest.approx(both_s - one_s), "it is overdue, not done"


def test_a_step_of_which_nothing_is_heard_tells_before_it_is_over() -> None:
    """An engine that hangs goes on reporting through its process."""
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=4 * BT), TOLD)
    world.arrive(2 * BT)
    one_s = prefill_seconds(TOLD, 2 * BT, 0)
    assert world.core.speeds(world.now + 2.0 * one_s) == TOLD
    told = world.core.speeds(world.now + 100.0 * one_s)
    assert prefill_seconds(told, 2048, 0) == pytest.approx(100.0 * prefill_seconds(TOLD, 2048, 0))
    assert told.decode_base_s == TOLD.decode_base_s
    world.now += one_s
    world.run_step(min(world.steps))
    assert world.core.speeds(world.now + 100.0) == world.core.state.tracker.speeds, "nothing runs: nothing is overdue"


def test_what_a_prompt_shares_with_one_before_it_is_counted_once() -> None:
    """It is found when the prompt begins; one that was given up is not."""
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=4 * BT), TOLD)
    first, second, alone_s = world.arrive(8 * BT), world.arrive(10 * BT), world.core.drain_seconds
    assert alone_s() == pytest.approx(prefill_seconds(TOLD, 10 * BT, 0, steps=3))
    other = world.arrive(6 * BT, reuse=False)
    assert alone_s() == pytest.approx(prefill_seconds(TOLD, 16 * BT, 0, steps=4)), (
        "it finds nothing, and shares nothing"
    )
    world.arrive(7 * BT)
    assert alone_s() == pytest.approx(prefill_seconds(TOLD, 16 * BT + 1, 0, steps=5)), "all but its last token"
    world.settle()
    assert [client.token is not None for client in (first, second, other)] == [True] * 3
    assert sum(end - begin for begin, end in second.counted) == 2 * BT
    assert alone_s() == 0.0


def test_nobody_finds_what_a_prompt_computes_whose_kv_was_deleted() -> None:
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=4 * BT), TOLD)
    world.arrive(8 * BT, transient=True)
    one_s = world.core.drain_seconds()
    second = world.arrive(8 * BT)
    assert world.core.drain_seconds() == pytest.approx(2 * one_s)
    world.settle()
    assert sum(end - begin for begin, end in second.counted) == 8 * BT


def test_what_a_prompt_would_have_computed_that_left_is_computed_by_the_next_one() -> None:
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=4 * BT), TOLD)
    world.arrive(4 * BT, 1)
    for blocks in (8, 8, 10, 6):
        world.arrive(blocks * BT)
    whole_s = world.core.drain_seconds()
    world.post(events.CancelPrefill(2))
    assert world.core.drain_seconds() == pytest.approx(whole_s - prefill_seconds(TOLD, 1, 8 * BT - 1, steps=0))
    world.post(events.CancelPrefill(4))
    world.post(events.CancelPrefill(3))
    others_s = prefill_seconds(TOLD, 4 * BT, 0, steps=3) + prefill_seconds(TOLD, 6 * BT, 0, steps=0)
    assert world.core.drain_seconds() == pytest.approx(others_s), "nobody is left before it"
    world.settle()
    assert world.core.drain_seconds() == 0.0
