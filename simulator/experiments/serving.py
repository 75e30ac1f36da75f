"""Experiments that serve a trace with a whole cluster: scale, scheduling, ratio."""

from dataclasses import replace

from moonpool.errors import ConfigError
from services.conductor.core.policies import POLICIES
from simulator.cluster.config import ClusterConfig
from simulator.experiments.frame import Progress, Result, Source, assumptions, serving_row, simulate
from simulator.report.charts import Chart
from simulator.report.quantiles import digits


def scale(config: ClusterConfig, source: Source, progress: Progress) -> Result:
    """One run: everything that is known of it."""
    summary, cluster = simulate(config, source.read())
    progress(f"{cluster.world.events} events")
    row = {**summary.to_json(), "events": cluster.world.events, "calls": cluster.calls.sent}
    row |= {name: digits(value) for name, value in cluster.use().items()}
    points = [(place, summary.ttft_s.get(name, 0.0)) for place, name in enumerate(("p50", "p90", "p99"))]
    chart = Chart("Time to first token", "percentile", "seconds", {"TTFT": points}, names=("p50", "p90", "p99"))
    return Result("scale", assumptions(config, source), [row], chart)


def scheduling(config: ClusterConfig, source: Source, progress: Progress) -> Result:
    """A row per policy of choosing prefill instances."""
    rows = []
    for policy in POLICIES:
        summary, _ = simulate(replace(config, policy=policy), source.read())
        rows.append({"policy": policy, **serving_row(summary)})
        progress(f"{policy}: mean TTFT {summary.ttft_s.get('mean', 0.0):g} s")
    series = {
        name: [(place, float(str(row[column]))) for place, row in enumerate(rows)]
        for name, column in (("mean", "ttft_mean_s"), ("p90", "ttft_p90_s"))
    }
    chart = Chart("Time to first token by policy", "", "seconds", series, names=tuple(POLICIES))
    facts = {name: value for name, value in assumptions(config, source).items() if name != "policy"}
    return Result("scheduling", facts, rows, chart)


def ratio(config: ClusterConfig, source: Source, progress: Progress, first: int = 1) -> Result:
    """A row per division of the instances into prefill and decode, from `first` prefill instances on.

    Raises:
        ConfigError: there are fewer than two divisions.
    """
    total = config.prefill + config.decode
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
