"""One request in the scheduler: state, phases of the current attempt, and the timers for both.

docs/states.md has the diagrams, which are generated from the tables here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from moonpool.conductor.core.events import (
    ATTEMPT_MARK,
    DecodeReservation,
    Failure,
    FailureSeries,
    RequestSpec,
)
from moonpool.conductor.core.expected import TellSession
from moonpool.conductor.core.latency_model import NO_TPOT_FORECAST, TpotForecast
from moonpool.conductor.core.router import RoutingDecision
from moonpool.conductor.placement.base import DecodeChoice

S = TypeVar("S", bound=Enum)


def _checked(transitions: Mapping[S, frozenset[S]], before: S, after: S) -> S:
    assert after in transitions[before], f"{before.name} -> {after.name} is no transition"
    return after


class RequestState(Enum):
    """What a request does now."""

    ARRIVED = 0
    """Just taken in. No request is in this state between two events."""
    PLACED = 1
    """Has an attempt: instances are chosen, and calls carry the attempt out."""
    WAITING_MEMORY = 2
    """No decode instance had enough KV blocks. Waits in `DecodeMemoryQueue`."""
    WAITING_SLO = 3
    """No placement kept the SLO, and the client lets the request wait. Waits in `SloQueue`."""
    WAITING_INSTANCE = 4
    """No instance could take the request. Waits until one joins."""
    BACKOFF = 5
    """An attempt failed. Waits before the next one."""
    REHASHING = 6
    """Waits for the block keys of the prompt and the answer so far."""
    WAITING_OWNER = 7
    """Resumed. Waits for the decode instance that runs the sequence to join this conductor."""
    TAKEN_OVER = 8
    """Follows a sequence without an attempt here: another conductor started the sequence, or moving the sequence away
    failed.
    """
    ENDED = 9
    """Complete, failed, or dropped."""


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.ARRIVED: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_SLO,
        RequestState.WAITING_INSTANCE,
        RequestState.WAITING_OWNER,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.PLACED: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_MEMORY,
        RequestState.WAITING_SLO,
        RequestState.WAITING_INSTANCE,
        RequestState.BACKOFF,
        RequestState.REHASHING,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.WAITING_MEMORY: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_SLO,
        RequestState.WAITING_INSTANCE,
        RequestState.ENDED,
    }),
    RequestState.WAITING_SLO: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_SLO,
        RequestState.ENDED,
    }),
    RequestState.WAITING_INSTANCE: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_INSTANCE,
        RequestState.ENDED,
    }),
    RequestState.BACKOFF: frozenset({
        RequestState.REHASHING,
        RequestState.ENDED,
    }),
    RequestState.REHASHING: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_INSTANCE,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.WAITING_OWNER: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_INSTANCE,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.TAKEN_OVER: frozenset({
        RequestState.BACKOFF,
        RequestState.REHASHING,
        RequestState.ENDED,
    }),
    RequestState.ENDED: frozenset(),
}  # fmt: skip


class PrefillPhase(Enum):
    """How far an attempt is at the prefill instance."""

    NOT_CALLED = 0
    """Decode memory is reserved first."""
    CALLED = 1
    """The prompt waits or is computed."""
    FIRST_TOKEN = 2
    """The first token has come. KV may still be on the way to decode."""
    ENDED = 3
    """The call has ended, or is not waited for, or decode computes the prompt."""


PREFILL_TRANSITIONS: Mapping[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.NOT_CALLED: frozenset({PrefillPhase.CALLED, PrefillPhase.ENDED}),
    PrefillPhase.CALLED: frozenset({PrefillPhase.NOT_CALLED, PrefillPhase.FIRST_TOKEN, PrefillPhase.ENDED}),
    PrefillPhase.FIRST_TOKEN: frozenset({PrefillPhase.ENDED}),
    PrefillPhase.ENDED: frozenset(),
}
"""CALLED leads back to NOT_CALLED if the instance's queue was longer than predicted (`StalePlacement`)."""


class DecodePhase(Enum):
    """How far an attempt is at decode."""

    NOT_CALLED = 0
    """Decode is not needed, or not called yet."""
    RESERVING = 1
    """Decode instances are asked for memory."""
    RESERVED = 2
    """An instance keeps KV blocks for the request."""
    STARTED = 3
    """The sequence is started there. The sequence runs as soon as the KV has arrived."""
    STREAMING = 4
    """Tokens have come."""
    ENDED = 5
    """The sequence has ended, or the instance is lost."""


