"""Race between placement policies: one trace, one load, one link speed, several arrival seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from moonpool.errors import ConfigError
from moonpool.scheduling.latency import prefill_seconds
from services.conductor.placement.decode_policies import DEFAULT_DECODE_POLICY
from services.conductor.placement.policies import DEFAULT_POLICY
from services.conductor.placement.policies.registry import load_decode_policy, load_policy
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
    """The cluster with links that load `link_gb` GB per second; 0 = each prefill instance has a separate cache only."""
    if not link_gb:
        return replace(config, kvstore=0, peers=False, copy_share=0.0)
    profile = config.profile
    speeds = replace(profile.speeds, load_bytes_per_s=link_gb * GB, peer_bytes_per_s=0.0)
    return replace(config, profile=replace(profile, speeds=speeds))


def jittered(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """The requests at times drawn within the trace clock's resolution, by seed, in time order.

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
    """TTFT over the seconds for the same prompt alone on an empty instance, by length class."""

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


@dataclass(frozen=True, slots=True)
class Racers:
    """The racers: each policy for prefill with each policy for decode."""

    policies: Sequence[str]
    decode_policies: Sequence[str] = (DEFAULT_DECODE_POLICY,)

    def __post_init__(self) -> None:
        for field, names in (("policy", self.policies), ("decode_policy", self.decode_policies)):
            if len(set(names)) < len(names):
                raise ConfigError(field, f"names a policy twice: {', '.join(names)}")
        for policy in self.policies:
            load_policy(policy)
        for policy in self.decode_policies:
            load_decode_policy(policy)


def race(config: ClusterConfig, source: RequestSource, racers: Racers, seeds: int, progress: Progress) -> Result:
    """A row per policy pair, over all arrival and delay seeds together."""
    requests = list(source.read())
    rows: list[Row] = []
    for decode_policy in racers.decode_policies:
        for policy in racers.policies:
            rows.append(_row(replace(config, policy=policy, decode_policy=decode_policy), requests, seeds))
            ttft_s, within = rows[-1]["ttft_mean_s"], rows[-1]["within"]
            progress(f"{policy}, {decode_policy}: mean TTFT {ttft_s} s, within limits {within}")
    series = {
        name: [(place, float(str(row[f"ttft_{name}_s"]))) for place, row in enumerate(rows)]
        for name in ("mean", "p50", "p99")
    }
    chart = Chart(
        "Time to first token by policy", "", "seconds", series, names=tuple(_name(row, racers) for row in rows)
    )
    facts = {name: value for name, value in assumptions(config, source).items() if name != "policy"}
    links = f"{config.load_bytes_per_s / GB:g} GB/s" if config.peers else "none: own caches only"
    return Result("race", {**facts, "links": links, "jitter_seeds": seeds}, rows, chart)


def _name(row: Row, racers: Racers) -> str:
    decode = f", {row['decode_policy']}" if len(racers.decode_policies) > 1 else ""
    return f"{row['policy']}{decode}"


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
        "decode_policy": config.decode_policy,
        "default": (config.policy, config.decode_policy) == (DEFAULT_POLICY, DEFAULT_DECODE_POLICY),
        "ttft_mean_s": summary.ttft_s.get("mean", 0.0),
        "ttft_p50_s": summary.ttft_s.get("p50", 0.0),
        "ttft_p99_s": summary.ttft_s.get("p99", 0.0),
        "tpot_mean_s": summary.tpot_s.get("mean", 0.0),
        "tpot_p99_s": summary.tpot_s.get("p99", 0.0),
        "within": summary.goodput_share,
        "reused": summary.reused_share,
        "slowdown_p99": slowdowns.p99(),
    }
