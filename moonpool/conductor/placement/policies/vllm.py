"""The instance that lacks little of the prompt, else the instance with the fewest prompts.

Source: KV-aware routing in vLLM's production stack (`--routing-logic kvaware`), whose controller knows which KV
instances hold. Where too many tokens would be left to compute, the stack goes by session or by requests per second;
here the prompts at the instance are counted, which both stand for.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.policies.scoring import least, new_tokens

MOST_LEFT = 2000
"""Tokens that the instance with the longest prefix may lack to be chosen for the prompt."""


@frozen
class VllmRouter:
    """KV-aware routing of vLLM's production stack."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by prompts there; an instance that lacks little goes first."""
        fewest = least(candidates, max(limit, len(candidates)), lambda candidate: candidate.there.prompts)
        best = max(fewest, key=lambda choice: choice.local_blocks)
        if best.local_blocks and new_tokens(candidates.request, best.local_blocks) <= MOST_LEFT:
            fewest = [best, *(choice for choice in fewest if choice.id != best.id)]
        return fewest[:limit]
