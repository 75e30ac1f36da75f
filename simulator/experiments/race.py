"""Race of placement policies: one trace, one load, one speed of links, several seeds of arrivals."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from moonpool.errors import ConfigError
from moonpool.scheduling.latency import prefill_seconds
from services.conductor.placement.policies import DEFAULT_POLICY
from services.conductor.placement.policies.registry import load_policy
from simulator.clock import PS
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import GB, ClusterConfig
from simulator.cluster.requests import DONE, Request
from simulator.experiments.frame import Progress, RequestSource, Result, Row, assumptions
from simulator.experiments.report import Chart, Collector, LatencyQuantiles, digits
from simulator.traces.mooncake import TraceRequest

LENGTH_CLASSES = (2048, 8192, 32768, 65536)
"""Last prompt lengths of all length classes but the longest, tokens."""


def linked(config: ClusterConfig, link_gb: float) -> ClusterConfig:
    """The cluster with links that load `link_gb` GB per second; 0 = each prefill instance has its own cache only."""
    if not link_gb:
        return replace(config, kvstore=0, peers=False, copy_share=0.0)
    profile = config.profile
    speeds = replace(profile.speeds, load_bytes_per_s=link_gb * GB, peer_bytes_per_s=0.0)
    return replace(config, profile=replace(profile, speeds=speeds))


def jittered(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """The requests at times drawn within the resolution of the trace's clock, by seed, in order of time.

    The resolution is the shortest time between two different timestamps. Requests that wait for others are not moved.
    """
    timed = [one for one in requests if not one.wait_for]
    gaps = (after.timestamp - one.timestamp for one, after in pairwise(timed))
    grain = min((gap for gap in gaps if gap > 0.0), default=0.0)
    draws = Random(seed)
    moved = [replace(one, timestamp=one.timestamp + draws.uniform(0.0, grain)) for one in timed]
    waiting = [one for one in requests if one.wait_for]
    return sorted((*moved, *waiting), key=lambda one: one.timestamp)


class Slowdowns:
    """TTFT over the seconds of the same prompt alone on an instance that holds nothing, by length class."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._classes = [LatencyQuantiles() for _ in range(len(LENGTH_CLASSES) + 1)]

    def add(self, request: Request) -> None:
        """A request has ended."""
        if request.outcome == DONE:
            speeds, steps = self._config.profile.speeds, -(-request.tokens // self._config.step_tokens)
            cold_s = prefill_seconds(speeds, request.tokens, 0, steps=steps)
            at = sum([request.tokens > last for last in LENGTH_CLASSES])
            self._classes[at].add((request.first_at - request.arrived) / PS / cold_s)

    def p99(self) -> dict[str, float]:
        """By the class's last length; classes without a request are left out."""
        names = [f"{last // 1024}k" for last in LENGTH_CLASSES] + ["longer"]
        return {name: digits(one.at(0.99)) for name, one in zip(names, self._classes, strict=True) if one.count}


def race(
    config: ClusterConfig, source: RequestSource, policies: Sequence[str], seeds: int, progress: Progress
) -> Result:
    """A row per policy, over all seeds of arrivals and delays together.

    Raises:
        ConfigError: a policy is unknown, or named twice.
    """
    if len(set(policies)) < len(policies):
        raise ConfigError("policy", f"names a policy twice: {', '.join(policies)}")
    for policy in policies:
        load_policy(policy)
    requests = list(source.read())
    rows: list[Row] = []
    for policy in policies:
        rows.append(_row(replace(config, policy=policy), requests, seeds))
        progress(f"{policy}: mean TTFT {rows[-1]['ttft_mean_s']} s, within limits {rows[-1]['within']}")
    series = {
        name: [(place, float(str(row[f"ttft_{name}_s"]))) for place, row in enumerate(rows)]
        for name in ("mean", "p50", "p99")
    }
    chart = Chart("Time to first token by policy", "", "seconds", series, names=tuple(policies))
    facts = {name: value for name, value in assumptions(config, source).items() if name != "policy"}
    links = f"{config.load_bytes_per_s / GB:g} GB/s" if config.peers else "none: own caches only"
    return Result("race", {**facts, "links": links, "jitter_seeds": seeds}, rows, chart)


def _row(config: ClusterConfig, requests: Sequence[TraceRequest], seeds: int) -> Row:
    collector, slowdowns = Collector(config.slo), Slowdowns(config)

    def ended(request: Request) -> None:
        collector.add(request)
        slowdowns.add(request)

    for number in range(seeds):
        cluster = Cluster(replace(config, seed=config.seed + number), ended)
        cluster.feed(jittered(requests, config.seed + number))
        cluster.run()
        cluster.check_at_rest()
    summary = collector.summary()
    return {
        "policy": config.policy,
        "default": config.policy == DEFAULT_POLICY,
        "ttft_mean_s": summary.ttft_s.get("mean", 0.0),
        "ttft_p50_s": summary.ttft_s.get("p50", 0.0),
        "ttft_p99_s": summary.ttft_s.get("p99", 0.0),
        "tpot_mean_s": summary.tpot_s.get("mean", 0.0),
        "within": summary.goodput_share,
        "reused": summary.reused_share,
        "slowdown_p99": slowdowns.p99(),
    }
