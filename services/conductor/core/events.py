"""Events and actions of the conductor's core, and failures as plain data.

The shell gives each request a number and never uses it again; events and actions name requests by it.
"""

from dataclasses import dataclass
from enum import Enum

from moonpool.frozen import frozen
from moonpool.scheduling.fair_share import QueueKey, priority_rank
from moonpool.scheduling.state_machine import CancelIo, IoEnded
from services.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from services.conductor.core.latency_model import PrefillChoice, SloLimits, Stratum, TpotForecast, stratum_of
from services.conductor.core.router import ReplicatePrefix, RoutingDecision


class FailureKind(Enum):
    """Kinds of failures; the values are the names of the classes in `moonpool.errors`."""

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
"""What was sent has not come whole: chance, unless it goes on. It says little of the instances."""


INNER_KINDS = (FailureKind.TRANSFER, FailureKind.STREAM, FailureKind.FRAME, FailureKind.MISMATCH)
"""Failures between instances; a client is told that its request could not be served."""


UNANSWERED_KINDS = (FailureKind.UNAVAILABLE, FailureKind.DEADLINE, FailureKind.STREAM, FailureKind.INTERNAL)
"""Whoever was asked may have done it all the same."""


FENCE_FIELD = "resume.count"
"""The field of the failure of a sequence that another conductor has taken over."""


NO_DECODE_ROOM = "no_decode_room"
"""Reason of a refusal because no decode instance has room."""


@frozen
class Failure:
    """One failure.

    Attributes:
        kind: which error it is.
        message: for a person.
        field: of the request or the instance, for INVALID and MISMATCH.
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
"""What a request is told that has no place when the conductor's drain is over."""


@frozen
class StalePlacement:
    """A prefill instance has not taken a prompt, as its queue is longer than was thought.

    All that is there takes `drain_s` seconds: the prompts up to its `taken`-th.
    """

    drain_s: float
    taken: int


@dataclass(slots=True)
class FailureSeries:
    """Attempts of a request that failed one after the other.

    A failure begins a new series where the answer has grown since the one before, and some time has passed: a long
    answer may lose an instance every minute. What ends engines time and again gets no further for it.

    Attributes:
        count: attempts that failed.
        broken: those that failed by more than chance.
    """

    count: int = 0
    broken: int = 0
    _began: float = 0.0
    _last: float = 0.0
    _tokens: int = 0

    def add(self, now: float, failure: Failure, tokens: int, apart_s: float) -> None:
        """Counts an attempt that has just failed when the answer had so many tokens; see `Series`."""
        if not self.count or (tokens > self._tokens and 0.0 < apart_s <= now - self._last):
            self.count, self.broken, self._began = 0, 0, now
        self.count += 1
        self.broken += failure.kind not in DAMAGED_KINDS
        self._last, self._tokens = now, tokens

    def is_over(self, retries: int, within_s: float) -> bool:
        """Whether no attempt follows: more than `retries` broke, or so many were damaged and it took `within_s`."""
        return self.broken > retries or (self.count > retries and self._last - self._began >= within_s)


def retries_exhausted(failure: Failure, attempts: int) -> Failure:
    """What the client is told when the last attempt has failed."""
    if failure.kind in INNER_KINDS:
        message = f"given up after {attempts} placements; the last failed: {failure}"
        return Failure(FailureKind.UNAVAILABLE, message)
    return failure


@frozen
class RoleChangeRequested:
    """Somebody wants an instance to change its role, whatever the load."""

    instance: str


@frozen
class ChangeRole:
    """Order an instance to drain, and to come back in the other role."""

    instance: str
    incarnation: int
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
    """Room that a decode instance has promised to one transfer."""

    decode: str
    incarnation: int
    address: str
    transfer_id: int
    generation: int
    held_blocks: int


