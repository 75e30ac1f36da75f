"""Experiments that serve a trace with a whole cluster: scale, scheduling, ratio, overload and roles."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

from moonpool.base.errors import ConfigError
from moonpool.conductor.core.admission import AdmissionMode
from moonpool.conductor.core.roles import RoleLimits
from moonpool.conductor.placement.policies import POLICIES
from moonpool.simulator.clock import PS, ps
from moonpool.simulator.cluster.admission import PAPER, SERVICES
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.cluster.requests import DONE, REFUSED, Request
from moonpool.simulator.experiments.frame import (
    Progress,
    RequestSource,
    Result,
    Row,
    assumptions,
    serving_row,
    simulate,
)
from moonpool.simulator.experiments.report import Chart, Collector, Summary, digits, longest_mean
from moonpool.simulator.traces.mooncake import TraceRequest
from moonpool.simulator.traces.workload import Workload, WorkloadMix


def scale(config: ClusterConfig, source: RequestSource, progress: Progress) -> Result:
    """One run with all known figures."""
    summary, cluster = simulate(config, source.read())
    progress(f"{cluster.world.events} events")
    row = {**summary.to_json(), "events": cluster.world.events, "calls": cluster.calls.sent}
    row |= {name: digits(value) for name, value in cluster.use().items()}
    points = [(place, summary.ttft_s.get(name, 0.0)) for place, name in enumerate(("p50", "p90", "p99"))]
    chart = Chart("Time to first token", "percentile", "seconds", {"TTFT": points}, names=("p50", "p90", "p99"))
    return Result("scale", assumptions(config, source), [row], chart)


def scheduling(
    config: ClusterConfig, source: RequestSource, progress: Progress, policies: Sequence[str] = tuple(POLICIES)
) -> Result:
    """A row for each policy that chooses prefill instances, which compute all prompts."""
    config = replace(config, decode_prompt_tokens=0)
    rows = []
    for policy in policies:
        summary, _ = simulate(replace(config, policy=policy), source.read())
        rows.append({"policy": policy, **serving_row(summary)})
        progress(f"{policy}: mean TTFT {summary.ttft_s.get('mean', 0.0):g} s")
    series = {
        name: [(place, float(str(row[column]))) for place, row in enumerate(rows)]
        for name, column in (("mean", "ttft_mean_s"), ("p90", "ttft_p90_s"))
    }
    chart = Chart("Time to first token by policy", "", "seconds", series, names=tuple(policies))
    facts = {name: value for name, value in assumptions(config, source).items() if name != "policy"}
    return Result("scheduling", facts, rows, chart)


def ratio(config: ClusterConfig, source: RequestSource, progress: Progress, first: int = 1) -> Result:
    """A row for each division into prefill and decode instances, from `first` prefill instances on.

    Raises:
        ConfigError: there are fewer than two divisions.
    """
    total = config.prefill + config.decode
    config = replace(config, decode_prompt_tokens=0)  # what is compared is where prompts are computed
    if not 1 <= first <= total - 2:
        raise ConfigError("first", f"must leave at least two divisions of {total} instances, is {first}")
    rows = []
    for prefill in range(first, total):
        mixed = replace(config, prefill=prefill, decode=total - prefill)
        summary, _ = simulate(mixed, source.read())
        rows.append({"prefill": prefill, "decode": total - prefill, **serving_row(summary)})
        progress(f"{prefill} prefill, {total - prefill} decode: goodput {summary.goodput_share:.1%}")
    points = [(float(str(row["prefill"])), float(str(row["goodput_share"]))) for row in rows]
    chart = Chart(f"Goodput of {total} instances", "prefill instances", "share", {"within both limits": points})
    facts = {**assumptions(config, source), "instances": f"{total}, {config.kvstore} kvstore"}
    return Result("ratio", facts, rows, chart)


SAMPLE_S = 10.0
SMOOTH = 30
"""Samples over which the load's slow course is averaged: the remainder is the swing."""
COMPARED = (*PAPER, SERVICES[AdmissionMode.PREDICTIVE])
PICTURED = ("early", "predictive")
READING = WorkloadMix(conversations=0.1, questions=0.1, document=3.5, answer_tokens=60.0)
TALKING = WorkloadMix(
    conversations=0.3, questions=0.7, first_turn=0.5, later_turn=0.5, question=0.5, answer_tokens=900.0
)
PART_S = 600.0
"""Seconds for each request kind."""
PARTS = 4
SWAPPING = "swapping"


