"""The built-in placement policies."""

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from operator import attrgetter

from moonpool.frozen import frozen
from services.conductor.placement.base import Candidates, PlacementPolicy, PrefillChoice

_KNOWN_S = attrgetter("known_s")
_ALONE_S = attrgetter("alone_s")


@frozen
class KVCacheCentric:
    """The least predicted time to first token, with every prefix there is: Algorithm 1 of the Mooncake paper."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the predicted time to first token, without what later prompts are expected to take.

        That counts in the request's limit: where the best would miss it, the first that keeps it is taken.
        """
        return candidates.keeping(candidates.least(limit, _KNOWN_S, _ALONE_S))


@frozen
class CacheAware:
    """The least predicted time to first token, each instance with its own blocks only."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the predicted time to first token, without what later prompts are expected to take.

        That counts in the request's limit: where the best would miss it, the first that keeps it is taken.
        """
        return candidates.keeping(candidates.least(limit, _KNOWN_S, _ALONE_S))


_QUEUE_S = attrgetter("queue_s")


@frozen
class LoadBalance:
    """The shortest queue in seconds, whatever the prefixes."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the seconds of queue."""
        return candidates.least(limit, _QUEUE_S, lambda _: 0.0)


@frozen
class RoundRobin:
    """The instance that was chosen least recently."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the turn of each; by name before the first one."""
        return [candidates.predict(place) for place in nsmallest(limit, candidates, key=attrgetter("turn", "name"))]


@frozen
class Random:
    """Any instance."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """The first ones of a random order (Fisher and Yates)."""
        places = sorted(candidates, key=attrgetter("name"))
        for at in range(min(limit, len(places))):
            other = at + candidates.draw(len(places) - at, at)
            places[at], places[other] = places[other], places[at]
        return [candidates.predict(place) for place in places[:limit]]


DEFAULT_POLICY = "kvcache_centric"
POLICIES: Mapping[str, PlacementPolicy] = {
    "random": Random(),
    "round_robin": RoundRobin(),
    "load_balance": LoadBalance(),
    "cache_aware": CacheAware(),
    DEFAULT_POLICY: KVCacheCentric(),
}
"""By name, the simplest first."""
