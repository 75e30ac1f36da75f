"""Admission: the conductor's own, and the decode pool load checks from the Mooncake paper's section 7."""

from dataclasses import dataclass
from functools import partial

from moonpool.base.errors import ConfigError, InvalidRequest, Unavailable
from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.base.settings import complete
from moonpool.conductor.core.admission import AdmissionMode
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.load_forecast import NO_LOAD, LoadForecast, LoadForecaster
from moonpool.conductor.core.request_spec import SloLimits
from moonpool.conductor.core.routing import RoutingRequest
from moonpool.conductor.core.scheduler import SchedulerLimits
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import Request

FULL = 1.0
"""Load above which no request is admitted."""
FIRST_S = 10.0
"""Seconds that answers are assumed to take until an answer has ended."""
ADMISSIONS = {
    "all": "nobody is refused",
    "baseline": (
        "each stage refuses by itself when the stage's work begins: prefill by the queue, decode when the KV comes"
    ),
    "early": "refused before prefill by both stages' present load, and by decode when the KV comes",
    "predictive": "the same by the load that decode is expected to have when the prompt is computed",
    "promised_none": "as the services do with --admission none: only decode checks, when asked for memory",
    "promised_early": "as the services do with --admission early: both stages as they are now, and decode likewise",
    "promised": "as the services do by default: predictive, and decode checks when asked for memory",
}
"""Which requests are admitted; `baseline`, `early` and `predictive` as the Mooncake paper has them."""
SERVICES = {
    AdmissionMode.NONE: "promised_none",
    AdmissionMode.EARLY: "promised_early",
    AdmissionMode.PREDICTIVE: "promised",
}
"""What the services do, by their flag `--admission`."""
PAPER = ("baseline", "early", "predictive")
HEADROOM = 0.9
"""Share of the TBT limit up to which requests are admitted: contexts grow, and a request is judged by the longest tenth
of the intervals, not by the mean.
"""
FOREVER_S = 1e7
_GATES = {"all": AdmissionMode.NONE, "baseline": AdmissionMode.EARLY, **{name: gate for gate, name in SERVICES.items()}}
LIMITS_LEFT_OUT = {
    "adopt_wait_s": "conductors and instances are lost and found as real ones are; no run varies the wait",
    "max_queued": "simulated requests have no queue deadline",
    "max_queued_bytes": "simulated requests have no queue deadline",
    "heartbeat_s": "only budgets depend on the time in which news spreads",
    "budgets": "simulated tenants have no budgets",
}
"""Fields of `SchedulerLimits` that keep their defaults, and why."""


@dataclass(slots=True)
class _AdmittedAnswer:
    """A request that was let in. `begins_at` is when the prompt is expected to be computed, or was computed."""

    tokens: int
    begins_at: float
    begun: bool = False


class PoolLoad:
    """The decode pool's present and expected load.

    Args:
        config: the cluster's.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._speeds, self._limit_s = config.profile.speeds, config.slo.tbt_s
        self._instances = config.decode + config.both
        self._answers: dict[int, _AdmittedAnswer] = {}
        self._ended, self._total_s = 0, 0.0

    @property
    def answer_s(self) -> float:
        """Seconds that every answer is expected to take: the mean over ended answers."""
        return self._total_s / self._ended if self._ended else FIRST_S

    def placed(self, request: int, tokens: int, begins_at: float) -> None:
        """Note a placed prompt with so many tokens, whose answer begins at `begins_at`."""
        self._answers[request] = _AdmittedAnswer(tokens, begins_at)

    def began(self, request: int, now: float) -> None:
        """Note that a request's first token has come."""
        answer = self._answers[request]
        answer.begins_at, answer.begun = now, True

    def ended(self, request: int, now: float) -> None:
        """A request is over, in any way; ignored if not placed."""
        answer = self._answers.pop(request, None)
        if answer is not None and answer.begun:
            self._ended += 1
            self._total_s += now - answer.begins_at

    def now(self) -> float:
        """What decodes now, prompts that are being computed left out."""
        return self._level([answer.tokens for answer in self._answers.values() if answer.begun])

    def at(self, when: float) -> float:
        """Load at a later time: requests with prompts computed by then have begun, and the oldest have ended."""
        since = when - self.answer_s
        return self._level([answer.tokens for answer in self._answers.values() if since < answer.begins_at <= when])

    def _level(self, contexts: list[int]) -> float:
        sequences, context = len(contexts) / self._instances, sum(contexts) / self._instances
        return decode_step_seconds(self._speeds, sequences, context) / self._limit_s


