"""Exploit a long prefix, explore with a short one.

Source: E2 of "Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (ICLR'25, arXiv 2407.00023). Two terms
come from this code: an instance's load is the predicted queue instead of the last three minutes' work, as the better
predictor, and eviction has no cost, as instances report no hit rates for blocks.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.policies.scoring import held_share, least

IMBALANCE = 2.0
"""Times the least load, beyond which an instance is not exploited."""


@frozen
class Preble:
    """The instance that holds most of the prompt, if more than half; else the least load and cost together."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by the cost, the exploited instance first."""
        explored = least(candidates, max(limit, len(candidates)), lambda candidate: candidate.known_s)
        exploited = max(explored, key=lambda choice: (choice.local_blocks, -choice.queue_s))
        spare_s = IMBALANCE * min(choice.queue_s + choice.alone_s for choice in explored)
        if held_share(candidates.request, exploited.local_blocks) > 0.5 and exploited.queue_s <= spare_s:
            explored = [exploited, *(choice for choice in explored if choice.id != exploited.id)]
        return explored[:limit]
