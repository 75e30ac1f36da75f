"""Events and actions of the conductor's core, and failures as plain data.

The shell gives each request a number and never uses the number again; events and actions name requests by number.
"""

from dataclasses import dataclass
from enum import Enum

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import QueueKey, priority_rank
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded
from moonpool.conductor.core.expected import TellSession
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.latency_model import SloLimits, Stratum, TpotForecast
from moonpool.conductor.core.router import ReplicatePrefix, RoutingDecision, StopReplication
from moonpool.conductor.core.tenant_activity import TellActivity
from moonpool.conductor.placement.base import PrefillChoice


class FailureKind(Enum):
    """Kinds of failures; the values are the names of the classes in `moonpool.base.errors`."""

    INVALID = "InvalidRequest"
    UNSUPPORTED = "Unsupported"
    OVERLOADED = "Overloaded"
    UNAVAILABLE = "Unavailable"
    NOT_FOUND = "NotFound"
    MISMATCH = "Mismatch"
    DEADLINE = "DeadlineExceeded"
    TRANSFER = "TransferFailed"
    STREAM = "StreamBroken"
    FRAME = "FrameError"
    INTERNAL = "Internal"


FINAL_KINDS = (FailureKind.INVALID, FailureKind.UNSUPPORTED)
"""Another placement meets the same failure."""
DAMAGED_KINDS = (FailureKind.TRANSFER, FailureKind.FRAME)
"""Data was damaged on the way: chance, unless repeated. Tells little about the instances."""
INNER_KINDS = (FailureKind.TRANSFER, FailureKind.STREAM, FailureKind.FRAME, FailureKind.MISMATCH)
"""Failures between instances; the client gets `Unavailable` instead."""
UNANSWERED_KINDS = (FailureKind.UNAVAILABLE, FailureKind.DEADLINE, FailureKind.STREAM, FailureKind.INTERNAL)
"""Failures after which the instance may have done the work all the same."""
FENCE_FIELD = "resume.count"
"""The failure's field if another conductor has taken over the sequence."""
NO_DECODE_ROOM = "no_decode_room"
"""Reason of a refusal because no decode instance has memory."""


@frozen
class Failure:
    """One failure.

    Attributes:
        kind: the error's kind.
        message: for a person.
        field: the request's or the instance's field, for INVALID and MISMATCH.
        reason: machine-readable, for OVERLOADED; likewise the predictions, the limit and the retry time, seconds.
    """

    kind: FailureKind
    message: str
    field: str = ""
    reason: str = ""
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    slo_s: float = 0.0
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    @property
    def fenced(self) -> bool:
        """Whether another conductor has taken the sequence over."""
        return self.kind is FailureKind.INVALID and self.field == FENCE_FIELD


CONDUCTOR_DRAINING = Failure(FailureKind.UNAVAILABLE, "this conductor is draining")
"""Error of a request that has no placement when the conductor's drain is over."""


@frozen
class StalePlacement:
    """A prefill instance has not taken a prompt: the queue is longer than predicted.

    Attributes:
        drain_s: seconds until the queue is done.
        taken: prompts taken so far, all included in `drain_s`.
    """

    drain_s: float
    taken: int


@dataclass(slots=True)
class FailureSeries:
    """Attempts of a request that failed in a row.

    A failure begins a new series if the answer has grown since the last failure and some time has passed: a long answer
    may lose an instance every minute. A request that kills engines does not grow, so such a series ends.

    Attributes:
        count: attempts that failed.
        broken: attempts that failed by more than chance.
    """

    count: int = 0
    broken: int = 0
    _began: float = 0.0
    _last: float = 0.0
    _tokens: int = 0

    def add(self, now: float, failure: Failure, tokens: int, apart_s: float) -> None:
        """Counts an attempt that has failed after `tokens` tokens. `apart_s`: least seconds between two series."""
        if not self.count or (tokens > self._tokens and 0.0 < apart_s <= now - self._last):
            self.count, self.broken, self._began = 0, 0, now
        self.count += 1
        self.broken += failure.kind not in DAMAGED_KINDS
        self._last, self._tokens = now, tokens

    def is_over(self, retries: int, within_s: float) -> bool:
        """Whether no attempt follows: more than `retries` broke, or were damaged over at least `within_s` seconds."""
        return self.broken > retries or (self.count > retries and self._last - self._began >= within_s)


