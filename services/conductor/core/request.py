"""The life of requests: placed, reserved, prefilled, decoded; again after a failed attempt; each ends exactly once.

A new attempt goes on from the prompt and the tokens so far: sampling depends on the position alone (docs/adr/0006).
"""

from moonpool.core.digest import digest_of
from moonpool.core.fair import Shares
from moonpool.core.kernel import Cancel, Ended, Tick
from moonpool.core.timers import Timers
from services.conductor.core.admission import Gate
from services.conductor.core.adopting import Adopting
from services.conductor.core.book import Book
from services.conductor.core.checks import check_requests
from services.conductor.core.failures import DRAINS, FINAL, Failure, Kind, Stale, given_up
from services.conductor.core.legs import Call, Hold, Legs
from services.conductor.core.life import Attempt, DecodeLeg, Phase, PrefillLeg, Request
from services.conductor.core.line import Line
from services.conductor.core.messages import (
    Accepted,
    Action,
    Arrived,
    ClientGone,
    Delivered,
    Event,
    Finish,
    FirstToken,
    Joined,
    Left,
    Prefilled,
    Promised,
    Rehashed,
    Reported,
    Result,
    Stopped,
    Tokens,
)
from services.conductor.core.picture import Picture
from services.conductor.core.placing import Limits, Placing, stay
from services.conductor.core.relief import Relief
from services.conductor.core.room import RoomQueue

WORD_S = 0.5
"""How long decode may take to say whether it has everything, when prefill is lost before it has said so."""


