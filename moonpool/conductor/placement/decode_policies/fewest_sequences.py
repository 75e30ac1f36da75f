"""The fewest sequences.

Source: the load balancer for vLLM's data-parallel engines, which sends a request to the engine with the fewest, and the
default in SGLang's router for decode workers, between two drawn workers; here all are looked at.
"""

from collections.abc import Sequence
from heapq import nsmallest

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import DecodeCandidates, DecodeChoice


@frozen
class FewestSequences:
    """The instance with the fewest sequences, then the one that was chosen least recently."""

    def order(self, candidates: DecodeCandidates, limit: int) -> Sequence[DecodeChoice]:
        choices = [candidates.predict(instance) for instance in candidates]
        return nsmallest(limit, choices, key=lambda choice: (choice.there.sequences, choice.there.turn, choice.id))
