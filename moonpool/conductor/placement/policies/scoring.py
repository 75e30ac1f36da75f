"""What the policies that score every instance have in common."""

from collections.abc import Callable, Sequence

from moonpool.conductor.placement.base import Candidates, PlacementRequest, PrefillChoice


def least(candidates: Candidates, limit: int, score: Callable[[PrefillChoice], float]) -> Sequence[PrefillChoice]:
    """Return the choices of the least scores, best first, after a look at every instance.

    Equal scores are ordered as `Candidates.least` orders them.
    """
    rated = [(choice, place) for place in candidates for choice in [candidates.predict(place)]]
    ranked = sorted([(score(choice), choice.there.stages, place, choice) for choice, place in rated])
    return [choice for *_, choice in ranked[:limit]]


def new_tokens(request: PlacementRequest, blocks: float) -> float:
    """Return the number of tokens of the prompt that `blocks` leading blocks leave to compute; at least one."""
    return max(1.0, request.prompt_tokens * (1.0 - held_share(request, blocks)))


def held_share(request: PlacementRequest, blocks: float) -> float:
    """Return the share of the prompt in `blocks` leading blocks."""
    return min(1.0, blocks / request.prompt_blocks) if request.prompt_blocks else 0.0
