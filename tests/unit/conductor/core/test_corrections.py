"""What measured times to first token teach of an instance."""

import pytest

from moonpool.cost import Speeds
from services.conductor.core.corrections import Corrections
from services.conductor.core.decodes import Answer, Decodes
from services.conductor.core.facts import LoadFacts
from tests.unit.conductor.core.worlds import World, decode_at, facts

TOLD = Speeds(prefill_per_token_s=1e-3, load_bytes_per_s=1e9)
TOKENS = 64
DECODE = facts("decode-0")


def world() -> World:
    return World(DECODE, facts("prefill-0", speeds=TOLD))


def test_what_an_instance_tells_is_believed_first() -> None:
    learnt = Corrections(TOLD)
    assert learnt.speeds is TOLD
    assert (learnt.company(busy=None).overhead_s, learnt.factors) == (0.0, (1.0, 1.0, 1.0))
    other = Speeds(prefill_per_token_s=2e-3)
    learnt.told(other)
    assert learnt.speeds is other


def test_overhead_is_learnt_apart() -> None:
    learnt = Corrections(TOLD)
    for _ in range(30):
        learnt.company(busy=None).observe_overhead(0.009)
    assert learnt.company(busy=None).overhead_s == pytest.approx(0.009, rel=0.05)
    assert learnt.factors == (1.0, 1.0, 1.0)


def test_each_part_has_a_factor_of_its_own() -> None:
    learnt = Corrections(TOLD)
    for number in range(600):
        sizes = 0.05 * (number % 2), 0.02 * (number % 3), 0.01 * (1 + number % 7)
        learnt.observe(sizes, (1.0, 1.0, 1.0), 1.3 * sizes[0] + 1.2 * sizes[1] + 0.9 * sizes[2])
    assert learnt.factors == pytest.approx((1.3, 1.2, 0.9), rel=0.05)
    assert learnt.speeds.prefill_per_token_s == pytest.approx(0.9e-3, rel=0.05)
    assert learnt.speeds.load_bytes_per_s == pytest.approx(1e9 / 1.2, rel=0.05)


def test_those_that_waited_teach_the_factor_of_waiting_alone() -> None:
    learnt = Corrections(TOLD)
    for _ in range(30):
        learnt.observe((0.1, 0.0, 0.1), (1.0, 1.0, 1.0), 0.24)
    assert learnt.factors[0] == pytest.approx(1.4, rel=0.05)
    assert learnt.factors[1:] == (1.0, 1.0)


def test_what_was_foreseen_is_compared_without_the_factors_of_then() -> None:
    one, other = Corrections(TOLD), Corrections(TOLD)
    one.observe((0.0, 0.0, 0.1), (1.0, 1.0, 1.0), 0.15)
    other.observe((0.0, 0.0, 0.2), (3.0, 0.5, 2.0), 0.15)
    assert one.factors == pytest.approx(other.factors)
    assert one.factors[2] > 1.1


