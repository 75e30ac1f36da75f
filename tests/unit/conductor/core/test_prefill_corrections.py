"""What measured times to first token teach of an instance."""

from dataclasses import replace

import pytest

from moonpool.base.scheduling.latency import Speeds, work_of
from moonpool.conductor.core.prefill_corrections import OverheadModel, PrefillCorrections
from moonpool.conductor.core.prefill_pool import LATER_SHARE
from tests.unit.conductor.core.worlds import World, facts

TOLD = Speeds(prefill_per_token_s=1e-3, load_bytes_per_s=1e9)
TOKENS = 64
DECODE = facts("decode-0")


def world() -> World:
    return World(DECODE, facts("prefill-0", speeds=TOLD))


def test_what_an_instance_tells_is_believed_first() -> None:
    learnt = PrefillCorrections(TOLD)
    assert learnt.speeds is TOLD
    assert (learnt.overhead.seconds, learnt.growing) == (0.0, 1.0)
    other = Speeds(prefill_per_token_s=2e-3)
    learnt.report(other)
    assert learnt.speeds is other


def test_what_grows_with_tokens_is_corrected_and_the_rest_is_not() -> None:
    told = replace(TOLD, prefill_base_s=0.01)
    learnt = PrefillCorrections(told)
    for number in range(200):
        growing_s, rest_s = 0.01 * (1 + number % 7), 0.01 + 0.02 * (number % 4)
        learnt.observe(growing_s, rest_s, 1.9 * growing_s + rest_s)
    assert learnt.growing == pytest.approx(1.9, rel=0.02)
    assert learnt.speeds.prefill_per_token_s == pytest.approx(1.9e-3, rel=0.02)
    assert learnt.speeds.prefill_base_s == told.prefill_base_s
    assert learnt.speeds.load_bytes_per_s == told.load_bytes_per_s
    assert learnt.slowdown(work_of(10, 0)) == pytest.approx((1e-2 + 1.9e-2) / 2e-2, rel=0.02), "a step of ten tokens"
    learnt.report(replace(told, prefill_per_token_s=2e-3))
    assert learnt.speeds.prefill_per_token_s == pytest.approx(3.8e-3, rel=0.02), "what was learnt stays"


def test_one_slow_prompt_is_not_believed_against_those_that_follow() -> None:
    """As the first prompt of a burst is, beside which others are computed."""
    learnt = PrefillCorrections(TOLD)
    learnt.observe(0.1, 0.0, 0.3)
    assert learnt.growing > 1.4
    for number in range(60):
        waits_s = 0.1 * (1 + number % 3)
        learnt.observe(0.1, waits_s, waits_s + 0.1)
    assert learnt.growing == pytest.approx(1.0, rel=0.05)


def test_a_prompt_that_waits_shares_the_step_in_which_it_ends_with_later_ones() -> None:
    """However long the queue is."""
    scene = World(DECODE, facts("prefill-0", speeds=TOLD, max_num_batched_tokens=TOKENS))
    assert scene.plan(TOKENS).prefill.tail_s == 0.0, "it does not wait"
    for queue_s in (0.1, 0.5):
        scene.report("prefill-0", now=0.0, drain_s=queue_s)
        choice = scene.plan(TOKENS).prefill
        assert choice.tail_s == pytest.approx(LATER_SHARE * 0.064)
        assert choice.ttft_s == pytest.approx(queue_s + 0.064 + choice.tail_s)
    for _ in range(60):
        plan = scene.plan(TOKENS)
        scene.cluster.first_token(plan, TOKENS, plan.prefill.ttft_s, 0.0, 0.0)
        scene.report("prefill-0", now=0.0, drain_s=0.5)
    assert scene.plan(TOKENS).prefill.prefill_s == pytest.approx(0.064), "what later prompts take teaches no speed"


def test_a_prompt_is_compared_with_what_the_instance_reported() -> None:
    """Not with the prediction, which has the factor in it."""
    scene = world()
    for _ in range(60):
        plan = scene.plan(TOKENS)
        scene.cluster.first_token(plan, TOKENS, 0.096, 0.0, 0.0)
    assert scene.plan(TOKENS).prefill.prefill_s == pytest.approx(0.096, rel=0.02)
    assert scene.plan(TOKENS).prefill.growing_s == pytest.approx(0.064)


class TestPicture:
    def test_a_plan_has_the_overhead_in_its_sum(self) -> None:
        scene = world()
        for _ in range(30):
            plan = scene.plan(TOKENS)
            scene.cluster.first_token(plan, TOKENS, plan.prefill.prefill_s, 0.02, 0.0)
        choice = scene.plan(TOKENS).prefill
        assert choice.overhead_s == pytest.approx(0.02, rel=0.05)
        assert choice.ttft_s == pytest.approx(choice.overhead_s + 0.064, rel=0.01)

    def test_a_prompt_that_was_not_what_was_foreseen_teaches_overhead_alone(self) -> None:
        scene = world()
        scene.cluster.first_token(scene.plan(TOKENS), TOKENS // 2, 5.0, 0.02, 0.0)
        choice = scene.plan(TOKENS).prefill
        assert choice.prefill_s == pytest.approx(0.064)
        assert choice.overhead_s > 0.01

    def test_what_is_left_begins_when_a_prompt_has_its_token(self) -> None:
        """A report said one second, three prompts are ours; the first takes longer than foreseen."""
        scene = world()
        plan, claims = scene.plan(TOKENS), list[int]()
        for number in range(1, 4):
            claims.append(scene.cluster.claim_prefill("prefill-0", 0.2, 0.0))
            scene.cluster.acknowledged(claims[-1], number)
        scene.report("prefill-0", now=0.0, drain_s=0.8, taken=3)  # 0.2 s of it are another conductor's
        assert scene.plan(TOKENS, now=0.0).prefill.queue_s == pytest.approx(0.8)
        scene.cluster.release(claims[0], 0.5)
        scene.cluster.first_token(plan, TOKENS, plan.prefill.alone_s, 0.0, 0.5)
        assert scene.plan(TOKENS, now=0.5).prefill.queue_s == pytest.approx(0.4), "two are left, and no others"

    def test_another_process_is_learnt_anew_and_unknown_ones_are_fine(self) -> None:
        scene = world()
        plan = scene.plan(TOKENS)
        scene.cluster.leave("prefill-0")
        scene.cluster.first_token(plan, TOKENS, 1.0, 1.0, 0.0)
        scene.join(facts("prefill-0", epoch=2, speeds=TOLD))
        assert scene.plan(TOKENS).prefill.overhead_s == 0.0


def test_a_few_that_took_long_do_not_change_the_overhead() -> None:
    overhead = OverheadModel()
    assert overhead.seconds == 0.0
    for seconds in (0.004, 0.006, 0.005, 0.3, 0.005, 0.2, 0.004):
        overhead.observe(seconds)
    assert overhead.seconds == 0.005
    for _ in range(8):
        overhead.observe(0.011)
    assert overhead.seconds == 0.011, "most of the last fifteen"
