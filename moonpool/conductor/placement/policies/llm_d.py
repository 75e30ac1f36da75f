"""Weighted scores, and "sticky until saturated".

Source: the scorers in llm-d's inference scheduler (prefix cache 3, KV memory 2, queue 2, each from 0 to 1), and the
2026 rule that keeps a prompt at the instance with most of the prefix until that instance is saturated.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.policies.scoring import held_share, least

PREFIX_WEIGHT, MEMORY_WEIGHT, QUEUE_WEIGHT = 3.0, 2.0, 2.0
STICKY_SHARE = 0.8
"""Share of the prompt that an instance must hold to keep the prompt."""
SATURATED_S = 5.0
"""Seconds by which the first token may come later there than anywhere else."""


@frozen
class LlmdScorers:
    """The highest weighted sum of three scores."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by the sum. The queue's score goes from 1 at the shortest to 0 at the longest, in prompts."""
        everywhere = least(candidates, max(limit, len(candidates)), lambda candidate: candidate.there.prompts)
        shortest, longest = everywhere[0].there.prompts, everywhere[-1].there.prompts

        def score(choice: PrefillChoice) -> float:
            queue = (longest - choice.there.prompts) / (longest - shortest) if longest > shortest else 1.0
            memory = 1.0 - min(1.0, choice.there.tokens / max(1.0, self._tokens(candidates, choice)))
            prefix = held_share(candidates.request, choice.local_blocks)
            return PREFIX_WEIGHT * prefix + MEMORY_WEIGHT * memory + QUEUE_WEIGHT * queue

        return sorted(everywhere, key=score, reverse=True)[:limit]

    def _tokens(self, candidates: Candidates, choice: PrefillChoice) -> float:
        """Return the number of tokens that the instance's pool holds."""
        request = candidates.request
        return choice.there.total_blocks * request.prompt_tokens / max(1, request.prompt_blocks)


@frozen
class LlmdSticky:
    """Where most of the prompt is held, until that instance is saturated; else the least work to do there."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by the seconds of work, the instances that keep the prompt first."""
        everywhere = least(
            candidates, max(limit, len(candidates)), lambda candidate: candidate.queue_s + candidate.busy_s
        )
        soonest_s = min(choice.known_s for choice in everywhere)

        def leaves(choice: PrefillChoice) -> bool:
            saturated = choice.known_s > soonest_s + SATURATED_S
            return saturated or held_share(candidates.request, choice.local_blocks) < STICKY_SHARE

        return sorted(everywhere, key=leaves)[:limit]
