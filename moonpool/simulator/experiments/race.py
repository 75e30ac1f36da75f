"""Races between placement policies: one trace, loads, link speeds, and several arrival seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from random import Random

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.latency import prefill_seconds
from moonpool.conductor.placement.decode_policies import DEFAULT_DECODE_POLICY
from moonpool.conductor.placement.policies import DEFAULT_POLICY
from moonpool.conductor.placement.policies.registry import load_decode_policy, load_policy
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import GB, ClusterConfig
from moonpool.simulator.cluster.requests import DONE, Request
from moonpool.simulator.experiments.frame import Progress, RequestSource, Result, Row, assumptions
from moonpool.simulator.experiments.report import Chart, Collector, LatencyQuantiles, digits
from moonpool.simulator.traces.mooncake import TraceRequest

LENGTH_CLASSES = (2048, 8192, 32768, 65536)
"""Greatest prompt length in each length class but the longest, tokens."""


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
    timed = [request for request in requests if not request.wait_for]
    gaps = (after.timestamp - before.timestamp for before, after in pairwise(timed))
    grain = min((gap for gap in gaps if gap > 0.0), default=0.0)
    draws = Random(seed)
    moved = [replace(request, timestamp=request.timestamp + draws.uniform(0.0, grain)) for request in timed]
    waiting = [request for request in requests if request.wait_for]
    return sorted((*moved, *waiting), key=lambda request: request.timestamp)


REFERENCE = "kvcache_centric"
"""Name of the Mooncake paper's Algorithm 1 among the rules; the default is compared with this rule, too."""


class Slowdowns:
    """TTFT over the seconds for the same prompt alone on an empty instance, by length class."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._classes = [LatencyQuantiles() for _ in range(len(LENGTH_CLASSES) + 1)]

    def add(self, request: Request) -> None:
        """A request has ended."""
        if request.outcome == DONE:
            speeds, steps = self._config.profile.speeds, -(-request.tokens // self._config.max_num_batched_tokens)
            cold_s = prefill_seconds(speeds, request.tokens, 0, steps=steps)
            at = sum([request.tokens > last for last in LENGTH_CLASSES])
            self._classes[at].add((request.first_at - request.arrived) / PS / cold_s)

    def p99(self) -> dict[str, float]:
        """By the class's last length; classes without a request are left out."""
        names = [f"{last // 1024}k" for last in LENGTH_CLASSES] + ["longer"]
        return {
            name: digits(each_class.at(0.99))
            for name, each_class in zip(names, self._classes, strict=True)
            if each_class.count
        }


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


@dataclass(frozen=True, slots=True)
class Courses:
    """Where policies race: each speed with each link.

    Attributes:
        speeds: requests come so many times as fast as in the trace.
        links_gb: as for `linked`.
        seeds: seeds for arrivals and delays; a row covers all seeds' requests.
    """

    speeds: Sequence[float] = (1.0,)
    links_gb: Sequence[float] = (100.0,)
    seeds: int = 3

    def __post_init__(self) -> None:
        for field, values in (("speed", self.speeds), ("link_gb", self.links_gb)):
            if len(set(values)) < len(values):
                raise ConfigError(field, f"names a value twice: {', '.join(map(str, values))}")
        if min(self.speeds) <= 0.0:
            raise ConfigError("speed", f"must be positive, is {min(self.speeds):g}")
        if min(self.links_gb) < 0.0:
            raise ConfigError("link_gb", f"must not be negative, is {min(self.links_gb):g}")


