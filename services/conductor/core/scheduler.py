"""The conductor's state machine.

Requests are placed, reserved, prefilled and decoded; retried, moved and taken over; each ends exactly once.

A retry continues from the prompt and the tokens so far: sampling depends on the position alone (docs/adr/0006).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from moonpool.errors import InvalidRequest, Unavailable
from moonpool.frozen import frozen
from moonpool.scheduling.fair_share import FairShares
from moonpool.scheduling.state_machine import CancelIo, IoEnded, Tick, Timers, digest_of
from services.conductor.core import admission
from services.conductor.core.admission import AdmissionGate, AdmissionMode
from services.conductor.core.cluster_state import EXPECTED_ANSWER_TOKENS, ClusterView
from services.conductor.core.decode_pool import PlacedAnswer
from services.conductor.core.events import (
    CONDUCTOR_DRAINING,
    FINAL_KINDS,
    NO_DECODE_ROOM,
    Action,
    AnnouncePlacement,
    CallResult,
    ClientGone,
    CompleteRequest,
    CompletionReason,
    DropRequest,
    Event,
    FailRequest,
    Failure,
    FailureKind,
    FirstToken,
    InstanceJoined,
    InstanceLeft,
    KeysChanged,
    KVDelivered,
    LeaveSequence,
    LoadReported,
    PrefillAccepted,
    PrefillMeasurements,
    Rehash,
    Rehashed,
    RequestArrived,
    RequestSpec,
    ReserveGranted,
    Resync,
    RoleChangeRequested,
    StalePlacement,
    StopRequested,
    TakeOverSequence,
    TokensArrived,
    retries_exhausted,
)
from services.conductor.core.latency_model import (
    DecodeChoice,
    MemoryNeed,
    OutputLengthModel,
    PrefillChoice,
    expected_blocks,
    step_load_s,
)
from services.conductor.core.request import (
    MAX_RESERVES,
    Attempt,
    AttemptCalls,
    CallKind,
    DecodePhase,
    OpenCall,
    PrefillPhase,
    RequestState,
    ScheduledRequest,
)
from services.conductor.core.roles import FIXED_ROLES, RoleBalancer, RoleLimits
from services.conductor.core.router import RoutingDecision
from services.conductor.core.wait_queue import DecodeMemoryQueue, MemoryWaiter, SloQueue, TenantCounts, blocks_left_free

REQUEST_TIMERS = ("deadline", "wait", "pause", "renew", "word", "owner")
"""Those of a request; the others belong to calls."""


class RequestTable:
    """All requests, by number."""

    def __init__(
        self,
        legs: AttemptCalls,
        rooms: DecodeMemoryQueue,
        line: SloQueue,
        timers: Timers[tuple[str, int]],
        lengths: OutputLengthModel,
    ) -> None:
        self.requests: dict[int, ScheduledRequest] = {}
        self.crowd = TenantCounts()
        """Whose they are."""
        self.memberless: dict[int, None] = {}
        """Those that wait for an instance to join."""
        self._legs = legs
        self._rooms = rooms
        self._line = line
        self._timers = timers
        self._lengths = lengths

    def open(self, ask: RequestSpec, keys: tuple[bytes, ...]) -> ScheduledRequest:
        """Takes a request in."""
        assert ask.number not in self.requests, f"request {ask.number} is there already"
        request = self.requests[ask.number] = ScheduledRequest(ask, keys)
        self.crowd.came(ask.place)
        if ask.resumed is not None:
            request.tokens, request.recovering = ask.resumed.tokens, True
        self._timers.set(("deadline", ask.number), ask.deadline)
        return request

    def complete(
        self, now: float, request: ScheduledRequest, finish: CompletionReason, out: list[Action], *, known: int = 0
    ) -> None:
        """The answer is whole, or goes on elsewhere; `known` is the call of a sequence that decode ends, 0 = none."""
        if finish is not CompletionReason.CANCELLED:
            self._legs.answered(request, now)
        self._legs.end(request, now, out, complete=True, known=known)
        if finish is CompletionReason.STOP:
            self._lengths.ended(request.ask.number, request.tokens)
        self._remove(now, request)
        out.append(CompleteRequest(request.ask.number, finish))

    def fail(
        self,
        now: float,
        request: ScheduledRequest,
        failure: Failure,
        out: list[Action],
        *,
        refused: bool = False,
        candidates: tuple[PrefillChoice, ...] = (),
    ) -> None:
        """The client gets an error; `refused` when no place was found, `candidates` being what was considered."""
        self._legs.end(request, now, out)
        self._remove(now, request)
        out.append(FailRequest(request.ask.number, failure, refused, candidates))

    def drop(self, now: float, request: ScheduledRequest, out: list[Action]) -> None:
        """The client is gone."""
        self._legs.end(request, now, out)
        self._remove(now, request)
        out.append(DropRequest(request.ask.number))

    def _remove(self, now: float, request: ScheduledRequest) -> None:
        number = request.ask.number
        del self.requests[number]
        self.crowd.left(request.ask.tenant, now)
        self.memberless.pop(number, None)
        self._rooms.remove(number)
        self._line.remove(number)
        self._lengths.removed(number)
        for kind in REQUEST_TIMERS:
            self._timers.clear((kind, number))


class Takeover:
    """Takes sequences over.

    Args:
        wait_s: seconds for which the instance that has the sequence may take to join a conductor that has just started.
        picture: who is there.
        legs: keeps the calls.
        timers: shared by the whole core.
    """

    def __init__(
        self, wait_s: float, picture: ClusterView, legs: AttemptCalls, timers: Timers[tuple[str, int]]
    ) -> None:
        self._wait_s = wait_s
        self._picture = picture
        self._legs = legs
        self._timers = timers

    def begin(self, now: float, request: ScheduledRequest, out: list[Action]) -> bool:
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
            request.phase = RequestState.OWNER
            self._timers.set(("owner", request.ask.number), now + self._wait_s)
        return True

    def joined(
        self, now: float, instance: str, requests: Iterable[ScheduledRequest], out: list[Action]
    ) -> list[ScheduledRequest]:
        """An instance has joined: what waits for it goes on. Returns those that are to be placed anew."""
        mine = [it for it in requests if it.phase is RequestState.OWNER and _owner_of(it) == instance]
        for request in mine:
            self._timers.clear(("owner", request.ask.number))
        return [request for request in mine if not self.begin(now, request, out)]

    def lost(
        self, who: tuple[str, int], requests: Iterable[ScheduledRequest], out: list[Action]
    ) -> list[ScheduledRequest]:
        """An incarnation of an instance is lost. Returns the requests whose sequence was taken over there.

        One that was being moved away goes on at its new place.
        """
        mine = [it for it in requests if it.adopted and self._follows(it) == who]
        for request in mine:
            self._legs.end_adopted(request, out)
        return [request for request in mine if request.phase is RequestState.ADOPTED]

    def let_go(self, request: ScheduledRequest, out: list[Action]) -> None:
        """Leaves what runs at decode there: the conductor ends, and another one may take it over."""
        attempt = request.attempt
        if request.adopted:
            out.append(LeaveSequence(request.adopted))
            request.adopted = 0
        if attempt is not None and attempt.decode in (DecodePhase.STARTED, DecodePhase.STREAMING):
            out.append(LeaveSequence(attempt.sequence_io))
            attempt.decode = DecodePhase.OVER

    def _follows(self, request: ScheduledRequest) -> tuple[str, int] | None:
        hold = self._legs.calls.get(request.adopted)
        return (hold.instance, hold.incarnation) if hold is not None else None

    def _adopt(self, now: float, request: ScheduledRequest, out: list[Action]) -> None:
        resumed, number = request.ask.resumed, request.ask.number
        assert resumed is not None
        assert resumed.target is not None
        sequence, target = resumed.sequence, resumed.target
        claim = self._picture.claim_decode(target.decode, self._running(now, request))
        hold = OpenCall(CallKind.ADOPT, number, sequence, target.decode, target.incarnation, claim)
        request.phase, request.adopted = RequestState.ADOPTED, self._legs.calls.begin(hold)
        out.append(TakeOverSequence(request.adopted, number, sequence, target, resumed.fence))

    def _running(self, now: float, request: ScheduledRequest) -> PlacedAnswer:
        """What is there already: its blocks are in what the instance tells, as soon as it reports."""
        ask, tokens, choices = request.ask, request.tokens, request.ask.choices
        expected = self._picture.forecasts.lengths.expected(ask.stratum, min(ask.max_tokens, EXPECTED_ANSWER_TOKENS))
        context = (ask.prompt_tokens + tokens) * choices
        return PlacedAnswer(context, 0, choices, ask.stratum, now, tokens, number=0, tokens=expected)

    def check_invariants(self, requests: Iterable[ScheduledRequest]) -> None:
        """Asserts that who waits for an instance does not wait for ever, and who has a sequence follows it."""
        for request in requests:
            waits = self._timers.at(("owner", request.ask.number)) is not None
            assert (request.phase is RequestState.OWNER) == waits
            assert (request.phase is RequestState.ADOPTED) <= bool(request.adopted)
            if request.adopted:
                hold = self._legs.calls.get(request.adopted)
                assert hold is not None
                assert hold.call in (CallKind.ADOPT, CallKind.SEQUENCE)
                assert hold.request == request.ask.number


def _owner_of(request: ScheduledRequest) -> str:
    resumed = request.ask.resumed
    return resumed.target.decode if resumed is not None and resumed.target is not None else ""


MAX_MOVING = 4
"""Requests that are being moved away from an instance at once: so that each is soon prefilled."""


class Migration:
    """Says who is to be moved.

    Args:
        picture: who drains, and who is slow.
        legs: keeps the calls.
    """

    def __init__(self, picture: ClusterView, legs: AttemptCalls) -> None:
        self._picture = picture
        self._legs = legs

    def leaving(self, now: float, instance: str, requests: Mapping[int, ScheduledRequest]) -> list[ScheduledRequest]:
        """Those that are to be moved away from an instance now."""
        if not self._picture.relieved(instance):
            return []
        here = list(self._running(instance, requests))
        free = MAX_MOVING - sum(request.moving for request in here)
        next_ones = [request for request in here if not request.moving and request.stays_until <= now]
        return [*self._prompts(instance, requests), *next_ones[: max(0, free)]]

    def _prompts(self, instance: str, requests: Mapping[int, ScheduledRequest]) -> Iterator[ScheduledRequest]:
        """Requests whose prompt waits, or is computed, at a prefill instance."""
        for number in self._legs.at(instance):
            attempt = requests[number].attempt
            if attempt is not None and attempt.prefill is PrefillPhase.SENT and attempt.plan.prefill.id == instance:
                yield requests[number]

    def _running(self, instance: str, requests: Mapping[int, ScheduledRequest]) -> Iterator[ScheduledRequest]:
        """Requests whose sequence, that their client hears, is at an instance."""
        for _, hold in self._legs.calls.followed(instance):
            request = requests.get(hold.request)
            if request is None:
                continue
            attempt = request.attempt
            mine = attempt is not None and attempt.sequence == hold.sequence and attempt.runs(beams=request.ask.beams)
            if (mine and not request.adopted) or self._legs.calls.get(request.adopted) is hold:
                yield request


MAX_ASKED = 4
"""Decode instances asked for one placement."""


FIRST_RETRY_PAUSE_S = 0.05


RETRY_PAUSE_FACTOR = 4.0


MAX_RETRY_PAUSE_S = 3.2


MOVE_RETRY_S = 1.0
"""Seconds from a move that failed to the next."""


TOKEN_BYTES = 4


@frozen
class SchedulerLimits:
    """How long requests are given, and how often; `ConductorConfig` describes each."""

    retries: int
    recovery_s: float
    room_wait_s: float
    reserve_timeout_s: float
    admission: AdmissionMode = AdmissionMode.PREDICTIVE
    adopt_wait_s: float = 5.0
    max_queued: int = 1024
    max_queued_bytes: int = 64 << 20


class Placer:
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
        limits: SchedulerLimits,
        picture: ClusterView,
        book: RequestTable,
        legs: AttemptCalls,
        rooms: DecodeMemoryQueue,
        line: SloQueue,
        shares: FairShares,
        timers: Timers[tuple[str, int]],
        gate: AdmissionGate,
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

    def place(self, now: float, request: ScheduledRequest, out: list[Action]) -> None:
        """Plans a request and begins an attempt, or lets it wait, or refuses it."""
        self._book.memberless.pop(request.ask.number, None)
        ask = request.ask
        at_decode = not request.attempts and ask.choices == 1 and not ask.beams and not ask.scored
        plan, able = self._considered(now, request, at_decode=at_decode)
        if (
            isinstance(plan, RoutingDecision)
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
        self, now: float, request: ScheduledRequest, *, at_decode: bool
    ) -> tuple[RoutingDecision | Failure, Sequence[DecodeChoice] | Failure]:
        """A plan, and the decode instances that may serve it; either may be a refusal."""
        plan, ask = self._plan(now, request, at_decode=at_decode), request.ask
        if isinstance(plan, Failure):
            return plan, plan
        elapsed_s = request.elapsed_s(now)
        return plan, plan.decodes if request.recovering else self._gate.check(
            ask.slo, plan, ask.stratum, now, elapsed_s
        )

    def ask(self, now: float, request: ScheduledRequest, attempt: Attempt, out: list[Action]) -> None:
        """Asks the next decode instance; after the last one the request waits, or fails."""
        if self._legs.ask(request, attempt, now, out):
            return
        full, failed = attempt.full, attempt.failed
        self._legs.end_attempt(request, now, out)
        if attempt.plan.at_decode:  # others may have room for it when prefill computes it
            self.place(now, request, out)
        elif request.adopted:
            stay_in_place(request, now)
        elif full is not None or failed is None:
            self._no_room(now, request, admission.no_room(full, attempt.plan), attempt.plan, out)
        elif failed.kind is FailureKind.INVALID:
            self._book.fail(now, request, failed, out)
        else:
            self._not_asked(now, request, failed, out)

    def refused(self, request: ScheduledRequest, attempt: Attempt, hold: OpenCall, result: CallResult) -> None:
        """Notes why an instance gave no promise: it is full, or too slow, or could not be asked."""
        if isinstance(result, Failure) and result.kind is FailureKind.OVERLOADED:
            attempt.full = result
            room, total = self._picture.decodes.room_of(hold.instance)
            if result.reason == NO_DECODE_ROOM and total:  # it is there still
                self._rooms.refused(hold.instance, room)
            return
        restarted = Failure(FailureKind.UNAVAILABLE, f"{hold.instance} was restarted")
        attempt.failed = result if isinstance(result, Failure) else restarted
        request.suspect(hold.instance)

    def placed(self, now: float, request: ScheduledRequest, attempt: Attempt, out: list[Action]) -> None:
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
        out.append(
            AnnouncePlacement(number, plan, attempt.sequence, attempt.target, waited_s, attempt.queued_s, attempt.pace)
        )
        if plan.at_decode:
            self._legs.compute(request, attempt, now, out)
        else:
            self._legs.prefill(request, attempt, now, out)

    def again(self, now: float, request: ScheduledRequest, attempt: Attempt, out: list[Action]) -> None:
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

    def _count(self, now: float, request: ScheduledRequest, plan: RoutingDecision, out: list[Action]) -> None:
        """Counts a request once, at its first place: its tenant pays, and it may be a reason for a copy."""
        if request.charged:
            return
        request.charged = True
        self._shares.serve(request.ask.tenant, self._cost_s(plan), request.ask.weight)
        wish = None if plan.at_decode else plan.wish
        copy = self._picture.hot.placed(request.keys, wish, request.ask.tenant, now)
        out += [copy] if copy is not None else []

    def _cost_s(self, plan: RoutingDecision) -> float:
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

    def give_up(self, now: float, request: ScheduledRequest, out: list[Action]) -> None:
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

    def _needs_at(self, decode: str) -> Callable[[MemoryNeed], int]:
        """Tells how many blocks a request is expected to need at a decode instance."""
        shape, answer = self._picture.shape, self._picture.decodes.answer_tokens(decode)
        return lambda need: expected_blocks(shape, need, answer) if shape is not None else need.longest

    def member_news(self, now: float, out: list[Action]) -> None:
        """An instance has joined: those for whom one was missing look for a place again."""
        for number in sorted(self._book.memberless):
            self.place(now, self._book.requests[number], out)

    def is_last_failure(self, now: float, request: ScheduledRequest, failure: Failure) -> bool:
        """Counts an attempt that has just failed; tells whether it was the last one.

        `retries` more follow the first that failed. Where what was sent was damaged, as many as there are pauses for
        within `recovery_s` of the first.
        """
        request.failures.add(now, failure, request.made, self._limits.recovery_s)
        return request.failures.is_over(self._limits.retries, self._limits.recovery_s)

    def anew(self, now: float, request: ScheduledRequest, failure: Failure, out: list[Action]) -> None:
        """Places a request again after its attempt has failed: at once if it is the first and others can take over."""
        request.refusal = failure
        if request.failures.count == 1 and not self._picture.only(request.suspects):
            self.rehash(request, out)
        else:
            self._pause(now, request, request.failures.count)

    def rehash(self, request: ScheduledRequest, out: list[Action]) -> None:
        """Asks for the keys of what is to be placed now."""
        assert request.refusal is not None
        request.phase = RequestState.KEYS
        out.append(Rehash(request.ask.number, request.failures.count, request.refusal))

    def move(self, now: float, request: ScheduledRequest, instance: str, out: list[Action]) -> None:
        """Places a request anew, away from an instance that has not failed it; what runs there goes on."""
        self._legs.detach(request, now, out)
        request.suspect(instance)
        request.recovering = True
        request.refusal = Failure(FailureKind.UNAVAILABLE, f"{instance} drains, or is slow")
        self.rehash(request, out)

    def _plan(self, now: float, request: ScheduledRequest, *, at_decode: bool) -> RoutingDecision | Failure:
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
            return Failure(FailureKind.UNAVAILABLE, error.message)
        except InvalidRequest as error:
            return Failure(FailureKind.INVALID, error.message, field=error.field)

    def _options(self, request: ScheduledRequest, able: Sequence[DecodeChoice], now: float) -> list[DecodeChoice]:
        """The instances to ask. A report may be stale, so at first also those that seem to be full are asked.

        But not by a tenant that has more than its share: it leaves some room to others.
        """
        place = request.ask.place
        leaves = not request.recovering and self._book.crowd.leaves_room(place, now)
        first = request.waits_since is None and not leaves

        def fits(option: DecodeChoice) -> bool:
            room, total = self._picture.decodes.room_of(option.id)
            return room >= option.blocks + (blocks_left_free(option.blocks, total) if leaves else 0)

        free = [option for option in able if self._rooms.free_to(option.id, place)]
        return [option for option in free if first or fits(option)][:MAX_ASKED]

    def _no_room(
        self, now: float, request: ScheduledRequest, refusal: Failure, plan: RoutingDecision, out: list[Action]
    ) -> None:
        if refusal.reason != NO_DECODE_ROOM and not request.recovering:
            self._not_kept(now, request, refusal, plan, out)
        elif self._may_wait(now, request, RequestState.ROOM, refusal, out):
            assert request.waits_since is not None
            demand = plan.demand
            need = MemoryNeed(demand.prompt_tokens, demand.total_blocks, demand.choices)
            self._rooms.add(MemoryWaiter(request.ask.place, need, request.waits_since, self._cost_s(plan)))

    def _not_kept(
        self, now: float, request: ScheduledRequest, refusal: Failure, plan: RoutingDecision, out: list[Action]
    ) -> None:
        """No placement keeps the request's limits: it waits for one if it may, or is refused."""
        if not request.ask.slo.queue_s:
            self._book.fail(now, request, refusal, out, refused=True, candidates=plan.candidates)
        elif self._may_wait(now, request, RequestState.QUEUE, refusal, out):
            nbytes = TOKEN_BYTES * request.ask.prompt_tokens
            place, cost_s = request.ask.place, self._cost_s(plan)
            for number in self._line.add(now, place, nbytes, cost_s, refusal.retry_after_s):
                self.give_up(now, self._book.requests[number], out)

    def _nowhere(self, now: float, request: ScheduledRequest, failure: Failure, out: list[Action]) -> None:
        if request.adopted:
            stay_in_place(request, now)
        elif failure.kind is FailureKind.UNAVAILABLE and request.recovering:
            if self._may_wait(now, request, RequestState.MEMBER, failure, out):
                self._book.memberless[request.ask.number] = None
        else:
            self._book.fail(now, request, failure, out, refused=True)

    def _not_asked(self, now: float, request: ScheduledRequest, failure: Failure, out: list[Action]) -> None:
        request.recovering = True
        request.unasked += 1
        failure = Failure(FailureKind.UNAVAILABLE, f"no decode instance could be asked for room: {failure}")
        if self._may_wait(now, request, RequestState.PAUSE, failure, out):
            self._pause(now, request, request.unasked)

    def _may_wait(
        self, now: float, request: ScheduledRequest, phase: RequestState, refusal: Failure, out: list[Action]
    ) -> bool:
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

    def _wait_limit_s(self, request: ScheduledRequest, since: float) -> float:
        limits, ttft_s = self._limits, request.ask.slo.ttft_s
        if request.recovering:
            return limits.recovery_s
        if request.ask.slo.queue_s:
            return request.ask.slo.queue_s - request.queued_s
        return limits.room_wait_s if ttft_s is None else min(limits.room_wait_s, ttft_s - (since - request.ask.arrived))

    def _pause(self, now: float, request: ScheduledRequest, count: int) -> None:
        request.phase = RequestState.PAUSE
        pause_s = min(FIRST_RETRY_PAUSE_S * RETRY_PAUSE_FACTOR ** (count - 1), MAX_RETRY_PAUSE_S)
        self._timers.set(("pause", request.ask.number), now + pause_s)


