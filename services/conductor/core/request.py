"""One request in the scheduler.

Its state, its current attempt, and the calls at prefill and decode that carry it out.

A call holds its claim until its `Ended` arrives, even if nothing waits for it any more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from moonpool.frozen import frozen
from moonpool.scheduling.state_machine import CancelIo, PendingIo, Timers, digest_of
from services.conductor.core.admission import AdmissionGate
from services.conductor.core.cluster_state import ClusterView
from services.conductor.core.decode_pool import PlacedAnswer
from services.conductor.core.events import (
    ATTEMPT_MARK,
    UNANSWERED_KINDS,
    Action,
    CallPrefill,
    CallReserve,
    CallResult,
    CancelReservation,
    DecodeReservation,
    Failure,
    FailureKind,
    FailureSeries,
    RenewSession,
    RequestSpec,
    ReserveGranted,
    StalePlacement,
    StartDecode,
)
from services.conductor.core.latency_model import NO_TPOT_FORECAST, DecodeChoice, PrefillChoice, TpotForecast
from services.conductor.core.router import RoutingDecision


class PrefillPhase(Enum):
    """Where a request is at prefill."""

    NONE = 0
    SENT = 1
    TOKEN = 2
    OVER = 3


class DecodePhase(Enum):
    """Where a request is at decode."""

    NONE = 0
    ASKED = 1
    PROMISED = 2
    STARTED = 3
    STREAMING = 4
    OVER = 5


@dataclass(slots=True)
class Attempt:
    """One placement of a request.

    Attributes:
        sequence: the id that engines see. It ends with the attempt's number, which is the fence: what earlier attempts
            still send is not mixed up with this one's.
        plan: where it goes; `incarnation` is that of the prefill instance.
        options: decode instances that were not asked yet, best first.
        asked: the `Reserve` that is waited for; 0 for none.
        late: those that have taken too long. The first promise counts, also a late one.
        full: the last refusal for want of room or speed; `failed` the last failure to ask.
        target: the promise.
        claim: of the prompt at prefill; 0 once it is released.
        lease_s: how long decode keeps it without news.
        promise: claim of the promised room, until the sequence's call holds it.
        delivered: decode has everything.
        places: instances that have, or had, a part in it.
        begun: when it was planned; `queued_s` before that the request had looked for a place in vain.
        token_at: when prefill gave its token; None before.
        pace: what of the times between its tokens is foreseen.
        stale: so many prefill instances in a row have not taken the prompt, as their queues were longer than thought.
        max_queue_s: the one that is called need not take it where its queue is longer; None = it must, or has taken it.
    """

    sequence: str
    plan: RoutingDecision
    incarnation: int
    options: list[DecodeChoice]
    claim: int
    prefill: PrefillPhase = PrefillPhase.NONE
    decode: DecodePhase = DecodePhase.NONE
    prefill_io: int = 0
    sequence_io: int = 0
    asked: int = 0
    late: list[int] = field(default_factory=list)
    full: Failure | None = None
    failed: Failure | None = None
    target: DecodeReservation | None = None
    lease_s: float = 0.0
    promise: int = 0
    delivered: bool = False
    places: list[str] = field(default_factory=list)
    begun: float = 0.0
    token_at: float | None = None
    pace: TpotForecast = NO_TPOT_FORECAST
    queued_s: float = 0.0
    stale: int = 0
    max_queue_s: float | None = None

    @property
    def may_be_stale(self) -> bool:
        """Whether prefill may answer that its queue is longer than thought."""
        return self.prefill is PrefillPhase.SENT and self.max_queue_s is not None

    @property
    def torn(self) -> bool:
        """Prefill is over, and nothing says that decode has everything."""
        return self.prefill is PrefillPhase.OVER and not self.delivered and self.decode is not DecodePhase.STREAMING

    def runs(self, *, beams: bool) -> bool:
        """Whether decode computes the sequence; of beams, which say nothing before their end, when it can."""
        return self.decode is DecodePhase.STREAMING or (beams and self.decode is DecodePhase.STARTED and self.delivered)


class RequestState(Enum):
    """What a request waits for: an attempt, room, a member, a pause to end, or its keys.

    QUEUE: a placement that keeps its limits. A resumed one: the instance that has its sequence, or the sequence that
    was taken over there. A sequence that is to be moved and finds no place is followed like one that was taken over.
    """

    PLACED = 0
    ROOM = 1
    MEMBER = 2
    PAUSE = 3
    KEYS = 4
    OWNER = 5
    ADOPTED = 6
    QUEUE = 7


@dataclass(slots=True)
class ScheduledRequest:
    """One request from its arrival to its end.

    Attributes:
        ask: what was asked for.
        keys: of all full blocks of the prompt and the tokens at the last placement.
        phase: what is waited for.
        tokens: length of the answer so far; 0 when there are several, of which prefill computes none.
        made: tokens that have come of all answers here; none of beams before their end.
        attempts: placements so far; the next one's number.
        failures: the latest attempts, as far as they failed.
        suspects: instances that failed it.
        attempt: the present one; None while it waits.
        adopted: the call that follows a sequence without an attempt: another conductor had it, or it is being moved;
            0 for none.
        stays_until: it is not moved before; there was no other place.
        reserves: `Reserve` calls that are out, of all attempts.
        unasked: placements in a row for which no decode instance could be asked.
        refusal: what the client is told when waiting is in vain.
        waits_since: when it began to look for a place in vain; None while it has one.
        queued_s: how long it has looked before, as far as that does not count in its limit.
        charged: its tenant has paid for it, and it has counted for copies.
        recovering: it was placed before, or could not be for a passing reason: it is not refused early.
    """

    ask: RequestSpec
    keys: tuple[bytes, ...]
    phase: RequestState = RequestState.PLACED
    tokens: int = 0
    made: int = 0
    attempts: int = 0
    failures: FailureSeries = field(default_factory=FailureSeries)
    suspects: list[str] = field(default_factory=list)
    attempt: Attempt | None = None
    adopted: int = 0
    stays_until: float = 0.0
    reserves: int = 0
    unasked: int = 0
    refusal: Failure | None = None
    waits_since: float | None = None
    queued_s: float = 0.0
    charged: bool = False
    recovering: bool = False

    @property
    def moving(self) -> bool:
        """Whether its sequence goes on while it is placed anew."""
        return bool(self.adopted) and self.phase is not RequestState.ADOPTED

    @property
    def begun(self) -> bool:
        """Whether some of its answer is here, or is being computed."""
        placed = self.attempt is not None and self.attempt.prefill is not PrefillPhase.NONE
        return bool(self.tokens or self.made or self.adopted or placed)

    @property
    def next_sequence(self) -> str:
        """The id under which engines see its next attempt: with the fence, which no earlier attempt had."""
        resumed, number = self.ask.resumed, self.attempts
        fence = f"{resumed.fence}.{number}" if resumed is not None else str(number)
        return f"{self.ask.id}{ATTEMPT_MARK}{fence}" if number or resumed is not None else self.ask.id

    def attempt_as(self, sequence: str) -> Attempt | None:
        """The present attempt, if engines see it under this id: the fence."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.sequence == sequence else None

    def elapsed_s(self, now: float) -> float:
        """Seconds since it arrived that count in its limit for the first token."""
        until = now if self.waits_since is None or not self.ask.slo.queue_s else self.waits_since
        return until - self.ask.arrived - self.queued_s

    def grow(self, tokens: int) -> None:
        """The answer, or one of them, has so many more tokens."""
        self.made += tokens
        if self.ask.choices == 1 and not self.ask.beams:
            self.tokens += tokens

    def suspect(self, instance: str) -> None:
        """Avoids an instance from now on."""
        if instance not in self.suspects:
            self.suspects.append(instance)


