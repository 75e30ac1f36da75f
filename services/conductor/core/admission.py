"""Admission control: refuses requests early, with the reason, the prediction and when to retry.

The Mooncake paper refuses with HTTP 429 when the predicted time to first token or between tokens exceeds its SLO.
"""

from collections.abc import Sequence
from enum import Enum
from operator import itemgetter

from moonpool.scheduling.fair_share import QueueKey
from services.conductor.core.decode_pool import LoadForecast, LoadForecaster
from services.conductor.core.events import NO_DECODE_ROOM, Failure, FailureKind
from services.conductor.core.latency_model import DecodeChoice, SloLimits, Stratum
from services.conductor.core.policies.base import TtftLimit
from services.conductor.core.router import RoutingDecision

HOPELESS_RETRY_S = 60.0
"""Retry time told when even an idle instance would be too slow, or when load is not expected to fall before."""


MIN_RETRY_S = 0.1


TOO_SLOW_RETRY_S = 1.0


NO_ROOM_RETRY_S = 1.0


class AdmissionMode(Enum):
    """Which requests are refused before anything is computed for them (docs/overload.md)."""

    NONE = "none"
    """None: only a decode instance refuses, if it could not keep the TBT limit."""
    EARLY = "early"
    """Those that miss a limit by the load of now."""
    PREDICTIVE = "predictive"
    """Those that miss a limit by the load that decode is expected to have when their prompt is computed."""


class AdmissionGate:
    """Decides who is let in.

    Args:
        admission: how.
        forecasts: of the decode instances.
    """

    def __init__(self, admission: AdmissionMode, forecasts: LoadForecaster) -> None:
        self.admission = admission
        self._forecasts = forecasts

    def check(
        self, slo: SloLimits, plan: RoutingDecision, stratum: Stratum, now: float, elapsed_s: float
    ) -> Failure | Sequence[DecodeChoice]:
        """The decode instances that may serve a request, best first; or its refusal.

        Args:
            slo: what is expected.
            plan: where it could go.
            stratum: says how long its answer may become.
            now: seconds.
            elapsed_s: seconds since the request arrived.
        """
        late = self.late(slo, plan, elapsed_s)
        if late is not None:
            return late
        if self.admission is AdmissionMode.NONE or slo.tbt_s is None or not plan.decodes:
            return plan.decodes
        predicted = [(self._tbt_s(option, plan, stratum, slo.tbt_s, now), option) for option in plan.decodes]
        if self.admission is AdmissionMode.PREDICTIVE and any(option.tbt_s > slo.tbt_s for option in plan.decodes):
            predicted.sort(key=itemgetter(0))
        kept = [option for tbt_s, option in predicted if tbt_s <= slo.tbt_s]
        return kept or self._too_slow(slo.tbt_s, plan, stratum, now, min([tbt_s for tbt_s, _ in predicted]))

    def ttft_limit(self, slo: SloLimits, queue_key: QueueKey, elapsed_s: float) -> TtftLimit | None:
        """TTFT limit for the router; None = the request is not refused, however late its first token comes."""
        if self.admission is AdmissionMode.NONE or slo.ttft_s is None:
            return None
        return TtftLimit(slo.ttft_s - elapsed_s, queue_key)

    def late(self, slo: SloLimits, plan: RoutingDecision, elapsed_s: float) -> Failure | None:
        """The refusal of a request whose first token would come too late. Arguments as for `check`."""
        if self.admission is AdmissionMode.NONE:
            return None
        return check_ttft(slo, plan.prefill.ttft_s, plan.prefill.alone_s, elapsed_s)

    def starts_in_s(self, plan: RoutingDecision) -> float:
        """When the decode instance shall expect the sequence, for its own check; 0 = count it now."""
        return plan.prefill.ttft_s if self.admission is AdmissionMode.PREDICTIVE else 0.0

    def _tbt_s(
        self, option: DecodeChoice, plan: RoutingDecision, stratum: Stratum, limit_s: float, now: float
    ) -> float:
        if self.admission is AdmissionMode.EARLY:
            return self._forecasts.tbt_now(option.id, _joining(plan))
        if option.tbt_s <= limit_s:  # even if all that is there and on its way stayed
            return option.tbt_s
        return self._forecasts.tbt_at(option.id, _joining(plan), stratum, now, now + plan.prefill.ttft_s)

    def _too_slow(
        self, limit_s: float, plan: RoutingDecision, stratum: Stratum, now: float, best_tbt_s: float
    ) -> Failure:
        foreseen = self.admission is AdmissionMode.PREDICTIVE
        when = f" in {plan.prefill.ttft_s:.3f} s, when the prompt is computed," if foreseen else ""
        return Failure(
            FailureKind.OVERLOADED,
            f"predicted time between tokens {best_tbt_s:.4f} s{when} exceeds the limit of {limit_s:.4f} s",
            reason="tbt_slo",
            predicted_ttft_s=plan.prefill.ttft_s,
            predicted_tbt_s=best_tbt_s,
            slo_s=limit_s,
            retry_after_s=self._relief_s(limit_s, plan, stratum, now) if foreseen else TOO_SLOW_RETRY_S,
        )

    def _relief_s(self, limit_s: float, plan: RoutingDecision, stratum: Stratum, now: float) -> float:
        """Seconds until some decode instance is expected to be quick enough."""
        later_s, joining = MIN_RETRY_S, _joining(plan)
        while later_s < HOPELESS_RETRY_S:
            at = now + plan.prefill.ttft_s + later_s
            if any(self._forecasts.tbt_at(option.id, joining, stratum, now, at) <= limit_s for option in plan.decodes):
                return later_s
            later_s *= 2
        return HOPELESS_RETRY_S


def _joining(plan: RoutingDecision) -> LoadForecast:
    demand = plan.demand
    return LoadForecast(demand.choices, demand.choices * demand.prompt_tokens)


def check_ttft(slo: SloLimits, ttft_s: float, alone_s: float, elapsed_s: float = 0.0) -> Failure | None:
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
        FailureKind.OVERLOADED,
        f"predicted time to first token {predicted:.3f} s exceeds the limit of {slo.ttft_s:.3f} s",
        reason="ttft_slo",
        predicted_ttft_s=predicted,
        slo_s=slo.ttft_s,
        retry_after_s=max(excess, MIN_RETRY_S) if alone_s <= slo.ttft_s else HOPELESS_RETRY_S,
    )


def no_memory(refusal: Failure | None, plan: RoutingDecision) -> Failure:
    """Refusal of a request for which no decode instance has memory; `refusal` is the last instance's own."""
    return Failure(
        FailureKind.OVERLOADED,
        f"no decode instance has room: {refusal.message if refusal else 'all are full by their last report'}",
        reason=(refusal.reason if refusal else "") or NO_DECODE_ROOM,
        predicted_ttft_s=plan.prefill.ttft_s,
        predicted_tbt_s=refusal.predicted_tbt_s if refusal else 0.0,
        slo_s=refusal.slo_s if refusal else 0.0,
        retry_after_s=(refusal.retry_after_s if refusal else 0.0) or NO_ROOM_RETRY_S,
    )