def stay_in_place(request: ScheduledRequest, now: float) -> None:
    """A request that is being moved has found no other place: its sequence goes on where it is, for a while."""
    request.phase, request.refusal, request.waits_since = RequestState.ADOPTED, None, None
    request.stays_until = now + MOVE_RETRY_S


def check_requests(
    book: RequestTable, legs: AttemptCalls, rooms: DecodeMemoryQueue, line: SloQueue, timers: Timers[tuple[str, int]]
) -> None:
    """Asserts it of all requests."""
    rooms.check_invariants()
    line.check_invariants()
    book.crowd.check_invariants(Counter([it.ask.tenant for it in book.requests.values()]))
    legs.check_places(book.requests.values())
    legs.calls.check_invariants()
    reserves = [hold.request for _, hold in legs.calls if hold.call is CallKind.RESERVE]
    for number, request in book.requests.items():
        assert number == request.ask.number
        assert request.reserves == reserves.count(number) <= MAX_RESERVES
        assert (request.phase is RequestState.ROOM) == (number in rooms)
        assert (request.phase is RequestState.QUEUE) == (number in line)
        assert (request.phase is RequestState.PLACED) == (request.attempt is not None)
        assert (request.phase is RequestState.MEMBER) == (number in book.memberless)
        assert (request.phase is RequestState.PAUSE) == (timers.at(("pause", number)) is not None)
        assert timers.at(("deadline", number)) is not None
        if request.phase in (RequestState.ROOM, RequestState.MEMBER, RequestState.QUEUE):
            assert timers.at(("wait", number)) is not None, "it would wait for ever"
        if request.attempt is not None:
            legs.check_attempt(request, request.attempt)
    claims = legs.held(book.requests.values())
    assert len(set(claims)) == len(claims), "a claim is held twice"
    assert len(timers) <= len(REQUEST_TIMERS) * len(book.requests) + len(legs.calls) + bool(len(line))