def retries_exhausted(failure: Failure, attempts: int) -> Failure:
    """Error for a request after the last attempt has failed."""
    if failure.kind in INNER_KINDS:
        message = f"given up after {attempts} placements; the last failed: {failure}"
        return Failure(FailureKind.UNAVAILABLE, message)
    return failure


@frozen
class RoleChangeRequested:
    """A person orders an instance to change roles, whatever the load."""

    instance: str


@frozen
class ChangeRole:
    """Order an instance to drain, and to come back in the other role."""

    instance: str
    epoch: int
    kind: InstanceKind


MIN_KNOWN_TOKENS = 4
"""Fewer tokens that a sequence has elsewhere are generated again: that is about as quick as prefilling them."""
ATTEMPT_MARK = "~"  # separates a request's id from the number of the attempt in the ids that engines see


class CompletionReason(Enum):
    """Why an answer is complete."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3


@frozen
class DecodeReservation:
    """KV blocks that a decode instance keeps for one transfer."""

    decode: str
    epoch: int
    address: str
    transfer_id: int
    generation: int
    held_blocks: int


@frozen
class ResumeState:
    """A request's progress when the client has lost the conductor.

    Attributes:
        tokens: tokens of the answer that the client has; 0 with several answers.
        fence: number of times the request has resumed, including now.
        sequence: last id under which decode knew the request.
        target: reservation at decode then, without the address. None = there was none.
    """

    tokens: int
    fence: int
    sequence: str
    target: DecodeReservation | None


@frozen
class RequestSpec:
    """A request without tokens.

    Attributes:
        number: names the request in events and actions.
        id: the client's name of the request.
        prompt_tokens: length of the prompt.
        max_tokens: tokens generated at most.
        prompt_key: hash of the prompt.
        slo: latency limits.
        arrived: time of arrival, seconds on the core's clock.
        deadline: time at which the request fails.
        choices: sequences that run together. Prefill computes the prompt alone for several.
        deferred: decode sends the answers whole, at their end; a new attempt begins again.
        tenant: owner of the request.
        scored: log probabilities or the embedding of the prompt are returned, which prefill computes.
        resumed: progress of a resumed request; None = new.
        priority: among the tenant's requests; lower ones go first.
        weight: the tenant's share relative to other tenants.
        needs: sampling options that not every engine has, as far as the request sets them.
        session: what the client says of the session that the request is a turn of; None = nothing.
    """

    number: int
    id: str
    prompt_tokens: int
    max_tokens: int
    prompt_key: bytes
    slo: SloLimits
    arrived: float
    deadline: float
    choices: int = 1
    deferred: bool = False
    tenant: str = ""
    scored: bool = False
    resumed: ResumeState | None = None
    priority: int = 0
    weight: float = 1.0
    needs: tuple[str, ...] = ()
    session: SessionTurn | None = None

    @property
    def queue_key(self) -> QueueKey:
        """The request's position among waiting requests."""
        return QueueKey(self.tenant, priority_rank(self.arrived, self.priority), self.number, self.weight)

    def queue_key_at(self, now: float) -> QueueKey:
        """The request's position at an instance on arrival now."""
        return QueueKey(self.tenant, priority_rank(now, self.priority), self.number, self.weight)

    @property
    def stratum(self) -> Stratum:
        """Requests that share forecasts of the answer's length."""
        return (self.tenant,)


# --- events ---------------------------------------------------------------------------------------------------------


@frozen
class RequestArrived:
    """A valid request; `keys`: of the prompt's full blocks, and of the answer so far if the request is resumed."""

    spec: RequestSpec
    keys: tuple[bytes, ...]


@frozen
class Rehashed:
    """Answer to `Rehash`: keys for the full blocks of the prompt and `tokens` answer tokens (0 for several answers)."""

    request: int
    tokens: int
    keys: tuple[bytes, ...]


@frozen
class StopRequested:
    """The answer shall end now: with the tokens so far, or with a failure if the answer cannot be sent."""

    request: int
    failure: Failure | None = None


