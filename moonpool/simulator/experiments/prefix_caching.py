"""Experiments on prefix caching.

`cache` (eviction policies), `hot` (hot prefixes), `transfer` (when moving KV pays).

The paper's line: reuse pays when B / G > 2ds / (gqa (apd + bd^2)), B bytes and G floating-point operations per second.
Solved for B, this is the prefix's bytes over the seconds for computing the prefix.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from moonpool.base.errors import ConfigError
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.conductor.core.events import StalePlacement
from moonpool.conductor.core.failures import Failure
from moonpool.conductor.core.request_spec import DecodeReservation
from moonpool.engine.emulated.profile import Profile
from moonpool.engine.prefill.core.actions import (
    ReportFirstToken,
)
from moonpool.engine.scheduler.prefix_sources import KVSource
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.policies import LRU, POLICIES
from moonpool.simulator.clock import SimulatedWorld
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.prefill import Peers, SimulatedPrefill
from moonpool.simulator.cluster.requests import PlacedSequence, Request
from moonpool.simulator.cluster.store import Store
from moonpool.simulator.eviction import chains_of, optimum, replay
from moonpool.simulator.experiments.frame import Progress, RequestSource, Result, assumptions, simulate
from moonpool.simulator.experiments.report import Chart, digits
from moonpool.simulator.network import CallDelays, Calls, Link, SimulatedNetwork
from moonpool.simulator.traces.mooncake import BLOCK_SIZE, TraceRequest

CAPACITIES = (0, 100_000, 50_000, 30_000, 10_000, 1_000)
"""In blocks; 0 = no bound."""
BLOCKS = ("full", "all")
OPTIMUM = "optimum"
UNBOUNDED = "inf"
WAYS = {"none": (False, 0.0), "loading": (True, 0.0), "loading and copies": (True, 0.1)}
"""How prefixes spread beside being computed where they are not: not, by being loaded, and by copies as well. Whether
peers are read, and the share of a link that copies may take."""
PREFIXES = (2048, 4096, 8192, 16384, 32768, 65536)
REST = 512
"""Tokens after the prefix."""
_STEPS = 40
_EQUAL = 1e-9


class HeadFirstLRU(LRU):
    """The textbook's order, in which a chain's head leaves before the tail; for comparison."""

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            super().touched([key])

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Keep the order: the head stays the oldest."""


COMPARED: Mapping[str, Callable[[], EvictionPolicy]] = {**POLICIES, "lru-head-first": HeadFirstLRU}
"""The store's policies, and a policy for comparison."""
Chains = list[list[BlockKey]]


