"""Hit shares of the kvstore's eviction policies in one global pool, beside those of Belady's optimum."""

from collections.abc import Callable, Mapping, Sequence

from moonpool.errors import ConfigError
from moonpool.kv.keys import BlockKey
from services.kvstore.policies import POLICIES
from services.kvstore.policies.base import EvictionPolicy
from services.kvstore.policies.queues import LRU
from simulator.experiments.frame import Progress, Result, Source
from simulator.policy_pool import chains_of, optimum, replay
from simulator.report.charts import Chart
from simulator.traces.mooncake import BLOCK_TOKENS, TraceRequest

CAPACITIES = (0, 100_000, 50_000, 30_000, 10_000, 1_000)
"""In blocks; 0 = no bound."""
BLOCKS = ("full", "all")
OPTIMUM = "optimum"
UNBOUNDED = "inf"


class HeadFirstLRU(LRU):
    """The textbook's order, in which a chain's head leaves before its tail; for comparison."""

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            super().touched([key])

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Changes nothing: the head stays the oldest."""


COMPARED: Mapping[str, Callable[[], EvictionPolicy]] = {**POLICIES, "lru-head-first": HeadFirstLRU}
"""The policies of the store, and one for comparison."""

Chains = list[list[BlockKey]]


def chains_in(requests: Sequence[TraceRequest], blocks: str = "full", block_tokens: int = BLOCK_TOKENS) -> Chains:
    """The block keys of each request, of its full blocks only or of all."""
    full = [request.input_length // block_tokens if blocks == "full" else None for request in requests]
    return chains_of(
        [(request.tenant, request.hash_ids[:count]) for request, count in zip(requests, full, strict=True)]
    )


def hit_share(chains: Chains, policy: str, capacity: int) -> float:
    """Hits of all block references under a policy, or the optimum; a request's hits stop at its first miss."""
    return optimum(chains, capacity) if policy == OPTIMUM else replay(chains, COMPARED[policy](), capacity)


def cache(
    source: Source,
    progress: Progress,
    policies: Sequence[str] = (*COMPARED, OPTIMUM),
    capacities: Sequence[int] = CAPACITIES,
    blocks: str = "all",
) -> Result:
    """A row per capacity, a column per policy.

    Raises:
        ConfigError: there is no such policy, or a way of counting.
    """
    for policy in policies:
        if policy not in (*COMPARED, OPTIMUM):
            raise ConfigError("policies", f"{policy!r} is none of {', '.join((*COMPARED, OPTIMUM))}")
    if blocks not in BLOCKS:
        raise ConfigError("blocks", f"must be one of {', '.join(BLOCKS)}, is {blocks!r}")
    chains = chains_in(list(source.read()), blocks, source.block_tokens)
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
