"""Finds places for requests: plans, asks decode for room, and lets those wait that find none now."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from moonpool.core.fair import Shares
from moonpool.core.timers import Timers
from moonpool.errors import InvalidRequest, Unavailable
from moonpool.frozen import frozen
from services.conductor.core import admission
from services.conductor.core.admission import Admission, Gate
from services.conductor.core.book import Book
from services.conductor.core.cost import DecodeChoice, Need, expected_blocks, step_load_s
from services.conductor.core.crowd import left_free
from services.conductor.core.failures import NO_DECODE_ROOM, Failure, Kind
from services.conductor.core.legs import Hold, Legs
from services.conductor.core.life import Attempt, Phase, Request
from services.conductor.core.line import Line
from services.conductor.core.messages import Action, Announce, Rehash, Result
from services.conductor.core.picture import Picture
from services.conductor.core.plan import Plan
from services.conductor.core.room import RoomQueue, Waiter

MAX_ASKED = 4
"""Decode instances asked for one placement."""
FIRST_PAUSE_S = 0.05
PAUSE_FACTOR = 4.0
MAX_PAUSE_S = 3.2
STAY_S = 1.0
"""Seconds from a move that failed to the next."""
TOKEN_BYTES = 4


@frozen
class Limits:
    """How long requests are given, and how often; `ConductorConfig` describes each."""

    retries: int
    recovery_s: float
    room_wait_s: float
    reserve_timeout_s: float
    admission: Admission = Admission.PREDICTIVE
    adopt_wait_s: float = 5.0
    max_queued: int = 1024
    max_queued_bytes: int = 64 << 20


class Placing:
    """Gives requests attempts.

    Args:
        limits: of waiting.
        picture: plans.
        book: ends those that find no place.
        legs: carries attempts out.
        rooms: who waits for room.
        line: who waits for a limit that can be kept.
        shares: of the tenants; placements are charged to them, in predicted seconds.
        timers: shared by the whole core.
        gate: refuses.
    """

    def __init__(
        self,
        limits: Limits,
        picture: Picture,
        book: Book,
        legs: Legs,
        rooms: RoomQueue,
        line: Line,
        shares: Shares,
        timers: Timers[tuple[str, int]],
        gate: Gate,
    ) -> None:
        self._limits = limits
        self._gate = gate
        self._picture = picture
        self._book = book
        self._legs = legs
        self._rooms = rooms
        self._line = line
        self._shares = shares
        self._timers = timers

    def place(self, now: float, request: Request, out: list[Action]) -> None:
        """Plans a request and begins an attempt, or lets it wait, or refuses it."""
        self._book.memberless.pop(request.ask.number, None)
        ask = request.ask
        at_decode = not request.attempts and ask.choices == 1 and not ask.beams and not ask.scored
        plan, able = self._considered(now, request, at_decode=at_decode)
        if (
            isinstance(plan, Plan)
            and plan.at_decode
            and (isinstance(able, Failure) or not self._options(request, able, now))
        ):
            plan, able = self._considered(now, request, at_decode=False)
        if isinstance(plan, Failure):
            self._nowhere(now, request, plan, out)
        elif isinstance(able, Failure):
            self._not_kept(now, request, able, plan, out)
        else:
            attempt = self._legs.begin(request, plan, self._options(request, able, now), now)
            if plan.decodes:
                self.ask(now, request, attempt, out)
            else:
                self.placed(now, request, attempt, out)

    def _considered(
        self, now: float, request: Request, *, at_decode: bool
    ) -> tuple[Plan | Failure, Sequence[DecodeChoice] | Failure]:
        """A plan, and the decode instances that may serve it; either may be a refusal."""
        plan, ask = self._plan(now, request, at_decode=at_decode), request.ask
        if isinstance(plan, Failure):
            return plan, plan
        elapsed_s = request.elapsed_s(now)
        return plan, plan.decodes if request.recovering else self._gate.check(
            ask.slo, plan, ask.stratum, now, elapsed_s
        )

    def ask(self, now: float, request: Request, attempt: Attempt, out: list[Action]) -> None:
        """Asks the next decode instance; after the last one the request waits, or fails."""
        if self._legs.ask(request, attempt, now, out):
            return
        full, failed = attempt.full, attempt.failed
        self._legs.end_attempt(request, now, out)
        if attempt.plan.at_decode:  # others may have room for it when prefill computes it
            self.place(now, request, out)
        elif request.adopted:
            stay(request, now)
        elif full is not None or failed is None:
            self._no_room(now, request, admission.no_room(full, attempt.plan), attempt.plan, out)
        elif failed.kind is Kind.INVALID:
            self._book.fail(now, request, failed, out)
        else:
            self._not_asked(now, request, failed, out)

    def refused(self, request: Request, attempt: Attempt, hold: Hold, result: Result) -> None:
        """Notes why an instance gave no promise: it is full, or too slow, or could not be asked."""
        if isinstance(result, Failure) and result.kind is Kind.OVERLOADED:
            attempt.full = result
            room, total = self._picture.decodes.room_of(hold.instance)
            if result.reason == NO_DECODE_ROOM and total:  # it is there still
                self._rooms.refused(hold.instance, room)
            return
        restarted = Failure(Kind.UNAVAILABLE, f"{hold.instance} was restarted")
        attempt.failed = result if isinstance(result, Failure) else restarted
        request.suspect(hold.instance)

    def placed(self, now: float, request: Request, attempt: Attempt, out: list[Action]) -> None:
        """The attempt has what it needs: prefill is called, or decode computes what it lacks."""
        plan, number = attempt.plan, request.ask.number
        if plan.at_decode and attempt.target is not None and attempt.target.held_blocks != plan.prefill.used_blocks:
            self._legs.end_attempt(request, now, out)  # it does not hold what was thought
            self.place(now, request, out)
            return
        for kind in ("wait", "pause"):
            self._timers.clear((kind, number))
        self._count(now, request, plan, out)
        self._legs.foresee(request, attempt)
        waited_s = attempt.begun - request.ask.arrived
        if request.waits_since is not None:
            attempt.queued_s = attempt.begun - request.waits_since
            request.queued_s += attempt.queued_s if request.ask.slo.queue_s else 0.0
        request.waits_since = request.refusal = None
        request.unasked = 0
        out.append(Announce(number, plan, attempt.sequence, attempt.target, waited_s, attempt.queued_s, attempt.pace))
        if plan.at_decode:
            self._legs.compute(request, attempt, now, out)
        else:
            self._legs.prefill(request, attempt, now, out)

    def again(self, now: float, request: Request, attempt: Attempt, out: list[Action]) -> None:
        """A prefill instance has not taken the prompt, as its queue was longer than thought: another place is found.

        Decode keeps its promise. The client was told a place, and its tenant has paid: it is not refused early now.
        """
        request.recovering = True
        plan = self._plan(now, request, at_decode=False)
        if isinstance(plan, Failure):
            self._legs.end_attempt(request, now, out)
            self._nowhere(now, request, plan, out)
            return
        self._legs.turn(request, attempt, plan, now)
        self.placed(now, request, attempt, out)

    def _count(self, now: float, request: Request, plan: Plan, out: list[Action]) -> None:
        """Counts a request once, at its first place: its tenant pays, and it may be a reason for a copy."""
        if request.charged:
            return
        request.charged = True
        self._shares.serve(request.ask.tenant, self._cost_s(plan), request.ask.weight)
        wish = None if plan.at_decode else plan.wish
        copy = self._picture.hot.placed(request.keys, wish, request.ask.tenant, now)
        out += [copy] if copy is not None else []

    def _cost_s(self, plan: Plan) -> float:
        """Predicted seconds of instances: the prompt's at prefill, and those that its answer adds to decode's steps."""
        demand = plan.demand
        decode = self._picture.decodes.get(plan.decodes[0].id) if plan.decodes else None
        if decode is None:
            return plan.prefill.busy_s
        step_s = step_load_s(decode.speeds, demand.choices, demand.prompt_tokens * demand.choices)
        return plan.prefill.busy_s + demand.decode_tokens * step_s

    def rest(self, now: float) -> None:
        """While nobody waits for a place, what tenants are given is taken from nobody: they are forgiven as much."""
        waits = len(self._rooms) or len(self._line)
        self._shares.rest_until(now, 0 if waits else len(self._picture.prefills.by_slot))

    def look_again(self, now: float, out: list[Action]) -> None:
        """Some of those who wait for a limit that can be kept look for a place."""
        for number in self._line.looking(now):
            self._line.remove(number)
            self.place(now, self._book.requests[number], out)

    def give_up(self, now: float, request: Request, out: list[Action]) -> None:
        """A request has waited for as long as it may."""
        refusal, since = request.refusal, request.waits_since
        assert refusal is not None
        if request.ask.slo.queue_s and since is not None:
            refusal = replace(refusal, message=f"after {now - since:.3f} s in the queue: {refusal.message}")
        self._book.fail(now, request, refusal, out, refused=True)

    def room_news(self, now: float, decode: str, out: list[Action]) -> None:
        """A decode instance has reported or joined: those who fit there look for a place again."""
        if not len(self._rooms):
            return
        room, total = self._picture.decodes.room_of(decode)
        for number in self._rooms.woken(
            decode, room, total, self._needs_at(decode), lambda place: self._book.crowd.leaves_room(place, now), now
        ):
            self._rooms.remove(number)
            self.place(now, self._book.requests[number], out)

    def _needs_at(self, decode: str) -> Callable[[Need], int]:
        """Tells how many blocks a request is expected to need at a decode instance."""
        shape, answer = self._picture.shape, self._picture.decodes.answer_tokens(decode)
        return lambda need: expected_blocks(shape, need, answer) if shape is not None else need.longest

    def member_news(self, now: float, out: list[Action]) -> None:
        """An instance has joined: those for whom one was missing look for a place again."""
        for number in sorted(self._book.memberless):
            self.place(now, self._book.requests[number], out)

    def is_last_failure(self, now: float, request: Request, failure: Failure) -> bool:
        """Counts an attempt that has just failed; tells whether it was the last one.

        `retries` more follow the first that failed. Where what was sent was damaged, as many as there are pauses for
        within `recovery_s` of the first.
        """
        request.failures.add(now, failure, request.made, self._limits.recovery_s)
        return request.failures.is_over(self._limits.retries, self._limits.recovery_s)

    def anew(self, now: float, request: Request, failure: Failure, out: list[Action]) -> None:
        """Places a request again after its attempt has failed: at once if it is the first and others can take over."""
        request.refusal = failure
        if request.failures.count == 1 and not self._picture.only(request.suspects):
            self.rehash(request, out)
        else:
            self._pause(now, request, request.failures.count)

    def rehash(self, request: Request, out: list[Action]) -> None:
        """Asks for the keys of what is to be placed now."""
        assert request.refusal is not None
        request.phase = Phase.KEYS
        out.append(Rehash(request.ask.number, request.failures.count, request.refusal))

    def move(self, now: float, request: Request, instance: str, out: list[Action]) -> None:
        """Places a request anew, away from an instance that has not failed it; what runs there goes on."""
        self._legs.detach(request, now, out)
        request.suspect(instance)
        request.recovering = True
        request.refusal = Failure(Kind.UNAVAILABLE, f"{instance} drains, or is slow")
        self.rehash(request, out)

    def _plan(self, now: float, request: Request, *, at_decode: bool) -> Plan | Failure:
        ask = request.ask
        try:
            plan = self._picture.plan(
                tokens=ask.prompt_tokens + request.tokens,
                answer_tokens=max(ask.max_tokens - request.tokens, 1 + ask.beams),  # decode chooses beams' only token
                choices=ask.choices,
                keys=request.keys,
                prompt_key=ask.prompt_key,
                now=now,
                suspects=request.suspects,
                at_decode=at_decode,
                limit=None if request.recovering else self._gate.limit(ask.slo, ask.place, request.elapsed_s(now)),
            )
            chosen = plan.prefill._replace(queue_s=self._picture.prefills.queue_s(plan.prefill, ask.place))
            candidates = tuple([chosen if it.id == chosen.id else it for it in plan.candidates])
            return replace(plan, prefill=chosen, candidates=candidates)
        except Unavailable as error:
            return Failure(Kind.UNAVAILABLE, error.message)
        except InvalidRequest as error:
            return Failure(Kind.INVALID, error.message, field=error.field)

    def _options(self, request: Request, able: Sequence[DecodeChoice], now: float) -> list[DecodeChoice]:
        """The instances to ask. A report may be stale, so at first also those that seem to be full are asked.

        But not by a tenant that has more than its share: it leaves some room to others.
        """
        place = request.ask.place
        leaves = not request.recovering and self._book.crowd.leaves_room(place, now)
        first = request.waits_since is None and not leaves

        def fits(option: DecodeChoice) -> bool:
            room, total = self._picture.decodes.room_of(option.id)
            return room >= option.blocks + (left_free(option.blocks, total) if leaves else 0)

        free = [option for option in able if self._rooms.free_to(option.id, place)]
        return [option for option in free if first or fits(option)][:MAX_ASKED]

    def _no_room(self, now: float, request: Request, refusal: Failure, plan: Plan, out: list[Action]) -> None:
        if refusal.reason != NO_DECODE_ROOM and not request.recovering:
            self._not_kept(now, request, refusal, plan, out)
        elif self._may_wait(now, request, Phase.ROOM, refusal, out):
            assert request.waits_since is not None
            demand = plan.demand
            need = Need(demand.prompt_tokens, demand.total_blocks, demand.choices)
            self._rooms.add(Waiter(request.ask.place, need, request.waits_since, self._cost_s(plan)))

    def _not_kept(self, now: float, request: Request, refusal: Failure, plan: Plan, out: list[Action]) -> None:
        """No placement keeps the request's limits: it waits for one if it may, or is refused."""
        if not request.ask.slo.queue_s:
            self._book.fail(now, request, refusal, out, refused=True, candidates=plan.candidates)
        elif self._may_wait(now, request, Phase.QUEUE, refusal, out):
            nbytes = TOKEN_BYTES * request.ask.prompt_tokens
            place, cost_s = request.ask.place, self._cost_s(plan)
            for number in self._line.add(now, place, nbytes, cost_s, refusal.retry_after_s):
                self.give_up(now, self._book.requests[number], out)

    def _nowhere(self, now: float, request: Request, failure: Failure, out: list[Action]) -> None:
        if request.adopted:
            stay(request, now)
        elif failure.kind is Kind.UNAVAILABLE and request.recovering:
            if self._may_wait(now, request, Phase.MEMBER, failure, out):
                self._book.memberless[request.ask.number] = None
        else:
            self._book.fail(now, request, failure, out, refused=True)

    def _not_asked(self, now: float, request: Request, failure: Failure, out: list[Action]) -> None:
        request.recovering = True
        request.unasked += 1
        failure = Failure(Kind.UNAVAILABLE, f"no decode instance could be asked for room: {failure}")
        if self._may_wait(now, request, Phase.PAUSE, failure, out):
            self._pause(now, request, request.unasked)

    def _may_wait(self, now: float, request: Request, phase: Phase, refusal: Failure, out: list[Action]) -> bool:
        """Lets a request wait for a place, within the limit that began with the first refusal; else it fails."""
        request.phase, request.refusal = phase, refusal
        if request.waits_since is None:
            request.waits_since = now
        until = request.waits_since + self._wait_limit_s(request, request.waits_since)
        if until <= now:
            self._book.fail(now, request, refusal, out, refused=True)
            return False
        self._timers.set(("wait", request.ask.number), until)
        return True

    def _wait_limit_s(self, request: Request, since: float) -> float:
        limits, ttft_s = self._limits, request.ask.slo.ttft_s
        if request.recovering:
            return limits.recovery_s
        if request.ask.slo.queue_s:
            return request.ask.slo.queue_s - request.queued_s
        return limits.room_wait_s if ttft_s is None else min(limits.room_wait_s, ttft_s - (since - request.ask.arrived))

    def _pause(self, now: float, request: Request, count: int) -> None:
        request.phase = Phase.PAUSE
        pause_s = min(FIRST_PAUSE_S * PAUSE_FACTOR ** (count - 1), MAX_PAUSE_S)
        self._timers.set(("pause", request.ask.number), now + pause_s)


def stay(request: Request, now: float) -> None:
    """A request that is being moved has found no other place: its sequence goes on where it is, for a while."""
    request.phase, request.refusal, request.waits_since = Phase.ADOPTED, None, None
    request.stays_until = now + STAY_S