@frozen
class ClientGone:
    """No client waits for the answer any more."""

    request: int


@frozen
class EndpointAsked:
    """A proxy asks which engine shall serve a request that the proxy sends by itself.

    Attributes:
        spec: the request.
        keys: for all full blocks of the prompt.
        others: ids of instances that must not be chosen.
    """

    spec: RequestSpec
    keys: tuple[bytes, ...]
    others: tuple[str, ...] = ()


@frozen
class EndpointDone:
    """The engine has begun to answer a proxy's request, or never will."""

    request: int


@frozen
class SessionUpdated:
    """A client says between two turns what is known of a session."""

    tenant: str
    turn: SessionTurn


@frozen
class PromptsAnnounced:
    """Clients will send prompts of a tenant.

    Attributes:
        tenant: whose.
        chains: keys of the prompts' full blocks.
        within_s: seconds until they come; None = they will not come after all.
    """

    tenant: str
    chains: tuple[tuple[bytes, ...], ...]
    within_s: float | None


@frozen
class PrefillAccepted:
    """A call's prefill instance has the prompt in the queue, as the `taken`-th."""

    io: int
    taken: int = 0


@frozen
class PrefillMeasurements:
    """How a prompt was prefilled.

    Attributes:
        computed_tokens: tokens that were computed.
        there_s: seconds from arrival at the instance to the first token, measured there.
        misses: (instance, key) of blocks that the index listed and the instance did not hold.
        loads: (instance, blocks, seconds) of complete reads.
    """

    computed_tokens: int
    there_s: float
    misses: tuple[tuple[str, bytes], ...] = ()
    loads: tuple[tuple[str, int, float], ...] = ()


@frozen
class FirstToken:
    """A prefill call has given the first token.

    Attributes:
        io: the call.
        how: what was measured.
        finish: set if the token completes the answer.
        known: the answer had the token already, as the sequence continues elsewhere meanwhile.
    """

    io: int
    how: PrefillMeasurements
    finish: CompletionReason | None = None
    known: bool = False


@frozen
class KVDelivered:
    """A prefill call says that all KV has arrived at decode."""

    io: int


@frozen
class TokensArrived:
    """Tokens of a sequence have come.

    Attributes:
        io: call that follows the sequence.
        count: tokens that are new to the answer; 0 if the instance had all.
        finish: set if they complete the answer.
        known: decode has ended the sequence; the call ends, too.
    """

    io: int
    count: int
    finish: CompletionReason | None = None
    known: bool = False


@frozen
class InstanceJoined:
    """An instance has joined, perhaps again."""

    facts: InstanceFacts


@frozen
class InstanceLeft:
    """An epoch of an instance is no member any more.

    With `lost`, the instance's requests fail now, for this reason.
    """

    instance: str
    epoch: int
    lost: str = ""


@frozen
class LoadReported:
    """An instance has reported load."""

    instance: str
    load: LoadFacts


@frozen
class KeysChanged:
    """A message of an instance's KV events."""

    instance: str
    sequence: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    snapshot_begin: bool
    snapshot_end: bool
    cooled: tuple[bytes, ...] = ()
    """Keys of a kvstore's blocks that are only on SSD from now on."""


@frozen
class ReserveGranted:
    """Result of `CallReserve`: decode keeps memory.

    Attributes:
        target: the reservation.
        lease_s: seconds for which decode keeps the memory without a renewal.
        taken: decode's number of the reservation.
        tbt_s: time between tokens that decode predicts.
    """

    target: DecodeReservation
    lease_s: float
    taken: int = 0
    tbt_s: float = 0.0


CallResult = ReserveGranted | StalePlacement | Failure | None
"""Result of a call; None = ended normally."""
FromClient = (
    RequestArrived
    | Rehashed
    | StopRequested
    | ClientGone
    | SessionUpdated
    | PromptsAnnounced
    | EndpointAsked
    | EndpointDone
)
FromCall = PrefillAccepted | FirstToken | KVDelivered | TokensArrived
FromCluster = InstanceJoined | InstanceLeft | LoadReported | KeysChanged | RoleChangeRequested
Event = FromClient | FromCall | FromCluster | IoEnded[CallResult]


