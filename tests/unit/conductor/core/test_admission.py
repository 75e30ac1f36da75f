"""Who is refused before anything is computed, why, and what is told about another try."""

from collections.abc import Sequence
from math import exp

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.admission import (
    HOPELESS_RETRY_S,
    TOO_SLOW_RETRY_S,
    AdmissionGate,
    AdmissionMode,
    check_ttft,
)
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.load_forecast import LoadForecast, load_at, load_now
from moonpool.conductor.core.request_spec import SloLimits
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.placement.base import DecodeChoice

from .worlds import World, decode_at, facts

STEP = Speeds(prefill_per_token_s=1.0, decode_per_sequence_s=0.1)
"""A second for each token of a prompt, a tenth of a second between tokens for each sequence."""
FIXED = Speeds(decode_base_s=0.1)


def test_a_late_first_token_is_refused_with_the_time_by_which_the_queue_will_have_shrunk() -> None:
    assert check_ttft(SloLimits(ttft_s=5.0), 5.0, 2.0) is None
    assert check_ttft(SloLimits(), 2e9, 2e9) is None
    refusal = check_ttft(SloLimits(ttft_s=5.0), 9.0, 2.0, elapsed_s=1.0)
    assert refusal is not None
    assert (refusal.kind, refusal.reason) == (FailureKind.OVERLOADED, "ttft_slo")
    assert (refusal.predicted_ttft_s, refusal.slo_s, refusal.retry_after_s) == (10.0, 5.0, 5.0)


def test_what_an_idle_instance_is_too_slow_for_is_hopeless() -> None:
    refusal = check_ttft(SloLimits(ttft_s=5.0), 6.0, 6.0)
    assert refusal is not None
    assert refusal.retry_after_s == HOPELESS_RETRY_S


class TestOutlook:
    def world(self) -> World:
        return World(facts("prefill-0"), facts("decode-0", speeds=FIXED), facts("decode-1", speeds=FIXED))

    def test_a_prompt_that_is_being_computed_is_no_load_now(self) -> None:
        world = self.world()
        started, _ = (world.cluster.claim_decode("decode-0", PlacedAnswer(64, 4, reported_at=9.0)) for _ in range(2))
        world.cluster.answer_grew(started, 1, 0.0)
        instance = world.cluster.decodes.get("decode-0")
        assert instance is not None
        assert load_now(instance) == LoadForecast(1, 64)
        world.report("decode-0", running=5, context_tokens=1000)  # does not include our two
        assert load_now(instance) == LoadForecast(6, 936)

    def test_answers_count_by_the_probability_that_they_still_run(self) -> None:
        world = self.world()
        lengths, cluster = world.cluster.forecasts.lengths, world.cluster
        instance = cluster.decodes.get("decode-0")
        assert instance is not None
        for _ in range(10):
            cluster.answer_grew(cluster.claim_decode("decode-0", PlacedAnswer(100, 7)), 8, 5.0)
        later = load_at(instance, lengths, 5.0, 15.0)  # 100 tokens more; a mean of 256 is believed
        share = exp(-100 / 256)
        assert later.sequences == pytest.approx(10 * share)
        assert later.context_tokens == pytest.approx(10 * share * (100 + 108))

    def test_one_on_its_way_counts_from_when_it_begins(self) -> None:
        world = self.world()
        lengths, cluster = world.cluster.forecasts.lengths, world.cluster
        instance = cluster.decodes.get("decode-0")
        assert instance is not None
        cluster.claim_decode("decode-0", PlacedAnswer(100, 7, reported_at=20.0))
        assert load_at(instance, lengths, 0.0, 10.0) == LoadForecast(0.0, 0.0)
        assert load_at(instance, lengths, 0.0, 20.0) == LoadForecast(1.0, 100.0)
        assert load_at(instance, lengths, 0.0, 45.6).sequences == pytest.approx(exp(-1))
        assert load_at(instance, lengths, 30.0, 30.0) == LoadForecast(1.0, 100.0), "it is late, and so begins later"

    def test_what_others_placed_stays(self) -> None:
        instance = decode_at(0, facts("decode-0", speeds=FIXED), 3, room=50)
        lengths = World().cluster.forecasts.lengths
        assert load_at(instance, lengths, 0.0, 1000.0) == LoadForecast(3.0, 300.0)


