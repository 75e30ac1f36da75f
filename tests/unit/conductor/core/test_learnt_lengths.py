"""What requests teach of answers' lengths, and what they tell decode when they ask for room."""

from dataclasses import replace

import pytest

from moonpool.conductor.core.actions import CallPrefill, CallReserve, FailRequest
from moonpool.conductor.core.admission import AdmissionMode
from moonpool.conductor.core.events import ClientGone, CompletionReason
from moonpool.conductor.core.output_lengths import OutputLengthModel
from moonpool.conductor.core.request_spec import SloLimits

from .world import GONE, LIMITS, World

ONE = ("",)


def lengths_of(world: World) -> OutputLengthModel:
    return world.cluster.forecasts.lengths


def test_an_answer_that_ends_by_itself_is_learnt_from_and_one_that_was_cut_off_is_censored() -> None:
    chances = []
    for finish in (CompletionReason.STOP, CompletionReason.LENGTH):
        world = World()
        for _ in range(20):
            _, prefill, start = world.decoding()
            assert len(lengths_of(world)) == 1
            world.more(start, 3, finish, known=True)
            world.end(start)
            world.end(prefill)
        assert len(lengths_of(world)) == 0
        chances.append(lengths_of(world).outlives(ONE, 4, so_far=3))
    assert chances[0] < 0.4
    assert chances[1] > 0.9


def test_refused_work_teaches_nothing() -> None:
    world = World()
    before = lengths_of(world).digest()
    world.arrive(slo=SloLimits(ttft_s=0.01))
    assert isinstance(world.ends[1], FailRequest)
    assert lengths_of(world).digest() == before


@pytest.mark.parametrize("end", ["client", "failure"])
def test_an_answer_without_its_end_is_followed_no_longer(end: str) -> None:
    world = World(limits=replace(LIMITS, retries=0))
    number, _, start = world.decoding()
    world.post(ClientGone(number)) if end == "client" else world.end(start, GONE)
    assert len(lengths_of(world)) == 0
    world.finish_all()


def test_an_answer_that_is_placed_again_is_followed_as_one() -> None:
    world = World()
    number, _, start = world.decoding()
    world.more(start, 5)
    world.end(start, GONE)
    world.rehash(number)
    assert len(lengths_of(world)) == 1
    world.finish_all()


@pytest.mark.parametrize(("admission", "starts_in_s"), [(AdmissionMode.PREDICTIVE, 0.04), (AdmissionMode.EARLY, 0.0)])
def test_decode_is_told_when_the_prompt_will_be_computed(admission: AdmissionMode, starts_in_s: float) -> None:
    world = World(limits=replace(LIMITS, admission=admission))
    world.arrive(prompt=40, slo=SloLimits(tbt_s=1.0))
    call = world.one(CallReserve)
    assert call.tbt_slo_s == 1.0
    assert call.starts_in_s == pytest.approx(starts_in_s)


@pytest.mark.parametrize("admission", list(AdmissionMode))
def test_without_admission_nobody_is_refused_before_decode_was_asked(admission: AdmissionMode) -> None:
    world = World(limits=replace(LIMITS, admission=admission))
    world.arrive(prompt=40, slo=SloLimits(ttft_s=0.01))
    assert bool(world.ends) == (admission is not AdmissionMode.NONE)
    world.finish_all()


@pytest.mark.parametrize(("limit_s", "where"), [(None, "prefill-0"), (0.0281, "prefill-0"), (0.0279, "prefill-1")])
def test_a_limit_that_the_best_place_would_miss_is_kept_at_the_next(limit_s: float | None, where: str) -> None:
    """The one that holds most is busy, the other one idle."""
    world, keys = World(prefills=0, decodes=1), (b"1" * 32, b"2" * 32)
    for number, blocks in enumerate((2, 1)):
        world.join_prefill(f"prefill-{number}", max_num_batched_tokens=40)
        world.holds(f"prefill-{number}", keys[:blocks])
    world.arrive(prompt=10)
    world.arrive(prompt=40, keys=keys, slo=SloLimits(ttft_s=limit_s))
    first, second = world.open(CallReserve)
    for call in (first, second):
        world.promise(call)
    assert [call.plan.prefill.id for call in world.open(CallPrefill)] == ["prefill-0", where]
    assert world.ends == {}