class Requests:
    """The core: all requests of one conductor."""

    def __init__(self, limits: Limits, picture: Picture) -> None:
        self.picture = picture
        self._timers: Timers[tuple[str, int]] = Timers()
        self._shares = Shares()
        self.rooms = RoomQueue(self._shares)
        self.line = Line(self._shares, self._timers, limits.max_queued, limits.max_queued_bytes)
        self._lengths = picture.forecasts.lengths
        gate = Gate(limits.admission, picture.forecasts)
        self._legs = Legs(picture, self._timers, limits.reserve_timeout_s, gate)
        self._book = Book(self._legs, self.rooms, self.line, self._timers, self._lengths)
        waiting = self.rooms, self.line, self._shares
        self._placing = Placing(limits, picture, self._book, self._legs, *waiting, self._timers, gate)
        self._adopting = Adopting(limits.adopt_wait_s, picture, self._legs, self._timers)
        self._relief = Relief(picture, self._legs)

    def __len__(self) -> int:
        return len(self._book.requests)

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return len(self._legs.calls)

    @property
    def stale(self) -> int:
        """Prompts that prefill instances have not taken, as their queues were longer than thought."""
        return self._legs.staleness.answers

    @property
    def claims(self) -> list[int]:
        """What is claimed in the picture."""
        return self._legs.held(self._book.requests.values())

    def due(self) -> float | None:
        """When the next deadline is over."""
        return self._timers.next()

    def handle(self, now: float, event: Event | Tick, out: list[Action]) -> None:
        """Takes an event; see `Core.handle`."""
        self._placing.rest(now)
        match event:
            case Reported() | Joined() | Left():  # most are these
                self._from_cluster(now, event, out)
            case Arrived(ask, keys):
                request = self._book.open(ask, keys)
                if not self._adopting.begin(now, request, out):
                    self._placing.place(now, request, out)
            case Rehashed() | Stopped() | ClientGone():
                self._from_client(now, event, out)
            case Accepted() | FirstToken() | Delivered() | Tokens():
                self._from_call(now, event, out)
            case Ended():
                self._ended(now, event, out)
        while (timer := self._timers.pop_due(now)) is not None:
            self._over(now, *timer, out)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _from_client(self, now: float, event: Rehashed | Stopped | ClientGone, out: list[Action]) -> None:
        request = self._book.requests.get(event.request)
        if request is None:
            return
        match event:
            case ClientGone():
                self._book.drop(now, request, out)
            case Stopped(failure=failure):
                self._stop(now, request, failure, out)
            case Rehashed(tokens=tokens, keys=keys):
                assert request.phase is Phase.KEYS, "keys that were not asked for"
                assert request.tokens == tokens, f"{tokens} tokens, not {request.tokens}"
                request.keys = keys
                self._placing.place(now, request, out)

    def _stop(self, now: float, request: Request, failure: Failure | None, out: list[Action]) -> None:
        """Ends an answer here as cancelled; one that cannot be told, or a request that was never placed, fails."""
        if failure is not None:
            self._book.fail(now, request, failure, out)
        elif request.begun:
            self._adopting.let_go(request, out)
            self._book.complete(now, request, Finish.CANCELLED, out)
        else:
            self._book.fail(now, request, request.refusal or DRAINS, out, refused=True)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _from_call(self, now: float, event: Accepted | FirstToken | Delivered | Tokens, out: list[Action]) -> None:
        hold = self._legs.calls.get(event.io)
        request = self._book.requests.get(hold.request) if hold is not None else None
        if hold is None or request is None:
            return
        attempt = request.attempt_as(hold.sequence)
        match event:
            case Accepted() if attempt is not None:
                self._legs.accepted(attempt, event.taken)
            case Delivered() if attempt is not None:
                attempt.delivered = True
            case FirstToken():
                self._first_token(now, request, attempt, event, out)
            case Tokens():
                if request.ask.choices == 1:  # of several, none tells the length of all
                    self.picture.grew(hold.claim, request.tokens + event.count, now)
                self._tokens(now, request, attempt, event, out)

    def _first_token(
        self, now: float, request: Request, attempt: Attempt | None, event: FirstToken, out: list[Action]
    ) -> None:
        request.grow(not event.known and not request.ask.beams)  # also one of an attempt that is over
        if attempt is not None:
            for load in event.how.loads:
                self.picture.loaded(attempt.claim, *load, now)
            self._legs.token(attempt, now)
            self._learn(now, attempt, event.how)
            self.picture.grew(attempt.promise, max(request.tokens, 1), now)
        if request.ask.choices == 1:
            self._lengths.begin(request.ask.number, request.ask.stratum)
        if event.finish is not None:
            self._book.complete(now, request, event.finish, out)
        elif attempt is not None and attempt.decode is DecodeLeg.PROMISED:
            self._legs.start(request, attempt, out)

    def _learn(self, now: float, attempt: Attempt, how: Prefilled) -> None:
        overhead_s = now - attempt.begun - how.there_s
        self.picture.first_token(attempt.plan, how.computed_tokens, how.there_s, overhead_s, now)
        for store, key in how.misses:
            self.picture.forget(store, [key], attempt.plan.index_version)

    def _tokens(self, now: float, request: Request, attempt: Attempt | None, event: Tokens, out: list[Action]) -> None:
        request.grow(event.count)
        self._lengths.grew(request.ask.number, request.tokens)
        if attempt is not None:  # decode begins only when it has everything
            attempt.decode = DecodeLeg.STREAMING
            self._timers.clear(("word", request.ask.number))
            self._arrived(now, request, out)
        if event.finish is not None:
            self._book.complete(now, request, event.finish, out, known=event.io if event.known else 0)

    def _arrived(self, now: float, request: Request, out: list[Action]) -> None:
        """A request that was being moved runs at its new place: the old sequence is ended, and another one may go."""
        old = self._legs.calls.get(request.adopted)
        self._legs.end_adopted(request, out)
        if old is not None:
            self._relieve(now, old.instance, out)

    def _ended(self, now: float, event: Ended[Result], out: list[Action]) -> None:
        hold = self._legs.calls.end(event.io)
        request = self._book.requests.get(hold.request)
        attempt = request.attempt_as(hold.sequence) if request is not None else None
        failure = event.result if isinstance(event.result, Failure) else None
        if hold.call is Call.RESERVE:
            self._reserved(now, event.io, hold, request, event.result, out)
            return
        if hold.call is Call.PREFILL:
            self._timers.clear(("linger", event.io))
        else:
            self.picture.release(hold.claim, now)
        if request is not None and request.adopted == event.io:
            failure = failure or Failure(Kind.STREAM, f"{hold.instance} ended the sequence without a reason")
            self._adopted_ended(now, request, failure, out)
        if request is None or attempt is None:
            return
        if isinstance(event.result, Stale) and attempt.may_be_stale:
            self._legs.not_taken(attempt, hold.instance, event.result, now)
            self._placing.again(now, request, attempt, out)
        elif hold.call is Call.PREFILL:
            self._prefill_ended(now, request, attempt, failure, out)
        else:
            self._sequence_ended(now, request, attempt, failure, out)

    def _adopted_ended(self, now: float, request: Request, failure: Failure, out: list[Action]) -> None:
        """A sequence without an attempt is over. One that was being moved goes on at its new place."""
        moving, request.adopted = request.moving, 0
        if not moving:
            self._attempt_failed(now, request, failure, [], out)
        elif failure.kind in FINAL:
            self._book.fail(now, request, failure, out)

    def _reserved(
        self, now: float, io: int, hold: Hold, request: Request | None, result: Result, out: list[Action]
    ) -> None:
        self._timers.clear(("reserve", io))
        got = self._legs.reserved(request, io, hold, result, now, out)
        if isinstance(result, Promised):
            self.rooms.promised(hold.instance)
        if request is None:
            return
        request.reserves, attempt = request.reserves - 1, request.attempt
        if attempt is None:
            return
        if got:
            self._placing.placed(now, request, attempt, out)
        elif attempt.decode is DecodeLeg.ASKED:
            if attempt.sequence == hold.sequence:
                self._placing.refused(request, attempt, hold, result)
            self._placing.ask(now, request, attempt, out)

    def _prefill_ended(
        self, now: float, request: Request, attempt: Attempt, failure: Failure | None, out: list[Action]
    ) -> None:
        """Matters only before decode has everything."""
        before, attempt.prefill = attempt.prefill, PrefillLeg.OVER
        prefill = attempt.plan.prefill.id
        if before is PrefillLeg.SENT:
            failure = failure or Failure(Kind.STREAM, f"{prefill} ended without a token")
            self._attempt_failed(now, request, failure, [prefill], out)
        elif before is PrefillLeg.TOKEN and attempt.torn:
            if failure is not None and failure.kind in (Kind.TRANSFER, Kind.FRAME) and attempt.target is not None:
                self._attempt_failed(now, request, failure, [prefill, attempt.target.decode], out)
            else:
                self._await_word(now, request)

    def _sequence_ended(
        self, now: float, request: Request, attempt: Attempt, failure: Failure | None, out: list[Action]
    ) -> None:
        assert attempt.target is not None
        decode = attempt.target.decode
        blamed = attempt.plan.prefill.id if attempt.torn else decode
        attempt.decode = DecodeLeg.OVER
        failure = failure or Failure(Kind.STREAM, f"{decode} ended the sequence without a reason")
        self._attempt_failed(now, request, failure, [blamed], out)

    def _await_word(self, now: float, request: Request) -> None:
        """Prefill is lost and may have sent everything: decode will begin, or say that it cannot."""
        self._timers.set(("word", request.ask.number), now + WORD_S)

    def _attempt_failed(
        self, now: float, request: Request, failure: Failure, blamed: list[str], out: list[Action]
    ) -> None:
        """Ends the attempt; the request is placed anew unless it has failed too often."""
        for instance in blamed:
            request.suspect(instance)
        if request.moving:
            self._legs.end_attempt(request, now, out)
            stay(request, now)
            return
        self._legs.end(request, now, out, complete=failure.fenced)
        request.recovering = True
        if failure.kind in FINAL:
            self._book.fail(now, request, failure, out)
        elif self._placing.is_last_failure(now, request, failure):
            self._book.fail(now, request, given_up(failure, request.failures.count), out)
        else:
            self._placing.anew(now, request, failure, out)

    # --- the cluster ------------------------------------------------------------------------------------------------

    def _from_cluster(self, now: float, event: Joined | Left | Reported, out: list[Action]) -> None:
        match event:
            case Reported(instance):
                self._placing.room_news(now, instance, out)
                self._relieve(now, instance, out)
            case Joined(facts):
                for request in self._adopting.joined(now, facts.id, self._book.requests.values(), out):
                    self._placing.place(now, request, out)
                self._placing.member_news(now, out)
                self._placing.room_news(now, facts.id, out)
            case Left(instance, incarnation, lost):
                self.rooms.forget(instance)
                who = instance, incarnation
                for number in self._legs.at(instance) if lost else ():
                    request = self._book.requests[number]
                    if request.attempt is not None:
                        self._lost(now, request, request.attempt, who, lost, out)
                for request in self._adopting.lost(who, self._book.requests.values(), out) if lost else ():
                    self._attempt_failed(now, request, Failure(Kind.STREAM, f"{instance} {lost}"), [instance], out)

    def _relieve(self, now: float, instance: str, out: list[Action]) -> None:
        """An instance that drains or is slow is rid of what it has, if another one takes it."""
        for request in self._relief.leaving(now, instance, self._book.requests):
            self._placing.move(now, request, instance, out)

    def _lost(
        self, now: float, request: Request, attempt: Attempt, who: tuple[str, int], why: str, out: list[Action]
    ) -> None:
        """An instance is lost, and with it what an attempt has there."""
        failure = Failure(Kind.STREAM, f"{who[0]} {why}")
        target = attempt.target
        if target is not None and who == (target.decode, target.incarnation):
            if attempt.decode is DecodeLeg.PROMISED:
                self._legs.lose_promise(attempt, now)
            self._attempt_failed(now, request, failure, [who[0]], out)
        elif who == (attempt.plan.prefill.id, attempt.incarnation):
            self._lost_prefill(now, request, attempt, failure, out)
        elif attempt.decode is DecodeLeg.ASKED and self._legs.gave_up(attempt, who, failure):
            request.suspect(who[0])
            self._placing.ask(now, request, attempt, out)

    def _lost_prefill(
        self, now: float, request: Request, attempt: Attempt, failure: Failure, out: list[Action]
    ) -> None:
        """Its call is given up. Decode is not to blame, and goes on when it has everything."""
        if attempt.prefill in (PrefillLeg.NONE, PrefillLeg.SENT):
            self._attempt_failed(now, request, failure, [attempt.plan.prefill.id], out)
        elif attempt.prefill is PrefillLeg.TOKEN:
            out.append(Cancel(attempt.prefill_io))
            attempt.prefill = PrefillLeg.OVER
            if attempt.torn:
                self._await_word(now, request)

    # --- time -------------------------------------------------------------------------------------------------------

    def _over(self, now: float, kind: str, number: int, out: list[Action]) -> None:
        """A deadline is over: of a call, or of a request."""
        if kind == "linger":
            out.append(Cancel(number))
            return
        if kind == "line":
            self._placing.look_again(now, out)
            return
        hold = self._legs.calls.get(number) if kind == "reserve" else None
        request = self._book.requests.get(hold.request if hold is not None else number)
        if request is None:
            return
        match kind:
            case "reserve":
                self._too_late(now, request, number, out)
            case "deadline":
                failure = Failure(Kind.DEADLINE, "the request took longer than it may")
                self._book.fail(now, request, failure, out)
            case "wait":
                self._placing.give_up(now, request, out)
            case "pause":
                self._placing.rehash(request, out)
            case "owner":
                self._placing.place(now, request, out)
            case _:
                self._attempt_over(now, request, kind, out)

    def _too_late(self, now: float, request: Request, io: int, out: list[Action]) -> None:
        attempt = request.attempt
        if attempt is not None and attempt.asked == io:
            self._legs.too_late(request, attempt)
            self._placing.ask(now, request, attempt, out)

    def _attempt_over(self, now: float, request: Request, kind: str, out: list[Action]) -> None:
        attempt = request.attempt
        assert attempt is not None, f"{kind} belongs to an attempt"
        if kind == "renew":
            self._legs.renew(request.ask.number, attempt, now, out)
        else:
            failure = Failure(Kind.STREAM, f"{attempt.plan.prefill.id} was lost before decode had everything")
            self._attempt_failed(now, request, failure, [attempt.plan.prefill.id], out)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two events."""
        check_requests(self._book, self._legs, self.rooms, self.line, self._timers)
        self._adopting.check_invariants(self._book.requests.values())

    def digest(self) -> bytes:
        """Hash of everything but the picture."""
        return digest_of(
            self._book.requests, self._book.crowd, self.rooms.state(), self.line, self._shares, self._legs, self._timers
        )
