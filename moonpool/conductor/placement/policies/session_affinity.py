"""A session stays at its instance, within a bound.

Source: the session affinity of NVIDIA Dynamo's frontend and of llm-d, where a session's turns go to the worker of the
last one; here only while the first token is at most `BOUND_S` later there. Otherwise as the default rule.
"""

from collections.abc import Sequence

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.policies.social import Social

BOUND_S = 2.0
"""Seconds by which the first token may come later than at the first choice."""


@frozen
class SessionAffinity:
    """The default rule, with the instance of the session's last turn first if that costs little."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order as `Social`, but for the session's instance."""
        choices, session = Social().order(candidates, limit), candidates.request.session
        if session is None or choices[0].id == session.prefill:
            return choices
        kept = next((choice for choice in choices if choice.id == session.prefill), None)
        if kept is None:  # the default rule gives a few instances only
            found = [candidates.predict(place) for place in candidates if place.name == session.prefill]
            kept = next((choice for choice in found if not choice.excluded), None)
        if kept is None or kept.ttft_s > choices[0].ttft_s + BOUND_S:
            return choices
        return [kept, *(choice for choice in choices if choice.id != kept.id)][:limit]