def limits_of(config: ClusterConfig) -> SchedulerLimits:
    """The conductor's limits."""
    if config.admission not in ADMISSIONS:
        raise ConfigError("admission", f"is one of {', '.join(ADMISSIONS)}, not {config.admission!r}")
    given = partial(
        SchedulerLimits,
        retries=config.retries,
        recovery_s=config.recovery_s,
        room_wait_s=config.room_wait_s or FOREVER_S,
        reserve_timeout_s=config.reserve_timeout_s,
        admission=AdmissionMode.EARLY
        if config.by_pool
        else _GATES.get(config.admission) or AdmissionMode(config.admission),
    )
    return complete(given, LIMITS_LEFT_OUT)


def slo_of(config: ClusterConfig) -> SloLimits:
    """What each request expects."""
    tbt_s = HEADROOM * config.slo.tbt_s
    if config.admission == "all":
        return SloLimits(None, config.slo.tbt_s if config.keep_tbt else None)
    return SloLimits(config.slo.ttft_s, None if config.admission == "baseline" or config.by_pool else tbt_s)


def keeps_tbt(config: ClusterConfig) -> bool:
    """Whether decode is asked to keep the limit when promising room."""
    return config.admission not in PAPER


class LateCheck:
    """The paper's check at decode, after a request's prompt has been computed.

    Args:
        config: the cluster's.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._wanted = config.admission in (PAPER[:1] if config.by_pool else PAPER)
        self._by_pool = config.by_pool
        self._tbt_s = FULL * config.slo.tbt_s if config.by_pool else HEADROOM * config.slo.tbt_s
        self.refused = 0
        """Requests that decode refused."""
        self.wasted_s = 0.0
        """Seconds that computing their prompts took."""

    def refuses(self, forecasts: LoadForecaster, request: Request, decode: str, prefill_s: float) -> bool:
        """Whether a decode instance is too slow now for a request that took `prefill_s` to prefill."""
        if not self._wanted or not decode or request.attempts > 1:
            return False
        joining = NO_LOAD if self._by_pool else LoadForecast(1, request.tokens)
        if forecasts.tbt_now(decode, joining) <= self._tbt_s:
            return False
        self.refused += 1
        self.wasted_s += prefill_s
        return True


class PoolGate:
    """Refuses by the whole decode pool's load, if the cluster's config says so.

    Args:
        config: the cluster's.

    Attributes:
        load: the pool's.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.load = PoolLoad(config)
        self._early = config.by_pool and config.admission == "early"
        self._predictive = config.by_pool and config.admission == "predictive"

    def refuses(self, request: Request, cluster: ClusterView, now: float) -> bool:
        """Whether a request that has just come is not let in; by prefill's queue the conductor's core refuses."""
        if self._early:
            return self.load.now() > FULL
        return self._predictive and self.load.at(now + _prefill_s(request, cluster, now)) > FULL


def _prefill_s(request: Request, cluster: ClusterView, now: float) -> float:
    """Predicted seconds until a prompt is computed."""
    keys = request.keys
    try:
        plan = cluster.plan(RoutingRequest(request.tokens, request.answer, keys, keys[0] if keys else b"", now))
    except (Unavailable, InvalidRequest):  # the core has a separate error for this
        return 0.0
    return plan.prefill.ttft_s
