"""The least tokens to compute, those that wait there among them.

Source: the cost in NVIDIA Dynamo's KV router for prefill workers: prompt tokens under way on the worker, and the new
prompt's tokens not found there. Blocks found in host memory or on disk count in part, as loading takes time.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.policies.scoring import least, new_tokens

MEMORY_CREDIT, SSD_CREDIT = 0.75, 0.25
"""Share of a block that counts as found if the block is loaded from memory elsewhere, or from SSD."""


@frozen
class DynamoCost:
    """The cost of Dynamo's KV router, at temperature 0."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        request = candidates.request

        def cost(choice: PrefillChoice) -> float:
            loaded = choice.used_blocks - choice.local_blocks
            found = (
                choice.local_blocks + MEMORY_CREDIT * (loaded - choice.cold_blocks) + SSD_CREDIT * choice.cold_blocks
            )
            return choice.there.tokens + new_tokens(request, found)

        return least(candidates, limit, cost)