class TestPicture:
    def test_a_plan_has_the_overhead_in_its_sum(self) -> None:
        it = world()
        for _ in range(30):
            plan = it.plan(TOKENS)
            it.picture.first_token(plan, TOKENS, plan.prefill.prefill_s, 0.02, 0.0)
        choice = it.plan(TOKENS).prefill
        assert choice.overhead_s == pytest.approx(0.02, rel=0.05)
        assert choice.ttft_s == pytest.approx(choice.overhead_s + 0.064, rel=0.01)

    def test_a_prompt_that_was_not_what_was_foreseen_teaches_overhead_alone(self) -> None:
        it = world()
        it.picture.first_token(it.plan(TOKENS), TOKENS // 2, 5.0, 0.02, 0.0)
        choice = it.plan(TOKENS).prefill
        assert choice.prefill_s == pytest.approx(0.064)
        assert choice.overhead_s > 0.01

    def test_what_is_left_begins_when_a_prompt_has_its_token(self) -> None:
        """A report said one second, three prompts are ours; the first takes longer than foreseen."""
        it = world()
        plan, claims = it.plan(TOKENS), list[int]()
        for number in range(1, 4):
            claims.append(it.picture.claim_prefill("prefill-0", 0.2, 0.0))
            it.picture.known(claims[-1], number)
        it.report("prefill-0", now=0.0, drain_s=0.8, taken=3)  # 0.2 s of it are another conductor's
        assert it.plan(TOKENS, now=0.0).prefill.queue_s == pytest.approx(0.8)
        it.picture.release(claims[0], 0.5)
        it.picture.first_token(plan, TOKENS, plan.prefill.alone_s, 0.0, 0.5)
        assert it.plan(TOKENS, now=0.5).prefill.queue_s == pytest.approx(0.4), "two are left, and no others"

    def test_another_process_is_learnt_anew_and_unknown_ones_are_fine(self) -> None:
        it = world()
        plan = it.plan(TOKENS)
        it.picture.leave("prefill-0")
        it.picture.first_token(plan, TOKENS, 1.0, 1.0, 0.0)
        it.join(facts("prefill-0", incarnation=2, speeds=TOLD))
        assert it.plan(TOKENS).prefill.overhead_s == 0.0


def test_prompts_in_company_have_a_factor_and_an_overhead_of_their_own() -> None:
    learnt = Corrections(TOLD)
    for number in range(400):
        busy = number % 2 == 0
        foreseen = 0.0, 0.0, 0.05 + 0.01 * (number % 5)
        learnt.observe(foreseen, (1.0, 1.0, 1.0), foreseen[2] * (1.2 if busy else 0.8), busy=busy)
        learnt.company(busy=busy).observe_overhead(0.012 if busy else 0.004)
    there, away = learnt.company(busy=True), learnt.company(busy=False)
    assert learnt.factors[2] * there.factor == pytest.approx(1.2, rel=0.05)
    assert learnt.factors[2] * away.factor == pytest.approx(0.8, rel=0.05)
    assert (there.overhead_s, away.overhead_s) == pytest.approx((0.012, 0.004), rel=0.1)


def test_an_engine_alone_on_its_host_has_no_company() -> None:
    here = World(facts("decode-0", host="b"), facts("prefill-0", speeds=TOLD, host="a"))
    assert here.plan().prefill.company is None
    nowhere = World(DECODE, facts("prefill-0", speeds=TOLD))
    assert nowhere.plan().prefill.company is None


def test_a_prompt_is_predicted_by_what_was_learnt_while_decode_computes() -> None:
    here = World(facts("decode-0", host="a"), facts("prefill-0", speeds=TOLD, host="a"))
    idle = here.plan()
    assert idle.prefill.company is False
    here.report("decode-0", running=1, free_blocks=90)
    busy = here.plan()
    assert busy.prefill.company is True
    assert busy.prefill.ttft_s == idle.prefill.ttft_s
    for _ in range(100):
        here.picture.first_token(busy, 64, 2 * idle.prefill.prefill_s, 0.0, 0.0)
        here.picture.first_token(idle, 64, idle.prefill.prefill_s, 0.0, 0.0)
    assert here.plan().prefill.prefill_s == pytest.approx(2 * idle.prefill.prefill_s, rel=0.1)
    here.report("decode-0", running=0, free_blocks=100)
    assert here.plan().prefill.prefill_s == pytest.approx(idle.prefill.prefill_s, rel=0.1)


def test_an_answer_that_has_room_but_has_not_begun_does_not_compute() -> None:
    here = World(facts("decode-0", host="a"), facts("prefill-0", speeds=TOLD, host="a"))
    here.serve()
    assert here.plan().prefill.company is False
    here.picture.grew(2, 1, 0.0)
    assert here.plan().prefill.company is True


def test_several_answers_to_one_prompt_do_not_compute_before_they_begin() -> None:
    decode, decodes = decode_at(0, facts("decode-0", host="a"), 0, room=90), Decodes()
    decodes.add(decode)
    decode.claim(1, Answer(64, 20, sequences=4))
    assert decodes.company("a") is False
    decode.report(LoadFacts(running=5, free_blocks=80), 0.0, 0.0)
    assert decodes.company("a") is True
    decode.report(LoadFacts(free_blocks=80), 0.0, 0.0)
    assert decodes.company("a") is False
    decode.answers[1].made = 1
    assert decodes.company("a") is True
