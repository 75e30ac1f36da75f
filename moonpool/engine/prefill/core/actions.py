"""Actions of the prefill scheduler.

Each action with an `io` is answered by exactly one `IoEnded`; other actions are not answered.
"""

from enum import Enum

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.block_lending import BlocksLent
from moonpool.base.scheduling.block_manager import MoveSlots
from moonpool.base.scheduling.kv_deletion import KVDeleted
from moonpool.base.scheduling.state_machine import CancelIo


class RefusalReason(Enum):
    """Why a job is refused."""

    DRAINING = "draining"
    STOPPED = "stopped"
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    """The prompt needs more blocks than the pool has."""


class JobOutcome(Enum):
    """How a job has ended."""

    DONE = "done"
    LEFT = "left"
    """The job was cancelled."""
    IO_FAILED = "io_failed"
    """Opening the transfer, sending or the verdict failed; the executor has the error."""
    STEP_GIVEN_UP = "step_given_up"
    """The engine gave up a step without an order; some slices may have been sent."""
    STOPPED = "stopped"


@frozen
class AcceptJob:
    """The job is queued."""

    job: int
    predicted_start_s: float


@frozen
class RefuseJob:
    """The job is refused."""

    job: int
    why: RefusalReason
    retry_after_s: float = 0.0


@frozen
class RefuseStaleJob:
    """The job is refused because the queue is longer than the conductor assumed.

    Attributes:
        drain_s: predicted seconds until all queued jobs are computed.
        taken: number of the last queued job.
    """

    job: int
    drain_s: float
    taken: int


@frozen
class ChunkOrder:
    """A job's slice in a step: consecutive tokens to compute.

    Attributes:
        blocks: the job's blocks up to `end`.
        last: the prompt ends here: a token is sampled.
        full_hit: the slice is the last token of a prompt with all KV there: no KV is written.
    """

    job: int
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
class LoadBlocks:
    """Read blocks from one of the job's sources into the pool, layers in order.

    Attributes:
        source: index in the job's sources.
        first: the first block's index in the sequence.
        timeout_s: longest time for the whole load.
    """

    io: int
    job: int
    source: int
    first: int
    blocks: tuple[int, ...]
    timeout_s: float


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
    """Open the job's transfer at decode."""

    io: int
    job: int


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
    """Send slices over the job's open transfer."""

    io: int
    job: int
    pieces: tuple[LayerBlocks, ...]


@frozen
class CloseTransfer:
    """Close the job's transfer. `aborted`: not all slices were sent."""

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
    """Write full blocks to a kvstore, as many as the write-back queue takes.

    Attributes:
        copy: index in the job's copies.
        first: the first block's index in the sequence.
        windowed: indices (in the sequence) of blocks that are written with the slices of layers with a window.
    """

    io: int
    job: int
    copy: int
    first: int
    blocks: tuple[int, ...]
    windowed: tuple[int, ...] = ()


@frozen
class PrefixMiss:
    """A kvstore lacked a block that the scheduler believed to be there.

    Attributes:
        source: index in the job's sources.
        block: index in the sequence; the kvstore held the blocks before.
        windowed: the block was there, without the slices of layers with a window.
    """

    source: int
    block: int
    windowed: bool = False


@frozen
class PrefixLoaded:
    """A source sent all blocks asked for. `source`: index in the job's sources."""

    source: int
    blocks: int
    seconds: float


@frozen
class ReportFirstToken:
    """The prompt is computed and the next token is known: report the token at once.

    `overtaken_tokens`: computed tokens whose load was under way meanwhile.
    """

    job: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    queue_s: float
    prefill_s: float
    misses: tuple[PrefixMiss, ...]
    loads: tuple[PrefixLoaded, ...] = ()
    overtaken_tokens: int = 0


@frozen
class EndJob:
    """The job has ended; only the job's `CloseTransfer`, `WriteBackBlocks` and `CancelIo` may follow.

    Attributes:
        tail_s: seconds from the first token to the verdict.
    """

    job: int
    outcome: JobOutcome
    tail_s: float = 0.0
    sent_bytes: int = 0


JobAnswer = AcceptJob | RefuseJob | RefuseStaleJob | ReportFirstToken | EndJob
"""Actions that the executor reports to the conductor."""
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
    | MoveSlots
    | CancelIo
)
