"""The calls that carry out the attempts of requests, and the claims on the cluster that they hold.

A call holds the claim until the call's `IoEnded` arrives, even if nothing waits for the call any more.
"""

from collections.abc import Iterable

from moonpool.base.scheduling.state_machine import CancelIo, Timers, digest_of
from moonpool.conductor.core.actions import (
    Action,
    CallPrefill,
    CallReserve,
    CancelReservation,
    RenewReservation,
    StartDecode,
    TakeOverSequence,
)
from moonpool.conductor.core.admission import AdmissionGate
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.core.events import CallResult, ReserveGranted, StalePlacement
from moonpool.conductor.core.failures import UNANSWERED_KINDS, Failure, FailureKind
from moonpool.conductor.core.kv_links import LinkRead
from moonpool.conductor.core.open_calls import FOLLOWING_CALLS, CallKind, OpenCall, OpenCalls
from moonpool.conductor.core.request import ScheduledAttempt, ScheduledRequest
from moonpool.conductor.core.request_spec import DecodeReservation
from moonpool.conductor.core.request_states import DecodePhase, PrefillPhase, RequestState, TimerKey, TimerKind
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.core.stale_placement import StalePlacementCheck
from moonpool.conductor.placement.base import DecodeChoice

MAX_RESERVES = 2
"""A request's `CallReserve` calls at once."""
RENEWALS = 3
"""A reservation's renewals within the lease."""
LINGER_S = 5.0
"""Seconds for which a prefill call may continue after the first token if the answer is complete: prefill still writes
to kvstores.
"""