DECODE_TRANSITIONS: Mapping[DecodePhase, frozenset[DecodePhase]] = {
    DecodePhase.NOT_CALLED: frozenset({DecodePhase.RESERVING}),
    DecodePhase.RESERVING: frozenset({DecodePhase.RESERVED}),
    DecodePhase.RESERVED: frozenset({DecodePhase.STARTED, DecodePhase.ENDED}),
    DecodePhase.STARTED: frozenset({DecodePhase.STREAMING, DecodePhase.ENDED}),
    DecodePhase.STREAMING: frozenset({DecodePhase.ENDED}),
    DecodePhase.ENDED: frozenset(),
}


class TimerKind(Enum):
    """What a timer of the scheduler is for; the number in a `TimerKey` is a request's or a call's."""

    DEADLINE = 0
    """A request must have ended."""
    WAIT = 1
    """A request has waited for a placement as long as allowed."""
    BACKOFF = 2
    """A request's pause between two attempts is over."""
    RENEWAL = 3
    """A request's reservation at decode must be renewed."""
    DELIVERY = 4
    """Decode must have said whether a request's KV has arrived."""
    OWNER = 5
    """The instance that runs a resumed request's sequence must have joined."""
    RESERVE = 6
    """A `CallReserve` has taken too long: the next instance is asked."""
    LINGER = 7
    """A prefill call must have ended after the answer is complete."""
    SLO_QUEUE = 8
    """Requests in the `SloQueue` look for a placement again."""


TimerKey = tuple[TimerKind, int]

REQUEST_TIMERS = (
    TimerKind.DEADLINE,
    TimerKind.WAIT,
    TimerKind.BACKOFF,
    TimerKind.RENEWAL,
    TimerKind.DELIVERY,
    TimerKind.OWNER,
)
"""Timers numbered by a request. They end with the request."""


@dataclass(slots=True)
class ScheduledAttempt:
    """One placement of a request, and the calls that carry the placement out.

    Attributes:
        sequence: id that engines see. The id ends with the attempt's number, which fences earlier attempts off.
        decision: instances that the router chose.
        epoch: the prefill instance's.
        decode_candidates: decode instances still to be asked for memory, best first.
        prefill_claim: claim of the prompt at prefill; 0 = released.
        prefill_phase, decode_phase: how far the attempt is.
        prefill_io, sequence_io: calls to prefill and decode; 0 before they start.
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
        """Changes the prefill phase; `PREFILL_TRANSITIONS` must allow the change."""
        self.prefill_phase = _checked(PREFILL_TRANSITIONS, self.prefill_phase, phase)

    def enter_decode(self, phase: DecodePhase) -> None:
        """Changes the decode phase; `DECODE_TRANSITIONS` must allow the change."""
        self.decode_phase = _checked(DECODE_TRANSITIONS, self.decode_phase, phase)

    @property
    def may_be_stale(self) -> bool:
        """Whether the prefill instance may answer `StalePlacement`."""
        return self.prefill_phase is PrefillPhase.CALLED and self.max_queue_s is not None

    @property
    def delivery_unknown(self) -> bool:
        """Whether prefill has ended and no message says that decode has all KV."""
        streaming = self.decode_phase is DecodePhase.STREAMING
        return self.prefill_phase is PrefillPhase.ENDED and not self.delivered and not streaming

    def runs(self, *, deferred: bool) -> bool:
        """Whether decode computes the sequence. Deferred answers send nothing before the end: they run when able."""
        started = self.decode_phase is DecodePhase.STARTED
        return self.decode_phase is DecodePhase.STREAMING or (deferred and started and self.delivered)


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
    refusal: Failure | None = None
    waits_since: float | None = None
    queued_s: float = 0.0
    counted: bool = False
    recovering: bool = False
    stores: tuple[str, ...] = ()
    warming: TellSession | None = None

    def enter(self, state: RequestState) -> None:
        """Changes the state; `TRANSITIONS` must allow the change."""
        self.state = _checked(TRANSITIONS, self.state, state)

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
        """Seconds since the arrival that count in the TTFT limit."""
        until = now if self.waits_since is None or not self.spec.slo.queue_s else self.waits_since
        return until - self.spec.arrived - self.queued_s

    def grow(self, tokens: int) -> None:
        """Counts new tokens in the answer, or in one answer."""
        self.generated += tokens
        if self.spec.choices == 1 and not self.spec.deferred:
            self.tokens += tokens

    def suspect(self, instance: str) -> None:
        """Avoids an instance from now on."""
        if instance not in self.suspects:
            self.suspects.append(instance)