def chains_in(requests: Sequence[TraceRequest], blocks: str = "full", block_size: int = BLOCK_SIZE) -> Chains:
    """Each request's block keys, for full blocks only or for all."""
    full = [request.input_length // block_size if blocks == "full" else None for request in requests]
    return chains_of(
        [(request.tenant, request.hash_ids[:count]) for request, count in zip(requests, full, strict=True)]
    )


def hit_share(chains: Chains, policy: str, capacity: int) -> float:
    """Hits among all block references under a policy, or the optimum; a request's hits stop at the first miss."""
    return optimum(chains, capacity) if policy == OPTIMUM else replay(chains, COMPARED[policy](), capacity)


def cache(
    source: RequestSource,
    progress: Progress,
    policies: Sequence[str] = (*COMPARED, OPTIMUM),
    capacities: Sequence[int] = CAPACITIES,
    blocks: str = "all",
) -> Result:
    """A row per capacity, a column per policy.

    Raises:
        ConfigError: no policy, or no way of counting, has this name.
    """
    for policy in policies:
        if policy not in (*COMPARED, OPTIMUM):
            raise ConfigError("policies", f"{policy!r} is none of {', '.join((*COMPARED, OPTIMUM))}")
    if blocks not in BLOCKS:
        raise ConfigError("blocks", f"must be one of {', '.join(BLOCKS)}, is {blocks!r}")
    chains = chains_in(list(source.read()), blocks, source.block_size)
    rows: list[dict[str, object]] = []
    series: dict[str, list[tuple[float, float]]] = {policy: [] for policy in policies}
    for capacity in capacities:
        row: dict[str, object] = {"capacity": capacity or UNBOUNDED}
        for policy in policies:
            share = hit_share(chains, policy, capacity)
            progress(f"{row['capacity']} blocks, {policy}: {share:.4f}")
            row[policy] = round(share, 4)
            if capacity:
                series[policy].insert(0, (float(capacity), share))
        rows.append(row)
    references = sum(map(len, chains))
    facts = {"trace": source.describe(), "blocks": blocks, "references": references, "pool": "one, global"}
    chart = Chart("Hit share over capacity", "blocks (logarithmic)", "hit share", _ordered(series), log_x=True)
    return Result("cache", facts, rows, chart)


def _ordered(series: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: sorted(points) for name, points in series.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLoad:
    """What comes.

    Attributes:
        requests: in all.
        rate_per_s: arrivals per second, Poisson.
        prefixes: number of hot prefixes, all asked for equally often.
        prefix_tokens: per prefix.
        share: share of requests that begin with a hot prefix; other requests have unique prompts of the same length.
        question_tokens: after the prefix.
        answer_tokens: per answer.
        seed: for arrivals.
    """

    requests: int = 2000
    rate_per_s: float = 16.0
    prefixes: int = 10
    prefix_tokens: int = 8192
    share: float = 0.95
    question_tokens: int = 512
    answer_tokens: int = 32
    seed: int = 1

    def __post_init__(self) -> None:
        if self.prefix_tokens < BLOCK_SIZE:
            raise ConfigError("prefix_tokens", f"must be at least a block of {BLOCK_SIZE}, is {self.prefix_tokens}")

    def arrivals(self) -> Iterator[TraceRequest]:
        """The requests; equal loads give equal requests."""
        draw, now, fresh = random.Random(f"hot {self.seed}"), 0.0, 0
        blocks = self.prefix_tokens // BLOCK_SIZE
        tokens = blocks * BLOCK_SIZE + self.question_tokens
        rest = -(-self.question_tokens // BLOCK_SIZE)
        for _ in range(self.requests):
            now += draw.expovariate(self.rate_per_s)
            hot = draw.random() < self.share
            first = draw.randrange(self.prefixes) * blocks
            own = self.prefixes * blocks + fresh
            prefix = range(first, first + blocks) if hot else range(own, own + blocks)
            end = own if hot else own + blocks
            fresh += rest + (0 if hot else blocks)
            yield TraceRequest(round(1000 * now), tokens, self.answer_tokens, (*prefix, *range(end, end + rest)))


def hot(config: ClusterConfig, load: HotLoad, progress: Progress) -> Result:
    """A row per way in which prefixes spread."""
    rows = []
    for name, (peers, copy_share) in WAYS.items():
        spread = replace(config, peers=peers, copy_share=copy_share)
        summary, cluster = simulate(spread, load.arrivals())
        ttft, use = summary.ttft_s, cluster.use()
        rows.append(
            {
                "spread by": name,
                "ttft_mean_s": ttft.get("mean"),
                "ttft_p50_s": ttft.get("p50"),
                "ttft_p90_s": ttft.get("p90"),
                "ttft_p99_s": ttft.get("p99"),
                "reused_share": summary.reused_share,
                "loaded_blocks": int(use["loaded_from_peers_blocks"]),
                "copied_blocks": int(use["copied_blocks"]),
                "prefill_busy": round(use["prefill_busy"], 4),
            }
        )
        progress(f"{name}: p90 of TTFT {ttft.get('p90', 0.0):g} s")
    series = {
        name: [(place, float(str(row[column]))) for place, row in enumerate(rows)]
        for name, column in (("p50", "ttft_p50_s"), ("p90", "ttft_p90_s"), ("p99", "ttft_p99_s"))
    }
    chart = Chart("Time to first token by how hot prefixes spread", "", "seconds", series, names=tuple(WAYS))
    facts = {**assumptions(config, RequestSource()), "trace": "generated", **asdict(load)}
    return Result("hot", facts, rows, chart)


def ttft_s(profile: Profile, prefix: int, bytes_per_s: float) -> float:
    """Simulated seconds to the first token when the prefix is loaded at a rate; computed when the rate is 0."""
    speeds = replace(profile.speeds, load_bytes_per_s=bytes_per_s)
    config = ClusterConfig(profile=replace(profile, speeds=speeds), prefill=1, decode=1, kvstore=1)
    world, ends = SimulatedWorld(), list[float]()
    network = SimulatedNetwork(world)
    store = Store(world, network, config, "s0", _ignore_changes, lambda: None)
    calls = Calls(world, CallDelays(0.0, 0.0), seed=0)
    peers = Peers(_ignore_changes, lambda: None, lambda _: None, _alone, lambda _: False, _alone)
    instance = SimulatedPrefill(network, config, "p0", [store], lambda _: store, calls, peers)
    keys = tuple(BlockKey(number.to_bytes(32, "little")) for number in range(prefix // config.block_size))
    if bytes_per_s:
        store.write(keys, Link("elsewhere", 1e18), lambda: None)
        world.run()
    begun = world.seconds
    prompt = PlacedSequence(Request(1, world.now, prefix + REST, 1, keys), "r1", prefix + REST, 1)
    sources = (KVSource("s0", len(keys)),) if bytes_per_s else ()
    instance.submit(prompt, None, _FirstTokenWait(lambda: ends.append(world.seconds)), sources)
    world.run()
    return ends[0] - begun


@dataclass(frozen=True, slots=True)
class _FirstTokenWait:
    """Waits for the first token."""

    came: Callable[[], None]

    def accepted(self, number: int) -> None:
        """See `Client.accepted`."""

    def token(self, told: ReportFirstToken) -> None:
        """See `Client.token`."""
        self.came()

    def delivered(self) -> None:
        """See `Client.delivered`."""

    def over(self, result: Failure | StalePlacement | None) -> None:
        """See `Client.over`."""
        assert result is None, result


def _alone(target: DecodeReservation) -> None:
    raise AssertionError("nobody else is there")


def _ignore_changes(changes: KeyChanges) -> None:
    """Drop changes: the parts' content is not tracked."""


def break_even(profile: Profile, prefix: int) -> float:
    """The rate, bytes per second, at which loading takes as long as computing; by bisection."""
    computed = ttft_s(profile, prefix, 0.0)
    low, high = 1.0, 1e15
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        if ttft_s(profile, prefix, middle) > computed * (1 - _EQUAL):  # equal: the core did not even try
            low = middle
        else:
            high = middle
    return high


def paper_line(profile: Profile, prefix: int, operations_per_s: float) -> float:
    """The paper's B for LLaMA-70B; the profile's KV bytes per token must equal that model's."""
    layers, width, a, b = 80, 8192, 4, 22
    operations = layers * (a * prefix * prefix * width + b * prefix * width * width)
    return prefix * profile.token_bytes * operations_per_s / operations


def transfer(profile: Profile, progress: Progress, prefixes: Sequence[int] = PREFIXES) -> Result:
    """A row for each prefix length."""
    reference = 8192
    seconds = ttft_s(profile, reference, 0.0) - ttft_s(profile, 0, 0.0)
    operations_per_s = reference * profile.token_bytes / seconds / paper_line(profile, reference, 1.0)
    rows = []
    for prefix in prefixes:
        line, truth = paper_line(profile, prefix, operations_per_s), break_even(profile, prefix)
        rows.append(
            {
                "prefix_tokens": prefix,
                "computed_s": digits(ttft_s(profile, prefix, 0.0)),
                "loaded_s_at_profile_rate": digits(ttft_s(profile, prefix, profile.speeds.load_bytes_per_s or 1e9)),
                "paper_gb_per_s": digits(line / 1e9),
                "simulated_gb_per_s": digits(truth / 1e9),
            }
        )
        progress(f"{prefix} tokens: paper {line / 1e9:.3g} GB/s, simulated {truth / 1e9:.3g} GB/s")
    series = {
        name: [(float(str(row["prefix_tokens"])), float(str(row[column]))) for row in rows]
        for name, column in (("paper's line", "paper_gb_per_s"), ("simulated", "simulated_gb_per_s"))
    }
    facts: dict[str, object] = {
        "profile": profile.name,
        "rest_tokens": REST,
        "operations_per_s": digits(operations_per_s),
        "operations_from": f"the profile's seconds for {reference} tokens",
    }
    chart = Chart("Bandwidth above which loading pays", "prefix, tokens (logarithmic)", "GB/s", series, log_x=True)
    return Result("transfer", facts, rows, chart)