MAX_STALE_ANSWERS = 8
"""Answers in a row for one placement. The next instance takes the prompt however long its queue is."""


STALE_SLACK = 0.2
"""Of the predicted time to first token, by which a queue may be longer than it was thought to be."""


STALE_SLACK_S = 0.01
"""What predictions are off by on any machine."""


class StalePlacementCheck:
    """Says which queue a prompt may find, and takes the answers of those where it was longer.

    Attributes:
        answers: so many have come.
    """

    def __init__(self, picture: ClusterView) -> None:
        self._picture = picture
        self.answers = 0

    def max_queue_s(self, plan: RoutingDecision, answered: int, now: float) -> float | None:
        """Seconds that everything may take that a prompt finds at its instance; None = it is taken all the same.

        What others of ours take that were placed there is counted in, whichever comes first.

        Args:
            plan: of the prompt, which is counted at its instance already.
            answered: how often it was not taken before.
            now: seconds.
        """
        best, instance = plan.prefill, self._picture.prefills.get(plan.prefill.id)
        bearable_s = _lead_s(best, plan.candidates)
        if instance is None or instance.load.drain_s is None or bearable_s is None or answered >= MAX_STALE_ANSWERS:
            return None
        before_s = max(0.0, instance.free_at - best.busy_s - now)
        allowed_s = (before_s + max(bearable_s, STALE_SLACK * best.ttft_s, STALE_SLACK_S)) / instance.slowed
        return allowed_s + self._picture.prefills.lagging_s(instance, now)

    def answered(self, instance_id: str, stale: StalePlacement, now: float) -> None:
        """An instance has told what it has, which corrects the picture. It is no report: it says nothing of blocks."""
        self.answers += 1
        prefills = self._picture.prefills
        instance = prefills.get(instance_id)
        if instance is not None:
            load = replace(instance.load, drain_s=stale.drain_s, taken=stale.taken, speeds=None)
            instance.report(load, now, slow_factor=0.0)  # of speeds, which it does not tell
            prefills.changed(instance)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self.answers)


