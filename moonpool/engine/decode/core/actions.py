"""Actions of the decode scheduler. Plain values: counts, keys and reasons, never tokens or bytes."""

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.block_lending import BlocksLent
from moonpool.base.scheduling.block_manager import MoveSlots
from moonpool.base.scheduling.kv_deletion import KVDeleted
from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.engine.scheduler.prefix_sources import LoadBlocks, PrefixLoaded, PrefixMiss


@frozen
class ReservationGranted:
    """Blocks are promised.

    Attributes:
        held: leading blocks that are cached here and need not be sent.
        tbt_s: predicted seconds between tokens with the request in the batch.
    """

    id: int
    held: int
    tbt_s: float


@frozen
class ReservationRefused:
    """There are too few blocks, or the time between tokens could not be kept.

    Attributes:
        reason: as in `moonpool.base.errors.Overloaded.reason`.
        why: the reason in words.
        tbt_s: predicted seconds between tokens with the request in the batch.
    """

    id: int
    reason: str
    why: str
    tbt_s: float


@frozen
class SetBlockTable:
    """A sequence's block table from now on."""

    id: int
    blocks: tuple[int, ...]


@frozen
class AppendBlock:
    """One more block at the end of a sequence's block table."""

    id: int
    block: int


@frozen
class Chunk:
    """One sequence's tokens that a step computes, or computes again.

    Attributes:
        sample: the chunk ends the tokens to compute: the next token is sampled.
        full_hit: the chunk ends a prompt whose KV is all there: no KV is written. The chunk is the last token, or the
            last block if layers have a recurrent state.
    """

    id: int
    start: int
    count: int
    sample: bool
    full_hit: bool = False


@frozen
class StartRun:
    """Start a run: each step computes one token for each sequence in the batch; the first also computes chunks.

    The batch continues for `steps` steps without asking: until then no sequence needs a block, and no waiting request
    could join. The run ends early with the first step in which a sequence ends, and after `StopRun`. Answered by one
    `RunDone`. Before the scheduler gets any other event, `RunProgress` tells how many steps have ended.

    Attributes:
        step: number of the run.
        copies: blocks copied before the first step writes: (from, to).
        patient: no client waits for single tokens, and no time was promised: the host's other work may go first.
        drafts: guessed tokens that may be checked in all, within the sequences' blocks. A run that checks some is over
            after one step.
    """

    step: int
    batch: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    steps: int = 1
    patient: bool = False
    drafts: int = 0


@frozen
class BeginPrompt:
    """A prompt's turn has come: its first chunk is planned next.

    Attributes:
        cached_tokens: leading tokens that are not computed, because they were cached.
        loaded_tokens: further tokens that are not computed, because they were loaded.
        misses: blocks that a kvstore lacked.
        loads: loads that arrived whole.
    """

    id: int
    cached_tokens: int
    loaded_tokens: int = 0
    misses: tuple[PrefixMiss, ...] = ()
    loads: tuple[PrefixLoaded, ...] = ()


@frozen
class StopRun:
    """End the run with the step being computed: a decision is needed.

    Attributes:
        hurried: the run is patient and a waiting request is not: the step yields to no other work any more.
    """

    step: int
    hurried: bool = False


@frozen
class FinishSequence:
    """The sequence has ended with the first token."""

    id: int
    reason: int


@frozen
class ForkSequences:
    """A request's sequences fork: each takes the parent's tokens and a further token.

    Attributes:
        forks: for each sequence the parent, and the parent's candidate that follows. Empty if the search is over.
        ended: new hypotheses: number, parent, candidate.
        kept: numbers of the hypotheses that are kept.
    """

    id: int
    forks: tuple[tuple[int, int], ...]
    ended: tuple[tuple[int, int, int], ...]
    kept: tuple[int, ...]


@frozen
class AnswersRanked:
    """A search is over. `hypotheses`: number and score, best first."""

    id: int
    hypotheses: tuple[tuple[int, float], ...]


@frozen
class RequestAborted:
    """The request ends early: from now on no KV is received and no token reported."""

    id: int
    why: str


@frozen
class RequestFreed:
    """The request has ended and has no blocks any more. `retained`: the output is kept until `DropOutputLog`."""

    id: int
    retained: bool = False


@frozen
class RequestParked:
    """The request has lost the conductor and all blocks.

    The request is kept until `RequestAdopted` or `DropOutputLog`.
    """

    id: int


@frozen
class DropOutputLog:
    """Drop a request's kept output."""

    id: int


@frozen
class RequestAdopted:
    """The stream has the request now: send each answer's tokens from a position on, and the end, if any."""

    id: int
    stream: int
    positions: tuple[int, ...]


@frozen
class FenceConductor:
    """Tell the stream that another conductor has the request."""

    id: int
    stream: int


@frozen
class SwapOut:
    """Copy the blocks out of the pool; they do not change until the copy has ended."""

    io: int
    id: int
    blocks: tuple[int, ...]


@frozen
class SwapIn:
    """Copy the swapped-out blocks, from block `first` on, into these pool blocks, and drop the copy."""

    io: int
    id: int
    first: int
    blocks: tuple[int, ...]


@frozen
class SwapDrop:
    """Drop the swapped-out blocks."""

    id: int


@frozen
class StoreBlock:
    """Write a full block to one of the request's kvstores; the block does not change until the write has ended.

    Attributes:
        index: the block's index in the sequence.
        store: index of the kvstore.
        windowed: the block has the slices of layers with a window, and these slices are written, too.
    """

    io: int
    id: int
    index: int
    block: int
    store: int
    windowed: bool = True


@frozen
class StopReceiving:
    """Write no more arriving KV into the request's blocks; they stay pinned until this has ended."""

    io: int
    id: int


Action = (
    ReservationGranted
    | ReservationRefused
    | SetBlockTable
    | AppendBlock
    | LoadBlocks
    | CancelIo
    | BeginPrompt
    | StartRun
    | StopRun
    | FinishSequence
    | ForkSequences
    | AnswersRanked
    | RequestAborted
    | RequestFreed
    | RequestParked
    | DropOutputLog
    | RequestAdopted
    | FenceConductor
    | SwapOut
    | SwapIn
    | SwapDrop
    | StoreBlock
    | StopReceiving
    | KVDeleted
    | BlocksLent
    | MoveSlots
)
