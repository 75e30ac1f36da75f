"""What measured times to first token teach of an instance."""

from dataclasses import replace

import pytest

from moonpool.scheduling.latency import Speeds, work_of
from services.conductor.core.decode_pool import DecodePool, PlacedAnswer
from services.conductor.core.instances import LoadFacts
from services.conductor.core.latency_model import (
    ALWAYS_BUSY,
    FIRST_FACTORS,
    FIRST_SLOWDOWN,
    LATER_SHARE,
    BusySpan,
    PrefillCorrections,
    SlowdownModel,
    contended_seconds,
)
from services.conductor.placement.base import LatencyParts
from tests.unit.conductor.core.worlds import World, decode_at, facts

TOLD = Speeds(prefill_per_token_s=1e-3, load_bytes_per_s=1e9)
TOKENS = 64
DECODE = facts("decode-0")
NONE = LatencyParts()


def world() -> World:
    return World(DECODE, facts("prefill-0", speeds=TOLD))


def test_what_an_instance_tells_is_believed_first() -> None:
    learnt = PrefillCorrections(TOLD)
    assert learnt.speeds is TOLD
    assert (learnt.overheads.seconds(0), learnt.factors) == (0.0, FIRST_FACTORS)
    other = Speeds(prefill_per_token_s=2e-3)
    learnt.report(other)
    assert learnt.speeds is other


def test_overhead_is_learnt_apart() -> None:
    learnt = PrefillCorrections(TOLD)
    for _ in range(30):
        learnt.overheads.observe(0, 0.009)
    assert learnt.overheads.seconds(0) == 0.009
    assert learnt.factors == FIRST_FACTORS


def test_each_part_has_a_factor_of_its_own() -> None:
    told = replace(TOLD, prefill_base_s=0.01)
    learnt, real = PrefillCorrections(told), LatencyParts(1.3, 1.2, 0.8, 1.9, 0.6)
    for number in range(600):
        waits = number % 4
        later_s = 0.04 if waits else 0.0
        sizes = LatencyParts(
            0.02 * waits, 0.02 * (number % 3), 0.01 * (1 + number % 2), 0.01 * (1 + number % 7), later_s
        )
        learnt.observe(sizes, NONE, sum([part * factor for part, factor in zip(sizes, real, strict=True)]))
    assert list(learnt.factors) == pytest.approx(list(real), rel=0.05)
    assert learnt.speeds.prefill_base_s == pytest.approx(0.8e-2, rel=0.05)
    assert learnt.speeds.prefill_per_token_s == pytest.approx(1.9e-3, rel=0.05)
    assert learnt.speeds.load_bytes_per_s == pytest.approx(1e9 / 1.2, rel=0.05)
    assert learnt.slowdown(work_of(10, 0)) == pytest.approx((0.8e-2 + 1.9e-2) / 2e-2, rel=0.05), "a step of ten tokens"


def test_an_idle_instance_s_one_slow_prompt_is_not_believed_against_those_that_wait_then() -> None:
    """As the first prompt of a burst is, beside which others are computed."""
    learnt = PrefillCorrections(TOLD)
    learnt.observe(LatencyParts(0.0, 0.0, 0.0, 0.1, 0.0), NONE, 0.3)
    assert learnt.factors.growing > 1.4
    for number in range(60):
        waits_s = 0.1 * (1 + number % 3)
        learnt.observe(LatencyParts(waits_s, 0.0, 0.0, 0.1, 0.0), NONE, waits_s + 0.1)
    assert list(learnt.factors) == pytest.approx(list(FIRST_FACTORS), rel=0.05)


def test_a_prompt_that_waits_shares_the_step_in_which_it_ends_with_later_ones() -> None:
    """So much more is expected as they have taken of it, however long the queue was."""
    it = World(DECODE, facts("prefill-0", speeds=TOLD, step_tokens=TOKENS))
    assert it.plan(TOKENS).prefill.tail_s == 0.0, "it does not wait"
    it.report("prefill-0", now=0.0, drain_s=0.5)
    first = it.plan(TOKENS).prefill
    assert first.tail_s == pytest.approx(LATER_SHARE * 0.064)
    assert first.ttft_s == pytest.approx(0.5 + 0.064 + first.tail_s)
    for number in range(120):
        queue_s = 0.1 * (number % 5)
        it.report("prefill-0", now=0.0, drain_s=queue_s)
        plan = it.plan(TOKENS)
        it.cluster.first_token(plan, TOKENS, queue_s + 0.064 + (0.05 if queue_s else 0.0), 0.0, 0.0)
    it.report("prefill-0", now=0.0, drain_s=0.3)
    assert it.plan(TOKENS).prefill.tail_s == pytest.approx(0.05, rel=0.2)
    assert it.plan(TOKENS).prefill.queue_s == pytest.approx(0.3, rel=0.05)


