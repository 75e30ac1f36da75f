"""Baselines: what web servers do, and the Mooncake paper's comparison (arXiv 2407.00079, section 8)."""

from collections.abc import Sequence
from heapq import nsmallest
from operator import attrgetter

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice

_QUEUE_S = attrgetter("queue_s")


@frozen
class LoadBalance:
    """The shortest queue in seconds, whatever the prefixes. With `stores`, what an instance lacks is loaded."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by the seconds of queue."""
        return candidates.least(limit, _QUEUE_S, lambda _: 0.0)


@frozen
class RoundRobin:
    """The instance that was chosen least recently."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by the turn of each; by name before the first one."""
        return [candidates.predict(place) for place in nsmallest(limit, candidates, key=attrgetter("turn", "name"))]


@frozen
class Random:
    """Any instance."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Return the first instances in a random order (Fisher and Yates)."""
        places = sorted(candidates, key=attrgetter("name"))
        for at in range(min(limit, len(places))):
            other = at + candidates.draw(len(places) - at, at)
            places[at], places[other] = places[other], places[at]
        return [candidates.predict(place) for place in places[:limit]]
