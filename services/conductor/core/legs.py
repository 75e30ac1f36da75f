"""What a request has going on elsewhere: its legs at prefill and decode, and the calls that carry them.

A call holds what it has claimed until its `Ended` has come, whether anybody is still interested or not.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from moonpool.core.digest import digest_of
from moonpool.core.kernel import Cancel, Outstanding
from moonpool.core.timers import Timers
from moonpool.frozen import frozen
from services.conductor.core.admission import Gate
from services.conductor.core.cost import DecodeChoice
from services.conductor.core.decodes import Answer
from services.conductor.core.failures import UNANSWERED, Failure, Kind, Stale
from services.conductor.core.life import Attempt, DecodeLeg, Phase, PrefillLeg, Request
from services.conductor.core.messages import Action, Prefill, Promised, Renew, Reserve, Result, Start, Target, Undo
from services.conductor.core.picture import Picture
from services.conductor.core.plan import Plan
from services.conductor.core.staleness import Staleness

MAX_RESERVES = 2
"""`Reserve` calls of one request that are out at once."""
RENEWALS = 3
"""Times that a promise is renewed within its lease."""
LINGER_S = 5.0
"""How long a prefill may go on after its token when the answer is complete: it still offers blocks to the kvstore."""


class Call(Enum):
    """Kinds of I/O."""

    RESERVE = 1
    PREFILL = 2
    SEQUENCE = 3
    ADOPT = 4


LEAST_KNOWN = 4
"""Fewer tokens that a sequence has elsewhere are generated again about as soon as they are computed in one go."""

FOLLOWING = (Call.SEQUENCE, Call.ADOPT)
"""By which a sequence is followed."""


@frozen
class Hold:
    """What a call belongs to and holds: `claim` in the picture, 0 for none; `instance` is who is called."""

    call: Call
    request: int
    sequence: str
    instance: str
    incarnation: int
    claim: int = 0


class Calls(Outstanding[Hold]):
    """All calls; those that follow sequences are found by the instance where these are."""

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[str, dict[int, Hold]] = {}

    def begin(self, holds: Hold) -> int:
        """See `Outstanding.begin`."""
        io = super().begin(holds)
        if holds.call in FOLLOWING:
            self._followed.setdefault(holds.instance, {})[io] = holds
        return io

    def end(self, io: int) -> Hold:
        """See `Outstanding.end`."""
        holds = super().end(io)
        if holds.call in FOLLOWING:
            there = self._followed[holds.instance]
            del there[io]
            if not there:
                del self._followed[holds.instance]
        return holds

    def followed(self, instance: str) -> list[tuple[int, Hold]]:
        """Calls that follow sequences at an instance, first begun first."""
        return list(self._followed.get(instance, {}).items())

    def check_invariants(self) -> None:
        """Asserts that the calls are found where they are."""
        following = [(io, hold) for io, hold in self if hold.call in FOLLOWING]
        assert sorted(following, key=lambda it: it[0]) == sorted(
            [it for there in self._followed.values() for it in there.items()], key=lambda it: it[0]
        )
        assert all(hold.instance == name for name, there in self._followed.items() for hold in there.values())


class Legs:
    """Carries out attempts: starts calls, and gives back what they hold. What to do next is for `Requests`."""

    def __init__(self, picture: Picture, timers: Timers[tuple[str, int]], reserve_timeout_s: float, gate: Gate) -> None:
        self.calls = Calls()
        self.staleness = Staleness(picture)
        self._picture = picture
        self._timers = timers
        self._reserve_timeout_s = reserve_timeout_s
        self._gate = gate
        self._at: dict[str, dict[int, None]] = {}  # requests whose attempts have a part at an instance

    def at(self, instance: str) -> list[int]:
        """Requests whose attempts have, or had, a part at an instance; first come first."""
        return sorted(self._at.get(instance, ()))

    def _take_part(self, request: Request, attempt: Attempt, instance: str) -> None:
        attempt.places.append(instance)
        self._at.setdefault(instance, {})[request.ask.number] = None

    def _leave(self, request: Request, attempt: Attempt) -> None:
        for instance in dict.fromkeys(attempt.places):
            there = self._at[instance]
            del there[request.ask.number]
            if not there:
                del self._at[instance]

    def check_places(self, requests: Iterable[Request]) -> None:
        """Asserts that an instance's requests are those whose attempts name it."""
        named = [(place, r.ask.number) for r in requests if r.attempt is not None for place in r.attempt.places]
        assert {(place, number) for place, there in self._at.items() for number in there} == set(named)

    def begin(self, request: Request, plan: Plan, options: Sequence[DecodeChoice], now: float) -> Attempt:
        """Begins an attempt: the prompt counts at prefill from now on."""
        sequence, request.attempts = request.next_sequence, request.attempts + 1
        incarnation, claim = self._picture.incarnation(plan.prefill.id), self._claim_prefill(request, plan, now)
        attempt = request.attempt = Attempt(sequence, plan, incarnation, list(options), claim, begun=now)
        request.phase = Phase.PLACED
        self._take_part(request, attempt, plan.prefill.id)
        return attempt

    def _claim_prefill(self, request: Request, plan: Plan, now: float) -> int:
        best = plan.prefill
        read = best.source, request.ask.place, best.read, plan.send_s
        claim = self._picture.claim_prefill(best.id, best.busy_s, now, *read)
        self._picture.prefills.coming.placed(claim, best.id, request.keys)
        return claim

    def not_taken(self, attempt: Attempt, instance: str, stale: Stale, now: float) -> None:
        """The prefill instance has a longer queue than was thought: the prompt is not there."""
        self._release_claim(attempt, now)
        attempt.prefill, attempt.stale = PrefillLeg.NONE, attempt.stale + 1
        self.staleness.answered(instance, stale, now)

    def turn(self, request: Request, attempt: Attempt, plan: Plan, now: float) -> None:
        """The prompt goes where a new plan says; decode keeps its promise."""
        attempt.plan, attempt.begun = plan, now
        attempt.incarnation = self._picture.incarnation(plan.prefill.id)
        attempt.claim = self._claim_prefill(request, plan, now)
        self._take_part(request, attempt, plan.prefill.id)

    def ask(self, request: Request, attempt: Attempt, now: float, out: list[Action]) -> bool:
        """Asks the next decode instance for room, unless an answer is waited for.

        Returns:
            False when none is left to ask, and no answer will come.
        """
        attempt.decode = DecodeLeg.ASKED
        if attempt.asked:
            return True
        if not attempt.options:
            return bool(attempt.late)
        if request.reserves < MAX_RESERVES:
            self._reserve(request, attempt, attempt.options.pop(0), now, out)
        return True  # else: the next one to end makes room for this one

    def too_late(self, request: Request, attempt: Attempt) -> None:
        """A `Reserve` takes too long: another instance may be asked meanwhile."""
        hold = self.calls.get(attempt.asked)
        assert hold is not None
        attempt.late.append(attempt.asked)
        attempt.asked = 0
        attempt.failed = Failure(Kind.UNAVAILABLE, f"{hold.instance} did not answer in time")
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
        self, request: Request | None, io: int, hold: Hold, result: Result, now: float, out: list[Action]
    ) -> bool:
        """A `Reserve` has ended. Returns whether the attempt has its promise by it; any other promise is undone."""
        attempt = request.attempt if request is not None else None
        waits = attempt is not None and attempt.target is None and (attempt.asked == io or io in attempt.late)
        if attempt is not None:
            attempt.late = [late for late in attempt.late if late != io]
            attempt.asked = 0 if attempt.asked == io else attempt.asked
        if not isinstance(result, Promised):
            self._picture.release(hold.claim, now)
            if isinstance(result, Failure) and result.kind in UNANSWERED:
                out.append(Undo(hold.sequence, Target(hold.instance, hold.incarnation, "", 0, 0, 0)))
            return False
        promised = result
        if attempt is None or not waits or promised.target.incarnation != hold.incarnation:
            out.append(Undo(hold.sequence, promised.target))
            self._picture.release(hold.claim, now)
            return False
        attempt.target, attempt.lease_s, attempt.promise = promised.target, promised.lease_s, hold.claim
        attempt.decode, attempt.asked, attempt.late = DecodeLeg.PROMISED, 0, []  # other promises are not waited for
        attempt.pace = attempt.pace._replace(tbt_s=promised.tbt_s)
        self._picture.known(attempt.promise, promised.taken)
        self.renew(hold.request, attempt, now, out)
        return True

    def prefill(self, request: Request, attempt: Attempt, now: float, out: list[Action]) -> None:
        """Calls prefill."""
        plan, number = attempt.plan, request.ask.number
        attempt.max_queue_s = self.staleness.max_queue_s(plan, attempt.stale, now)
        hold = Hold(Call.PREFILL, number, attempt.sequence, plan.prefill.id, attempt.incarnation)
        attempt.prefill, attempt.prefill_io = PrefillLeg.SENT, self.calls.begin(hold)
        call = attempt.prefill_io, number, attempt.sequence, plan, attempt.incarnation, attempt.target
        out.append(Prefill(*call, attempt.max_queue_s))

    def accepted(self, attempt: Attempt, taken: int) -> None:
        """Prefill has the prompt in its queue, as its `taken`-th."""
        attempt.max_queue_s = None
        if attempt.claim:
            self._picture.known(attempt.claim, taken)

    def token(self, attempt: Attempt, now: float) -> None:
        """Prefill has given its token."""
        attempt.prefill, attempt.token_at = PrefillLeg.TOKEN, now
        self._picture.prefills.computed(attempt.claim)
        self._release_claim(attempt, now)

    def expected_tokens(self, request: Request, longest: int) -> float:
        """How long what is still to come of an answer is expected to become."""
        ask, lengths = request.ask, self._picture.forecasts.lengths
        return lengths.expected(ask.stratum, longest, max(ask.least_tokens - request.tokens, 0))

    def foresee(self, request: Request, attempt: Attempt) -> None:
        """Notes what is foreseen of the times between an answer's tokens where room is promised for it."""
        target, plan = attempt.target, attempt.plan
        decode = self._picture.decodes.get(target.decode) if target is not None else None
        if decode is not None and attempt.pace.tbt_s:
            steps = self.expected_tokens(request, plan.demand.decode_tokens + 1) - 1.0
            attempt.pace = decode.pace.foresee(attempt.pace.tbt_s, steps, plan.prefill.others, joins=not plan.at_decode)

    def answered(self, request: Request, now: float) -> None:
        """The last token of an answer is here: what it took is learnt, if all of it was foreseen at one place."""
        attempt, once = request.attempt, request.attempts == 1 and request.ask.resumed is None
        if attempt is None or attempt.target is None or attempt.token_at is None or not (once and attempt.pace.tbt_s):
            return
        decode = self._picture.decodes.get(attempt.target.decode)
        if decode is not None and request.ask.choices == 1 and request.tokens > 1:
            decode.pace.observe(attempt.pace, request.tokens - 1, now - attempt.token_at)

    def compute(self, request: Request, attempt: Attempt, now: float, out: list[Action]) -> None:
        """Starts the sequence at decode, which computes the rest of the prompt: there is nothing for prefill to do."""
        self._release_claim(attempt, now)
        attempt.prefill, attempt.delivered = PrefillLeg.OVER, True
        if request.ask.choices == 1:
            self._picture.forecasts.lengths.begin(request.ask.number, request.ask.stratum)
        self.start(request, attempt, out, compute=True)

    def start(self, request: Request, attempt: Attempt, out: list[Action], *, compute: bool = False) -> None:
        """Starts the sequence at decode; its call holds the room from now on."""
        target, number = attempt.target, request.ask.number
        assert target is not None
        hold = Hold(Call.SEQUENCE, number, attempt.sequence, target.decode, target.incarnation, attempt.promise)
        attempt.decode, attempt.promise, attempt.sequence_io = DecodeLeg.STARTED, 0, self.calls.begin(hold)
        self._timers.clear(("renew", number))
        out.append(Start(attempt.sequence_io, number, attempt.sequence, target, compute))

    def renew(self, request: int, attempt: Attempt, now: float, out: list[Action]) -> None:
        """Keeps the promise, now and within its lease again."""
        if attempt.target is not None and attempt.decode is DecodeLeg.PROMISED:
            out.append(Renew(attempt.target))
            if attempt.lease_s > 0:
                self._timers.set(("renew", request), now + attempt.lease_s / RENEWALS)

    def lose_promise(self, attempt: Attempt, now: float) -> None:
        """The instance that promised room is lost before the sequence was started there."""
        attempt.decode = DecodeLeg.OVER
        self._picture.release(attempt.promise, now)
        attempt.promise = 0

    def end(self, request: Request, now: float, out: list[Action], *, complete: bool = False, known: int = 0) -> None:
        """Ends the attempt, and what was adopted, as far as there is one. Arguments as for `end_attempt`."""
        self.end_adopted(request, out, known=known)
        self.end_attempt(request, now, out, complete=complete, known=known)

    def end_adopted(self, request: Request, out: list[Action], *, known: int = 0) -> None:
        """Ends a sequence that is followed without an attempt."""
        if request.adopted and request.adopted != known:
            out.append(Cancel(request.adopted))
        request.adopted = 0

    def detach(self, request: Request, now: float, out: list[Action]) -> None:
        """Ends the attempt, but follows a sequence that runs as if it were adopted: it is being moved away."""
        attempt = request.attempt
        if attempt is not None and attempt.runs(beams=request.ask.beams) and not request.adopted:
            request.adopted = attempt.sequence_io
        self.end_attempt(request, now, out, complete=True, known=request.adopted)

    def end_attempt(
        self, request: Request, now: float, out: list[Action], *, complete: bool = False, known: int = 0
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
        if attempt.prefill is PrefillLeg.TOKEN and complete:
            self._timers.set(("linger", attempt.prefill_io), now + LINGER_S)
        elif attempt.prefill in (PrefillLeg.SENT, PrefillLeg.TOKEN):
            out.append(Cancel(attempt.prefill_io))
        if attempt.decode is DecodeLeg.PROMISED:
            assert attempt.target is not None
            out.append(Undo(attempt.sequence, attempt.target))
            self.lose_promise(attempt, now)
        elif attempt.decode in (DecodeLeg.STARTED, DecodeLeg.STREAMING) and attempt.sequence_io != known:
            out.append(Cancel(attempt.sequence_io))

    def held(self, requests: Iterable[Request]) -> list[int]:
        """All claims that calls and attempts hold."""
        claims = [hold.claim for _, hold in self.calls]
        for request in requests:
            if request.attempt is not None:
                claims += [request.attempt.claim, request.attempt.promise]
        return sorted(claim for claim in claims if claim)

    def check_attempt(self, request: Request, attempt: Attempt) -> None:
        """Asserts that an attempt's legs have their calls and claims, and that it waits for something."""
        calls = self.calls
        assert (attempt.prefill in (PrefillLeg.NONE, PrefillLeg.SENT)) == bool(attempt.claim)
        if attempt.prefill in (PrefillLeg.SENT, PrefillLeg.TOKEN):
            assert attempt.prefill_io in calls
        assert (attempt.decode in (DecodeLeg.STARTED, DecodeLeg.STREAMING)) == (attempt.sequence_io in calls)
        assert (attempt.decode is DecodeLeg.PROMISED) == bool(attempt.promise)
        if attempt.decode is DecodeLeg.ASKED:
            assert attempt.asked or attempt.late or request.reserves == MAX_RESERVES, "nothing is waited for"
            assert attempt.prefill is PrefillLeg.NONE
        elif attempt.decode is not DecodeLeg.STREAMING and attempt.prefill is PrefillLeg.OVER and attempt.torn:
            assert self._timers.at(("word", request.ask.number)) is not None, "it would wait for ever"

    def digest(self) -> bytes:
        """Hash of the calls."""
        return digest_of(self.calls, self.staleness)

    def _reserve(self, request: Request, attempt: Attempt, option: DecodeChoice, now: float, out: list[Action]) -> None:
        number = request.ask.number
        incarnation = self._picture.incarnation(option.id)
        plan = attempt.plan
        demand, begins_at = plan.demand, now + plan.prefill.ttft_s
        context = demand.prompt_tokens * demand.choices
        expected = self.expected_tokens(request, demand.decode_tokens + 1)
        answer = Answer(context, option.blocks, demand.choices, request.ask.stratum, begins_at, tokens=expected)
        claim = self._picture.claim_decode(option.id, answer)
        hold = Hold(Call.RESERVE, number, attempt.sequence, option.id, incarnation, claim)
        attempt.asked = io = self.calls.begin(hold)
        self._take_part(request, attempt, option.id)
        request.reserves += 1
        self._timers.set(("reserve", io), now + self._reserve_timeout_s)
        stores = tuple(store.id for store in plan.write_back)
        tbt_slo_s = None if request.recovering else request.ask.slo.tbt_s
        starts_in_s = self._gate.starts_in_s(plan)
        out.append(Reserve(io, number, attempt.sequence, option.id, incarnation, tbt_slo_s, starts_in_s, stores))

    def _release_claim(self, attempt: Attempt, now: float) -> None:
        if attempt.claim:
            self._picture.release(attempt.claim, now)
            attempt.claim = 0
