"""The baselines of the Mooncake paper and of web servers, to compare with."""

from collections.abc import Sequence
from heapq import nsmallest
from operator import attrgetter

from moonpool.frozen import frozen
from services.conductor.core.latency_model import PrefillChoice
from services.conductor.core.policies.base import Candidates

_QUEUE_S = attrgetter("queue_s")


@frozen
class LoadBalance:
    """The shortest queue in seconds, whoever holds what."""

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
