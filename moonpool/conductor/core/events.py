"""Events of the conductor's core.

The shell gives each request a number and never uses the number again; events and actions name requests by number.
"""

from enum import Enum

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.conductor.core.failures import Failure
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.request_spec import DecodeReservation, RequestSpec


class CompletionReason(Enum):
    """Why an answer is complete."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3


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
    """No client waits for the answer any more; `tokens`: the answer's new ones of which no call has told."""

    request: int
    tokens: int = 0


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
class PromptComputed:
    """A decode instance in the role both has computed a sequence's prompt; the first tokens come as `TokensArrived`."""

    io: int
    how: PrefillMeasurements


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
class RoleChangeRequested:
    """A person orders an instance to change roles, whatever the load."""

    instance: str


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


@frozen
class StalePlacement:
    """A prefill instance has not taken a prompt: the queue is longer than predicted.

    Attributes:
        drain_s: seconds until the queue is done.
        taken: prompts taken so far, all included in `drain_s`.
    """

    drain_s: float
    taken: int


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
FromCall = PrefillAccepted | FirstToken | PromptComputed | KVDelivered | TokensArrived
FromCluster = InstanceJoined | InstanceLeft | LoadReported | KeysChanged | RoleChangeRequested
Event = FromClient | FromCall | FromCluster | IoEnded[CallResult]
