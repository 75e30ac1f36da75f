"""Who is let in: the conductor's own gate; and the paper's check at decode when a prompt has been computed."""

from collections.abc import Sequence
from dataclasses import replace

from moonpool.errors import ConfigError
from services.conductor.core.admission import Admission, Gate, Slo
from services.conductor.core.cost import DecodeChoice
from services.conductor.core.failures import Failure
from services.conductor.core.outlook import Outlook
from services.conductor.core.picture import Picture
from services.conductor.core.plan import Plan
from simulator.cluster.config import ClusterConfig
from simulator.cluster.requests import Attempt

ADMISSIONS = {
    "all": "nobody is refused",
    "baseline": "each stage refuses for itself when its work begins: prefill by its queue, decode when the KV comes",
    "early": "refused before prefill by the load of both stages as it is now; decode looks again when the KV comes",
    "predictive": "the same by the load that decode is expected to have when the prompt is computed",
}
"""Who is let in; the last three in the order of the Mooncake paper."""
HEADROOM = 0.9
"""Share of the TBT limit up to which requests are let in: contexts grow, and a request is judged by its longest tenth
of intervals, not by the mean."""
_GATES = {"all": Admission.NONE, "baseline": Admission.EARLY}


class Entrance:
    """Lets requests in, or refuses them.

    Args:
        config: of the cluster; its limits count for every request.
        picture: the conductor's.
    """

    def __init__(self, config: ClusterConfig, picture: Picture) -> None:
        if config.admission not in ADMISSIONS:
            raise ConfigError("admission", f"is one of {', '.join(ADMISSIONS)}, not {config.admission!r}")
        self._config = config
        self._forecasts = picture.forecasts
        self._gate = Gate(_GATES.get(config.admission) or Admission(config.admission), picture.forecasts)
        self._tbt_s = HEADROOM * config.slo.tbt_s
        self._slo = Slo(config.slo.ttft_s, None if config.admission == "baseline" else self._tbt_s)
        self.refused_late = 0
        """Requests that decode refused when their prompts were computed."""
        self.wasted_s = 0.0
        """Seconds that computing these prompts took."""

    def let_in(self, plan: Plan, now: float) -> Plan | None:
        """The plan with the decode instances that may serve it; None when the request is refused."""
        found: Failure | Sequence[DecodeChoice] = self._gate.check(self._slo, plan, now, 0.0)
        return None if isinstance(found, Failure) else replace(plan, decodes=tuple(found))

    def too_late(self, attempt: Attempt) -> bool:
        """Whether decode refuses a request whose prompt has been computed, because it is too slow now."""
        if self._config.admission == "all" or attempt.decode < 0 or attempt.request.attempts > 1:
            return False
        if self._forecasts.tbt_now(f"d{attempt.decode}", Outlook(1, attempt.tokens)) <= self._tbt_s:
            return False
        self.refused_late += 1
        self.wasted_s += attempt.prefill_s
        return True
