"""What must hold between any two events in the life of requests."""

from moonpool.core.timers import Timers
from services.conductor.core.book import TIMERS, Book
from services.conductor.core.legs import MAX_RESERVES, Call, Legs
from services.conductor.core.life import Attempt, DecodeLeg, Phase, PrefillLeg, Request
from services.conductor.core.room import RoomQueue


def check_requests(book: Book, legs: Legs, rooms: RoomQueue, timers: Timers[tuple[str, int]]) -> None:
    """Asserts it of all requests."""
    rooms.check_invariants()
    legs.check_places(book.requests.values())
    reserves = [hold.request for _, hold in legs.calls if hold.call is Call.RESERVE]
    for number, request in book.requests.items():
        assert number == request.ask.number
        assert request.reserves == reserves.count(number) <= MAX_RESERVES
        assert (request.phase is Phase.ROOM) == (number in rooms)
        assert (request.phase is Phase.PLACED) == (request.attempt is not None)
        assert (request.phase is Phase.MEMBER) == (number in book.memberless)
        assert (request.phase is Phase.PAUSE) == (timers.at(("pause", number)) is not None)
        assert timers.at(("deadline", number)) is not None
        if request.phase in (Phase.ROOM, Phase.MEMBER):
            assert timers.at(("wait", number)) is not None, "it would wait for ever"
        if request.attempt is not None:
            _check_attempt(request, request.attempt, legs, timers)
    claims = legs.held(book.requests.values())
    assert len(set(claims)) == len(claims), "a claim is held twice"
    assert len(timers) <= len(TIMERS) * len(book.requests) + len(legs.calls)


def _check_attempt(request: Request, attempt: Attempt, legs: Legs, timers: Timers[tuple[str, int]]) -> None:
    assert (attempt.prefill in (PrefillLeg.NONE, PrefillLeg.SENT)) == bool(attempt.claim)
    if attempt.prefill in (PrefillLeg.SENT, PrefillLeg.TOKEN):
        assert attempt.prefill_io in legs.calls
    assert (attempt.decode in (DecodeLeg.STARTED, DecodeLeg.STREAMING)) == (attempt.sequence_io in legs.calls)
    assert (attempt.decode is DecodeLeg.PROMISED) == bool(attempt.promise)
    if attempt.decode is DecodeLeg.ASKED:
        assert attempt.asked or attempt.late or request.reserves == MAX_RESERVES, "nothing is waited for"
        assert attempt.prefill is PrefillLeg.NONE
    elif attempt.decode is not DecodeLeg.STREAMING and attempt.prefill is PrefillLeg.OVER and attempt.torn:
        assert timers.at(("word", request.ask.number)) is not None, "it would wait for ever"