def _lead_s(best: PrefillChoice, candidates: Sequence[PrefillChoice]) -> float | None:
    """By how much sooner the first token comes than anywhere else; None = there is nowhere else."""
    others = [it.ttft_s for it in candidates if it.id != best.id and not it.excluded]
    return min(others) - best.ttft_s if others else None


MAX_RESERVES = 2
"""`Reserve` calls of one request that are out at once."""


RENEWALS = 3
"""Times that a promise is renewed within its lease."""


LINGER_S = 5.0
"""How long a prefill may go on after its token when the answer is complete: it still offers blocks to the kvstore."""


class CallKind(Enum):
    """Kinds of I/O."""

    RESERVE = 1
    PREFILL = 2
    SEQUENCE = 3
    ADOPT = 4


MIN_KNOWN_TOKENS = 4
"""Fewer tokens that a sequence has elsewhere are generated again about as soon as they are computed in one go."""


FOLLOWING_CALLS = (CallKind.SEQUENCE, CallKind.ADOPT)
"""By which a sequence is followed."""


@frozen
class OpenCall:
    """What a call belongs to and holds: `claim` in the picture, 0 for none; `instance` is who is called."""

    call: CallKind
    request: int
    sequence: str
    instance: str
    incarnation: int
    claim: int = 0


class OpenCalls(PendingIo[OpenCall]):
    """All calls; those that follow sequences are found by the instance where these are."""

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[str, dict[int, OpenCall]] = {}

    def begin(self, holds: OpenCall) -> int:
        """See `Outstanding.begin`."""
        io = super().begin(holds)
        if holds.call in FOLLOWING_CALLS:
            self._followed.setdefault(holds.instance, {})[io] = holds
        return io

    def end(self, io: int) -> OpenCall:
        """See `Outstanding.end`."""
        holds = super().end(io)
        if holds.call in FOLLOWING_CALLS:
            there = self._followed[holds.instance]
            del there[io]
            if not there:
                del self._followed[holds.instance]
        return holds

    def followed(self, instance: str) -> list[tuple[int, OpenCall]]:
        """Calls that follow sequences at an instance, first begun first."""
        return list(self._followed.get(instance, {}).items())

    def check_invariants(self) -> None:
        """Asserts that the calls are found where they are."""
        following = [(io, hold) for io, hold in self if hold.call in FOLLOWING_CALLS]
        assert sorted(following, key=lambda it: it[0]) == sorted(
            [it for there in self._followed.values() for it in there.items()], key=lambda it: it[0]
        )
        assert all(hold.instance == name for name, there in self._followed.items() for hold in there.values())


