"""A prefill instance is busier than was thought, and says so: the picture is corrected, and the prompt placed again."""

import pytest

from services.conductor.core.admission import Slo
from services.conductor.core.failures import Stale
from services.conductor.core.messages import Accepted, Announce, Fail, Prefill, Reserve, Undo
from services.conductor.core.staleness import LEAST_S, MOST, SLACK

from .world import World

PROMPT_S = 0.1
"""What a prompt of 100 tokens takes."""


def placed(prefills: int = 2, *drains: float, slo: Slo = Slo()) -> tuple[World, Prefill]:  # noqa: B008
    """Instances with these queues by their reports, and a prompt of 100 tokens that has its promise at decode."""
    world = World(prefills=prefills, decodes=1)
    for number, drain_s in enumerate(drains):
        world.report(f"prefill-{number}", 64, drain_s=drain_s)
    world.arrive(prompt=100, slo=slo)
    world.promise(world.one(Reserve))
    return world, world.one(Prefill)


def test_a_prompt_may_find_the_queue_that_was_thought_and_a_fifth_of_its_time() -> None:
    _, call = placed(2, 1.0, 1.0)
    assert call.max_queue_s == pytest.approx(1.0 + SLACK * (1.0 + PROMPT_S))


def test_it_may_find_as_much_as_makes_the_next_best_as_good() -> None:
    _, call = placed(2, 1.0, 3.0)
    assert call.max_queue_s == pytest.approx(3.0)


def test_short_prompts_are_not_sent_about_for_what_is_within_the_noise() -> None:
    world = World(decodes=1)
    for number in range(2):
        world.report(f"prefill-{number}", 64, drain_s=0.0)
    world.arrive(prompt=1)
    world.promise(world.one(Reserve))
    assert world.one(Prefill).max_queue_s == pytest.approx(LEAST_S)


def test_own_prompts_that_were_placed_there_count_in_whatever_order_they_come() -> None:
    world = World(prefills=2, decodes=1)
    for number in range(2):
        world.report(f"prefill-{number}", 64, drain_s=0.0)
    for _ in range(3):  # the third one goes where the first is
        world.arrive(prompt=100)
    first = world.open(Reserve)[0]
    world.promise(first)
    alone, late = PROMPT_S * SLACK, PROMPT_S
    assert world.one(Prefill).max_queue_s == pytest.approx(late + alone)


@pytest.mark.parametrize(("prefills", "drains"), [(1, (1.0,)), (2, ())])
def test_where_there_is_no_other_or_no_queue_is_told_it_is_taken_as_it_is(
    prefills: int, drains: tuple[float, ...]
) -> None:
    _, call = placed(prefills, *drains)
    assert call.max_queue_s is None


def test_it_goes_elsewhere_and_decode_keeps_its_promise() -> None:
    world, call = placed(2, 0.0, 0.5)
    world.end(call, Stale(2.0, taken=7))
    again = world.one(Prefill)
    assert (call.plan.prefill.id, again.plan.prefill.id) == ("prefill-0", "prefill-1")
    assert (again.target, again.sequence) == (call.target, call.sequence)
    assert world.all(Undo) == []
    assert world.open(Reserve) == []
    assert [it.plan.prefill.id for it in world.all(Announce)] == ["prefill-0", "prefill-1"]
    assert world.core.requests.stale == 1
    world.first_token(again)
    world.finish_all()


def test_the_answer_counts_until_a_newer_report_comes() -> None:
    world, call = placed(2, 0.0, 0.5)
    world.end(call, Stale(2.0, taken=7))
    prefill = world.picture.prefills.get("prefill-0")
    assert prefill is not None
    assert prefill.free_at == world.now + 2.0
    world.report("prefill-0", 64, drain_s=0.1, taken=6)  # was sent before the answer
    assert prefill.free_at == world.now + 2.0
    world.report("prefill-0", 64, drain_s=0.1, taken=7)
    assert prefill.free_at == world.now + 0.1


def test_after_some_answers_it_is_taken_however_long_the_queue_is() -> None:
    world, call = placed(2, 0.0, 0.0)
    for number in range(MOST):
        assert call.max_queue_s is not None, number
        world.end(call, Stale(5.0 + number, taken=number))
        call = world.one(Prefill)
    assert call.max_queue_s is None
    world.post(Accepted(call.io, MOST))
    world.finish_all()


def test_a_limit_that_no_place_keeps_any_more_is_a_refusal_and_the_promise_comes_back() -> None:
    world, call = placed(2, 0.0, 4.0, slo=Slo(ttft_s=1.0))
    world.end(call, Stale(3.0, taken=1))
    fail = world.ends[call.request]
    assert isinstance(fail, Fail)
    assert (fail.refused, fail.failure.reason) == (True, "ttft_slo")
    assert fail.failure.predicted_ttft_s == pytest.approx(3.0 + PROMPT_S, rel=0.1)
    assert [undo.target for undo in world.all(Undo)] == [call.target]
    assert world.picture.claims == []


def test_an_answer_to_an_attempt_that_is_over_changes_nothing() -> None:
    world, call = placed(2, 0.0, 0.0)
    world.leave("prefill-0")
    world.end(call, Stale(3.0, taken=1))
    assert world.core.requests.stale == 0
    world.finish_all()