@frozen
class ResumeState:
    """How far a request is whose client has lost its conductor.

    Attributes:
        tokens: of the answer, that the client has; 0 when there are several.
        fence: how often it has resumed, this time included.
        sequence: the id under which decode knew it last.
        target: decode's promise then; its address is not known here. None = there was none.
    """

    tokens: int
    fence: int
    sequence: str
    target: DecodeReservation | None


@frozen
class RequestSpec:
    """A request, without its tokens.

    Attributes:
        number: names it in events and actions.
        id: as the client knows it.
        prompt_tokens: length of the prompt; `max_tokens` are generated at most.
        prompt_key: hash of the prompt.
        slo: what is expected.
        arrived: when it came; `deadline` when it fails. Seconds of the core's clock.
        choices: sequences that run together, answers or beams; prefill computes the prompt alone for several.
        beams: they are beams: tokens come when all are known, and what is placed anew begins again.
        tenant: whose it is; `weight` is its share, relative to others'.
        scored: the prompt's log probabilities are wanted: prefill computes all of it.
        resumed: it is not new.
        priority: among the tenant's own; lower ones go first.
        least_tokens: the answer has at least; `max_tokens` where nothing ends it before.
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
    beams: bool = False
    tenant: str = ""
    scored: bool = False
    resumed: ResumeState | None = None
    priority: int = 0
    weight: float = 1.0
    least_tokens: int = 0

    @property
    def queue_key(self) -> QueueKey:
        """Its position among requests that wait."""
        return QueueKey(self.tenant, priority_rank(self.arrived, self.priority), self.number, self.weight)

    @property
    def stratum(self) -> Stratum:
        """For forecasts of the answer's length."""
        return stratum_of(self.tenant, self.prompt_tokens)


# --- events ---------------------------------------------------------------------------------------------------------


@frozen
class RequestArrived:
    """A valid request; `keys` are those of the full blocks of its prompt, and of the answer so far if it is resumed."""

    spec: RequestSpec
    keys: tuple[bytes, ...]


@frozen
class Rehashed:
    """Answer to `Rehash`: keys of the full blocks of prompt and `tokens`, those not generated again (0 of several)."""

    request: int
    tokens: int
    keys: tuple[bytes, ...]


@frozen
class StopRequested:
    """The answer shall end now: with the tokens so far, or with a failure, as it cannot be told."""

    request: int
    failure: Failure | None = None


@frozen
class ClientGone:
    """Nobody waits for the answer any more."""

    request: int


@frozen
class PrefillAccepted:
    """A prefill (its io) has the prompt in its queue, as its `taken`-th."""

    io: int
    taken: int = 0


@frozen
class PrefillMeasurements:
    """How a prompt was prefilled; `misses` are (instance, key) that the index believed to be there.

    `loads` are (instance, blocks, seconds) of reads that gave all that was wanted. `there_s` are seconds from its
    coming to its first token, as the instance measured them.
    """

    computed_tokens: int
    there_s: float
    misses: tuple[tuple[str, bytes], ...] = ()
    loads: tuple[tuple[str, int, float], ...] = ()


@frozen
class FirstToken:
    """A prefill (its io) has given its token, which the answer has; `finish` is set when it completes the answer.

    `known`: the answer had it already, as its sequence goes on elsewhere meanwhile.
    """

    io: int
    how: PrefillMeasurements
    finish: CompletionReason | None = None
    known: bool = False


@frozen
class KVDelivered:
    """A prefill (its io) says that all KV has arrived at decode."""

    io: int


@frozen
class TokensArrived:
    """The answer has `count` more tokens from a sequence (its io); 0 when it knew those that came.

    `finish` is set when they complete the answer; `known` when decode has said so itself, whose call then ends.
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
    """An incarnation of an instance is not a member any more. With `lost` its requests fail now, with this reason."""

    instance: str
    incarnation: int
    lost: str = ""


@frozen
class LoadReported:
    """An instance has reported its load."""

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
    """Of a kvstore's: on its SSD only from now on."""


