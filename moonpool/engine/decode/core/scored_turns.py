"""Turns of sequences with log probabilities: beside other tenants, a step has few of one tenant's."""

from bisect import bisect_right
from operator import attrgetter

from moonpool.engine.decode.core.present_tenants import PresentTenants
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.decode.core.tenant_shares import by_tenant

SCORED_ROWS = 8
"""Sequences with log probabilities that one tenant has in a step beside other tenants."""


class ScoredTurns:
    """Chooses the sequences that go without a token in the next step, while others of their tenant have one.

    With 20 likely tokens, a sequence's token costs the step and all that passes the token on several times as much as a
    plain one. Other tenants' tokens would wait for that. Sequences of a search fork together after each step, so they
    have no turns.

    Args:
        tenants: those that are present at the instance, also with requests whose KV has still to come.
    """

    def __init__(self, tenants: PresentTenants) -> None:
        self._tenants = tenants
        self._last: dict[str, int] = {}  # by tenant with turns: the sequence that had the last one

    def needed(self, running: list[DecodeRequest], now: float) -> bool:
        """Return whether a tenant has too many rows of a step with the `running` requests."""
        return self._tenants.several(now) and _has_many(running)

    def resting(self, running: list[DecodeRequest], now: float) -> list[RequestSequence]:
        """Return the running sequences without a turn in the next step, and count the turns of the others.

        Turns go on where they were after steps without other tenants.
        """
        if not self.needed(running, now):
            self._last = self._last if _has_many(running) else {}
            return []
        resting, last = list[RequestSequence](), dict[str, int]()
        for tenant, requests in by_tenant(filter(_is_scored, running)).items():
            by_id = attrgetter("id")
            sequences = sorted((sequence for request in requests for sequence in request.sequences), key=by_id)
            first = bisect_right(sequences, self._last.get(tenant, -1), key=by_id)
            turns = [*sequences[first:], *sequences[:first]]
            last[tenant] = turns[:SCORED_ROWS][-1].id
            resting += turns[SCORED_ROWS:]
        self._last = last
        return resting

    def digest(self) -> list[tuple[str, int]]:
        """Return a hash input: who had the last turn."""
        return list(self._last.items())


def _is_scored(request: DecodeRequest) -> bool:
    return bool(request.spec.logprob_bytes) and request.search is None


def _has_many(running: list[DecodeRequest]) -> bool:
    """Return whether one tenant has more scored sequences than a step has beside other tenants."""
    tenants = by_tenant(filter(_is_scored, running)).values()
    return any(sum(len(request.sequences) for request in requests) > SCORED_ROWS for requests in tenants)
