"""The requests that have not ended, and their ends. Each ends exactly once, and gives back everything it holds."""

from moonpool.core.timers import Timers
from services.conductor.core.cost import PrefillChoice
from services.conductor.core.crowd import Crowd
from services.conductor.core.failures import Failure
from services.conductor.core.legs import Legs
from services.conductor.core.lengths import Lengths
from services.conductor.core.life import Request
from services.conductor.core.line import Line
from services.conductor.core.messages import Action, Ask, Complete, Drop, Fail, Finish
from services.conductor.core.room import RoomQueue

TIMERS = ("deadline", "wait", "pause", "renew", "word", "owner")
"""Those of a request; the others belong to calls."""


class Book:
    """All requests, by number."""

    def __init__(
        self, legs: Legs, rooms: RoomQueue, line: Line, timers: Timers[tuple[str, int]], lengths: Lengths
    ) -> None:
        self.requests: dict[int, Request] = {}
        self.crowd = Crowd()
        """Whose they are."""
        self.memberless: dict[int, None] = {}
        """Those that wait for an instance to join."""
        self._legs = legs
        self._rooms = rooms
        self._line = line
        self._timers = timers
        self._lengths = lengths

    def open(self, ask: Ask, keys: tuple[bytes, ...]) -> Request:
        """Takes a request in."""
        assert ask.number not in self.requests, f"request {ask.number} is there already"
        request = self.requests[ask.number] = Request(ask, keys)
        self.crowd.came(ask.place)
        if ask.resumed is not None:
            request.tokens, request.recovering = ask.resumed.tokens, True
        self._timers.set(("deadline", ask.number), ask.deadline)
        return request

    def complete(self, now: float, request: Request, finish: Finish, out: list[Action], *, known: int = 0) -> None:
        """The answer is whole, or goes on elsewhere; `known` is the call of a sequence that decode ends, 0 = none."""
        if finish is not Finish.CANCELLED:
            self._legs.answered(request, now)
        self._legs.end(request, now, out, complete=True, known=known)
        if finish is Finish.STOP:
            self._lengths.ended(request.ask.number, request.tokens)
        self._remove(now, request)
        out.append(Complete(request.ask.number, finish))

    def fail(
        self,
        now: float,
        request: Request,
        failure: Failure,
        out: list[Action],
        *,
        refused: bool = False,
        candidates: tuple[PrefillChoice, ...] = (),
    ) -> None:
        """The client gets an error; `refused` when no place was found, `candidates` being what was considered."""
        self._legs.end(request, now, out)
        self._remove(now, request)
        out.append(Fail(request.ask.number, failure, refused, candidates))

    def drop(self, now: float, request: Request, out: list[Action]) -> None:
        """The client is gone."""
        self._legs.end(request, now, out)
        self._remove(now, request)
        out.append(Drop(request.ask.number))

    def _remove(self, now: float, request: Request) -> None:
        number = request.ask.number
        del self.requests[number]
        self.crowd.left(request.ask.tenant, now)
        self.memberless.pop(number, None)
        self._rooms.remove(number)
        self._line.remove(number)
        self._lengths.removed(number)
        for kind in TIMERS:
            self._timers.clear((kind, number))
