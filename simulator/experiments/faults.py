"""Lost and late messages, crashes of instances and stores: every request ends, and everything comes back."""

from collections import Counter
from dataclasses import replace

from moonpool.core.draws import draw_below, draw_unit
from moonpool.errors import ConfigError
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig
from simulator.cluster.requests import DONE, Request
from simulator.experiments.frame import Progress, Result, Source
from simulator.kernel.calls import CallDelays
from simulator.kernel.clock import ps
from simulator.report.charts import Chart
from simulator.traces.mooncake import TraceRequest
from simulator.traces.workload import CHAT, Workload

REQUESTS = 40
MIX = replace(CHAT, tenants=3, several=0.15)
RETRIES, RECOVERY_S = 60, 120.0
"""So patient is the conductor: several crashes may come to a request, and all instances of a kind be away at once."""
_MOST_CRASHES = 4
_MOST_DROPPED, _MOST_LATE = 0.03, 0.05


def cluster_of(config: ClusterConfig, seed: int) -> ClusterConfig:
    """The cluster under one seed's faults."""
    delays = CallDelays(
        drop_share=_MOST_DROPPED * draw_unit(seed, 1), late_share=_MOST_LATE * draw_unit(seed, 2), late_s=5.0
    )
    return replace(config, delays=delays, seed=seed, retries=RETRIES, recovery_s=RECOVERY_S)


def crashes_of(config: ClusterConfig, seed: int, until_s: float) -> list[tuple[float, str, float]]:
    """(when, who, how long it is away) of one seed."""
    names = [
        f"{kind}{number}"
        for kind, count in (("p", config.prefill), ("d", config.decode), ("s", config.kvstore), ("c", 1))
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
    """One run under one seed's faults; asserts that everything comes back. Returns also the number of crashes."""
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


def faults(config: ClusterConfig, seeds: int, first_seed: int, progress: Progress, source: Source) -> Result:
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
        "instances": f"{config.prefill} prefill, {config.decode} decode, {config.kvstore} kvstore",
        "trace": source.describe() if source.path else f"chat, seed {source.seed}, {len(requests)} requests",
        "first_seed": first_seed,
        "retries": RETRIES,
        "recovery_s": RECOVERY_S,
    }
    return Result("faults", facts, [row], chart)
