"""What the core wants done. An action with an `io` is answered by exactly one `Ended`, the others by nothing."""

from enum import Enum

from moonpool.frozen import frozen
from moonpool.scheduling.block_manager import BlocksLent, KVDeleted
from moonpool.scheduling.state_machine import CancelIo


class RefusalReason(Enum):
    """Why a job is not taken."""

    DRAINING = "draining"
    STOPPED = "stopped"
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    """The pool can never hold it."""


class JobOutcome(Enum):
    """How a job has ended."""

    DONE = "done"
    LEFT = "left"
    IO_FAILED = "io_failed"
    """Opening the transfer, sending or the verdict; the shell has the error."""
    STEP_GIVEN_UP = "step_given_up"
    """By the engine itself: some slices may have left already."""
    STOPPED = "stopped"


@frozen
class AcceptJob:
    """The job is queued."""

    job: int
    predicted_start_s: float


@frozen
class RefuseJob:
    """The job is not taken, and nothing of it is kept."""

    job: int
    why: RefusalReason
    retry_after_s: float = 0.0


@frozen
class RefuseStaleJob:
    """The job is not taken, as the queue is longer than it was thought to be; nothing of it is kept."""

    job: int
    drain_s: float
    """Predicted seconds until everything that is here is computed."""
    taken: int
    """Number of the last job that is among it."""


@frozen
class ChunkOrder:
    """A job's share of a step: consecutive tokens to compute."""

    job: int
    start: int
    end: int
    blocks: tuple[int, ...]
    """The job's blocks up to `end`."""
    last: bool
    """The prompt ends here: a token is sampled."""
    full_hit: bool = False
    """It is the last token of a prompt whose KV is all there: nothing is written."""


@frozen
class RunStep:
    """Run one forward pass; steps begin in the order of their numbers. `io` is the step's number."""

    io: int
    chunks: tuple[ChunkOrder, ...]
    gated: bool
    """Wait before each layer until its gate is open."""


@frozen
class OpenKVGate:
    """The step may compute all layers up to this one."""

    step: int
    layer: int


@frozen
class DropSequenceSlice:
    """A job's share of a step counts for nothing any more; its prefix may not be there."""

    step: int
    index: int
    """Of the chunk."""


@frozen
class GiveUpStep:
    """Give the step up before its next layer."""

    step: int


@frozen
class LoadBlocks:
    """Read blocks from one of the job's sources into the pool, layers in order."""

    io: int
    job: int
    source: int
    """Index in the job's sources."""
    first: int
    """Index in the sequence of the first block."""
    blocks: tuple[int, ...]
    timeout_s: float
    """Longest time for all of it."""


@frozen
class ReadReplica:
    """Read blocks of a copy from its source into the pool."""

    io: int
    number: int
    """Of the copy."""
    first: int
    """Index in the chain of the first block."""
    blocks: tuple[int, ...]
    timeout_s: float


@frozen
class EndReplication:
    """A copy is over."""

    number: int
    blocks: int
    """That have come; 0 also when it was passed over."""


@frozen
class OpenTransfer:
    """Open the job's transfer at decode."""

    io: int
    job: int


@frozen
class LayerBlocks:
    """Consecutive blocks of one layer."""

    layer: int
    first: int
    """Index in the sequence of the first block."""
    blocks: tuple[int, ...]
    step: int | None
    """The step that made them; None for a prefix."""


@frozen
class SendSlices:
    """Send slices over the job's open transfer."""

    io: int
    job: int
    pieces: tuple[LayerBlocks, ...]


@frozen
class CloseTransfer:
    """Nothing more comes on the job's transfer. Aborted: it is given up."""

    job: int
    aborted: bool


@frozen
class AwaitVerdict:
    """Wait for decode's verdict on the closed transfer."""

    io: int
    job: int
    timeout_s: float


@frozen
class WriteBackBlocks:
    """Write full blocks to a kvstore, as far as there is room for it."""

    io: int
    job: int
    copy: int
    """Index in the job's copies."""
    first: int
    """Index in the sequence of the first block."""
    blocks: tuple[int, ...]


@frozen
class PrefixMiss:
    """A kvstore did not hold a block that it was believed to hold."""

    source: int
    """Index in the job's sources."""
    block: int
    """Index in the sequence; the kvstore gave those before it."""


@frozen
class PrefixLoaded:
    """A source gave all that it was asked for."""

    source: int
    """Index in the job's sources."""
    blocks: int
    seconds: float


@frozen
class ReportFirstToken:
    """The prompt is computed and its next token is known: say so at once."""

    job: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    queue_s: float
    prefill_s: float
    misses: tuple[PrefixMiss, ...]
    loads: tuple[PrefixLoaded, ...] = ()


@frozen
class EndJob:
    """The job is over; the last action for it but `CloseTransfer`, `PutBlocks` and `Cancel`."""

    job: int
    outcome: JobOutcome
    tail_s: float = 0.0
    """From the token to the verdict, seconds."""
    sent_bytes: int = 0


JobAnswer = AcceptJob | RefuseJob | RefuseStaleJob | ReportFirstToken | EndJob
"""What the conductor is told of a job."""


Action = (
    JobAnswer
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
    | CancelIo
)
