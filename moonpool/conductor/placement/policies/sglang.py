"""The longest prefix while the load is even, otherwise the fewest prompts.

Source: the cache-aware policy in SGLang's router (sgl-router, now the SGLang Model Gateway), which vLLM's Rust router
shares. The router's prompt tree approximates what instances hold; here the conductor's index is exact. The gateway
counts running requests, which number hundreds at a decoding instance, and calls a difference of 64 uneven; a prefill
instance has few, so 4 replaces 64 here. With 64 all prompts of a conversation would stay where they are whatever waits
there.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.policies.scoring import held_share, least

UNEVEN_BY, UNEVEN_TIMES = 4, 1.5
"""The load is uneven if the longest queue is this many prompts longer, and this many times as long, as the shortest."""
LEAST_MATCH = 0.3
"""Share of the prompt that an instance must hold to be chosen for the prompt."""


@frozen
class SglangRouter:
    """The cache-aware policy of SGLang's router."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by prompts there; the instance that holds most goes first while the load is even."""
        fewest = least(candidates, max(limit, len(candidates)), lambda candidate: candidate.there.prompts)
        shortest, longest = fewest[0].there.prompts, fewest[-1].there.prompts
        uneven = longest - shortest > UNEVEN_BY and longest > UNEVEN_TIMES * shortest
        best = max(fewest, key=lambda choice: choice.local_blocks)
        if not uneven and held_share(candidates.request, best.local_blocks) > LEAST_MATCH:
            fewest = [best, *(choice for choice in fewest if choice.id != best.id)]
        return fewest[:limit]
