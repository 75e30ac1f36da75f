"""The most free memory.

Source: the cost in NVIDIA Dynamo's KV router for decode workers: blocks in use there, including the request's. Blocks
of the prompt that the instance holds need not be sent.
"""

from collections.abc import Sequence
from heapq import nsmallest

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import DecodeCandidates, DecodeChoice


@frozen
class MostMemory:
    """The instance where the fewest blocks are in use, the request's new ones among them."""

    def order(self, candidates: DecodeCandidates, limit: int) -> Sequence[DecodeChoice]:
        choices = [candidates.predict(instance) for instance in candidates]
        return nsmallest(limit, choices, key=lambda choice: (_used(choice), choice.there.turn, choice.id))


def _used(choice: DecodeChoice) -> int:
    return choice.there.total_blocks - choice.there.available_blocks + choice.blocks - choice.held_blocks