def race(config: ClusterConfig, source: RequestSource, racers: Racers, courses: Courses, progress: Progress) -> Result:
    """A row per link, speed and policy pair, over all arrival and delay seeds together."""
    requests = list(source.read())
    rows: list[Row] = []
    for link_gb, speed in product(courses.links_gb, courses.speeds):
        there = replace(linked(config, link_gb), rate=speed)
        for decode_policy, policy in product(racers.decode_policies, racers.policies):
            row = _row(replace(there, policy=policy, decode_policy=decode_policy), requests, courses.seeds)
            rows.append({**row, "speed": speed, "link_gb": link_gb})
            progress(
                f"{link_gb:g} GB/s, {speed:g} x, {policy}, {decode_policy}: mean TTFT {row['ttft_mean_s']} s, "
                f"within limits {row['within']}"
            )
    facts = {name: value for name, value in assumptions(config, source).items() if name not in ("policy", "rate")}
    facts |= {"jitter_seeds": courses.seeds}
    if missed := misses(rows):
        facts["missed"] = missed
    return Result("race", facts, rows, _chart(rows, racers, courses))


WORST_MEAN, WORST_SHARE, WORST_SLOWDOWN = 1.02, 0.005, 1.02
"""The default's bounds: mean TTFT over the best rule's; how much the share within limits may be below the reference's;
p99 of the slowdown over the reference's, in each length class."""


def misses(rows: Sequence[Row]) -> list[str]:
    """A line for each figure that the default placement misses; none if default or reference did not race."""
    found: list[str] = []
    for course in dict.fromkeys((row["link_gb"], row["speed"], row["decode_policy"]) for row in rows):
        here = {
            str(row["policy"]): row for row in rows if (row["link_gb"], row["speed"], row["decode_policy"]) == course
        }
        if not {DEFAULT_POLICY, REFERENCE} <= here.keys():
            continue
        own, reference = here[DEFAULT_POLICY], here[REFERENCE]
        best = min(here.values(), key=lambda row: _figure(row, "ttft_mean_s"))
        told: list[str] = []
        if _figure(own, "ttft_mean_s") > WORST_MEAN * _figure(best, "ttft_mean_s"):
            told.append(f"mean {own['ttft_mean_s']} s, {best['policy']} {best['ttft_mean_s']} s")
        if _figure(own, "within") < _figure(reference, "within") - WORST_SHARE:
            told.append(f"within {own['within']}, {REFERENCE} {reference['within']}")
        own_p99, reference_p99 = own["slowdown_p99"], reference["slowdown_p99"]
        assert isinstance(own_p99, dict)
        assert isinstance(reference_p99, dict)
        told += [
            f"slowdown of {name} {p99}, {REFERENCE} {reference_p99[name]}"
            for name, p99 in own_p99.items()
            if p99 > WORST_SLOWDOWN * reference_p99[name]
        ]
        found += [f"{course[0]:g} GB/s, {course[1]:g} x: {line}" for line in told]
    return found


def _figure(row: Row, name: str) -> float:
    return float(str(row[name]))


def _chart(rows: Sequence[Row], racers: Racers, courses: Courses) -> Chart:
    """Bars of one course; of several, a line per policy, over the speeds or, at one speed, over the links."""
    title, names = "Time to first token by policy", [_name(row, racers) for row in rows]
    if len(rows) == len(racers.policies) * len(racers.decode_policies):
        series = {
            name: [(float(place), _figure(row, f"ttft_{name}_s")) for place, row in enumerate(rows)]
            for name in ("mean", "p50", "p99")
        }
        return Chart(title, "", "seconds", series, names=tuple(names))
    across = "speed" if len(courses.speeds) > 1 else "link_gb"
    lines: dict[str, list[tuple[float, float]]] = {}
    for row, name in zip(rows, names, strict=True):
        both = len(courses.speeds) > 1 < len(courses.links_gb)
        line = lines.setdefault(f"{name}, {row['link_gb']:g} GB/s" if both else name, [])
        line.append((_figure(row, across), _figure(row, "ttft_mean_s")))
    label = "times as fast as in the trace" if across == "speed" else "GB/s of each link"
    return Chart(f"Mean t{title[1:]}", label, "seconds", {name: sorted(line) for name, line in lines.items()})


def _name(row: Row, racers: Racers) -> str:
    decode = f", {row['decode_policy']}" if len(racers.decode_policies) > 1 else ""
    return f"{row['policy']}{decode}"


def _row(config: ClusterConfig, requests: Sequence[TraceRequest], seeds: int) -> dict[str, object]:
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