class AttemptCalls:
    """The calls of attempts: starts and ends them, and holds their claims. `RequestScheduler` decides what to do next.

    Args:
        cluster: counts the claims.
        timers: the scheduler's.
        actions: gets the actions; shared with the scheduler.
        reserve_timeout_s: seconds after which the next decode instance is asked.
        gate: says when decode shall expect a sequence.
    """

    def __init__(
        self,
        cluster: ClusterView,
        timers: Timers[TimerKey],
        actions: list[Action],
        reserve_timeout_s: float,
        gate: AdmissionGate,
    ) -> None:
        self.open = OpenCalls()
        self.stale_check = StalePlacementCheck(cluster)
        self._cluster = cluster
        self._timers = timers
        self._actions = actions
        self._reserve_timeout_s = reserve_timeout_s
        self._gate = gate
        self._requests_at: dict[str, dict[int, None]] = {}

    def requests_at(self, instance: str) -> list[int]:
        """Requests whose attempts have, or had, a part at an instance, by number."""
        return sorted(self._requests_at.get(instance, ()))

    def _take_part(self, request: ScheduledRequest, attempt: ScheduledAttempt, instance: str) -> None:
        attempt.instances.append(instance)
        self._requests_at.setdefault(instance, {})[request.spec.number] = None

    def _leave(self, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        for instance in dict.fromkeys(attempt.instances):
            there = self._requests_at[instance]
            del there[request.spec.number]
            if not there:
                del self._requests_at[instance]

    # --- begin ------------------------------------------------------------------------------------------------------

    def begin(
        self, request: ScheduledRequest, decision: RoutingDecision, candidates: list[DecodeChoice], now: float
    ) -> ScheduledAttempt:
        """Begin an attempt: from now on the prompt counts at the prefill instance."""
        sequence, request.attempts = request.next_sequence, request.attempts + 1
        epoch = self._cluster.epoch(decision.prefill.id)
        claim = self.claim_prefill(request, decision, now)
        attempt = request.attempt = ScheduledAttempt(sequence, decision, epoch, candidates, claim, begun=now)
        request.enter(RequestState.PLACED)
        self._take_part(request, attempt, decision.prefill.id)
        return attempt

    def replace_decision(
        self, request: ScheduledRequest, attempt: ScheduledAttempt, decision: RoutingDecision, now: float
    ) -> None:
        """Place the prompt at another prefill instance; the reservation at decode stays."""
        attempt.decision, attempt.begun = decision, now
        attempt.epoch = self._cluster.epoch(decision.prefill.id)
        attempt.prefill_claim = self.claim_prefill(request, decision, now)
        self._take_part(request, attempt, decision.prefill.id)

    def claim_prefill(self, request: ScheduledRequest, decision: RoutingDecision, now: float) -> int:
        """Count a prompt at the chosen prefill instance; return the claim's number."""
        best, spec = decision.prefill, request.spec
        # The instance orders by arrival there and delay (docs/adr/0056): the conductor predicts by the same key.
        key = spec.queue_key if best.delay_s is None else spec.queue_key_at(now).delayed(best.delay_s)
        tokens = self._cluster.tokens_to_compute(decision)
        claim = self._cluster.claim_prefill(
            best.id, best.busy_s, now, best.source, key, LinkRead.of(best), decision.send_s, tokens
        )
        self._cluster.prefills.in_flight.placed(claim, best.id, request.keys)
        return claim

    def _release_prefill(self, attempt: ScheduledAttempt, now: float) -> None:
        if attempt.prefill_claim:
            self._cluster.release(attempt.prefill_claim, now)
            attempt.prefill_claim = 0

    # --- decode memory ----------------------------------------------------------------------------------------------

    def reserve(self, request: ScheduledRequest, attempt: ScheduledAttempt, now: float) -> bool:
        """Ask the next decode instance for memory, unless an answer is waited for.

        Returns:
            False if no instance is left to ask and no answer will come.
        """
        if attempt.decode_phase is not DecodePhase.RESERVING:
            attempt.enter_decode(DecodePhase.RESERVING)
        if attempt.pending_reserve:
            return True
        if not attempt.decode_candidates:
            return bool(attempt.overdue_reserves)
        if request.reserves < MAX_RESERVES:  # else the next call to end makes room for this one
            self._call_reserve(request, attempt, attempt.decode_candidates.pop(0), now)
        return True

    def _call_reserve(
        self, request: ScheduledRequest, attempt: ScheduledAttempt, choice: DecodeChoice, now: float
    ) -> None:
        spec, decision = request.spec, attempt.decision
        demand, begins_at = decision.demand, now + decision.prefill.ttft_s
        answer = PlacedAnswer(
            demand.prompt_tokens * demand.choices,
            choice.blocks,
            demand.choices,
            spec.stratum,
            begins_at,
            prompt_s=decision.prefill.prefill_s if decision.at_decode else 0.0,
        )
        claim = self._cluster.claim_decode(choice.id, answer)
        epoch = self._cluster.epoch(choice.id)
        call = OpenCall(CallKind.RESERVE, spec.number, attempt.sequence, choice.id, epoch, claim)
        attempt.pending_reserve = io = self.open.begin(call)
        self._take_part(request, attempt, choice.id)
        request.reserves += 1
        self._timers.set((TimerKind.RESERVE, io), now + self._reserve_timeout_s)
        self._actions.append(
            CallReserve(
                io,
                spec.number,
                attempt.sequence,
                choice.id,
                epoch,
                tbt_slo_s=None if request.recovering else spec.slo.tbt_s,
                starts_in_s=self._gate.starts_in_s(decision),
                stores=tuple(store.id for store in decision.write_back),
                computes_prompt=decision.both,
                max_queue_s=self._max_queue_s(request, attempt, now) if decision.both else None,
                rows=decision.rows if decision.both else (),
            )
        )

    def _max_queue_s(self, request: ScheduledRequest, attempt: ScheduledAttempt, now: float) -> float | None:
        """Return the longest queue that a prompt may meet at an instance in the role both; None = any."""
        decision = attempt.decision
        if decision.prefill.id in request.full:  # the others have no place, either
            return None
        return self.stale_check.max_queue_s(decision, request.stale_answers, now)

    def reserve_overdue(self, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """A `CallReserve` takes too long: another instance may be asked meanwhile."""
        call = self.open.get(attempt.pending_reserve)
        assert call is not None
        attempt.overdue_reserves.append(attempt.pending_reserve)
        attempt.pending_reserve = 0
        attempt.failed = Failure(FailureKind.UNAVAILABLE, f"{call.instance} did not answer in time")
        request.suspect(call.instance)

    def instance_lost(self, attempt: ScheduledAttempt, instance: str, epoch: int, failure: Failure) -> bool:
        """Drop what a lost instance may still promise. Return whether the instance was asked for memory."""
        calls = (attempt.pending_reserve, *attempt.overdue_reserves)
        lost = [io for io in calls if (call := self.open.get(io)) and (call.instance, call.epoch) == (instance, epoch)]
        attempt.pending_reserve = 0 if attempt.pending_reserve in lost else attempt.pending_reserve
        attempt.overdue_reserves = [io for io in attempt.overdue_reserves if io not in lost]
        attempt.failed = failure if lost else attempt.failed
        return bool(lost)

    def reserve_ended(
        self, request: ScheduledRequest | None, io: int, call: OpenCall, result: CallResult, now: float
    ) -> bool:
        """Take the result of a `CallReserve`; a reservation that no attempt waits for is cancelled.

        Returns:
            Whether this call gave the request's attempt a reservation.
        """
        attempt = request.attempt if request is not None else None
        waits = False
        if attempt is not None:
            waits = attempt.reservation is None and io in (attempt.pending_reserve, *attempt.overdue_reserves)
            attempt.overdue_reserves = [reserve for reserve in attempt.overdue_reserves if reserve != io]
            attempt.pending_reserve = 0 if attempt.pending_reserve == io else attempt.pending_reserve
        if not isinstance(result, ReserveGranted):
            self._cluster.release(call.claim, now)
            # Decode may have reserved all the same, and its answer was lost.
            if isinstance(result, Failure) and result.kind in UNANSWERED_KINDS:
                unknown = DecodeReservation(call.instance, call.epoch, "", 0, 0, 0)
                self._actions.append(CancelReservation(call.sequence, unknown))
            return False
        # Nobody waits for it any more, another instance was quicker, or the instance has restarted since.
        if attempt is None or not waits or result.target.epoch != call.epoch:
            self._actions.append(CancelReservation(call.sequence, result.target))
            self._cluster.release(call.claim, now)
            return False
        attempt.enter_decode(DecodePhase.RESERVED)
        attempt.reservation, attempt.lease_s, attempt.decode_claim = result.target, result.lease_s, call.claim
        attempt.pending_reserve, attempt.overdue_reserves = 0, []  # further reservations are not waited for
        attempt.tpot = attempt.tpot._replace(tbt_s=result.tbt_s)
        self._cluster.acknowledged(attempt.decode_claim, result.taken)
        if attempt.decision.both:
            self._cluster.acknowledged(attempt.prefill_claim, result.taken)
        self.renew(call.request, attempt, now)
        return True

    def renew(self, number: int, attempt: ScheduledAttempt, now: float) -> None:
        """Renew a request's reservation, now and within the lease again."""
        if attempt.reservation is not None and attempt.decode_phase is DecodePhase.RESERVED:
            self._actions.append(RenewReservation(attempt.reservation))
            if attempt.lease_s > 0:
                self._timers.set((TimerKind.RENEWAL, number), now + attempt.lease_s / RENEWALS)

    def lose_reservation(self, attempt: ScheduledAttempt, now: float) -> None:
        """The reservation is given up, or the decode instance is lost, before the sequence was started."""
        attempt.enter_decode(DecodePhase.ENDED)
        self._cluster.release(attempt.decode_claim, now)
        attempt.decode_claim = 0

    # --- prefill ----------------------------------------------------------------------------------------------------

    def call_prefill(self, request: ScheduledRequest, attempt: ScheduledAttempt, now: float) -> None:
        decision, number = attempt.decision, request.spec.number
        attempt.max_queue_s = self.stale_check.max_queue_s(decision, attempt.stale_answers, now)
        prefill, epoch = decision.prefill.id, attempt.epoch
        attempt.enter_prefill(PrefillPhase.CALLED)
        attempt.prefill_io = self.open.begin(OpenCall(CallKind.PREFILL, number, attempt.sequence, prefill, epoch))
        self._actions.append(
            CallPrefill(
                attempt.prefill_io,
                number,
                attempt.sequence,
                decision,
                epoch,
                attempt.reservation,
                attempt.max_queue_s,
            )
        )

    def prefill_accepted(self, attempt: ScheduledAttempt, taken: int) -> None:
        """The prefill instance has the prompt in the queue, as the `taken`-th."""
        attempt.max_queue_s = None
        if attempt.prefill_claim:
            self._cluster.acknowledged(attempt.prefill_claim, taken)

    def prefill_refused(self, attempt: ScheduledAttempt, instance: str, stale: StalePlacement, now: float) -> None:
        """The prefill instance has not taken the prompt: the queue is longer than predicted."""
        self._release_prefill(attempt, now)
        attempt.enter_prefill(PrefillPhase.NOT_CALLED)
        attempt.stale_answers += 1
        self.stale_check.answered(instance, stale, now)

    def first_token(self, attempt: ScheduledAttempt, now: float) -> None:
        """The prompt is computed: the prompt counts there no more."""
        attempt.enter_prefill(PrefillPhase.FIRST_TOKEN)
        attempt.first_token_at = now
        attempt.overtaken = self._cluster.overtaken(attempt.prefill_claim)
        self._cluster.prefills.computed(attempt.prefill_claim)
        self._release_prefill(attempt, now)

    # --- sequences --------------------------------------------------------------------------------------------------

    def start_sequence(self, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """Start the sequence at decode; the start call holds the reserved memory from now on."""
        target, number, decision = attempt.reservation, request.spec.number, attempt.decision
        assert target is not None
        attempt.enter_decode(DecodePhase.STARTED)
        claim, attempt.decode_claim = attempt.decode_claim, 0
        attempt.sequence_io = self.open.begin(
            OpenCall(CallKind.SEQUENCE, number, attempt.sequence, target.decode, target.epoch, claim)
        )
        self._timers.clear((TimerKind.RENEWAL, number))
        plan = decision if decision.both else None
        start = StartDecode(attempt.sequence_io, number, attempt.sequence, target, decision.computed_at_decode, plan)
        self._actions.append(start)

    def compute_at_decode(self, request: ScheduledRequest, attempt: ScheduledAttempt, now: float) -> None:
        """Start the sequence at decode, which computes what it lacks of the prompt: prefill is not called."""
        if attempt.decision.both:  # the prompt counts there until it is computed
            attempt.enter_prefill(PrefillPhase.CALLED)
            self.start_sequence(request, attempt)
            return
        self._release_prefill(attempt, now)
        attempt.enter_prefill(PrefillPhase.ENDED)
        attempt.delivered = True
        if request.spec.choices == 1:
            self._cluster.forecasts.lengths.begin(request.spec.number, request.spec.stratum)
        self.start_sequence(request, attempt)

    def prompt_computed(self, attempt: ScheduledAttempt, now: float) -> None:
        """An instance in the role both has computed the prompt, whose KV is where the answer runs."""
        self.first_token(attempt, now)
        attempt.enter_prefill(PrefillPhase.ENDED)
        attempt.delivered = True

    def take_over(self, request: ScheduledRequest, now: float) -> None:
        """Take over the sequence that another conductor started.

        The sequence's blocks are in the instance's next report.
        """
        spec, resumed, target = request.spec, request.spec.resumed, request.owner
        assert resumed is not None
        assert target is not None
        context = (spec.prompt_tokens + request.tokens) * spec.choices
        answer = PlacedAnswer(context, 0, spec.choices, spec.stratum, now, request.tokens, number=0)
        claim = self._cluster.claim_decode(target.decode, answer)
        request.followed_call = self.open.begin(
            OpenCall(CallKind.TAKE_OVER, spec.number, resumed.sequence, target.decode, target.epoch, claim)
        )
        self._actions.append(
            TakeOverSequence(request.followed_call, spec.number, resumed.sequence, target, resumed.fence)
        )

    # --- forecasts --------------------------------------------------------------------------------------------------

    def forecast_tpot(self, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """Note the forecast of the time per output token at the reserved instance."""
        target = attempt.reservation
        decode = self._cluster.decodes.get(target.decode) if target is not None else None
        if decode is not None and attempt.tpot.tbt_s:
            attempt.tpot = decode.tpot.forecast(attempt.tpot.tbt_s, attempt.decision.prefill.others)

    def observe_tpot(self, request: ScheduledRequest, now: float) -> None:
        """Learn from a complete answer how long the tokens took, if one attempt gave all tokens."""
        attempt, once = request.attempt, request.attempts == 1 and request.spec.resumed is None
        if attempt is None or attempt.reservation is None or attempt.first_token_at is None:
            return
        decode = self._cluster.decodes.get(attempt.reservation.decode)
        if once and attempt.tpot.tbt_s and decode is not None and request.spec.choices == 1 and request.tokens > 1:
            answered_s = now - attempt.first_token_at
            decode.tpot.observe(attempt.tpot, request.tokens - 1, answered_s)
            decision, length = attempt.decision, (request.tokens - 1) / attempt.decision.demand.decode_tokens
            self._cluster.hindsight.answered(
                request.spec.number, decision.decodes, decode.facts.id, attempt.begun, answered_s, length
            )

    # --- end --------------------------------------------------------------------------------------------------------

    def end(self, request: ScheduledRequest, now: float, *, complete: bool = False, known: int = 0) -> None:
        """End the attempt and the followed sequence, if there are any. Arguments as for `end_attempt`."""
        self.end_followed(request, known=known)
        self.end_attempt(request, now, complete=complete, known=known)

    def end_followed(self, request: ScheduledRequest, *, known: int = 0) -> None:
        """End a sequence that is followed without an attempt."""
        if request.followed_call and request.followed_call != known:
            self._actions.append(CancelIo(request.followed_call))
        request.followed_call = 0

    def detach(self, request: ScheduledRequest, now: float) -> None:
        """End the attempt to move the request; a sequence that runs is followed on without the attempt."""
        attempt = request.attempt
        if attempt is not None and attempt.runs(deferred=request.spec.deferred) and not request.followed_call:
            request.followed_call = attempt.sequence_io
        self.end_attempt(request, now, complete=True, known=request.followed_call)

    def end_attempt(self, request: ScheduledRequest, now: float, *, complete: bool = False, known: int = 0) -> None:
        """End the attempt, if there is one. The attempt's claims are released now, or when the calls end.

        Args:
            request: the request of the attempt.
            now: seconds.
            complete: the answer is complete, or goes on elsewhere. A prefill call that has given the first token may
                continue for `LINGER_S`: the call may still send KV.
            known: call of a sequence that decode has ended, or that is followed on; 0 = none.
        """
        attempt, request.attempt = request.attempt, None
        number = request.spec.number
        for kind in (TimerKind.RENEWAL, TimerKind.DELIVERY):
            self._timers.clear((kind, number))
        if attempt is None:
            return
        self._leave(request, attempt)
        self._release_prefill(attempt, now)
        # Prefill still writes blocks to kvstores; a cancel would lose them.
        if attempt.prefill_phase is PrefillPhase.FIRST_TOKEN and complete:
            self._timers.set((TimerKind.LINGER, attempt.prefill_io), now + LINGER_S)
        elif attempt.prefill_phase in (PrefillPhase.CALLED, PrefillPhase.FIRST_TOKEN) and attempt.prefill_io:
            self._actions.append(CancelIo(attempt.prefill_io))
        if attempt.decode_phase is DecodePhase.RESERVED:
            assert attempt.reservation is not None
            self._actions.append(CancelReservation(attempt.sequence, attempt.reservation))
            self.lose_reservation(attempt, now)
        elif attempt.decode_phase in (DecodePhase.STARTED, DecodePhase.STREAMING) and attempt.sequence_io != known:
            self._actions.append(CancelIo(attempt.sequence_io))

    # --- checks -----------------------------------------------------------------------------------------------------

    def claims(self, requests: Iterable[ScheduledRequest]) -> list[int]:
        """Return all claims that calls and attempts hold, ascending."""
        claims = [call.claim for _, call in self.open]
        for request in requests:
            if request.attempt is not None:
                claims += [request.attempt.prefill_claim, request.attempt.decode_claim]
        return sorted(claim for claim in claims if claim)

    def check_invariants(self, requests: Iterable[ScheduledRequest]) -> None:
        """Assert that calls and instances belong to the attempts of these requests, which are all."""
        self.open.check_invariants()
        parts: set[tuple[str, int]] = set()
        for request in requests:
            if request.attempt is not None:
                parts |= {(instance, request.spec.number) for instance in request.attempt.instances}
                self._check_attempt(request, request.attempt)
            if request.followed_call:
                call = self.open.get(request.followed_call)
                assert call is not None
                assert call.kind in FOLLOWING_CALLS
                assert call.request == request.spec.number
        assert {(instance, number) for instance, there in self._requests_at.items() for number in there} == parts

    def _check_attempt(self, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """Assert that an attempt's phases have their calls and claims, and that the attempt waits for something."""
        prefill, decode, calls = attempt.prefill_phase, attempt.decode_phase, self.open
        assert (prefill in (PrefillPhase.NOT_CALLED, PrefillPhase.CALLED)) == bool(attempt.prefill_claim)
        if prefill in (PrefillPhase.CALLED, PrefillPhase.FIRST_TOKEN):
            assert attempt.prompt_io in calls
        assert (decode in (DecodePhase.STARTED, DecodePhase.STREAMING)) == (attempt.sequence_io in calls)
        assert (decode is DecodePhase.RESERVED) == bool(attempt.decode_claim)
        if decode is DecodePhase.RESERVING:
            waits = attempt.pending_reserve or attempt.overdue_reserves or request.reserves == MAX_RESERVES
            assert waits, "nothing is waited for"
            assert prefill is PrefillPhase.NOT_CALLED
        elif attempt.delivery_unknown:
            delivery = self._timers.at((TimerKind.DELIVERY, request.spec.number))
            assert delivery is not None, "it would wait for ever"

    def digest(self) -> bytes:
        """Return the hash of the calls."""
        return digest_of(self.open, self.stale_check)
