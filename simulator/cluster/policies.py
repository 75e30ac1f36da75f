"""How a prefill instance is chosen: the conductor's own algorithm, and the baselines of the Mooncake paper."""

from collections.abc import Callable, Mapping, Sequence

from moonpool.core.draws import draw_below
from services.conductor.placement import Demand, PrefillChoice, PrefillView, Shape, predict_prefill, rank_prefills
from services.conductor.stores import StoreView
from simulator.cluster.config import ClusterConfig

Choose = Callable[[ClusterConfig, int, Demand, Shape, Sequence[PrefillView], Sequence[StoreView]], PrefillChoice]
"""(config, number of the decision, what is wanted, sizes, prefill instances, kvstores) -> the choice."""


def _kvcache_centric(
    config: ClusterConfig,
    number: int,
    demand: Demand,
    shape: Shape,
    prefills: Sequence[PrefillView],
    stores: Sequence[StoreView],
) -> PrefillChoice:
    """Moonpool's: the least predicted time to first token over queue, loading from a store, and computing."""
    return rank_prefills(demand, shape, prefills, stores, config.threshold)[0]


def _cache_aware(
    config: ClusterConfig,
    number: int,
    demand: Demand,
    shape: Shape,
    prefills: Sequence[PrefillView],
    stores: Sequence[StoreView],
) -> PrefillChoice:
    """The same without stores: only an instance's own blocks are of use."""
    return rank_prefills(demand, shape, prefills, (), config.threshold)[0]


def _load_balance(
    config: ClusterConfig,
    number: int,
    demand: Demand,
    shape: Shape,
    prefills: Sequence[PrefillView],
    stores: Sequence[StoreView],
) -> PrefillChoice:
    """The shortest queue, whoever holds what."""
    best = min(prefills, key=lambda view: (view.suspect, view.queue_s, view.placed, view.id))
    return predict_prefill(demand, shape, best, None, config.threshold)


def _random(
    config: ClusterConfig,
    number: int,
    demand: Demand,
    shape: Shape,
    prefills: Sequence[PrefillView],
    stores: Sequence[StoreView],
) -> PrefillChoice:
    """Any, by seed."""
    view = prefills[draw_below(len(prefills), config.seed, number)]
    return predict_prefill(demand, shape, view, None, config.threshold)


POLICIES: Mapping[str, Choose] = {
    "random": _random,
    "load-balance": _load_balance,
    "cache-aware": _cache_aware,
    "kvcache-centric": _kvcache_centric,
}
"""By the name that experiments use, the worst first."""
