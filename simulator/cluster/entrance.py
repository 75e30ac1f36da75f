"""Admission: the conductor's own gate; and, as in the Mooncake paper, a check when a prompt has been computed."""

from moonpool.errors import ConfigError, InvalidRequest, Unavailable
from services.conductor.core.admission import Admission, Slo
from services.conductor.core.outlook import NOTHING, Forecasts, Outlook
from services.conductor.core.picture import Picture
from services.conductor.core.placing import Limits
from simulator.cluster.config import ClusterConfig
from simulator.cluster.levels import FULL, PoolLoad
from simulator.cluster.requests import Request

ADMISSIONS = {
    "all": "nobody is refused",
    "baseline": "each stage refuses for itself when its work begins: prefill by its queue, decode when the KV comes",
    "early": "refused before prefill by the load of both stages as it is now, and by decode when the KV comes",
    "predictive": "the same by the load that decode is expected to have when the prompt is computed",
    "promised_none": "as the services do with --admission none: decode alone looks, when it is asked for room",
    "promised_early": "as the services do with --admission early: both stages as they are now, and decode likewise",
    "promised": "as the services do by default: predictive, and decode looks when it is asked for room",
}
"""Who is let in; `baseline`, `early` and `predictive` as the Mooncake paper has them."""
SERVICES = {
    Admission.NONE: "promised_none",
    Admission.EARLY: "promised_early",
    Admission.PREDICTIVE: "promised",
}
"""What the services do, by their flag `--admission`."""
PAPER = ("baseline", "early", "predictive")
HEADROOM = 0.9
"""Share of the TBT limit up to which requests are let in: contexts grow, and a request is judged by its longest tenth
of intervals, not by the mean."""
FOREVER_S = 1e7
_GATES = {"all": Admission.NONE, "baseline": Admission.EARLY, **{name: gate for gate, name in SERVICES.items()}}


def limits_of(config: ClusterConfig) -> Limits:
    """The conductor's limits."""
    if config.admission not in ADMISSIONS:
        raise ConfigError("admission", f"is one of {', '.join(ADMISSIONS)}, not {config.admission!r}")
    return Limits(
        retries=config.retries,
        recovery_s=config.recovery_s,
        room_wait_s=config.room_wait_s or FOREVER_S,
        reserve_timeout_s=config.reserve_timeout_s,
        admission=Admission.EARLY if config.by_pool else _GATES.get(config.admission) or Admission(config.admission),
    )


def slo_of(config: ClusterConfig) -> Slo:
    """What each request expects."""
    tbt_s = HEADROOM * config.slo.tbt_s
    if config.admission == "all":
        return Slo(None, config.slo.tbt_s if config.keep_tbt else None)
    return Slo(config.slo.ttft_s, None if config.admission == "baseline" or config.by_pool else tbt_s)


def keeps_tbt(config: ClusterConfig) -> bool:
    """Whether decode is asked to keep the limit when it promises room."""
    return config.admission not in PAPER


class LateCheck:
    """The paper's check at decode, of requests whose prompts have been computed.

    Args:
        config: of the cluster.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._wanted = config.admission in (PAPER[:1] if config.by_pool else PAPER)
        self._by_pool = config.by_pool
        self._tbt_s = FULL * config.slo.tbt_s if config.by_pool else HEADROOM * config.slo.tbt_s
        self.refused = 0
        """Requests that decode refused."""
        self.wasted_s = 0.0
        """Seconds that computing their prompts took."""

    def refuses(self, forecasts: Forecasts, request: Request, decode: str, prefill_s: float) -> bool:
        """Whether a decode instance is too slow now for a request whose prompt took `prefill_s` to compute."""
        if not self._wanted or not decode or request.attempts > 1:
            return False
        joining = NOTHING if self._by_pool else Outlook(1, request.tokens)
        if forecasts.tbt_now(decode, joining) <= self._tbt_s:
            return False
        self.refused += 1
        self.wasted_s += prefill_s
        return True


class PoolGate:
    """Refuses by the load of the whole decode pool, where the cluster's config wants that.

    Args:
        config: of the cluster.

    Attributes:
        load: of the pool.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.load = PoolLoad(config)
        self._early = config.by_pool and config.admission == "early"
        self._predictive = config.by_pool and config.admission == "predictive"

    def refuses(self, request: Request, picture: Picture, now: float) -> bool:
        """Whether a request that has just come is not let in; by prefill's queue the conductor's core refuses."""
        if self._early:
            return self.load.now() > FULL
        return self._predictive and self.load.at(now + _prefill_s(request, picture, now)) > FULL


def _prefill_s(request: Request, picture: Picture, now: float) -> float:
    """Predicted seconds until a prompt is computed."""
    keys = request.keys
    try:
        plan = picture.plan(
            tokens=request.tokens, answer_tokens=request.answer, keys=keys, prompt_key=keys[0] if keys else b"", now=now
        )
    except (Unavailable, InvalidRequest):  # the core has its own word for it
        return 0.0
    return plan.prefill.ttft_s
