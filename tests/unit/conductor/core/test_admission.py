from services.conductor.core.admission import HOPELESS_RETRY_S, Slo, check_plan, check_tbt, check_ttft
from services.conductor.core.cost import DecodeChoice, PrefillChoice
from services.conductor.core.facts import Demand
from services.conductor.core.failures import Kind
from services.conductor.core.plan import Plan


def plan(ttft_s: float, *tbts: float) -> Plan:
    prefill = PrefillChoice("prefill-0", 0, 0, 0.0, 0.0, ttft_s, ttft_s)
    decodes = tuple(DecodeChoice(f"decode-{n}", tbt_s, 1.0) for n, tbt_s in enumerate(tbts))
    return Plan(prefill, decodes, (), (), (prefill,), Demand(16, 1, 2, 8), 0)


def test_a_late_first_token_is_refused_with_the_time_by_which_the_queue_will_have_shrunk() -> None:
    assert check_ttft(Slo(ttft_s=5.0), 5.0, 2.0) is None
    assert check_ttft(Slo(), 2e9, 2e9) is None
    refusal = check_ttft(Slo(ttft_s=5.0), 9.0, 2.0, elapsed_s=1.0)
    assert refusal is not None
    assert (refusal.kind, refusal.reason) == (Kind.OVERLOADED, "ttft_slo")
    assert (refusal.predicted_ttft_s, refusal.slo_s, refusal.retry_after_s) == (10.0, 5.0, 5.0)


def test_what_an_idle_instance_is_too_slow_for_is_hopeless() -> None:
    refusal = check_ttft(Slo(ttft_s=5.0), 6.0, 6.0)
    assert refusal is not None
    assert refusal.retry_after_s == HOPELESS_RETRY_S


def test_slow_tokens_are_refused_when_they_are_so_everywhere() -> None:
    assert check_tbt(Slo(tbt_s=0.5), 0.5) is None
    assert check_tbt(Slo(), 9.0) is None
    refusal = check_tbt(Slo(tbt_s=0.5), 0.6)
    assert refusal is not None
    assert (refusal.reason, refusal.predicted_tbt_s) == ("tbt_slo", 0.6)


def test_a_plan_is_checked_by_its_best_decode_instance_if_it_has_any() -> None:
    slo = Slo(ttft_s=5.0, tbt_s=0.5)
    assert check_plan(slo, plan(4.0, 0.6, 0.4), 0.0) is None
    assert check_plan(slo, plan(4.0), 0.0) is None
    late, slow = check_plan(slo, plan(6.0, 0.1), 0.0), check_plan(slo, plan(1.0, 0.6, 0.7), 0.0)
    assert late is not None
    assert slow is not None
    assert (late.reason, slow.reason) == ("ttft_slo", "tbt_slo")
