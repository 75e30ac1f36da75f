"""Own time to the answer's end, and what the answer takes from the sequences of the same batch.

Each answer token makes a step longer, for every sequence that runs there: both terms are seconds that some answer
waits, so that they need no weights. docs/adr/0056-social-placement.md says the same of prompts.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import DecodeCandidates, DecodeChoice


@frozen
class SocialDecode:
    """The least seconds over all answers, this answer and the others together."""

    def order(self, candidates: DecodeCandidates, limit: int) -> Sequence[DecodeChoice]:
        """By own time and what others lose; of many instances, those where the answer ends soonest are compared."""
        found = candidates.least(2 * limit)
        return sorted(found, key=lambda choice: (choice.compared_s + choice.others_s, choice.there.turn, choice.id))[
            :limit
        ]