def test_what_was_foreseen_is_compared_without_the_factors_of_then() -> None:
    one, other = PrefillCorrections(TOLD), PrefillCorrections(TOLD)
    one.observe(LatencyParts(0.0, 0.0, 0.0, 0.1, 0.0), NONE, 0.15)
    other.observe(LatencyParts(0.0, 0.0, 0.0, 0.2, 0.0), LatencyParts(3.0, 0.5, 0.7, 2.0, 0.2), 0.15)
    assert one.factors == pytest.approx(other.factors)
    assert one.factors.growing > 1.1


class TestPicture:
    def test_a_plan_has_the_overhead_in_its_sum(self) -> None:
        it = world()
        for _ in range(30):
            plan = it.plan(TOKENS)
            it.cluster.first_token(plan, TOKENS, plan.prefill.prefill_s, 0.02, 0.0)
        choice = it.plan(TOKENS).prefill
        assert choice.overhead_s == pytest.approx(0.02, rel=0.05)
        assert choice.ttft_s == pytest.approx(choice.overhead_s + 0.064, rel=0.01)

    def test_a_prompt_that_was_not_what_was_foreseen_teaches_overhead_alone(self) -> None:
        it = world()
        it.cluster.first_token(it.plan(TOKENS), TOKENS // 2, 5.0, 0.02, 0.0)
        choice = it.plan(TOKENS).prefill
        assert choice.prefill_s == pytest.approx(0.064)
        assert choice.overhead_s > 0.01

    def test_what_is_left_begins_when_a_prompt_has_its_token(self) -> None:
        """A report said one second, three prompts are ours; the first takes longer than foreseen."""
        it = world()
        plan, claims = it.plan(TOKENS), list[int]()
        for number in range(1, 4):
            claims.append(it.cluster.claim_prefill("prefill-0", 0.2, 0.0))
            it.cluster.acknowledged(claims[-1], number)
        it.report("prefill-0", now=0.0, drain_s=0.8, taken=3)  # 0.2 s of it are another conductor's
        assert it.plan(TOKENS, now=0.0).prefill.queue_s == pytest.approx(0.8)
        it.cluster.release(claims[0], 0.5)
        it.cluster.first_token(plan, TOKENS, plan.prefill.alone_s, 0.0, 0.5)
        assert it.plan(TOKENS, now=0.5).prefill.queue_s == pytest.approx(0.4), "two are left, and no others"

    def test_another_process_is_learnt_anew_and_unknown_ones_are_fine(self) -> None:
        it = world()
        plan = it.plan(TOKENS)
        it.cluster.leave("prefill-0")
        it.cluster.first_token(plan, TOKENS, 1.0, 1.0, 0.0)
        it.join(facts("prefill-0", incarnation=2, speeds=TOLD))
        assert it.plan(TOKENS).prefill.overhead_s == 0.0


def test_a_few_that_took_long_do_not_change_the_overhead() -> None:
    overheads = PrefillCorrections(TOLD).overheads
    for seconds in (0.004, 0.006, 0.005, 0.3, 0.005, 0.2, 0.004):
        overheads.observe(1, seconds)
    assert overheads.seconds(1) == 0.005
    for _ in range(8):
        overheads.observe(1, 0.011)
    assert overheads.seconds(1) == 0.011, "most of the last fifteen"


def test_the_overhead_depends_on_how_many_others_there_are() -> None:
    """Where nothing was measured, it is that of the next number."""
    overheads = PrefillCorrections(TOLD).overheads
    assert overheads.seconds(0) == 0.0
    overheads.observe(2, 0.02)
    assert [overheads.seconds(others) for others in range(6)] == [0.02] * 6
    overheads.observe(0, 0.005)
    overheads.observe(7, 0.03)
    assert [overheads.seconds(others) for others in range(6)] == [0.005, 0.005, 0.02, 0.02, 0.03, 0.03]


@pytest.mark.parametrize(
    ("busy_spans", "whole_s", "shared"),
    [
        ([], 0.1, 0.0),
        ([ALWAYS_BUSY], 0.2, 1.0),
        ([BusySpan(0.0, 0.1)], 0.15, 0.5),  # half of the first 100 ms counts
        ([BusySpan(0.04, 0.1)], 0.13, 0.3),
        ([BusySpan(0.0, 0.06), BusySpan(0.02, 0.1), BusySpan(0.3, 0.4)], 0.15, 0.5),
        ([BusySpan(0.1, 0.2)], 0.1, 0.0),
    ],
)
def test_work_takes_longer_beside_other_engines(busy_spans: list[BusySpan], whole_s: float, shared: float) -> None:
    assert contended_seconds(0.1, busy_spans, 2.0) == pytest.approx((whole_s, shared))


def test_what_company_costs_is_learnt_beside_the_speed() -> None:
    """It computes 1.2 times as long as it says, and half as quick while others compute."""
    learnt = PrefillCorrections(TOLD)
    for number in range(400):
        busy_spans = [[], [ALWAYS_BUSY], [BusySpan(0.0, 0.03)]][number % 3]
        alone_s = 0.05 + 0.01 * (number % 5)
        _, shared = contended_seconds(alone_s * learnt.factors.growing, busy_spans, learnt.slowdown_model.of(1))
        there_s, _ = contended_seconds(1.2 * alone_s, busy_spans, 2.0)
        learnt.observe(LatencyParts(0.0, 0.0, 0.0, alone_s, 0.0), NONE, there_s, shared, 1)
    assert learnt.factors.growing == pytest.approx(1.2, rel=0.1)
    assert learnt.slowdown_model.of(1) == pytest.approx(2.0, rel=0.1)


def test_what_was_placed_before_company_was_known_to_be_slow_does_not_teach_too_much() -> None:
    """Many prompts are under way that were predicted by the first belief; work takes four times as long."""
    learnt = PrefillCorrections(TOLD)
    for _ in range(40):
        learnt.observe(LatencyParts(0.0, 0.0, 0.0, 0.1, 0.0), NONE, 0.4, 1.0, 8)
    assert learnt.slowdown_model.of(8) * learnt.factors.growing == pytest.approx(4.0, rel=0.1)


def test_company_of_more_requests_is_learnt_apart() -> None:
    model = SlowdownModel()
    assert [model.of(others) for others in (0, 1, 20)] == [FIRST_SLOWDOWN] * 3
    for _ in range(40):
        model.observe(1, 0.1, 0.0, 0.2)
    assert model.of(1) == pytest.approx(2.0, rel=0.05)
    assert model.of(20) == model.of(1), "the nearest bucket's"
    for _ in range(40):
        model.observe(9, 0.1, 0.0, 0.35)
        model.observe(2, 0.1, 0.0, 0.05)
    assert [model.of(others) for others in (8, 20)] == pytest.approx([3.5, 3.5], rel=0.05)
    assert model.of(3) == 1.0, "other engines make nothing quicker"


def test_company_costs_an_emulated_engine_nothing() -> None:
    learnt = PrefillCorrections(TOLD, alone=True)
    for _ in range(20):
        learnt.observe(LatencyParts(0.0, 0.0, 0.0, 0.05, 0.0), NONE, 0.06, shared=1.0, others=1)
    assert learnt.slowdown_model.of(1) == 1.0
    assert learnt.factors.growing == pytest.approx(1.2, rel=0.05)


def test_an_engine_alone_on_its_host_has_no_company() -> None:
    here = World(facts("decode-0", host="b"), facts("prefill-0", speeds=TOLD, host="a"))
    assert here.plan().prefill.shared is None
    nowhere = World(DECODE, facts("prefill-0", speeds=TOLD))
    assert nowhere.plan().prefill.shared is None


def test_a_prompt_is_predicted_by_what_decode_will_compute_beside_it() -> None:
    """At first other engines are taken to make work half as slow again."""
    here = World(
        facts("decode-0", host="a", speeds=Speeds(decode_base_s=0.002)), facts("prefill-0", speeds=TOLD, host="a")
    )
    idle = here.plan().prefill
    assert (idle.shared, idle.others) == (0.0, 0)
    assert idle.prefill_s == pytest.approx(0.064)
    here.cluster.claim_decode("decode-0", PlacedAnswer(64, 2, reported_at=0.0, generated=1, tokens=11))
    busy = here.plan().prefill
    assert busy.others == 1
    assert busy.shared == pytest.approx(0.020 / 1.5 / 0.064)
    assert busy.prefill_s == pytest.approx(0.064 + 0.020 - 0.020 / 1.5)
    later = here.plan(now=0.015).prefill
    assert later.shared == pytest.approx(0.005 / 1.5 / 0.064)
    here.report("decode-0", running=2, free_blocks=90)  # another conductor's
    assert here.plan(now=0.015).prefill.prefill_s == pytest.approx(0.064 * 1.5)


def spans(decodes: DecodePool, now: float) -> list[float]:
    """Begins and ends."""
    return [time for span in decodes.busy_spans("a", now) or () for time in span]


def test_answers_compute_from_their_first_token_to_the_last_that_is_expected() -> None:
    decode, decodes = (
        decode_at(0, facts("decode-0", host="a", speeds=Speeds(decode_base_s=0.01)), 0, room=90),
        DecodePool(),
    )
    decodes.add(decode)
    decode.claim(1, PlacedAnswer(64, 20, sequences=4, reported_at=3.0, tokens=10))
    assert spans(decodes, 1.0) == pytest.approx([2.0, 2.1])
    assert decodes.busy_spans("b", 1.0) is None
    decode.answers[1].generated, decode.answers[1].reported_at = 6, 3.5
    assert spans(decodes, 3.5) == pytest.approx([0.0, 0.04])
    assert spans(decodes, 9.0) == pytest.approx([0.0, 0.01]), "longer than expected"
    decode.acknowledged(1, 1)
    decode.report(LoadFacts(running=4, free_blocks=80, taken=1), 0.0, 0.0)
    assert decode.others == 0
    decode.report(LoadFacts(running=5, free_blocks=80, taken=1), 0.0, 0.0)
    assert decodes.busy_spans("a", 9.0) == [ALWAYS_BUSY]