@dataclass(slots=True)
class Loads:
    """Load on both pools every `SAMPLE_S` seconds, as shares of the limits.

    `prefill`: mean queue seconds over the TTFT limit. `decode`: mean step seconds over the TBT limit.
    """

    cluster: Cluster
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def sample(self, _: object = None) -> None:
        """Take a sample, then the next sample after `SAMPLE_S`, as long as there are requests."""
        cluster, config = self.cluster, self.cluster.config
        now = cluster.world.seconds
        queued_s = fmean([prefill.core.drain_seconds(now) for prefill in cluster.prefills])
        forecasts = cluster.conductors[0].core.cluster.forecasts
        step_s = fmean([forecasts.tbt_now(f"d{number}") for number in range(config.decode)])
        self.prefill.append(queued_s / config.slo.ttft_s)
        self.decode.append(step_s / config.slo.tbt_s)
        if cluster.busy:
            cluster.world.after(ps(SAMPLE_S), self.sample)


def overload(config: ClusterConfig, source: RequestSource, progress: Progress) -> Result:
    """A row per admission mode: the paper's, by the whole pool's load or by request, and the services'."""
    rows, series = [], {}
    for name in COMPARED:
        by_pool = config.by_pool and name in PAPER
        loads, row = _run_overload(replace(config, admission=name, by_pool=by_pool), source.read())
        rows.append(row)
        for pool, values in (("prefill", loads.prefill), ("decode", loads.decode)) if name in PICTURED else ():
            series[f"{name}: {pool}"] = [(place * SAMPLE_S, digits(value)) for place, value in enumerate(values)]
        progress(f"{name}: {row['refused']} of {row['requests']} refused")
    chart = Chart("Load of the pools, of what the limits allow", "seconds", "share", series)
    decided = "by the load of the whole decode pool, but promised" if config.by_pool else "request by request"
    return Result("overload", {**assumptions(config, source), "decided": decided}, rows, chart)


def _run_overload(config: ClusterConfig, requests: Iterable[TraceRequest]) -> tuple[Loads, Row]:
    collector = Collector(config.slo)
    cluster = Cluster(config, collector.add)
    loads = Loads(cluster)
    cluster.feed(requests)
    loads.sample()
    cluster.run()
    cluster.check_at_rest()
    return loads, _overload_row(config.admission, collector.summary(), cluster, loads)


def _overload_row(name: str, summary: Summary, cluster: Cluster, loads: Loads) -> Row:
    return {
        "admission": name,
        "requests": summary.requests,
        "refused": summary.outcomes.get(REFUSED, 0),
        "after_prefill": cluster.conductors[0].late.refused,
        "wasted_prefill_s": digits(cluster.conductors[0].late.wasted_s),
        "goodput_share": summary.goodput_share,
        "ttft_p90_s": summary.ttft_s.get("p90"),
        "tbt_p90_s": summary.tbt_s.get("p90"),
        "prefill_swing": digits(swing(loads.prefill)),
        "decode_swing": digits(swing(loads.decode)),
        "correlation": digits(correlation(swings(loads.prefill), swings(loads.decode))),
    }


def swings(values: Sequence[float]) -> list[float]:
    """A series without the slow course, the running mean over `SMOOTH` samples."""
    half = SMOOTH // 2
    return [value - fmean(values[max(0, at - half) : at + half + 1]) for at, value in enumerate(values)]


def swing(values: Sequence[float]) -> float:
    """A series' standard deviation around the slow course."""
    return pstdev(swings(values)) if values else 0.0


