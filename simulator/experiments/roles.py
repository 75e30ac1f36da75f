"""Experiment `roles`: goodput where the mix of requests shifts, with fixed roles and with machines that change theirs.

For a while documents are read, which is work for prefill; then conversations have long answers, which is work for
decode; and so on in turn. No fixed division suits both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moonpool.errors import ConfigError
from services.conductor.core.roles import RoleLimits
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig, Slo
from simulator.cluster.requests import DONE, Request
from simulator.experiments.frame import Progress, Result, Row
from simulator.kernel.clock import PS
from simulator.report.charts import Chart
from simulator.report.collector import Collector, longest_mean
from simulator.report.quantiles import digits
from simulator.traces.mooncake import TraceRequest
from simulator.traces.workload import Mix, Workload

READING = Mix(conversations=0.1, questions=0.1, document=3.5, answer_tokens=60.0)
TALKING = Mix(conversations=0.3, questions=0.7, first_turn=0.5, later_turn=0.5, question=0.5, answer_tokens=900.0)
PART_S = 600.0
"""Seconds of one kind of requests."""
PARTS = 4
SWAPPING = "swapping"


@dataclass(frozen=True, slots=True)
class Shifts:
    """Requests whose mix shifts every `part_s` seconds.

    Attributes:
        rates: requests per second of the two mixes.
        part_s: see above.
        parts: how often it is the one or the other.
        seed: of the requests.
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
    """Goodput of each part by itself: requests belong to the part in which they come."""

    def __init__(self, slo: Slo, part_s: float, parts: int) -> None:
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
        """Within both limits, of those that came."""
        return [digits(good / max(1, came)) for good, came in zip(self.good, self.came, strict=True)]


def roles(config: ClusterConfig, shifts: Shifts, progress: Progress) -> Result:
    """A row per fixed division of the machines, and one where they change their roles.

    Raises:
        ConfigError: there are fewer than four machines.
    """
    machines = config.prefill + config.decode
    if machines < 4:
        raise ConfigError("prefill", "roles change among four machines at least")
    limits = RoleLimits(swap=True, ttft_s=config.slo.ttft_s, tbt_s=config.slo.tbt_s)
    divisions = [machines * quarters // 4 for quarters in (1, 2, 3)]
    rows, series = [], {}
    for prefill in divisions:
        row, phases, _ = _run(replace(config, prefill=prefill, decode=machines - prefill), shifts)
        name = f"{prefill} + {machines - prefill}"
        rows.append({"division": name, **row})
        series[name] = list(enumerate(phases.shares()))
        progress(f"{name}: goodput {row['goodput_share']}")
    row, phases, cluster = _run(replace(config, roles=limits), shifts)
    rows.append({"division": SWAPPING, **row})
    series[SWAPPING] = list(enumerate(phases.shares()))
    for when, name in cluster.machines.changed:
        progress(f"{when / PS:.0f} s: {name} is there")
    names = tuple(("reading", "talking")[part % 2] for part in range(shifts.parts))
    chart = Chart("Within both limits, by part", "", "share", series, names=names)
    return Result("roles", _facts(config, shifts, machines, limits), rows, chart)


def _run(config: ClusterConfig, shifts: Shifts) -> tuple[Row, Phases, Cluster]:
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


def _facts(config: ClusterConfig, shifts: Shifts, machines: int, limits: RoleLimits) -> dict[str, object]:
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
