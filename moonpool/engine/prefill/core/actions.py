"""Actions of the prefill scheduler.

Each action with an `io` is answered by exactly one `IoEnded`; other actions are not answered.
"""

from enum import Enum

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.block_lending import BlocksLent
from moonpool.base.scheduling.block_manager import MoveSlots
from moonpool.base.scheduling.kv_deletion import KVDeleted
from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.engine.scheduler.prefix_sources import LoadBlocks, PrefixLoaded, PrefixMiss


class RefusalReason(Enum):
    """Why a request is refused."""

    DRAINING = "draining"
    STOPPED = "stopped"
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    """The prompt needs more blocks than the pool has."""


class PrefillOutcome(Enum):
    """How a request has ended."""

    DONE = "done"
    LEFT = "left"
    """The request was cancelled."""
    IO_FAILED = "io_failed"
    """Opening the transfer, sending or the verdict failed; the executor has the error."""
    STEP_GIVEN_UP = "step_given_up"
    """The engine gave up a step without an order; some slices may have been sent."""
    STOPPED = "stopped"


@frozen
class AcceptRequest:
    """The request is queued."""

    id: int
    predicted_start_s: float


@frozen
class RefuseRequest:
    """The request is refused."""

    id: int
    why: RefusalReason
    retry_after_s: float = 0.0


@frozen
class RefuseStaleRequest:
    """The request is refused because the queue is longer than the conductor assumed.

    Attributes:
        drain_s: predicted seconds until all queued requests are computed.
        taken: number of the last queued request.
    """

    id: int
    drain_s: float
    taken: int


@frozen
class ChunkOrder:
    """A request's slice in a step: consecutive tokens to compute.

    Attributes:
        blocks: the request's blocks up to `end`.
        last: the prompt ends here: a token is sampled.
        full_hit: the slice is the last token of a prompt with all KV there: no KV is written.
    """

    id: int
    start: int
    end: int
    blocks: tuple[int, ...]
    last: bool
    full_hit: bool = False


@frozen
class RunStep:
    """Run one forward pass; steps begin in the order of their numbers.

    Attributes:
        io: number of the step.
        gated: the step waits before each layer until the layer's gate is open.
    """

    io: int
    chunks: tuple[ChunkOrder, ...]
    gated: bool


@frozen
class OpenKVGate:
    """The step may compute all layers up to this layer."""

    step: int
    layer: int


@frozen
class DropSequenceSlice:
    """A step's slice does not count any more; the prefix may be missing. `index`: the chunk's index."""

    step: int
    index: int


@frozen
class GiveUpStep:
    """Give the step up before the next layer."""

    step: int


@frozen
class ReadReplica:
    """Read a replication's blocks from the source into the pool.

    Attributes:
        number: the replication's number.
        first: the first block's index in the chain.
    """

    io: int
    number: int
    first: int
    blocks: tuple[int, ...]
    timeout_s: float


@frozen
class EndReplication:
    """A replication has ended. `blocks`: blocks that arrived; 0 if the order was skipped."""

    number: int
    blocks: int


@frozen
class OpenTransfer:
    """Open the request's transfer at decode."""

    io: int
    id: int


@frozen
class LayerBlocks:
    """One layer's consecutive blocks.

    Attributes:
        first: the first block's index in the sequence.
        step: the step that computed the blocks; None for a prefix.
    """

    layer: int
    first: int
    blocks: tuple[int, ...]
    step: int | None


@frozen
class SendSlices:
    """Send slices over the request's open transfer."""

    io: int
    id: int
    pieces: tuple[LayerBlocks, ...]


@frozen
class CloseTransfer:
    """Close the request's transfer. `aborted`: not all slices were sent."""

    id: int
    aborted: bool


@frozen
class AwaitVerdict:
    """Wait for decode's verdict on the closed transfer."""

    io: int
    id: int
    timeout_s: float


@frozen
class WriteBackBlocks:
    """Write full blocks to a kvstore, as many as the write-back queue takes.

    Attributes:
        copy: index in the request's copies.
        first: the first block's index in the sequence.
        windowed: indices (in the sequence) of blocks that are written with the slices of layers with a window.
    """

    io: int
    id: int
    copy: int
    first: int
    blocks: tuple[int, ...]
    windowed: tuple[int, ...] = ()


@frozen
class ReportFirstToken:
    """The prompt is computed and the next token is known: report the token at once.

    `overtaken_tokens`: computed tokens whose load was under way meanwhile.
    """

    id: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    queue_s: float
    prefill_s: float
    misses: tuple[PrefixMiss, ...]
    loads: tuple[PrefixLoaded, ...] = ()
    overtaken_tokens: int = 0


@frozen
class EndRequest:
    """The request has ended; only the request's `CloseTransfer`, `WriteBackBlocks` and `CancelIo` may follow.

    Attributes:
        tail_s: seconds from the first token to the verdict.
    """

    id: int
    outcome: PrefillOutcome
    tail_s: float = 0.0
    sent_bytes: int = 0


PrefillAnswer = AcceptRequest | RefuseRequest | RefuseStaleRequest | ReportFirstToken | EndRequest
"""Actions that the executor reports to the conductor."""
Action = (
    PrefillAnswer
    | RunStep
    | OpenKVGate
    | DropSequenceSlice
    | GiveUpStep
    | LoadBlocks
    | ReadReplica
    | EndReplication
    | OpenTransfer
    | SendSlices
    | CloseTransfer
    | AwaitVerdict
    | WriteBackBlocks
    | KVDeleted
    | BlocksLent
    | MoveSlots
    | CancelIo
)
