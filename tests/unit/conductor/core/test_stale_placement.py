"""A prefill instance is busier than was thought, and says so: the cluster is corrected, and the prompt placed again."""

import pytest

from moonpool.conductor.core.actions import AnnouncePlacement, CallPrefill, CallReserve, CancelReservation
from moonpool.conductor.core.events import PrefillAccepted, StalePlacement
from moonpool.conductor.core.request_spec import SloLimits
from moonpool.conductor.core.stale_placement import MAX_STALE_ANSWERS, STALE_SLACK, STALE_SLACK_S

from .world import World

PROMPT_S = 0.1
"""What a prompt of 100 tokens takes."""


def placed(prefills: int = 2, *drains: float, slo: SloLimits = SloLimits()) -> tuple[World, CallPrefill]:  # noqa: B008
    """Instances with these queues by their reports, and a prompt of 100 tokens that has its promise at decode."""
    world = World(prefills=prefills, decodes=1)
    for number, drain_s in enumerate(drains):
        world.report(f"prefill-{number}", 64, drain_s=drain_s)
    world.arrive(prompt=100, slo=slo)
    world.promise(world.one(CallReserve))
    return world, world.one(CallPrefill)


def test_a_prompt_may_find_the_queue_that_was_thought_and_a_fifth_of_its_time() -> None:
    _, call = placed(2, 1.0, 1.0)
    assert call.max_queue_s == pytest.approx(1.0 + STALE_SLACK * (1.0 + PROMPT_S))


def test_it_may_find_as_much_as_makes_the_next_best_as_good() -> None:
    _, call = placed(2, 1.0, 3.0)
    assert call.max_queue_s == pytest.approx(3.0)


def test_short_prompts_are_not_sent_about_for_what_is_within_the_noise() -> None:
    world = World(decodes=1)
    for number in range(2):
        world.report(f"prefill-{number}", 64, drain_s=0.0)
    world.arrive(prompt=1)
    world.promise(world.one(CallReserve))
    assert world.one(CallPrefill).max_queue_s == pytest.approx(STALE_SLACK_S)


def test_own_prompts_that_were_placed_there_count_in_whatever_order_they_come() -> None:
    world = World(prefills=2, decodes=1)
    for number in range(2):
        world.report(f"prefill-{number}", 64, drain_s=0.0)
    for _ in range(3):  # the third one goes where the first is
        world.arrive(prompt=100)
    first = world.open(CallReserve)[0]
    world.promise(first)
    alone, late = PROMPT_S * STALE_SLACK, PROMPT_S
    assert world.one(CallPrefill).max_queue_s == pytest.approx(late + alone)


@pytest.mark.parametrize(("prefills", "drains"), [(1, (1.0,)), (2, ())])
def test_where_there_is_no_other_or_no_queue_is_told_it_is_taken_as_it_is(
    prefills: int, drains: tuple[float, ...]
) -> None:
    _, call = placed(prefills, *drains)
    assert call.max_queue_s is None


def test_it_goes_elsewhere_and_decode_keeps_its_promise() -> None:
    world, call = placed(2, 0.0, 0.5)
    world.end(call, StalePlacement(2.0, taken=7))
    again = world.one(CallPrefill)
    assert (call.plan.prefill.id, again.plan.prefill.id) == ("prefill-0", "prefill-1")
    assert (again.target, again.sequence) == (call.target, call.sequence)
    assert world.all(CancelReservation) == []
    assert world.open(CallReserve) == []
    assert [placed.plan.prefill.id for placed in world.all(AnnouncePlacement)] == ["prefill-0", "prefill-1"]
    assert world.core.scheduler.stale == 1
    world.first_token(again)
    world.finish_all()


def test_the_answer_counts_until_a_newer_report_comes() -> None:
    world, call = placed(2, 0.0, 0.5)
    world.end(call, StalePlacement(2.0, taken=7))
    prefill = world.cluster.prefills.get("prefill-0")
    assert prefill is not None
    assert prefill.free_at == world.now + 2.0
    world.report("prefill-0", 64, drain_s=0.1, taken=6)  # was sent before the answer
    assert prefill.free_at == world.now + 2.0
    world.report("prefill-0", 64, drain_s=0.1, taken=7)
    assert prefill.free_at == world.now + 0.1