class AttemptCalls:
    """Carries out attempts: starts calls, and gives back what they hold. What to do next is for `Requests`."""

    def __init__(
        self, picture: ClusterView, timers: Timers[tuple[str, int]], reserve_timeout_s: float, gate: AdmissionGate
    ) -> None:
        self.calls = OpenCalls()
        self.staleness = StalePlacementCheck(picture)
        self._picture = picture
        self._timers = timers
        self._reserve_timeout_s = reserve_timeout_s
        self._gate = gate
        self._at: dict[str, dict[int, None]] = {}  # requests whose attempts have a part at an instance

    def at(self, instance: str) -> list[int]:
        """Requests whose attempts have, or had, a part at an instance; first come first."""
        return sorted(self._at.get(instance, ()))

    def _take_part(self, request: ScheduledRequest, attempt: Attempt, instance: str) -> None:
        attempt.places.append(instance)
        self._at.setdefault(instance, {})[request.ask.number] = None

    def _leave(self, request: ScheduledRequest, attempt: Attempt) -> None:
        for instance in dict.fromkeys(attempt.places):
            there = self._at[instance]
            del there[request.ask.number]
            if not there:
                del self._at[instance]

    def check_places(self, requests: Iterable[ScheduledRequest]) -> None:
        """Asserts that an instance's requests are those whose attempts name it."""
        named = [(place, r.ask.number) for r in requests if r.attempt is not None for place in r.attempt.places]
        assert {(place, number) for place, there in self._at.items() for number in there} == set(named)

    def begin(
        self, request: ScheduledRequest, plan: RoutingDecision, options: Sequence[DecodeChoice], now: float
    ) -> Attempt:
        """Begins an attempt: the prompt counts at prefill from now on."""
        sequence, request.attempts = request.next_sequence, request.attempts + 1
        incarnation, claim = self._picture.incarnation(plan.prefill.id), self._claim_prefill(request, plan, now)
        attempt = request.attempt = Attempt(sequence, plan, incarnation, list(options), claim, begun=now)
        request.phase = RequestState.PLACED
        self._take_part(request, attempt, plan.prefill.id)
        return attempt

    def _claim_prefill(self, request: ScheduledRequest, plan: RoutingDecision, now: float) -> int:
        best = plan.prefill
        read = best.source, request.ask.place, best.read, plan.send_s
        claim = self._picture.claim_prefill(best.id, best.busy_s, now, *read)
        self._picture.prefills.coming.placed(claim, best.id, request.keys)
        return claim

    def not_taken(self, attempt: Attempt, instance: str, stale: StalePlacement, now: float) -> None:
        """The prefill instance has a longer queue than was thought: the prompt is not there."""
        self._release_claim(attempt, now)
        attempt.prefill, attempt.stale = PrefillPhase.NONE, attempt.stale + 1
        self.staleness.answered(instance, stale, now)

    def turn(self, request: ScheduledRequest, attempt: Attempt, plan: RoutingDecision, now: float) -> None:
        """The prompt goes where a new plan says; decode keeps its promise."""
        attempt.plan, attempt.begun = plan, now
        attempt.incarnation = self._picture.incarnation(plan.prefill.id)
        attempt.claim = self._claim_prefill(request, plan, now)
        self._take_part(request, attempt, plan.prefill.id)

    def ask(self, request: ScheduledRequest, attempt: Attempt, now: float, out: list[Action]) -> bool:
        """Asks the next decode instance for room, unless an answer is waited for.

        Returns:
            False when none is left to ask, and no answer will come.
        """
        attempt.decode = DecodePhase.ASKED
        if attempt.asked:
            return True
        if not attempt.options:
            return bool(attempt.late)
        if request.reserves < MAX_RESERVES:
            self._reserve(request, attempt, attempt.options.pop(0), now, out)
        return True  # else: the next one to end makes room for this one

    def too_late(self, request: ScheduledRequest, attempt: Attempt) -> None:
        """A `Reserve` takes too long: another instance may be asked meanwhile."""
        hold = self.calls.get(attempt.asked)
        assert hold is not None
        attempt.late.append(attempt.asked)
        attempt.asked = 0
        attempt.failed = Failure(FailureKind.UNAVAILABLE, f"{hold.instance} did not answer in time")
        request.suspect(hold.instance)

    def gave_up(self, attempt: Attempt, who: tuple[str, int], failure: Failure) -> bool:
        """An instance is lost: what it still promises is not taken. Returns whether it was asked for room."""

        def lost(io: int) -> bool:
            hold = self.calls.get(io)
            return hold is not None and (hold.instance, hold.incarnation) == who

        waited = [io for io in (attempt.asked, *attempt.late) if lost(io)]
        attempt.asked = 0 if attempt.asked in waited else attempt.asked
        attempt.late = [io for io in attempt.late if io not in waited]
        attempt.failed = failure if waited else attempt.failed
        return bool(waited)

    def reserved(
        self,
        request: ScheduledRequest | None,
        io: int,
        hold: OpenCall,
        result: CallResult,
        now: float,
        out: list[Action],
    ) -> bool:
        """A `Reserve` has ended. Returns whether the attempt has its promise by it; any other promise is undone."""
        attempt = request.attempt if request is not None else None
        waits = attempt is not None and attempt.target is None and (attempt.asked == io or io in attempt.late)
        if attempt is not None:
            attempt.late = [late for late in attempt.late if late != io]
            attempt.asked = 0 if attempt.asked == io else attempt.asked
        if not isinstance(result, ReserveGranted):
            self._picture.release(hold.claim, now)
            if isinstance(result, Failure) and result.kind in UNANSWERED_KINDS:
                out.append(
                    CancelReservation(hold.sequence, DecodeReservation(hold.instance, hold.incarnation, "", 0, 0, 0))
                )
            return False
        promised = result
        if attempt is None or not waits or promised.target.incarnation != hold.incarnation:
            out.append(CancelReservation(hold.sequence, promised.target))
            self._picture.release(hold.claim, now)
            return False
        attempt.target, attempt.lease_s, attempt.promise = promised.target, promised.lease_s, hold.claim
        attempt.decode, attempt.asked, attempt.late = DecodePhase.PROMISED, 0, []  # other promises are not waited for
        attempt.pace = attempt.pace._replace(tbt_s=promised.tbt_s)
        self._picture.known(attempt.promise, promised.taken)
        self.renew(hold.request, attempt, now, out)
        return True

    def prefill(self, request: ScheduledRequest, attempt: Attempt, now: float, out: list[Action]) -> None:
        """Calls prefill."""
        plan, number = attempt.plan, request.ask.number
        attempt.max_queue_s = self.staleness.max_queue_s(plan, attempt.stale, now)
        hold = OpenCall(CallKind.PREFILL, number, attempt.sequence, plan.prefill.id, attempt.incarnation)
        attempt.prefill, attempt.prefill_io = PrefillPhase.SENT, self.calls.begin(hold)
        call = attempt.prefill_io, number, attempt.sequence, plan, attempt.incarnation, attempt.target
        out.append(CallPrefill(*call, attempt.max_queue_s))

    def accepted(self, attempt: Attempt, taken: int) -> None:
        """Prefill has the prompt in its queue, as its `taken`-th."""
        attempt.max_queue_s = None
        if attempt.claim:
            self._picture.known(attempt.claim, taken)

    def token(self, attempt: Attempt, now: float) -> None:
        """Prefill has given its token."""
        attempt.prefill, attempt.token_at = PrefillPhase.TOKEN, now
        self._picture.prefills.computed(attempt.claim)
        self._release_claim(attempt, now)

    def expected_tokens(self, request: ScheduledRequest, longest: int) -> float:
        """How long what is still to come of an answer is expected to become."""
        ask, lengths = request.ask, self._picture.forecasts.lengths
        return lengths.expected(ask.stratum, longest, max(ask.least_tokens - request.tokens, 0))

    def foresee(self, request: ScheduledRequest, attempt: Attempt) -> None:
        """Notes what is foreseen of the times between an answer's tokens where room is promised for it."""
        target, plan = attempt.target, attempt.plan
        decode = self._picture.decodes.get(target.decode) if target is not None else None
        if decode is not None and attempt.pace.tbt_s:
            steps = self.expected_tokens(request, plan.demand.decode_tokens + 1) - 1.0
            attempt.pace = decode.pace.foresee(attempt.pace.tbt_s, steps, plan.prefill.others, joins=not plan.at_decode)

    def answered(self, request: ScheduledRequest, now: float) -> None:
        """The last token of an answer is here: what it took is learnt, if all of it was foreseen at one place."""
        attempt, once = request.attempt, request.attempts == 1 and request.ask.resumed is None
        if attempt is None or attempt.target is None or attempt.token_at is None or not (once and attempt.pace.tbt_s):
            return
        decode = self._picture.decodes.get(attempt.target.decode)
        if decode is not None and request.ask.choices == 1 and request.tokens > 1:
            decode.pace.observe(attempt.pace, request.tokens - 1, now - attempt.token_at)

    def compute(self, request: ScheduledRequest, attempt: Attempt, now: float, out: list[Action]) -> None:
        """Starts the sequence at decode, which computes the rest of the prompt: there is nothing for prefill to do."""
        self._release_claim(attempt, now)
        attempt.prefill, attempt.delivered = PrefillPhase.OVER, True
        if request.ask.choices == 1:
            self._picture.forecasts.lengths.begin(request.ask.number, request.ask.stratum)
        self.start(request, attempt, out, compute=True)

    def start(self, request: ScheduledRequest, attempt: Attempt, out: list[Action], *, compute: bool = False) -> None:
        """Starts the sequence at decode; its call holds the room from now on."""
        target, number = attempt.target, request.ask.number
        assert target is not None
        hold = OpenCall(CallKind.SEQUENCE, number, attempt.sequence, target.decode, target.incarnation, attempt.promise)
        attempt.decode, attempt.promise, attempt.sequence_io = DecodePhase.STARTED, 0, self.calls.begin(hold)
        self._timers.clear(("renew", number))
        out.append(StartDecode(attempt.sequence_io, number, attempt.sequence, target, compute))

    def renew(self, request: int, attempt: Attempt, now: float, out: list[Action]) -> None:
        """Keeps the promise, now and within its lease again."""
        if attempt.target is not None and attempt.decode is DecodePhase.PROMISED:
            out.append(RenewSession(attempt.target))
            if attempt.lease_s > 0:
                self._timers.set(("renew", request), now + attempt.lease_s / RENEWALS)

    def lose_promise(self, attempt: Attempt, now: float) -> None:
        """The instance that promised room is lost before the sequence was started there."""
        attempt.decode = DecodePhase.OVER
        self._picture.release(attempt.promise, now)
        attempt.promise = 0

    def end(
        self, request: ScheduledRequest, now: float, out: list[Action], *, complete: bool = False, known: int = 0
    ) -> None:
        """Ends the attempt, and what was adopted, as far as there is one. Arguments as for `end_attempt`."""
        self.end_adopted(request, out, known=known)
        self.end_attempt(request, now, out, complete=complete, known=known)

    def end_adopted(self, request: ScheduledRequest, out: list[Action], *, known: int = 0) -> None:
        """Ends a sequence that is followed without an attempt."""
        if request.adopted and request.adopted != known:
            out.append(CancelIo(request.adopted))
        request.adopted = 0

    def detach(self, request: ScheduledRequest, now: float, out: list[Action]) -> None:
        """Ends the attempt, but follows a sequence that runs as if it were adopted: it is being moved away."""
        attempt = request.attempt
        if attempt is not None and attempt.runs(beams=request.ask.beams) and not request.adopted:
            request.adopted = attempt.sequence_io
        self.end_attempt(request, now, out, complete=True, known=request.adopted)

    def end_attempt(
        self, request: ScheduledRequest, now: float, out: list[Action], *, complete: bool = False, known: int = 0
    ) -> None:
        """Ends the attempt, if there is one. What it holds comes back now, or when its calls end.

        Args:
            request: whose attempt ends.
            now: seconds.
            out: gets the actions.
            complete: the answer is whole, or goes on at another conductor; a prefill that has given its token may go on
                for a while: it may still send KV.
            known: the call of a sequence that decode knows to be over, or that is followed on; 0 = none.
        """
        attempt, request.attempt = request.attempt, None
        number = request.ask.number
        for kind in ("renew", "word"):
            self._timers.clear((kind, number))
        if attempt is None:
            return
        self._leave(request, attempt)
        self._release_claim(attempt, now)
        if attempt.prefill is PrefillPhase.TOKEN and complete:
            self._timers.set(("linger", attempt.prefill_io), now + LINGER_S)
        elif attempt.prefill in (PrefillPhase.SENT, PrefillPhase.TOKEN):
            out.append(CancelIo(attempt.prefill_io))
        if attempt.decode is DecodePhase.PROMISED:
            assert attempt.target is not None
            out.append(CancelReservation(attempt.sequence, attempt.target))
            self.lose_promise(attempt, now)
        elif attempt.decode in (DecodePhase.STARTED, DecodePhase.STREAMING) and attempt.sequence_io != known:
            out.append(CancelIo(attempt.sequence_io))

    def held(self, requests: Iterable[ScheduledRequest]) -> list[int]:
        """All claims that calls and attempts hold."""
        claims = [hold.claim for _, hold in self.calls]
        for request in requests:
            if request.attempt is not None:
                claims += [request.attempt.claim, request.attempt.promise]
        return sorted(claim for claim in claims if claim)

    def check_attempt(self, request: ScheduledRequest, attempt: Attempt) -> None:
        """Asserts that an attempt's legs have their calls and claims, and that it waits for something."""
        calls = self.calls
        assert (attempt.prefill in (PrefillPhase.NONE, PrefillPhase.SENT)) == bool(attempt.claim)
        if attempt.prefill in (PrefillPhase.SENT, PrefillPhase.TOKEN):
            assert attempt.prefill_io in calls
        assert (attempt.decode in (DecodePhase.STARTED, DecodePhase.STREAMING)) == (attempt.sequence_io in calls)
        assert (attempt.decode is DecodePhase.PROMISED) == bool(attempt.promise)
        if attempt.decode is DecodePhase.ASKED:
            assert attempt.asked or attempt.late or request.reserves == MAX_RESERVES, "nothing is waited for"
            assert attempt.prefill is PrefillPhase.NONE
        elif attempt.decode is not DecodePhase.STREAMING and attempt.prefill is PrefillPhase.OVER and attempt.torn:
            assert self._timers.at(("word", request.ask.number)) is not None, "it would wait for ever"

    def digest(self) -> bytes:
        """Hash of the calls."""
        return digest_of(self.calls, self.staleness)

    def _reserve(
        self, request: ScheduledRequest, attempt: Attempt, option: DecodeChoice, now: float, out: list[Action]
    ) -> None:
        number = request.ask.number
        incarnation = self._picture.incarnation(option.id)
        plan = attempt.plan
        demand, begins_at = plan.demand, now + plan.prefill.ttft_s
        context = demand.prompt_tokens * demand.choices
        expected = self.expected_tokens(request, demand.decode_tokens + 1)
        answer = PlacedAnswer(context, option.blocks, demand.choices, request.ask.stratum, begins_at, tokens=expected)
        claim = self._picture.claim_decode(option.id, answer)
        hold = OpenCall(CallKind.RESERVE, number, attempt.sequence, option.id, incarnation, claim)
        attempt.asked = io = self.calls.begin(hold)
        self._take_part(request, attempt, option.id)
        request.reserves += 1
        self._timers.set(("reserve", io), now + self._reserve_timeout_s)
        stores = tuple(store.id for store in plan.write_back)
        tbt_slo_s = None if request.recovering else request.ask.slo.tbt_s
        starts_in_s = self._gate.starts_in_s(plan)
        out.append(CallReserve(io, number, attempt.sequence, option.id, incarnation, tbt_slo_s, starts_in_s, stores))

    def _release_claim(self, attempt: Attempt, now: float) -> None:
        if attempt.claim:
            self._picture.release(attempt.claim, now)
            attempt.claim = 0
