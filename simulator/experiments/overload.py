"""Experiment `overload`: who is refused, and how the load of both pools swings, by how requests are let in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

from services.conductor.core.admission import Admission
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig
from simulator.cluster.entrance import PAPER, SERVICES
from simulator.cluster.requests import REFUSED
from simulator.experiments.frame import Progress, Result, Row, Source, assumptions
from simulator.kernel.clock import ps
from simulator.report.charts import Chart
from simulator.report.collector import Collector, Summary
from simulator.report.quantiles import digits
from simulator.traces.mooncake import TraceRequest

SAMPLE_S = 10.0
SMOOTH = 30
"""Samples over which the slow course of the load is averaged: what is left is its swinging."""
COMPARED = (*PAPER, SERVICES[Admission.PREDICTIVE])
PICTURED = ("early", "predictive")


@dataclass(slots=True)
class Loads:
    """Load of both pools every `SAMPLE_S` seconds, as shares of what the limits allow.

    `prefill`: mean seconds of queue, of the TTFT limit. `decode`: mean seconds of a step, of the TBT limit.
    """

    cluster: Cluster
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def sample(self, _: object = None) -> None:
        """Takes a sample, and the next one after a while, as long as there are requests."""
        cluster, config = self.cluster, self.cluster.config
        now = cluster.world.seconds
        queued_s = fmean([prefill.core.drain_seconds(now) for prefill in cluster.prefills])
        forecasts = cluster.conductors[0].core.picture.forecasts
        step_s = fmean([forecasts.tbt_now(f"d{number}") for number in range(config.decode)])
        self.prefill.append(queued_s / config.slo.ttft_s)
        self.decode.append(step_s / config.slo.tbt_s)
        if cluster.busy:
            cluster.world.after(ps(SAMPLE_S), self.sample)


def overload(config: ClusterConfig, source: Source, progress: Progress) -> Result:
    """A row per way of letting requests in: the paper's, by the whole pool's load or by request, and the services'."""
    rows, series = [], {}
    for name in COMPARED:
        by_pool = config.by_pool and name in PAPER
        loads, row = _run(replace(config, admission=name, by_pool=by_pool), source.read())
        rows.append(row)
        for pool, values in (("prefill", loads.prefill), ("decode", loads.decode)) if name in PICTURED else ():
            series[f"{name}: {pool}"] = [(place * SAMPLE_S, digits(value)) for place, value in enumerate(values)]
        progress(f"{name}: {row['refused']} of {row['requests']} refused")
    chart = Chart("Load of the pools, of what the limits allow", "seconds", "share", series)
    decided = "by the load of the whole decode pool, but promised" if config.by_pool else "request by request"
    return Result("overload", {**assumptions(config, source), "decided": decided}, rows, chart)


def _run(config: ClusterConfig, requests: Iterable[TraceRequest]) -> tuple[Loads, Row]:
    collector = Collector(config.slo)
    cluster = Cluster(config, collector.add)
    loads = Loads(cluster)
    cluster.feed(requests)
    loads.sample()
    cluster.run()
    cluster.check_at_rest()
    return loads, _row(config.admission, collector.summary(), cluster, loads)


def _row(name: str, summary: Summary, cluster: Cluster, loads: Loads) -> Row:
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
    """What is left of a series without its slow course, the running mean over `SMOOTH` samples."""
    half = SMOOTH // 2
    return [value - fmean(values[max(0, at - half) : at + half + 1]) for at, value in enumerate(values)]


def swing(values: Sequence[float]) -> float:
    """Standard deviation of a series around its slow course."""
    return pstdev(swings(values)) if values else 0.0


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's coefficient; 0 where one series does not vary."""
    spread = pstdev(one) * pstdev(other) if one else 0.0
    if not spread:
        return 0.0
    means = fmean(one), fmean(other)
    return fmean([(a - means[0]) * (b - means[1]) for a, b in zip(one, other, strict=True)]) / spread