@frozen
class ReserveGranted:
    """Result of `Reserve`: room is kept for `lease_s` seconds without news. It is decode's `taken`-th promise.

    `tbt_s`: the time between tokens that decode predicts.
    """

    target: DecodeReservation
    lease_s: float
    taken: int = 0
    tbt_s: float = 0.0


CallResult = ReserveGranted | StalePlacement | Failure | None
"""Of any I/O; None = it ended as it should."""


FromClient = RequestArrived | Rehashed | StopRequested | ClientGone


FromCall = PrefillAccepted | FirstToken | KVDelivered | TokensArrived


FromCluster = InstanceJoined | InstanceLeft | LoadReported | KeysChanged | RoleChangeRequested


Event = FromClient | FromCall | FromCluster | IoEnded[CallResult]


# --- actions --------------------------------------------------------------------------------------------------------


@frozen
class CallReserve:
    """Ask a decode instance for room. Ends with `Promised` or a failure; it is never cancelled.

    `tbt_slo_s` is to be kept from `starts_in_s` seconds on.
    """

    io: int
    request: int
    sequence: str
    decode: str
    incarnation: int
    tbt_slo_s: float | None
    starts_in_s: float
    stores: tuple[str, ...]


@frozen
class CallPrefill:
    """Call a prefill instance; `target` is None when only its token is wanted. Ends with None, `Stale` or a failure.

    It is `Stale` where everything that is there takes longer than `max_queue_s`; None = however long it takes.
    """

    io: int
    request: int
    sequence: str
    plan: RoutingDecision
    incarnation: int
    target: DecodeReservation | None
    max_queue_s: float | None


@frozen
class StartDecode:
    """Tell decode the first token and follow the sequence. `Cancel` ends it there and here.

    With `compute` decode computes what it does not hold of the prompt, and the first token.
    """

    io: int
    request: int
    sequence: str
    target: DecodeReservation
    compute: bool = False


@frozen
class TakeOverSequence:
    """Take a request over at decode, and follow it from what its client has. `Cancel` ends it there and here."""

    io: int
    request: int
    sequence: str
    target: DecodeReservation
    fence: int


@frozen
class RenewSession:
    """Keep the conductor's session with decode, by which the promise lives."""

    target: DecodeReservation


@frozen
class CancelReservation:
    """Tell decode that the promise, not started yet, is not wanted.

    Where the answer to `Reserve` was lost, its name alone is known: the target has no transfer and no address.
    """

    sequence: str
    target: DecodeReservation


@frozen
class AnnouncePlacement:
    """The request is placed, `waited_s` after it arrived: tell the client, and keep it for `Explain`.

    For `queued_s` it had looked for a place in vain. `sequence` is the id that engines see. Without a target only its
    first token is wanted. `tpot` is the forecast of its time per output token.
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
    """Give the keys of the prompt and the answer so far; the request is placed again because of `failure`."""

    request: int
    failures: int
    failure: Failure


@frozen
class CompleteRequest:
    """The request has ended: tell the client the rest."""

    request: int
    finish: CompletionReason


@frozen
class FailRequest:
    """The request has ended with an error; `refused` before or between placements, with what was considered."""

    request: int
    failure: Failure
    refused: bool = False
    candidates: tuple[PrefillChoice, ...] = ()


@frozen
class DropRequest:
    """The request has ended; its client is gone."""

    request: int


@frozen
class Resync:
    """An instance's KV events have a gap: order a snapshot."""

    instance: str


@frozen
class LeaveSequence:
    """Follow a sequence (its io) no more, and leave it at decode for another conductor."""

    io: int


Order = (
    CallReserve
    | CallPrefill
    | StartDecode
    | TakeOverSequence
    | RenewSession
    | CancelReservation
    | Resync
    | ReplicatePrefix
    | ChangeRole
    | LeaveSequence
    | CancelIo
)


Action = Order | AnnouncePlacement | Rehash | CompleteRequest | FailRequest | DropRequest