def test_after_some_answers_it_is_taken_however_long_the_queue_is() -> None:
    world, call = placed(2, 0.0, 0.0)
    for number in range(MAX_STALE_ANSWERS):
        assert call.max_queue_s is not None, number
        world.end(call, StalePlacement(5.0 + number, taken=number))
        call = world.one(CallPrefill)
    assert call.max_queue_s is None
    world.post(PrefillAccepted(call.io, MAX_STALE_ANSWERS))
    world.finish_all()


def test_who_was_told_a_place_is_not_refused_early_though_no_place_keeps_its_limit_any_more() -> None:
    world, call = placed(2, 0.0, 4.0, slo=SloLimits(ttft_s=1.0))
    world.end(call, StalePlacement(3.0, taken=1))
    again = world.one(CallPrefill)
    assert (again.target, world.all(CancelReservation), world.ends) == (call.target, [], {})
    world.finish_all()


def test_what_it_has_waited_for_a_place_is_told_with_each_place() -> None:
    world = World(decodes=1)
    for number in range(2):
        world.report(f"prefill-{number}", 64, drain_s=4.0)
    world.arrive(prompt=100, slo=SloLimits(ttft_s=1.0, queue_s=30.0))
    assert world.open(CallReserve) == []
    for number in range(2):
        world.report(f"prefill-{number}", 64, drain_s=0.0)
    world.sleep(5.0)
    world.promise(world.one(CallReserve))
    world.end(world.one(CallPrefill), StalePlacement(0.5, taken=1))
    first, second = world.all(AnnouncePlacement)
    assert (first.sequence, first.queued_s) == (second.sequence, second.queued_s)
    assert first.queued_s > 0.0
    world.finish_all()


def test_an_instance_that_must_take_the_prompt_and_does_not_has_failed() -> None:
    world, call = placed(1, 1.0)
    assert call.max_queue_s is None
    world.end(call, StalePlacement(3.0, taken=1 << 62))
    assert (world.core.scheduler.stale, world.rehashes) == (0, [])
    world.sleep(0.05)
    assert world.rehashes == [call.request], "a failed attempt is followed by another one after a pause"
    prefill = world.cluster.prefills.get("prefill-0")
    assert prefill is not None
    assert prefill.load.taken == 0
    world.finish_all()


def test_an_instance_that_has_taken_the_prompt_has_failed_when_it_does_not_compute_it() -> None:
    world, call = placed(2, 0.0, 0.5)
    world.post(PrefillAccepted(call.io, 1))
    world.end(call, StalePlacement(3.0, taken=1))
    assert (world.core.scheduler.stale, world.rehashes) == (0, [call.request])
    world.finish_all()


def test_what_an_instance_makes_up_counts_no_longer_than_one_report() -> None:
    world, call = placed(2, 0.0, 0.5)
    world.end(call, StalePlacement(2.0, taken=1 << 62))
    prefill = world.cluster.prefills.get("prefill-0")
    assert prefill is not None
    world.report("prefill-0", 64, drain_s=0.1, taken=6)
    assert prefill.free_at == world.now + 2.0
    world.report("prefill-0", 64, drain_s=0.1, taken=7)
    assert (prefill.free_at, prefill.load.taken) == (world.now + 0.1, 7)
    world.report("prefill-0", 64, drain_s=0.3, taken=6)  # again one that was overtaken
    assert prefill.free_at == world.now + 0.1
    world.finish_all()


def test_an_answer_to_an_attempt_that_is_over_changes_nothing() -> None:
    world, call = placed(2, 0.0, 0.0)
    world.leave("prefill-0")
    world.end(call, StalePlacement(3.0, taken=1))
    assert world.core.scheduler.stale == 0
    world.finish_all()
