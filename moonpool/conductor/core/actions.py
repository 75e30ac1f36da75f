"""Actions of the conductor's core; events and actions name requests by number."""

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.conductor.core.events import CompletionReason
from moonpool.conductor.core.failures import Failure
from moonpool.conductor.core.instances import InstanceKind
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.request_spec import DecodeReservation
from moonpool.conductor.core.retention import TellSession
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.core.store_pool import RowsPlace
from moonpool.conductor.core.tenant_activity import TellActivity
from moonpool.conductor.core.tpot_model import TpotForecast
from moonpool.conductor.placement.base import PrefillChoice


@frozen
class CallReserve:
    """Ask a decode instance for memory. Ends with `ReserveGranted` or a failure; never cancelled.

    `tbt_slo_s` must be kept from `starts_in_s` seconds on.

    Attributes:
        computes_prompt: the instance computes the prompt, too. A refusal for the reason `STALE` says that prompts there
            take longer than `max_queue_s` seconds; None = never for that reason.
        rows: as of `RoutingDecision`, for a prompt that the instance computes.
    """

    io: int
    request: int
    sequence: str
    decode: str
    epoch: int
    tbt_slo_s: float | None
    starts_in_s: float
    stores: tuple[str, ...]
    computes_prompt: bool = False
    max_queue_s: float | None = None
    rows: tuple[RowsPlace | None, ...] = ()


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

    Attributes:
        plan: the decision, if the instance is in the role both: what to load and write back, and the prompt's place.
    """

    io: int
    request: int
    sequence: str
    target: DecodeReservation
    compute: bool = False
    plan: RoutingDecision | None = None


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
class RenewReservation:
    """Renew a reservation at decode, which otherwise ends with its lease."""

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


@frozen
class ChangeRole:
    """Order an instance to drain, and to come back in the other role."""

    instance: str
    epoch: int
    kind: InstanceKind


InstanceOrder = Resync | ReplicatePrefix | StopReplication | TellSession | TellActivity | ChangeRole
"""What an instance is told beside calls."""
Order = (
    CallReserve
    | CallPrefill
    | StartDecode
    | TakeOverSequence
    | RenewReservation
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
