"""Refuses requests early, with the reason, the prediction and when to try again.

The Mooncake paper refuses with HTTP 429 when the predicted time to first token or between tokens exceeds its SLO.
"""

from dataclasses import dataclass

from services.conductor.core.failures import NO_DECODE_ROOM, Failure, Kind
from services.conductor.core.plan import Plan

HOPELESS_RETRY_S = 60.0
"""Retry time told when even an idle instance would be too slow."""
MIN_RETRY_S = 0.1
TOO_SLOW_RETRY_S = 1.0
NO_ROOM_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request expects, seconds; None = no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None


def check_plan(slo: Slo, plan: Plan, elapsed_s: float) -> Failure | None:
    """The refusal of a request whose limits are predicted to be missed even at the best placement.

    Args:
        slo: what is expected.
        plan: predictions, best first.
        elapsed_s: seconds since the request arrived.
    """
    late = check_ttft(slo, plan.prefill.ttft_s, plan.prefill.alone_s, elapsed_s)
    if late is not None or not plan.decodes:
        return late
    return check_tbt(slo, min(option.tbt_s for option in plan.decodes))


def check_ttft(slo: Slo, ttft_s: float, alone_s: float, elapsed_s: float = 0.0) -> Failure | None:
    """The refusal when the first token would come too late; the retry time is when the queue will have shrunk enough.

    Args:
        slo: what is expected.
        ttft_s: seconds from now to the first token, predicted.
        alone_s: what it would be on an idle instance.
        elapsed_s: seconds since the request arrived.
    """
    predicted = elapsed_s + ttft_s
    if slo.ttft_s is None or predicted <= slo.ttft_s:
        return None
    excess = predicted - slo.ttft_s
    return Failure(
        Kind.OVERLOADED,
        f"predicted time to first token {predicted:.3f} s exceeds the limit of {slo.ttft_s:.3f} s",
        reason="ttft_slo",
        predicted_ttft_s=predicted,
        slo_s=slo.ttft_s,
        retry_after_s=max(excess, MIN_RETRY_S) if alone_s <= slo.ttft_s else HOPELESS_RETRY_S,
    )


def check_tbt(slo: Slo, best_tbt_s: float) -> Failure | None:
    """The refusal when tokens would come too slowly at every decode instance."""
    if slo.tbt_s is None or best_tbt_s <= slo.tbt_s:
        return None
    return Failure(
        Kind.OVERLOADED,
        f"predicted time between tokens {best_tbt_s:.4f} s exceeds the limit of {slo.tbt_s:.4f} s",
        reason="tbt_slo",
        predicted_tbt_s=best_tbt_s,
        slo_s=slo.tbt_s,
        retry_after_s=TOO_SLOW_RETRY_S,
    )


def no_room(refusal: Failure | None, plan: Plan) -> Failure:
    """What a request is told that found no room; `refusal` is the last decode instance's own."""
    return Failure(
        Kind.OVERLOADED,
        f"no decode instance has room: {refusal.message if refusal else 'all are full by their last report'}",
        reason=(refusal.reason if refusal else "") or NO_DECODE_ROOM,
        predicted_ttft_s=plan.prefill.ttft_s,
        predicted_tbt_s=refusal.predicted_tbt_s if refusal else 0.0,
        slo_s=refusal.slo_s if refusal else 0.0,
        retry_after_s=(refusal.retry_after_s if refusal else 0.0) or NO_ROOM_RETRY_S,
    )
