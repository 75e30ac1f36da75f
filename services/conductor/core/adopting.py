"""Resumed requests: their sequence may still be at decode, whose conductor was lost, and is taken over there.

Where decode does not know it any more, or is gone itself, the request is placed anew like any other whose attempt has
failed. docs/adr/0012-resuming.md has the rules.
"""

from collections.abc import Iterable

from moonpool.core.timers import Timers
from services.conductor.core.decodes import Answer
from services.conductor.core.legs import Call, Hold, Legs
from services.conductor.core.life import DecodeLeg, Phase, Request
from services.conductor.core.messages import Action, Adopt, LetGo
from services.conductor.core.picture import EXPECTED_ANSWER_TOKENS, Picture


class Adopting:
    """Takes sequences over.

    Args:
        wait_s: seconds for which the instance that has the sequence may take to join a conductor that has just started.
        picture: who is there.
        legs: keeps the calls.
        timers: shared by the whole core.
    """

    def __init__(self, wait_s: float, picture: Picture, legs: Legs, timers: Timers[tuple[str, int]]) -> None:
        self._wait_s = wait_s
        self._picture = picture
        self._legs = legs
        self._timers = timers

    def begin(self, now: float, request: Request, out: list[Action]) -> bool:
        """Takes the sequence of a new request over, or waits for its instance.

        Returns:
            False when it is to be placed like any other.
        """
        owner = request.ask.resumed.target if request.ask.resumed is not None else None
        if owner is None:
            return False
        there = self._picture.incarnation(owner.decode)
        if there and there != owner.incarnation:
            return False  # restarted: it knows nothing of the sequence
        if there:
            self._adopt(now, request, out)
        else:
            request.phase = Phase.OWNER
            self._timers.set(("owner", request.ask.number), now + self._wait_s)
        return True

    def joined(self, now: float, instance: str, requests: Iterable[Request], out: list[Action]) -> list[Request]:
        """An instance has joined: what waits for it goes on. Returns those that are to be placed anew."""
        mine = [it for it in requests if it.phase is Phase.OWNER and _owner(it) == instance]
        for request in mine:
            self._timers.clear(("owner", request.ask.number))
        return [request for request in mine if not self.begin(now, request, out)]

    def lost(self, who: tuple[str, int], requests: Iterable[Request], out: list[Action]) -> list[Request]:
        """An incarnation of an instance is lost. Returns the requests whose sequence was taken over there.

        One that was being moved away goes on at its new place.
        """
        mine = [it for it in requests if it.adopted and self._follows(it) == who]
        for request in mine:
            self._legs.end_adopted(request, out)
        return [request for request in mine if request.phase is Phase.ADOPTED]

    def let_go(self, request: Request, out: list[Action]) -> None:
        """Leaves what runs at decode there: the conductor ends, and another one may take it over."""
        attempt = request.attempt
        if request.adopted:
            out.append(LetGo(request.adopted))
            request.adopted = 0
        if attempt is not None and attempt.decode in (DecodeLeg.STARTED, DecodeLeg.STREAMING):
            out.append(LetGo(attempt.sequence_io))
            attempt.decode = DecodeLeg.OVER

    def _follows(self, request: Request) -> tuple[str, int] | None:
        hold = self._legs.calls.get(request.adopted)
        return (hold.instance, hold.incarnation) if hold is not None else None

    def _adopt(self, now: float, request: Request, out: list[Action]) -> None:
        resumed, number = request.ask.resumed, request.ask.number
        assert resumed is not None
        assert resumed.target is not None
        sequence, target = resumed.sequence, resumed.target
        claim = self._picture.claim_decode(target.decode, self._running(now, request))
        hold = Hold(Call.ADOPT, number, sequence, target.decode, target.incarnation, claim)
        request.phase, request.adopted = Phase.ADOPTED, self._legs.calls.begin(hold)
        out.append(Adopt(request.adopted, number, sequence, target, resumed.fence))

    def _running(self, now: float, request: Request) -> Answer:
        """What is there already: its blocks are in what the instance tells, as soon as it reports."""
        ask, tokens, choices = request.ask, request.tokens, request.ask.choices
        expected = self._picture.forecasts.lengths.expected(ask.stratum, min(ask.max_tokens, EXPECTED_ANSWER_TOKENS))
        context = (ask.prompt_tokens + tokens) * choices
        return Answer(context, 0, choices, ask.stratum, now, tokens, number=0, tokens=expected)

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Asserts that who waits for an instance does not wait for ever, and who has a sequence follows it."""
        for request in requests:
            waits = self._timers.at(("owner", request.ask.number)) is not None
            assert (request.phase is Phase.OWNER) == waits
            assert (request.phase is Phase.ADOPTED) <= bool(request.adopted)
            if request.adopted:
                hold = self._legs.calls.get(request.adopted)
                assert hold is not None
                assert hold.call in (Call.ADOPT, Call.SEQUENCE)
                assert hold.request == request.ask.number


def _owner(request: Request) -> str:
    resumed = request.ask.resumed
    return resumed.target.decode if resumed is not None and resumed.target is not None else ""
