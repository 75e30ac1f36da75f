"""New tokens times prompts there.

Source: LMetric, "Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling" (OSDI'26, arXiv
2603.15202). The product needs no weight between the two: a weight would cancel out in the comparison.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.policies.scoring import least, new_tokens


@frozen
class LMetric:
    """The least product of tokens to compute and prompts at the instance, the new prompt included."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        request = candidates.request
        return least(
            candidates,
            limit,
            lambda candidate: new_tokens(request, candidate.local_blocks) * (candidate.there.prompts + 1.0),
        )
