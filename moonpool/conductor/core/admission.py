"""Admission control: refuses requests early, with the reason, the prediction and when to retry.

The Mooncake paper refuses with HTTP 429 if the predicted time to first token or between tokens exceeds the SLO.
"""

from collections.abc import Sequence
from enum import Enum
from operator import itemgetter

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.conductor.core.failures import NO_DECODE_ROOM, Failure, FailureKind
from moonpool.conductor.core.load_forecast import LoadForecast, LoadForecaster
from moonpool.conductor.core.output_lengths import Stratum
from moonpool.conductor.core.prefill_pool import TtftLimit
from moonpool.conductor.core.request_spec import SloLimits
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.placement.base import DecodeChoice

HOPELESS_RETRY_S = 60.0
"""Retry time if even an idle instance would be too slow, or if load is not expected to fall sooner."""
MIN_RETRY_S = 0.1
TOO_SLOW_RETRY_S = 1.0
NO_ROOM_RETRY_S = 1.0
TTFT_SLO = "ttft_slo"
"""Reason of a refusal because the first token would come too late."""


class AdmissionMode(Enum):
    """Which requests are refused before anything is computed for them (docs/overload.md)."""

    NONE = "none"
    """None: only a decode instance refuses, if the instance could not keep the TBT limit."""
    EARLY = "early"
    """Requests that miss a limit by the load of now."""
    PREDICTIVE = "predictive"
    """Requests that miss a limit by the load that decode is expected to have when their prompt is computed."""


class AdmissionGate:
    """The gate that refuses requests which would miss their SLO.

    Args:
        admission: which requests are refused.
        forecasts: the decode instances' forecasts.
    """

    def __init__(self, admission: AdmissionMode, forecasts: LoadForecaster) -> None:
        self.admission = admission
        self._forecasts = forecasts

    def check(
        self, slo: SloLimits, decision: RoutingDecision, stratum: Stratum, now: float, elapsed_s: float
    ) -> Failure | Sequence[DecodeChoice]:
        """Return the decode instances that may serve a request, best first; or the refusal.

        Args:
            slo: limits of the request.
            decision: the request's placement.
            stratum: stratum whose forecasts for answer lengths apply.
            now: seconds.
            elapsed_s: seconds since the request arrived.
        """
        late = self.late(slo, decision, elapsed_s)
        if late is not None:
            return late
        if self.admission is AdmissionMode.NONE or slo.tbt_s is None or not decision.decodes:
            return decision.decodes
        predicted = [(self._tbt_s(option, decision, stratum, slo.tbt_s, now), option) for option in decision.decodes]
        # The placement policy orders by the load of now. Where that is too much, what counts is who is free in time.
        if self.admission is AdmissionMode.PREDICTIVE and any(option.tbt_s > slo.tbt_s for option in decision.decodes):
            predicted.sort(key=itemgetter(0))
        kept = [option for tbt_s, option in predicted if tbt_s <= slo.tbt_s]
        return kept or self._too_slow(slo.tbt_s, decision, stratum, now, min([tbt_s for tbt_s, _ in predicted]))

    def ttft_limit(self, slo: SloLimits, queue_key: QueueKey, elapsed_s: float) -> TtftLimit | None:
        """Return the TTFT limit for the router; None = never refuse the request, however late the first token comes."""
        if self.admission is AdmissionMode.NONE or slo.ttft_s is None:
            return None
        return TtftLimit(slo.ttft_s - elapsed_s, queue_key)

    def late(self, slo: SloLimits, decision: RoutingDecision, elapsed_s: float) -> Failure | None:
        """Return the refusal if a request's first token would come too late. Arguments as for `check`."""
        if self.admission is AdmissionMode.NONE:
            return None
        return check_ttft(slo, decision.prefill.ttft_s, decision.prefill.alone_s, elapsed_s)

    def starts_in_s(self, decision: RoutingDecision) -> float:
        """Seconds after which the decode instance shall expect the sequence, for the instance's own check; 0 = now."""
        return decision.prefill.ttft_s if self.admission is AdmissionMode.PREDICTIVE else 0.0

    def _tbt_s(
        self, option: DecodeChoice, decision: RoutingDecision, stratum: Stratum, limit_s: float, now: float
    ) -> float:
        if self.admission is AdmissionMode.EARLY:
            return self._forecasts.tbt_now(option.id, _joining(decision))
        if option.tbt_s <= limit_s:  # even if all present and expected sequences stayed: no costly forecast is needed
            return option.tbt_s
        return self._forecasts.tbt_at(option.id, _joining(decision), stratum, now, now + decision.prefill.ttft_s)

    def _too_slow(
        self, limit_s: float, decision: RoutingDecision, stratum: Stratum, now: float, best_tbt_s: float
    ) -> Failure:
        foreseen = self.admission is AdmissionMode.PREDICTIVE
        when = f" in {decision.prefill.ttft_s:.3f} s, when the prompt is computed," if foreseen else ""
        return Failure(
            FailureKind.OVERLOADED,
            f"predicted time between tokens {best_tbt_s:.4f} s{when} exceeds the limit of {limit_s:.4f} s",
            reason="tbt_slo",
            predicted_ttft_s=decision.prefill.ttft_s,
            predicted_tbt_s=best_tbt_s,
            slo_s=limit_s,
            retry_after_s=self._retry_after_s(limit_s, decision, stratum, now) if foreseen else TOO_SLOW_RETRY_S,
        )

    def _retry_after_s(self, limit_s: float, decision: RoutingDecision, stratum: Stratum, now: float) -> float:
        """Return the seconds until a decode instance is expected to keep the limit."""
        later_s, joining = MIN_RETRY_S, _joining(decision)
        while later_s < HOPELESS_RETRY_S:
            at = now + decision.prefill.ttft_s + later_s
            if any(
                self._forecasts.tbt_at(option.id, joining, stratum, now, at) <= limit_s for option in decision.decodes
            ):
                return later_s
            later_s *= 2  # each look is a forecast: a rough time is enough for a retry
        return HOPELESS_RETRY_S


