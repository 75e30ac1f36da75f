"""What must hold between any two events in the life of requests."""

from collections import Counter

from moonpool.core.timers import Timers
from services.conductor.core.book import TIMERS, Book
from services.conductor.core.legs import MAX_RESERVES, Call, Legs
from services.conductor.core.life import Phase
from services.conductor.core.line import Line
from services.conductor.core.room import RoomQueue


def check_requests(book: Book, legs: Legs, rooms: RoomQueue, line: Line, timers: Timers[tuple[str, int]]) -> None:
    """Asserts it of all requests."""
    rooms.check_invariants()
    line.check_invariants()
    book.crowd.check_invariants(Counter([it.ask.tenant for it in book.requests.values()]))
    legs.check_places(book.requests.values())
    legs.calls.check_invariants()
    reserves = [hold.request for _, hold in legs.calls if hold.call is Call.RESERVE]
    for number, request in book.requests.items():
        assert number == request.ask.number
        assert request.reserves == reserves.count(number) <= MAX_RESERVES
        assert (request.phase is Phase.ROOM) == (number in rooms)
        assert (request.phase is Phase.QUEUE) == (number in line)
        assert (request.phase is Phase.PLACED) == (request.attempt is not None)
        assert (request.phase is Phase.MEMBER) == (number in book.memberless)
        assert (request.phase is Phase.PAUSE) == (timers.at(("pause", number)) is not None)
        assert timers.at(("deadline", number)) is not None
        if request.phase in (Phase.ROOM, Phase.MEMBER, Phase.QUEUE):
            assert timers.at(("wait", number)) is not None, "it would wait for ever"
        if request.attempt is not None:
            legs.check_attempt(request, request.attempt)
    claims = legs.held(book.requests.values())
    assert len(set(claims)) == len(claims), "a claim is held twice"
    assert len(timers) <= len(TIMERS) * len(book.requests) + len(legs.calls) + bool(len(line))
