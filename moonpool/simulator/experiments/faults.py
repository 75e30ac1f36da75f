"""Experiments with faults: `faults` (lost or late messages, crashes), `conductors` (several, then one less)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.state_machine import draw_below, draw_unit
from moonpool.simulator.clock import PS, ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import DONE, Request
from moonpool.simulator.experiments.frame import Progress, RequestSource, Result, Row, assumptions
from moonpool.simulator.experiments.report import Chart, Collector, LatencyQuantiles, digits
from moonpool.simulator.network import CallDelays
from moonpool.simulator.traces.mooncake import TraceRequest
from moonpool.simulator.traces.workload import CHAT, Workload

REQUESTS = 40
MIX = replace(CHAT, tenants=3, several=0.15)
RETRIES, RECOVERY_S = 60, 120.0
"""The conductor's patience: a request may meet several crashes, and all instances with the same role may be away at
once.
"""
_MOST_CRASHES = 4
_MOST_DROPPED, _MOST_LATE = 0.03, 0.05


def cluster_of(config: ClusterConfig, seed: int) -> ClusterConfig:
    """The cluster under one seed's faults."""
    delays = CallDelays(
        drop_share=_MOST_DROPPED * draw_unit(seed, 1), late_share=_MOST_LATE * draw_unit(seed, 2), late_s=5.0
    )
    return replace(config, delays=delays, seed=seed, retries=RETRIES, recovery_s=RECOVERY_S)


def crashes_of(config: ClusterConfig, seed: int, until_s: float) -> list[tuple[float, str, float]]:
    """(when, instance, seconds away) for one seed."""
    names = [
        f"{kind}{number}"
        for kind, count in (("p", config.prefill), ("d", config.decode + config.both), ("s", config.kvstore), ("c", 1))
        for number in range(count)
    ]
    return [
        (
            until_s * draw_unit(seed, 3, turn),
            names[draw_below(len(names), seed, 4, turn)],
            20 * draw_unit(seed, 5, turn),
        )
        for turn in range(draw_below(_MOST_CRASHES + 1, seed, 6))
    ]


def storm(config: ClusterConfig, requests: list[TraceRequest], seed: int) -> tuple[list[Request], Cluster, int]:
    """A run under one seed's faults; asserts that everything comes back. Returns also the number of crashes."""
    ended: list[Request] = []
    cluster = Cluster(cluster_of(config, seed), ended.append)
    cluster.feed(requests)
    crashes = crashes_of(config, seed, requests[-1].timestamp / 1000 + 5.0)
    for when, name, away in crashes:
        cluster.world.at(ps(when), lambda crash: cluster.crash(*crash), (name, away))
    cluster.run()
    cluster.check_at_rest()
    assert len(ended) == len(requests), f"seed {seed}: a request did not end"
    for request in ended:
        gaps = request.made - len(request.intervals) - request.choices
        assert request.outcome != DONE or (request.whole and not gaps), f"seed {seed}: a gap"
    return ended, cluster, len(crashes)