def correlation(value: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's coefficient; 0 where one series does not vary."""
    spread = pstdev(value) * pstdev(other) if value else 0.0
    if not spread:
        return 0.0
    means = fmean(value), fmean(other)
    return fmean([(a - means[0]) * (b - means[1]) for a, b in zip(value, other, strict=True)]) / spread


@dataclass(frozen=True, slots=True)
class Shifts:
    """Requests with a mix that shifts every `part_s` seconds.

    Attributes:
        rates: the two mixes' requests per second.
        part_s: see above.
        parts: how often each kind comes.
        seed: for the requests.
    """

    rates: tuple[float, float]
    part_s: float = PART_S
    parts: int = PARTS
    seed: int = 1

    def read(self) -> Iterator[TraceRequest]:
        """The requests; parts have no blocks in common."""
        for part in range(self.parts):
            mix = replace((READING, TALKING)[part % 2], rate_per_s=self.rates[part % 2])
            count = round(1.5 * self.part_s * mix.rate_per_s) + 1  # turns come on top: more than enough
            for request in Workload(self.seed + part, mix).requests(count):
                if request.timestamp >= 1000 * self.part_s:
                    break
                ids = tuple([hash_id * self.parts + part for hash_id in request.hash_ids])
                yield replace(request, timestamp=request.timestamp + 1000 * self.part_s * part, hash_ids=ids)


class Phases:
    """Goodput for each part alone: requests belong to the part in which they arrive."""

    def __init__(self, slo: SloTargets, part_s: float, parts: int) -> None:
        self._slo, self._part = slo, round(part_s * PS)
        self.came, self.good = [0] * parts, [0] * parts

    def add(self, request: Request) -> None:
        """A request has ended."""
        part = min(request.arrived // self._part, len(self.came) - 1)
        self.came[part] += 1
        in_time = request.first_at - request.arrived <= self._slo.ttft_s * PS
        smooth = longest_mean(request.intervals) <= self._slo.tbt_s * PS
        self.good[part] += request.outcome == DONE and in_time and smooth

    def shares(self) -> list[float]:
        """Share of requests within both limits."""
        return [digits(good / max(1, came)) for good, came in zip(self.good, self.came, strict=True)]


def roles(config: ClusterConfig, shifts: Shifts, progress: Progress) -> Result:
    """A row for each fixed division of machines, and a row with role changes.

    Raises:
        ConfigError: there are fewer than four machines.
    """
    config = replace(config, decode_prompt_tokens=0)  # what is compared is where prompts are computed
    machines = config.prefill + config.decode
    if machines < 4:
        raise ConfigError("prefill", "roles change among four machines at least")
    limits = RoleLimits(swap=True, ttft_s=config.slo.ttft_s, tbt_s=config.slo.tbt_s)
    divisions = [machines * quarters // 4 for quarters in (1, 2, 3)]
    rows, series = [], {}
    for prefill in divisions:
        row, phases, _ = _run_roles(replace(config, prefill=prefill, decode=machines - prefill), shifts)
        name = f"{prefill} + {machines - prefill}"
        rows.append({"division": name, **row})
        series[name] = list(enumerate(phases.shares()))
        progress(f"{name}: goodput {row['goodput_share']}")
    row, phases, cluster = _run_roles(replace(config, roles=limits), shifts)
    rows.append({"division": SWAPPING, **row})
    series[SWAPPING] = list(enumerate(phases.shares()))
    for when, name in cluster.machines.changed:
        progress(f"{when / PS:.0f} s: {name} is there")
    names = tuple(("reading", "talking")[part % 2] for part in range(shifts.parts))
    chart = Chart("Within both limits, by part", "", "share", series, names=names)
    return Result("roles", _roles_facts(config, shifts, machines, limits), rows, chart)


def _run_roles(config: ClusterConfig, shifts: Shifts) -> tuple[Row, Phases, Cluster]:
    collector, phases = Collector(config.slo), Phases(config.slo, shifts.part_s, shifts.parts)

    def ended(request: Request) -> None:
        collector.add(request)
        phases.add(request)

    cluster = Cluster(config, ended)
    cluster.feed(shifts.read())
    cluster.run()
    cluster.check_at_rest()
    summary, shares = collector.summary(), phases.shares()
    row: Row = {
        "requests": summary.requests,
        "done": summary.outcomes.get(DONE, 0),
        "goodput_share": summary.goodput_share,
        "least_part": min(shares),
        "parts": dict(enumerate(shares, 1)),
        "ttft_p90_s": summary.ttft_s.get("p90"),
        "tbt_p90_s": summary.tbt_s.get("p90"),
        "changes": len(cluster.machines.changed),
    }
    return row, phases, cluster


def _roles_facts(config: ClusterConfig, shifts: Shifts, machines: int, limits: RoleLimits) -> dict[str, object]:
    return {
        "machines": f"{machines}, {config.kvstore} kvstore",
        "begins": f"{config.prefill} prefill, {config.decode} decode where roles change",
        "profile": config.profile.name,
        "parts": f"{shifts.parts} of {shifts.part_s:g} s: reading at {shifts.rates[0]:g}/s, talking at "
        f"{shifts.rates[1]:g}/s, seed {shifts.seed}",
        "slo": f"TTFT {config.slo.ttft_s:g} s, TBT {config.slo.tbt_s:g} s",
        "admission": config.admission,
        "roles": f"ratio {limits.ratio:g} for {limits.hold_s:g} s, dwell {limits.dwell_s:g} s, "
        f"a change takes {config.role_change_s:g} s",
        "seed": config.seed,
    }