class Busy:
    """Two prefills and decodes: answers that run, and some that are on their way."""

    def __init__(self, running: int = 0, reserved: int = 0, begins_at: float = 10.0) -> None:
        self.world = World(facts("prefill-0", speeds=STEP), *(facts(f"decode-{n}", speeds=STEP) for n in range(2)))
        cluster = self.world.cluster
        for name in ("decode-0", "decode-1"):
            for _ in range(running):
                cluster.answer_grew(cluster.claim_decode(name, PlacedAnswer(10, 1)), 1, 0.0)
            for _ in range(reserved):
                cluster.claim_decode(name, PlacedAnswer(10, 1, reported_at=begins_at))

    def check(self, admission: AdmissionMode, slo: SloLimits, tokens: int = 20) -> Failure | Sequence[DecodeChoice]:
        plan: RoutingDecision = self.world.plan(tokens)
        return AdmissionGate(admission, self.world.cluster.forecasts).check(slo, plan, (), 0.0, 0.0)


def reason(found: Failure | Sequence[DecodeChoice]) -> str:
    return found.reason if isinstance(found, Failure) else ""


LIMIT = SloLimits(ttft_s=30.0, tbt_s=1.05)
"""Ten sequences."""


def test_an_idle_cluster_refuses_nobody_whom_it_can_serve() -> None:
    for admission in AdmissionMode:
        assert reason(Busy().check(admission, LIMIT)) == ""
    assert reason(Busy().check(AdmissionMode.PREDICTIVE, SloLimits(ttft_s=19.0))) == "ttft_slo"
    assert reason(Busy().check(AdmissionMode.PREDICTIVE, SloLimits(tbt_s=0.09))) == "tbt_slo"
    assert reason(Busy().check(AdmissionMode.NONE, SloLimits(ttft_s=19.0, tbt_s=0.09))) == ""


def test_load_that_is_on_its_way_is_seen_by_prediction_only() -> None:
    """The oscillation of early rejection: all are let in while decode is idle, and then none."""
    world = Busy(reserved=10)
    assert reason(world.check(AdmissionMode.EARLY, LIMIT)) == ""
    refusal = world.check(AdmissionMode.PREDICTIVE, LIMIT)
    assert isinstance(refusal, Failure)
    assert (refusal.kind, refusal.reason, refusal.slo_s) == (FailureKind.OVERLOADED, "tbt_slo", 1.05)
    assert 1.05 < refusal.predicted_tbt_s < 1.1, "ten and it, less what may end in the ten seconds between"
    assert refusal.predicted_ttft_s == 20.0
    assert refusal.retry_after_s == 3.2
    assert "in 20.000 s, when the prompt is computed" in refusal.message


def test_who_was_promised_room_before_is_not_made_slow_by_who_begins_earlier() -> None:
    world = Busy(reserved=10, begins_at=22.0)
    refusal = world.check(AdmissionMode.PREDICTIVE, LIMIT)
    assert isinstance(refusal, Failure)
    share = exp(-20 / 256)  # at 0.1 s a token, while nothing else runs
    assert refusal.predicted_tbt_s == pytest.approx(0.1 * (10 + share)), "at 22 s, not at 20 s, when nothing runs"


def test_who_will_have_ended_when_the_next_begin_is_let_in() -> None:
    """After 400 tokens: one of five still runs."""
    assert reason(Busy(reserved=10, begins_at=60.0).check(AdmissionMode.PREDICTIVE, LIMIT)) == ""


def test_load_that_will_have_ended_refuses_nobody_by_prediction() -> None:
    world = Busy(running=10)
    refusal = world.check(AdmissionMode.EARLY, LIMIT)
    assert isinstance(refusal, Failure)
    assert refusal.predicted_tbt_s == pytest.approx(1.1)
    assert refusal.retry_after_s == TOO_SLOW_RETRY_S
    for number in range(40):  # answers have about 8 tokens: those of now are over in 20 s
        world.world.cluster.forecasts.lengths.begin(number, ("",))
        world.world.cluster.forecasts.lengths.ended(number, 8)
    assert reason(world.check(AdmissionMode.PREDICTIVE, LIMIT)) == ""
    assert reason(world.check(AdmissionMode.PREDICTIVE, LIMIT, tokens=1)) == "tbt_slo", "a second from now they are not"


def test_only_instances_that_keep_the_limit_are_asked() -> None:
    world = Busy(reserved=12)
    for claim in world.world.cluster.claims[12:]:
        world.world.cluster.release(claim, 0.0)
    found = world.check(AdmissionMode.PREDICTIVE, LIMIT)
    assert not isinstance(found, Failure)
    assert [choice.id for choice in found] == ["decode-1"]


def test_the_retry_time_is_when_load_is_expected_to_have_fallen() -> None:
    world = Busy(reserved=30, begins_at=20.0)
    times = []
    for limit in (3.05, 2.55, 1.55, 0.05):
        refusal = world.check(AdmissionMode.PREDICTIVE, SloLimits(tbt_s=limit))
        assert isinstance(refusal, Failure)
        times.append(refusal.retry_after_s)
    assert times == sorted(times)
    assert times[0] < times[1]
    assert times[-1] == HOPELESS_RETRY_S
