"""One request in the scheduler, and its current attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.conductor.core.failures import Failure, FailureSeries
from moonpool.conductor.core.request_spec import ATTEMPT_MARK, DecodeReservation, RequestSpec
from moonpool.conductor.core.request_states import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    TRANSITIONS,
    DecodePhase,
    PrefillPhase,
    RequestState,
    checked,
)
from moonpool.conductor.core.retention import TellSession
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.core.tpot_model import NO_TPOT_FORECAST, TpotForecast
from moonpool.conductor.placement.base import DecodeChoice

_WAITS_FOR = {
    RequestState.WAITING_MEMORY: "decode memory",
    RequestState.WAITING_SLO: "a placement that keeps the request's limits",
    RequestState.WAITING_INSTANCE: "an instance that takes requests",
    RequestState.BACKOFF: "the next attempt, as an instance failed",
    RequestState.REHASHING: "the block keys of the prompt",
    RequestState.WAITING_OWNER: "the decode instance that runs the answer",
    RequestState.TAKEN_OVER: "further tokens of an answer that another conductor placed",
}


@dataclass(slots=True)
class ScheduledRequest:
    """One request from arrival to end.

    Attributes:
        spec: what the client asked for.
        keys: keys for all full blocks of the prompt and the tokens so far, at the last placement.
        state: what the request does now.
        tokens: length of the answer so far; 0 with several answers, none of which prefill computes again.
        generated: tokens that have come of all answers; none from deferred answers before their end.
        attempts: placements so far; the next attempt's number.
        failures: the latest attempts in a row that failed.
        suspects: ids of instances that failed the request; used only when no other is left.
        attempt: the current one; None while the request has no placement.
        followed_call: call that follows a sequence without an attempt, after a takeover or while moving; 0 = none.
        stays_until: time before which the sequence is not moved again, as no other instance took the sequence.
        reserves: `CallReserve` calls of all attempts that have not ended.
        unasked: placements in a row for which no decode instance could be asked.
        full: ids of instances in the role both that had no place since the request looks for one.
        stale_answers: of these, those whose prompts take longer than predicted.
        refusal: error to return if the wait times out.
        waits_since: time since which the request looks for a placement in vain; None during an attempt.
        queued_s: seconds of earlier waits that do not count in the TTFT limit.
        counted: charged to the tenant, and counted for prefix replication.
        stores: kvstores that shall hold the prompt's KV, if the request has a session.
        warming: the order for blocks on SSD that the prompt waits for; None = none, or not wanted any more.
        recovering: placed before, or held up by a passing failure: the request is not refused early any more.
    """

    spec: RequestSpec
    keys: tuple[bytes, ...]
    state: RequestState = RequestState.ARRIVED
    tokens: int = 0
    generated: int = 0
    attempts: int = 0
    failures: FailureSeries = field(default_factory=FailureSeries)
    suspects: list[str] = field(default_factory=list)
    attempt: ScheduledAttempt | None = None
    followed_call: int = 0
    stays_until: float = 0.0
    reserves: int = 0
    unasked: int = 0
    full: list[str] = field(default_factory=list)
    stale_answers: int = 0
    refusal: Failure | None = None
    waits_since: float | None = None
    queued_s: float = 0.0
    counted: bool = False
    recovering: bool = False
    stores: tuple[str, ...] = ()
    warming: TellSession | None = None

    def enter(self, state: RequestState) -> None:
        """Change the state; `TRANSITIONS` must allow the change."""
        self.state = checked(TRANSITIONS, self.state, state)

    @property
    def moving(self) -> bool:
        """Whether the sequence continues at the old instance while the request is placed anew."""
        return bool(self.followed_call) and self.state is not RequestState.TAKEN_OVER

    @property
    def begun(self) -> bool:
        """Whether some of the answer has come or is being computed."""
        called = self.attempt is not None and self.attempt.prefill_phase is not PrefillPhase.NOT_CALLED
        return bool(self.tokens or self.generated or self.followed_call or called)

    @property
    def waits_for(self) -> str:
        """What the request waits for now, for a person."""
        if self.state is not RequestState.PLACED or self.attempt is None:
            return _WAITS_FOR.get(self.state, "a decision of the conductor")
        attempt, prefill = self.attempt, self.attempt.decision.prefill.id
        decode = attempt.reservation.decode if attempt.reservation is not None else ""
        if attempt.decode_phase is DecodePhase.RESERVING:
            return "a reservation at decode"
        if attempt.prefill_phase is PrefillPhase.CALLED:
            return f"the first token from {prefill}"
        if attempt.decode_phase is DecodePhase.STREAMING:
            return f"further tokens from {decode}"
        return f"the KV on the way from {prefill} to {decode}" if decode else f"the end of the answer from {prefill}"

    @property
    def owner(self) -> DecodeReservation | None:
        """The reservation under which another conductor started the sequence; None = there is none."""
        return self.spec.resumed.target if self.spec.resumed is not None else None

    @property
    def next_sequence(self) -> str:
        """Id under which engines see the next attempt. No earlier attempt had this id."""
        resumed, number = self.spec.resumed, self.attempts
        fence = f"{resumed.fence}.{number}" if resumed is not None else str(number)
        return f"{self.spec.id}{ATTEMPT_MARK}{fence}" if number or resumed is not None else self.spec.id

    def attempt_as(self, sequence: str) -> ScheduledAttempt | None:
        """The current attempt if engines see the attempt under this id; None if the id is an earlier attempt's."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.sequence == sequence else None

    def elapsed_s(self, now: float) -> float:
        """Return the seconds since the arrival that count in the TTFT limit."""
        until = now if self.waits_since is None or not self.spec.slo.queue_s else self.waits_since
        return until - self.spec.arrived - self.queued_s

    def grow(self, tokens: int) -> None:
        """Count new tokens in the answer, or in one answer."""
        self.generated += tokens
        if self.spec.choices == 1 and not self.spec.deferred:
            self.tokens += tokens

    def suspect(self, instance: str) -> None:
        """Avoid an instance from now on."""
        if instance not in self.suspects:
            self.suspects.append(instance)