def faults(config: ClusterConfig, seeds: int, first_seed: int, progress: Progress, source: RequestSource) -> Result:
    """Sums over many seeds.

    Raises:
        AssertionError: a request did not end, tokens are missing, or something is still held; names the seed.
    """
    if seeds < 1:
        raise ConfigError("seeds", "must be at least 1")
    totals: Counter[str] = Counter()
    requests = list(source.read()) if source.path else Workload(source.seed, MIX).requests(source.requests or REQUESTS)
    for seed in range(first_seed, first_seed + seeds):
        ended, cluster, crashes = storm(config, requests, seed)
        totals.update(f"ended: {request.outcome}" for request in ended)
        totals.update(requests=len(ended), crashes=crashes, attempts=sum(request.attempts for request in ended),
                      dropped=cluster.calls.dropped, late=cluster.calls.late, calls=cluster.calls.sent)  # fmt: skip
        if (seed - first_seed + 1) % 50 == 0:
            progress(f"{seed - first_seed + 1} of {seeds} seeds")
    order = ("requests", "calls", "dropped", "late", "crashes", "attempts")
    row: dict[str, object] = {"seeds": seeds, **{name: totals[name] for name in order}}
    row |= {name: totals[name] for name in sorted(totals) if name.startswith("ended")}
    names = ("dropped", "late", "crashes")
    points = [(place, float(totals[name])) for place, name in enumerate(names)]
    chart = Chart("Faults that every request survived", "", "faults", {"faults": points}, names=names)
    facts: dict[str, object] = {
        "instances": f"{config.division}, {config.kvstore} kvstore",
        "trace": source.describe() if source.path else f"chat, seed {source.seed}, {len(requests)} requests",
        "first_seed": first_seed,
        "retries": RETRIES,
        "recovery_s": RECOVERY_S,
    }
    return Result("faults", facts, [row], chart)


COUNTS = (1, 2, 4, 8)
DOWN_S = 20.0
"""Seconds until the lost conductor is replaced."""


class Gaps:
    """Each stream's longest pause."""

    def __init__(self) -> None:
        self.longest = LatencyQuantiles()
        self.resumed = 0

    def add(self, request: Request) -> None:
        """A request has ended."""
        self.longest.add(max(request.intervals, default=0) / PS)
        self.resumed += request.resumed > 0


def conductors(config: ClusterConfig, source: RequestSource, crash_s: float, progress: Progress) -> Result:
    """Two rows per number of conductors: undisturbed, and with a conductor lost after `crash_s` seconds.

    Raises:
        AssertionError: a request did not end, or a part still holds KV or room.
    """
    rows: list[Row] = []
    for count in COUNTS:
        for lost in (False, True):
            rows.append(_run_conductors(replace(config, conductors=count), source, crash_s if lost else 0.0))
            progress(f"{count} conductors{', one is lost' if lost else ''}: TTFT {rows[-1]['ttft_mean_s']} s")
    facts = {
        **assumptions(config, source),
        "crash": f"the first conductor after {crash_s:g} s, back {DOWN_S:g} s later",
    }
    return Result("conductors", facts, rows, _conductors_chart(rows))


def _run_conductors(config: ClusterConfig, source: RequestSource, crash_s: float) -> Row:
    collector, gaps = Collector(config.slo), Gaps()

    def ended(request: Request) -> None:
        collector.add(request)
        gaps.add(request)

    cluster = Cluster(config, ended)
    cluster.feed(source.read())
    if crash_s:
        cluster.world.at(ps(crash_s), lambda _: cluster.crash("c0", DOWN_S))
    cluster.run()
    cluster.check_at_rest()
    summary = collector.summary()
    return {
        "conductors": config.conductors,
        "lost": int(crash_s > 0),
        "requests": summary.requests,
        "done": summary.outcomes.get(DONE, 0),
        "resumed": gaps.resumed,
        "stale": sum(conductor.core.scheduler.stale for conductor in cluster.conductors),
        "ttft_mean_s": summary.ttft_s.get("mean"),
        "ttft_p90_s": summary.ttft_s.get("p90"),
        "ttft_error_p50": summary.ttft_error.get("p50"),
        "ttft_error_p90": summary.ttft_error.get("p90"),
        "tbt_p90_s": summary.tbt_s.get("p90"),
        "longest_gap_s": digits(gaps.longest.most),
        "goodput_share": summary.goodput_share,
        "reused_share": summary.reused_share,
    }


def _conductors_chart(rows: Sequence[Row]) -> Chart:
    series = {
        name: [(float(str(row["conductors"])), float(str(row["ttft_mean_s"]))) for row in rows if row["lost"] == lost]
        for name, lost in (("undisturbed", 0), ("one is lost", 1))
    }
    return Chart("Mean time to first token by conductors side by side", "conductors", "seconds", series)