DELIVERY_TIMEOUT_S = 0.5
"""How long decode may take to say whether it has everything, when prefill is lost before it has said so."""


class RequestScheduler:
    """The core: all requests of one conductor."""

    def __init__(self, limits: SchedulerLimits, picture: ClusterView) -> None:
        self.picture = picture
        self._timers: Timers[tuple[str, int]] = Timers()
        self._shares = FairShares()
        self.rooms = DecodeMemoryQueue(self._shares)
        self.line = SloQueue(self._shares, self._timers, limits.max_queued, limits.max_queued_bytes)
        self._lengths = picture.forecasts.lengths
        gate = AdmissionGate(limits.admission, picture.forecasts)
        self._legs = AttemptCalls(picture, self._timers, limits.reserve_timeout_s, gate)
        self._book = RequestTable(self._legs, self.rooms, self.line, self._timers, self._lengths)
        waiting = self.rooms, self.line, self._shares
        self._placing = Placer(limits, picture, self._book, self._legs, *waiting, self._timers, gate)
        self._adopting = Takeover(limits.adopt_wait_s, picture, self._legs, self._timers)
        self._relief = Migration(picture, self._legs)

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
            case LoadReported() | InstanceJoined() | InstanceLeft():  # most are these
                self._from_cluster(now, event, out)
            case RequestArrived(ask, keys):
                request = self._book.open(ask, keys)
                if not self._adopting.begin(now, request, out):
                    self._placing.place(now, request, out)
            case Rehashed() | StopRequested() | ClientGone():
                self._from_client(now, event, out)
            case PrefillAccepted() | FirstToken() | KVDelivered() | TokensArrived():
                self._from_call(now, event, out)
            case IoEnded():
                self._ended(now, event, out)
        while (timer := self._timers.pop_due(now)) is not None:
            self._over(now, *timer, out)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _from_client(self, now: float, event: Rehashed | StopRequested | ClientGone, out: list[Action]) -> None:
        request = self._book.requests.get(event.request)
        if request is None:
            return
        match event:
            case ClientGone():
                self._book.drop(now, request, out)
            case StopRequested(failure=failure):
                self._stop(now, request, failure, out)
            case Rehashed(tokens=tokens, keys=keys):
                assert request.phase is RequestState.KEYS, "keys that were not asked for"
                assert request.tokens == tokens, f"{tokens} tokens, not {request.tokens}"
                request.keys = keys
                self._placing.place(now, request, out)

    def _stop(self, now: float, request: ScheduledRequest, failure: Failure | None, out: list[Action]) -> None:
        """Ends an answer here as cancelled; one that cannot be told, or a request that was never placed, fails."""
        if failure is not None:
            self._book.fail(now, request, failure, out)
        elif request.begun:
            self._adopting.let_go(request, out)
            self._book.complete(now, request, CompletionReason.CANCELLED, out)
        else:
            self._book.fail(now, request, request.refusal or CONDUCTOR_DRAINING, out, refused=True)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _from_call(
        self, now: float, event: PrefillAccepted | FirstToken | KVDelivered | TokensArrived, out: list[Action]
    ) -> None:
        hold = self._legs.calls.get(event.io)
        request = self._book.requests.get(hold.request) if hold is not None else None
        if hold is None or request is None:
            return
        attempt = request.attempt_as(hold.sequence)
        match event:
            case PrefillAccepted() if attempt is not None:
                self._legs.accepted(attempt, event.taken)
            case KVDelivered() if attempt is not None:
                attempt.delivered = True
            case FirstToken():
                self._first_token(now, request, attempt, event, out)
            case TokensArrived():
                if request.ask.choices == 1:  # of several, none tells the length of all
                    self.picture.grew(hold.claim, request.tokens + event.count, now)
                self._tokens(now, request, attempt, event, out)

    def _first_token(
        self, now: float, request: ScheduledRequest, attempt: Attempt | None, event: FirstToken, out: list[Action]
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
        elif attempt is not None and attempt.decode is DecodePhase.PROMISED:
            self._legs.start(request, attempt, out)

    def _learn(self, now: float, attempt: Attempt, how: PrefillMeasurements) -> None:
        overhead_s = now - attempt.begun - how.there_s
        self.picture.first_token(attempt.plan, how.computed_tokens, how.there_s, overhead_s, now)
        for store, key in how.misses:
            self.picture.forget(store, [key], attempt.plan.index_version)

    def _tokens(
        self, now: float, request: ScheduledRequest, attempt: Attempt | None, event: TokensArrived, out: list[Action]
    ) -> None:
        request.grow(event.count)
        self._lengths.grew(request.ask.number, request.tokens)
        if attempt is not None:  # decode begins only when it has everything
            attempt.decode = DecodePhase.STREAMING
            self._timers.clear(("word", request.ask.number))
            self._arrived(now, request, out)
        if event.finish is not None:
            self._book.complete(now, request, event.finish, out, known=event.io if event.known else 0)

    def _arrived(self, now: float, request: ScheduledRequest, out: list[Action]) -> None:
        """A request that was being moved runs at its new place: the old sequence is ended, and another one may go."""
        old = self._legs.calls.get(request.adopted)
        self._legs.end_adopted(request, out)
        if old is not None:
            self._relieve(now, old.instance, out)

    def _ended(self, now: float, event: IoEnded[CallResult], out: list[Action]) -> None:
        hold = self._legs.calls.end(event.io)
        request = self._book.requests.get(hold.request)
        attempt = request.attempt_as(hold.sequence) if request is not None else None
        failure = event.result if isinstance(event.result, Failure) else None
        if hold.call is CallKind.RESERVE:
            self._reserved(now, event.io, hold, request, event.result, out)
            return
        if hold.call is CallKind.PREFILL:
            self._timers.clear(("linger", event.io))
        else:
            self.picture.release(hold.claim, now)
        if request is not None and request.adopted == event.io:
            failure = failure or Failure(FailureKind.STREAM, f"{hold.instance} ended the sequence without a reason")
            self._adopted_ended(now, request, failure, out)
        if request is None or attempt is None:
            return
        if isinstance(event.result, StalePlacement) and attempt.may_be_stale:
            self._legs.not_taken(attempt, hold.instance, event.result, now)
            self._placing.again(now, request, attempt, out)
        elif hold.call is CallKind.PREFILL:
            self._prefill_ended(now, request, attempt, failure, out)
        else:
            self._sequence_ended(now, request, attempt, failure, out)

    def _adopted_ended(self, now: float, request: ScheduledRequest, failure: Failure, out: list[Action]) -> None:
        """A sequence without an attempt is over. One that was being moved goes on at its new place."""
        moving, request.adopted = request.moving, 0
        if not moving:
            self._attempt_failed(now, request, failure, [], out)
        elif failure.kind in FINAL_KINDS:
            self._book.fail(now, request, failure, out)

    def _reserved(
        self,
        now: float,
        io: int,
        hold: OpenCall,
        request: ScheduledRequest | None,
        result: CallResult,
        out: list[Action],
    ) -> None:
        self._timers.clear(("reserve", io))
        got = self._legs.reserved(request, io, hold, result, now, out)
        if isinstance(result, ReserveGranted):
            self.rooms.promised(hold.instance)
        if request is None:
            return
        request.reserves, attempt = request.reserves - 1, request.attempt
        if attempt is None:
            return
        if got:
            self._placing.placed(now, request, attempt, out)
        elif attempt.decode is DecodePhase.ASKED:
            if attempt.sequence == hold.sequence:
                self._placing.refused(request, attempt, hold, result)
            self._placing.ask(now, request, attempt, out)

    def _prefill_ended(
        self, now: float, request: ScheduledRequest, attempt: Attempt, failure: Failure | None, out: list[Action]
    ) -> None:
        """Matters only before decode has everything."""
        before, attempt.prefill = attempt.prefill, PrefillPhase.OVER
        prefill = attempt.plan.prefill.id
        if before is PrefillPhase.SENT:
            failure = failure or Failure(FailureKind.STREAM, f"{prefill} ended without a token")
            self._attempt_failed(now, request, failure, [prefill], out)
        elif before is PrefillPhase.TOKEN and attempt.torn:
            if (
                failure is not None
                and failure.kind in (FailureKind.TRANSFER, FailureKind.FRAME)
                and attempt.target is not None
            ):
                self._attempt_failed(now, request, failure, [prefill, attempt.target.decode], out)
            else:
                self._await_word(now, request)

    def _sequence_ended(
        self, now: float, request: ScheduledRequest, attempt: Attempt, failure: Failure | None, out: list[Action]
    ) -> None:
        assert attempt.target is not None
        decode = attempt.target.decode
        blamed = attempt.plan.prefill.id if attempt.torn else decode
        attempt.decode = DecodePhase.OVER
        failure = failure or Failure(FailureKind.STREAM, f"{decode} ended the sequence without a reason")
        self._attempt_failed(now, request, failure, [blamed], out)

    def _await_word(self, now: float, request: ScheduledRequest) -> None:
        """Prefill is lost and may have sent everything: decode will begin, or say that it cannot."""
        self._timers.set(("word", request.ask.number), now + DELIVERY_TIMEOUT_S)

    def _attempt_failed(
        self, now: float, request: ScheduledRequest, failure: Failure, blamed: list[str], out: list[Action]
    ) -> None:
        """Ends the attempt; the request is placed anew unless it has failed too often."""
        for instance in blamed:
            request.suspect(instance)
        if request.moving:
            self._legs.end_attempt(request, now, out)
            stay_in_place(request, now)
            return
        self._legs.end(request, now, out, complete=failure.fenced)
        request.recovering = True
        if failure.kind in FINAL_KINDS:
            self._book.fail(now, request, failure, out)
        elif self._placing.is_last_failure(now, request, failure):
            self._book.fail(now, request, retries_exhausted(failure, request.failures.count), out)
        else:
            self._placing.anew(now, request, failure, out)

    # --- the cluster ------------------------------------------------------------------------------------------------

    def _from_cluster(self, now: float, event: InstanceJoined | InstanceLeft | LoadReported, out: list[Action]) -> None:
        match event:
            case LoadReported(instance):
                self._placing.room_news(now, instance, out)
                self._relieve(now, instance, out)
            case InstanceJoined(facts):
                for request in self._adopting.joined(now, facts.id, self._book.requests.values(), out):
                    self._placing.place(now, request, out)
                self._placing.member_news(now, out)
                self._placing.room_news(now, facts.id, out)
            case InstanceLeft(instance, incarnation, lost):
                self.rooms.forget(instance)
                who = instance, incarnation
                for number in self._legs.at(instance) if lost else ():
                    request = self._book.requests[number]
                    if request.attempt is not None:
                        self._lost(now, request, request.attempt, who, lost, out)
                for request in self._adopting.lost(who, self._book.requests.values(), out) if lost else ():
                    self._attempt_failed(
                        now, request, Failure(FailureKind.STREAM, f"{instance} {lost}"), [instance], out
                    )

    def _relieve(self, now: float, instance: str, out: list[Action]) -> None:
        """An instance that drains or is slow is rid of what it has, if another one takes it."""
        for request in self._relief.leaving(now, instance, self._book.requests):
            self._placing.move(now, request, instance, out)

    def _lost(
        self, now: float, request: ScheduledRequest, attempt: Attempt, who: tuple[str, int], why: str, out: list[Action]
    ) -> None:
        """An instance is lost, and with it what an attempt has there."""
        failure = Failure(FailureKind.STREAM, f"{who[0]} {why}")
        target = attempt.target
        if target is not None and who == (target.decode, target.incarnation):
            if attempt.decode is DecodePhase.PROMISED:
                self._legs.lose_promise(attempt, now)
            self._attempt_failed(now, request, failure, [who[0]], out)
        elif who == (attempt.plan.prefill.id, attempt.incarnation):
            self._lost_prefill(now, request, attempt, failure, out)
        elif attempt.decode is DecodePhase.ASKED and self._legs.gave_up(attempt, who, failure):
            request.suspect(who[0])
            self._placing.ask(now, request, attempt, out)

    def _lost_prefill(
        self, now: float, request: ScheduledRequest, attempt: Attempt, failure: Failure, out: list[Action]
    ) -> None:
        """Its call is given up. Decode is not to blame, and goes on when it has everything."""
        if attempt.prefill in (PrefillPhase.NONE, PrefillPhase.SENT):
            self._attempt_failed(now, request, failure, [attempt.plan.prefill.id], out)
        elif attempt.prefill is PrefillPhase.TOKEN:
            out.append(CancelIo(attempt.prefill_io))
            attempt.prefill = PrefillPhase.OVER
            if attempt.torn:
                self._await_word(now, request)

    # --- time -------------------------------------------------------------------------------------------------------

    def _over(self, now: float, kind: str, number: int, out: list[Action]) -> None:
        """A deadline is over: of a call, or of a request."""
        if kind == "linger":
            out.append(CancelIo(number))
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
                failure = Failure(FailureKind.DEADLINE, "the request took longer than it may")
                self._book.fail(now, request, failure, out)
            case "wait":
                self._placing.give_up(now, request, out)
            case "pause":
                self._placing.rehash(request, out)
            case "owner":
                self._placing.place(now, request, out)
            case _:
                self._attempt_over(now, request, kind, out)

    def _too_late(self, now: float, request: ScheduledRequest, io: int, out: list[Action]) -> None:
        attempt = request.attempt
        if attempt is not None and attempt.asked == io:
            self._legs.too_late(request, attempt)
            self._placing.ask(now, request, attempt, out)

    def _attempt_over(self, now: float, request: ScheduledRequest, kind: str, out: list[Action]) -> None:
        attempt = request.attempt
        assert attempt is not None, f"{kind} belongs to an attempt"
        if kind == "renew":
            self._legs.renew(request.ask.number, attempt, now, out)
        else:
            failure = Failure(FailureKind.STREAM, f"{attempt.plan.prefill.id} was lost before decode had everything")
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


class ConductorCore:
    """What one conductor decides. The picture hears of a change before the requests do."""

    def __init__(self, limits: SchedulerLimits, picture: ClusterView, roles: RoleLimits = FIXED_ROLES) -> None:
        self.picture = picture
        self.roles = RoleBalancer(roles, picture.prefills, picture.decodes)
        self.requests = RequestScheduler(limits, picture)

    def handle(self, now: float, event: Event | Tick, out: list[Action]) -> None:
        """Takes an event; see `Core.handle`."""
        match event:
            case LoadReported(instance, load):
                self.picture.report(instance, load, now)
                self.roles.look(now, out)
            case KeysChanged():
                self._keys(event, out)
            case InstanceJoined(facts):
                self.picture.join(facts, now)
                self.roles.joined(now, facts)
            case InstanceLeft(instance, incarnation):
                if self.picture.incarnation(instance) == incarnation:
                    self.picture.leave(instance)
            case RoleChangeRequested(instance):
                self.roles.order(now, instance, out)
        self.requests.handle(now, event, out)

    def _keys(self, event: KeysChanged, out: list[Action]) -> None:
        if self.picture.incarnation(event.instance) and self.picture.events(
            event.instance,
            event.sequence,
            event.stored,
            event.removed,
            event.cooled,
            snapshot_begin=event.snapshot_begin,
            snapshot_end=event.snapshot_end,
        ):
            out.append(Resync(event.instance))

    def due(self) -> float | None:
        """When the next deadline is over."""
        return self.requests.due()

    def check_invariants(self) -> None:
        """Asserts what must hold between any two events."""
        self.picture.check_invariants()
        self.requests.check_invariants()
        assert self.picture.claims == self.requests.claims, "a claim counts that nobody holds, or the other way round"

    def digest(self) -> bytes:
        """Hash of the whole state."""
        return digest_of(self.picture, self.requests, self.roles)