@dataclass(slots=True)
class ScheduledAttempt:
    """One placement of a request, and the calls that carry the placement out.

    Attributes:
        sequence: id that engines see. The id ends with the attempt's number, which fences earlier attempts off.
        decision: instances that the router chose.
        epoch: epoch of the instance that computes the prompt.
        decode_candidates: decode instances still to be asked for memory, best first.
        prefill_claim: claim of the prompt at prefill; 0 = released.
        prefill_phase, decode_phase: how far the attempt is.
        prefill_io, sequence_io: calls to prefill and decode; 0 before they start. In the role both the sequence's call
            computes the prompt.
        pending_reserve: the `CallReserve` that is waited for; 0 = none.
        overdue_reserves: earlier ones that took too long. The first reservation counts, also a late one.
        full: last refusal because of memory or TBT.
        failed: last failure to ask an instance.
        reservation: KV blocks kept at decode; None before.
        lease_s: seconds for which decode keeps the reservation without a renewal.
        decode_claim: claim on the reserved memory until the sequence's call holds the claim; 0 = none.
        delivered: decode has all KV of the prompt.
        instances: ids of instances that have, or had, a part in the attempt.
        begun: time of the placement, seconds.
        first_token_at: time of the first token; None before.
        tpot: forecast of the time per output token.
        queued_s: seconds for which the request had looked for a placement before.
        stale_answers: prefill instances in a row that answered `StalePlacement`.
        max_queue_s: longest queue with which the prefill instance must take the prompt. None: any, or already taken.
        overtaken: prompts that were placed later went before the prompt.
    """

    sequence: str
    decision: RoutingDecision
    epoch: int
    decode_candidates: list[DecodeChoice]
    prefill_claim: int
    prefill_phase: PrefillPhase = PrefillPhase.NOT_CALLED
    decode_phase: DecodePhase = DecodePhase.NOT_CALLED
    prefill_io: int = 0
    sequence_io: int = 0
    pending_reserve: int = 0
    overdue_reserves: list[int] = field(default_factory=list)
    full: Failure | None = None
    failed: Failure | None = None
    reservation: DecodeReservation | None = None
    lease_s: float = 0.0
    decode_claim: int = 0
    delivered: bool = False
    instances: list[str] = field(default_factory=list)
    begun: float = 0.0
    first_token_at: float | None = None
    tpot: TpotForecast = NO_TPOT_FORECAST
    queued_s: float = 0.0
    stale_answers: int = 0
    max_queue_s: float | None = None
    overtaken: bool = False

    def enter_prefill(self, phase: PrefillPhase) -> None:
        """Change the prefill phase; `PREFILL_TRANSITIONS` must allow the change."""
        self.prefill_phase = checked(PREFILL_TRANSITIONS, self.prefill_phase, phase)

    def enter_decode(self, phase: DecodePhase) -> None:
        """Change the decode phase; `DECODE_TRANSITIONS` must allow the change."""
        self.decode_phase = checked(DECODE_TRANSITIONS, self.decode_phase, phase)

    @property
    def may_be_stale(self) -> bool:
        """Whether the prefill instance may answer `StalePlacement`."""
        return self.prefill_phase is PrefillPhase.CALLED and self.max_queue_s is not None

    @property
    def delivery_unknown(self) -> bool:
        """Whether prefill has ended and no message says that decode has all KV."""
        streaming = self.decode_phase is DecodePhase.STREAMING
        return self.prefill_phase is PrefillPhase.ENDED and not self.delivered and not streaming

    @property
    def prompt_io(self) -> int:
        """The call that computes the prompt."""
        return self.sequence_io if self.decision.both else self.prefill_io

    def runs(self, *, deferred: bool) -> bool:
        """Whether decode computes the sequence. Deferred answers send nothing before the end: they run when able."""
        started = self.decode_phase is DecodePhase.STARTED
        return self.decode_phase is DecodePhase.STREAMING or (deferred and started and self.delivered)
