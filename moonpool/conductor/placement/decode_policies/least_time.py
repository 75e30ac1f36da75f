"""The least time to the answer's end, where speeds of identical instances are not told apart by chance."""

import sys
from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import DecodeCandidates, DecodeChoice

SPEED_NOISE = 1.5
"""Factor by which measured speeds of identical instances differ on noisy machines."""


@frozen
class LeastTime:
    """The instance where the answer ends soonest; if that differs by less than noise, by what is known for sure.

    Otherwise the luckiest measurement at start would draw all light load to one instance.
    """

    def order(self, candidates: DecodeCandidates, limit: int) -> Sequence[DecodeChoice]:
        """By the seconds. Within noise by fewer sequences, more blocks held, less context, and least recent choice."""
        found = candidates.least(limit)
        near_s = SPEED_NOISE * min([choice.compared_s for choice in found], default=0.0)

        def order(choice: DecodeChoice) -> tuple[float, float, float, float, str]:
            there = choice.there
            if choice.compared_s > near_s:
                return sys.maxsize, choice.compared_s, there.turn, 0, choice.id
            return there.sequences, -choice.held_blocks, there.context_tokens, there.turn, choice.id

        return sorted(found, key=order)
