"""Policies that choose the least predicted time to first token (TTFT)."""

from collections.abc import Sequence
from operator import attrgetter

from moonpool.frozen import frozen
from services.conductor.core.latency_model import PrefillChoice
from services.conductor.core.policies.base import Candidates

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
