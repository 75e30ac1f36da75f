import pytest

from moonpool.errors import Overloaded
from services.conductor.admission import HOPELESS_RETRY_S, Slo, check_queue, check_tbt, check_ttft
from services.conductor.core.cost import PrefillChoice


def choice(queue_s: float, prefill_s: float) -> PrefillChoice:
    return PrefillChoice("a", 0, 0, queue_s, 0.0, prefill_s, prefill_s)


def test_refusal_on_predicted_ttft_tells_why_and_when() -> None:
    check_ttft(Slo(ttft_s=5.0), choice(3.0, 2.0))
    check_ttft(Slo(), choice(3.0, 2e9))
    with pytest.raises(Overloaded) as caught:
        check_ttft(Slo(ttft_s=5.0), choice(7.0, 2.0), elapsed_s=1.0)
    error = caught.value
    assert (error.reason, error.predicted_ttft_s, error.slo_s, error.retry_after_s) == ("ttft_slo", 10.0, 5.0, 5.0)
    with pytest.raises(Overloaded) as caught:
        check_ttft(Slo(ttft_s=5.0), choice(0.0, 6.0))
    assert caught.value.retry_after_s == HOPELESS_RETRY_S


def test_refusal_on_tbt_and_on_a_full_queue() -> None:
    check_tbt(Slo(tbt_s=0.5), 0.5)
    with pytest.raises(Overloaded) as caught:
        check_tbt(Slo(tbt_s=0.5), 0.6)
    assert (caught.value.reason, caught.value.predicted_tbt_s) == ("tbt_slo", 0.6)
    check_queue(1, 2)
    with pytest.raises(Overloaded, match="2 requests"):
        check_queue(2, 2)
