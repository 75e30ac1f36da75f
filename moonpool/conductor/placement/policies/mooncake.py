"""The least predicted time to first token.

Source: Algorithm 1 in "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving" (arXiv 2407.00079), with
the open points decided in docs/adr/0016-policies.md.
"""

from collections.abc import Sequence
from operator import attrgetter

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice

_KNOWN_S = attrgetter("known_s")
_ALONE_S = attrgetter("alone_s")


@frozen
class KVCacheCentric:
    """The least predicted time to first token, with every prefix there is."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by the predicted time to first token, without what later prompts are expected to take.

        Later prompts count in the request's limit: if the best instance would miss the limit, the first that keeps the
        limit is taken.
        """
        return candidates.keeping(candidates.least(limit, _KNOWN_S, _ALONE_S))


@frozen
class CacheAware:
    """The least predicted time to first token, if each instance uses only its own blocks."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by the predicted time to first token, without what later prompts are expected to take.

        Later prompts count in the request's limit: if the best instance would miss the limit, the first that keeps the
        limit is taken.
        """
        return candidates.keeping(candidates.least(limit, _KNOWN_S, _ALONE_S))
