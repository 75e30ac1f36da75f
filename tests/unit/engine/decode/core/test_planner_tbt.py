"""Promised times between tokens, as contexts grow."""

import pytest

from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.engine.decode.core.actions import StartRun
from moonpool.engine.decode.core.admission import RequestForecast, peak_steps
from moonpool.engine.decode.core.request import RequestStatus
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.tbt_world import STEEP, PacedWorld
from tests.unit.engine.decode.core.world import config


def step_s(sequences: int, context: int) -> float:
    return decode_step_seconds(STEEP, sequences, context)


def begun(answers: int, slo: float, assumed: int, **settings: object) -> tuple[PacedWorld, list[int]]:
    """Two sequences of eight tokens with promises, both of which are kept now."""
    world = PacedWorld(config(80, speeds=STEEP, assumed_answer_tokens=assumed, **settings))
    return world, [world.go(prompt(8, seed), answers, slo=slo) for seed in (1, 2)]


@pytest.mark.parametrize("run_steps", [1, 64])
def test_who_came_last_leaves_when_answers_are_longer_than_expected(run_steps: int) -> None:
    """Answers of 200 where four were expected: two with 50 tokens of context each are as slow as may be."""
    limit = step_s(2, 100)
    world, (first, second) = begun(200, limit, 4, run_steps=run_steps)
    while len(world.core.planner.batch) == 2 or world.core.planner.batch.ticks < 10:
        world.step()
    planner = world.core.planner
    assert (planner.batch.ids, planner.waiting[0].id, planner.slots.kept) == ((first,), second, {second: 1})
    assert [len(world.sequences[number].tokens) for number in (first, second)] == [51, 50], "101, after 99"
    assert world.reserve(prompt(4, 3), slo=limit) is None
    while first in world.core.requests:
        assert planner.batch.ids == (first,)
        world.step()
    assert planner.batch.ids == (second,)
    world.work()
    assert [len(world.answers[number]) for number in (first, second)] == [200, 200]
    world.assert_at_rest()


def test_a_promise_that_can_be_kept_no_longer_makes_nobody_leave_who_was_promised_a_time_himself() -> None:
    """The first one alone is too slow for its promise from 60 tokens on: then the second one, 1 s, comes again."""
    world = PacedWorld(config(80, speeds=STEEP, assumed_answer_tokens=4))
    first = world.go(prompt(8, 1), 200, slo=step_s(1, 60))
    while len(world.sequences[first].tokens) < 40:
        world.step()
    second, free = world.go(prompt(8, 2), 300, slo=1.0, starts_in_s=10.0), world.go(prompt(8, 3), 300)
    batches = []
    while first in world.core.requests:
        world.step()
        assert world.run is not None
        batches.append((len(world.sequences[first].tokens), world.run.batch) if first in world.sequences else None)
    alone = [tokens for tokens, batch in filter(None, batches) if batch == (first,)]
    both = [tokens for tokens, batch in filter(None, batches) if batch == (first, second)]
    assert (alone[-1], both[0], both[-1]) == (60, 61, 207)
    assert world.run is not None
    assert world.run.batch == (second, free), "who was promised nothing waits for the promise's end"


def test_one_that_was_promised_a_time_earlier_takes_the_place_of_those_who_came_later() -> None:
    limit = step_s(2, 60)
    world = PacedWorld(config(80, speeds=STEEP, assumed_answer_tokens=4))
    first = world.reserve(prompt(40, 1), 30, slo=limit)
    second = world.go(prompt(8, 2), 60, slo=limit)
    assert first is not None
    for _ in range(30):
        world.step()
    world.arrive(first)
    world.start(first)
    world.step()
    assert world.run == StartRun(32, (first,))
    assert world.core.requests[second].status is RequestStatus.WAITING
    world.work()
    assert [len(world.answers[number]) for number in (first, second)] == [30, 60]


def test_a_time_is_promised_for_the_step_as_it_will_be() -> None:
    """Two sequences keep the promise now, and not with the answers that are expected."""
    limit = step_s(2, 2 * (8 + 30 - 1))
    for assumed, promised in ((30, True), (31, False)):
        world = PacedWorld(config(80, speeds=STEEP, assumed_answer_tokens=assumed))
        assert world.reserve(prompt(8, 1), slo=limit, total=100) is not None
        assert (world.reserve(prompt(8, 2), slo=limit, total=100) is not None) == promised
        assert world.reserve(prompt(8, 3)) is not None, "nothing was promised to it"


def test_no_longer_than_an_answer_may_be_is_expected() -> None:
    limit = step_s(2, 2 * (8 + 20 - 1))
    world = PacedWorld(config(80, speeds=STEEP, assumed_answer_tokens=500))
    assert world.reserve(prompt(8, 1), slo=limit, total=28) is not None
    assert world.reserve(prompt(8, 2), slo=limit, total=28) is not None


def test_who_catches_up_waits_while_a_token_of_it_would_break_a_promise_and_no_more_is_promised() -> None:
    world = PacedWorld(config(80, speeds=STEEP, assumed_answer_tokens=4))
    limit = step_s(1, 40)
    first = world.go(prompt(8, 1), 33, slo=limit)
    while len(world.sequences[first].tokens) < 38:
        world.step()
    computes = world.reserve(prompt(8, 2), 3)
    assert computes is not None
    world.compute(computes)
    while first in world.core.requests:
        world.step()
        assert world.run is not None
        assert not (world.run.batch and world.run.chunks), "39 tokens leave 20 us, a token takes 100"
    world.work()
    assert len(world.answers[computes]) == 3


def test_a_promise_leaves_room_for_those_who_are_to_catch_up() -> None:
    limit = step_s(2, 2 * (8 + 4 - 1)) + STEEP.prefill_per_token_s / 2
    for catches in (False, True):
        world = PacedWorld(config(80, speeds=STEEP, assumed_answer_tokens=4, chunked_prefill_size=1))
        if catches:
            other = world.reserve(prompt(8, 2), 3, total=12)
            assert other is not None
            world.compute(other)
        else:
            assert world.reserve(prompt(8, 2), 3, total=12) is not None
        assert (world.reserve(prompt(8, 3), 3, slo=limit, total=12) is None) == catches


def test_the_worst_moments_are_just_before_ends() -> None:
    """Of one that is there, one that comes at step 4 and ends with step 6, and one that comes when it is over."""
    watched = RequestForecast(0, 10, 1, 100)
    lives = [watched, RequestForecast(4, 6, 2, 50), RequestForecast(11, 30, 9, 900), RequestForecast(0, 2, 1, BT)]
    assert list(peak_steps(lives, watched)) == [(2, 100 + BT + 4), (3, 106 + 54), (1, 110)]