# --- actions --------------------------------------------------------------------------------------------------------


@frozen
class CallReserve:
    """Ask a decode instance for memory. Ends with `ReserveGranted` or a failure; never cancelled.

    `tbt_slo_s` must be kept from `starts_in_s` seconds on.
    """

    io: int
    request: int
    sequence: str
    decode: str
    epoch: int
    tbt_slo_s: float | None
    starts_in_s: float
    stores: tuple[str, ...]


@frozen
class CallPrefill:
    """Call a prefill instance. Ends with None, `StalePlacement` or a failure.

    Attributes:
        target: where the KV goes; None if the first token is all that is needed.
        max_queue_s: the instance answers `StalePlacement` if the queue takes longer, seconds; None = never.
    """

    io: int
    request: int
    sequence: str
    plan: RoutingDecision
    epoch: int
    target: DecodeReservation | None
    max_queue_s: float | None


@frozen
class StartDecode:
    """Send decode the first token and follow the sequence. `CancelIo` ends the sequence there, too.

    With `compute`, decode computes the missing part of the prompt, and the first token.
    """

    io: int
    request: int
    sequence: str
    target: DecodeReservation
    compute: bool = False


@frozen
class TakeOverSequence:
    """Take a sequence over at decode, and follow the sequence from the client's position.

    `CancelIo` ends the sequence there, too.
    """

    io: int
    request: int
    sequence: str
    target: DecodeReservation
    fence: int


@frozen
class RenewSession:
    """Renew the conductor's session with decode, which keeps the reservation."""

    target: DecodeReservation


@frozen
class CancelReservation:
    """Cancel a reservation at decode that was not started.

    If the answer to `CallReserve` was lost, the target has neither transfer nor address: the sequence names the
    reservation.
    """

    sequence: str
    target: DecodeReservation


@frozen
class AnnouncePlacement:
    """The request is placed: tell the client, and keep the decision for `Explain`.

    Attributes:
        sequence: id that engines see.
        target: reservation at decode; None if the first token is all that is needed.
        waited_s: seconds since the arrival.
        queued_s: seconds of these for which the request looked for a placement in vain.
        tpot: forecast of the time per output token.
    """

    request: int
    plan: RoutingDecision
    sequence: str
    target: DecodeReservation | None
    waited_s: float
    queued_s: float
    tpot: TpotForecast


@frozen
class Rehash:
    """Hash the prompt and the answer so far: the request is placed again because of `failure`."""

    request: int
    failures: int
    failure: Failure


@frozen
class CompleteRequest:
    """The request has ended: send the client what is left of the answer."""

    request: int
    finish: CompletionReason


@frozen
class FailRequest:
    """The request has ended with an error; `refused`: no placement was found among `candidates`."""

    request: int
    failure: Failure
    refused: bool = False
    candidates: tuple[PrefillChoice, ...] = ()


@frozen
class DropRequest:
    """The request has ended; the client is gone."""

    request: int


@frozen
class Resync:
    """An instance's KV events have a gap: order a snapshot."""

    instance: str


@frozen
class LeaveSequence:
    """End the call that follows a sequence, and leave the sequence at decode for another conductor."""

    io: int


InstanceOrder = Resync | ReplicatePrefix | StopReplication | TellSession | TellActivity | ChangeRole
"""What an instance is told beside calls."""
Order = (
    CallReserve
    | CallPrefill
    | StartDecode
    | TakeOverSequence
    | RenewSession
    | CancelReservation
    | InstanceOrder
    | LeaveSequence
    | CancelIo
)


@frozen
class EndpointPicked:
    """Answer to `EndpointAsked`.

    Attributes:
        request: the request's number.
        engines: ids of prefill instances, best first; empty if there is a failure.
        failure: why there is none.
        predicted_ttft_s: at the first of them.
    """

    request: int
    engines: tuple[str, ...]
    failure: Failure | None = None
    predicted_ttft_s: float = 0.0


Action = Order | EndpointPicked | AnnouncePlacement | Rehash | CompleteRequest | FailRequest | DropRequest
