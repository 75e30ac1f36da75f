"""Experiment `conductors`: several side by side, who know nothing of each other's placements; and one that is lost.

Each places by what instances report and by its own requests, so two may choose the same idle instance within one
report; the second one is told so (`stale`: so many answers) and chooses again. When one is lost its clients resume at
another one.
"""

from collections.abc import Sequence
from dataclasses import replace

from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig
from simulator.cluster.requests import DONE, Request
from simulator.experiments.frame import Progress, Result, Row, Source, assumptions
from simulator.kernel.clock import PS, ps
from simulator.report.charts import Chart
from simulator.report.collector import Collector
from simulator.report.quantiles import Quantiles, digits

COUNTS = (1, 2, 4, 8)
DOWN_S = 20.0
"""Seconds until the lost conductor is replaced."""


class Gaps:
    """The longest pause of each stream."""

    def __init__(self) -> None:
        self.longest = Quantiles()
        self.resumed = 0

    def add(self, request: Request) -> None:
        """A request has ended."""
        self.longest.add(max(request.intervals, default=0) / PS)
        self.resumed += request.resumed > 0


def conductors(config: ClusterConfig, source: Source, crash_s: float, progress: Progress) -> Result:
    """Two rows per number of conductors: undisturbed, and one is lost after `crash_s` seconds.

    Raises:
        AssertionError: a request did not end, or something is still held.
    """
    rows: list[Row] = []
    for count in COUNTS:
        for lost in (False, True):
            rows.append(_run(replace(config, conductors=count), source, crash_s if lost else 0.0))
            progress(f"{count} conductors{', one is lost' if lost else ''}: TTFT {rows[-1]['ttft_mean_s']} s")
    facts = {
        **assumptions(config, source),
        "crash": f"the first conductor after {crash_s:g} s, back {DOWN_S:g} s later",
    }
    return Result("conductors", facts, rows, _chart(rows))


def _run(config: ClusterConfig, source: Source, crash_s: float) -> Row:
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
        "stale": sum(conductor.core.requests.stale for conductor in cluster.conductors),
        "ttft_mean_s": summary.ttft_s.get("mean"),
        "ttft_p90_s": summary.ttft_s.get("p90"),
        "ttft_error_p50": summary.ttft_error.get("p50"),
        "ttft_error_p90": summary.ttft_error.get("p90"),
        "tbt_p90_s": summary.tbt_s.get("p90"),
        "longest_gap_s": digits(gaps.longest.most),
        "goodput_share": summary.goodput_share,
        "reused_share": summary.reused_share,
    }


def _chart(rows: Sequence[Row]) -> Chart:
    series = {
        name: [(float(str(row["conductors"])), float(str(row["ttft_mean_s"]))) for row in rows if row["lost"] == lost]
        for name, lost in (("undisturbed", 0), ("one is lost", 1))
    }
    return Chart("Mean time to first token by conductors side by side", "conductors", "seconds", series)