def _joining(decision: RoutingDecision) -> LoadForecast:
    demand = decision.demand
    return LoadForecast(demand.choices, demand.choices * demand.prompt_tokens)


def check_ttft(slo: SloLimits, ttft_s: float, alone_s: float, elapsed_s: float = 0.0) -> Failure | None:
    """The refusal when the first token would come too late; the retry time is when the queue will have shrunk enough.

    Args:
        slo: limits of the request.
        ttft_s: predicted seconds from now to the first token.
        alone_s: the same on an idle instance.
        elapsed_s: seconds since the request arrived.
    """
    predicted = elapsed_s + ttft_s
    if slo.ttft_s is None or predicted <= slo.ttft_s:
        return None
    excess = predicted - slo.ttft_s
    return Failure(
        FailureKind.OVERLOADED,
        f"predicted time to first token {predicted:.3f} s exceeds the limit of {slo.ttft_s:.3f} s",
        reason=TTFT_SLO,
        predicted_ttft_s=predicted,
        slo_s=slo.ttft_s,
        retry_after_s=max(excess, MIN_RETRY_S) if alone_s <= slo.ttft_s else HOPELESS_RETRY_S,
    )


def no_memory(refusal: Failure | None, decision: RoutingDecision) -> Failure:
    """Return the refusal of a request for which no decode instance has memory; `refusal` is the last instance's own."""
    return Failure(
        FailureKind.OVERLOADED,
        f"no decode instance has room: {refusal.message if refusal else 'all are full by their last report'}",
        reason=(refusal.reason if refusal else "") or NO_DECODE_ROOM,
        predicted_ttft_s=decision.prefill.ttft_s,
        predicted_tbt_s=refusal.predicted_tbt_s if refusal else 0.0,
        slo_s=refusal.slo_s if refusal else 0.0,
        retry_after_s=(refusal.retry_after_s if refusal else 0.0) or NO_ROOM_RETRY_S,
    )
