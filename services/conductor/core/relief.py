"""Moves requests away from decode instances that drain and from slow ones, where others can take them over.

A sequence that runs is *moved*: it goes on where it is and is followed as before, while the request is placed anew with
the tokens that it has. The new place is told what the old one has made meanwhile, and goes on behind it; with its first
message the old one is ended. If there is no new place, it stays. A prompt that waits at a slow prefill instance is
placed anew at once. docs/adr/0018-failover.md has the rules.
"""

from collections.abc import Iterator, Mapping

from services.conductor.core.legs import Legs
from services.conductor.core.life import PrefillLeg, Request
from services.conductor.core.picture import Picture

AT_ONCE = 4
"""Requests that are being moved away from an instance at once: so that each is soon prefilled."""


class Relief:
    """Says who is to be moved.

    Args:
        picture: who drains, and who is slow.
        legs: keeps the calls.
    """

    def __init__(self, picture: Picture, legs: Legs) -> None:
        self._picture = picture
        self._legs = legs

    def leaving(self, now: float, instance: str, requests: Mapping[int, Request]) -> list[Request]:
        """Those that are to be moved away from an instance now."""
        if not self._picture.relieved(instance):
            return []
        here = list(self._running(instance, requests))
        free = AT_ONCE - sum(request.moving for request in here)
        next_ones = [request for request in here if not request.moving and request.stays_until <= now]
        return [*self._prompts(instance, requests), *next_ones[: max(0, free)]]

    def _prompts(self, instance: str, requests: Mapping[int, Request]) -> Iterator[Request]:
        """Requests whose prompt waits, or is computed, at a prefill instance."""
        for number in self._legs.at(instance):
            attempt = requests[number].attempt
            if attempt is not None and attempt.prefill is PrefillLeg.SENT and attempt.plan.prefill.id == instance:
                yield requests[number]

    def _running(self, instance: str, requests: Mapping[int, Request]) -> Iterator[Request]:
        """Requests whose sequence, that their client hears, is at an instance."""
        for _, hold in self._legs.calls.followed(instance):
            request = requests.get(hold.request)
            if request is None:
                continue
            attempt = request.attempt
            mine = attempt is not None and attempt.sequence == hold.sequence and attempt.runs(beams=request.ask.beams)
            if (mine and not request.adopted) or self._legs.calls.get(request.adopted) is hold:
                yield request
