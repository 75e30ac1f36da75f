"""Actions of the decode core. Plain values: counts, keys and reasons, never tokens or bytes."""

from moonpool.frozen import frozen
from moonpool.scheduling.block_manager import BlocksLent, KVDeleted


@frozen
class ReservationGranted:
    """Room is promised."""

    id: int
    held: int
    """Leading blocks that are here already and need not be sent."""
    tbt_s: float
    """Predicted seconds between tokens with the request in the batch."""


@frozen
class ReservationRefused:
    """There is no room, or the time between tokens could not be kept."""

    id: int
    reason: str
    """As in `Overloaded.reason`."""
    why: str
    tbt_s: float


@frozen
class SetBlockTable:
    """A sequence's blocks from now on, in order."""

    id: int
    blocks: tuple[int, ...]


@frozen
class AppendBlock:
    """One block more, behind the others."""

    id: int
    block: int


@frozen
class Chunk:
    """Tokens of one sequence that are computed (again) in a step."""

    id: int
    start: int
    count: int
    sample: bool
    """They are the last ones: the next token is sampled."""
    full_hit: bool = False
    """It is the last token of a prompt whose KV is all there: nothing is written."""


@frozen
class StartRun:
    """Run a step: one token for each sequence of the batch, and some chunks. Answered by one `StepDone`.

    The same batch may go on for `steps` steps without asking: until then nobody needs a block, and nobody who waits
    could join. The run ends early with the first step in which a sequence ends, and after a `Cut`. Before the core is
    told anything else, it is told by `Stepped` how many steps are over.
    """

    step: int
    batch: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks that are copied before the step writes anything: from, to."""
    steps: int = 1
    patient: bool = False
    """Nobody waits for a single token of these, and none was promised: other work of the host may go before."""


@frozen
class StopRun:
    """End the run with the step that is being computed: there is something to decide."""

    step: int
    hurried: bool = False
    """It is patient, and who waits is not: the step lets nothing else go before any more."""


@frozen
class FinishSequence:
    """The sequence has ended with its first token."""

    id: int
    reason: int


@frozen
class SelectBeams:
    """The beams of a request go on: each takes the tokens of its parent and one more."""

    id: int
    beams: tuple[tuple[int, int], ...]
    """For each beam its parent, and which of the parent's candidates follows. None when the search is over."""
    ended: tuple[tuple[int, int, int], ...]
    """Hypotheses that ended: number, parent, candidate."""
    kept: tuple[int, ...]
    """The hypotheses that are not forgotten, by number."""


@frozen
class BeamsRanked:
    """A beam search is over."""

    id: int
    hypotheses: tuple[tuple[int, float], ...]
    """Number and score, the best first."""


@frozen
class RequestAborted:
    """The request ends early: no KV is taken for it and no token told any more."""

    id: int
    why: str


@frozen
class RequestFreed:
    """The request has ended and its blocks are not its any more."""

    id: int
    logged: bool = False
    """What it has said is kept until `Forget`."""


@frozen
class RequestParked:
    """The request has lost its conductor and gives its blocks up. It is kept until it is `Adopted`, or `Forget`."""

    id: int


@frozen
class DropOutputLog:
    """What was kept of the sequence is not wanted any more."""

    id: int


@frozen
class RequestAdopted:
    """The stream has the request now: send it each answer's tokens from a position on, and the end if it has ended."""

    id: int
    stream: int
    positions: tuple[int, ...]


@frozen
class FenceConductor:
    """Tell the stream that another conductor has the sequence."""

    id: int
    stream: int


@frozen
class SwapOut:
    """Copy the blocks out of the pool; they stay as they are until it has `Ended`."""

    io: int
    id: int
    blocks: tuple[int, ...]


@frozen
class SwapIn:
    """Copy what was swapped out, from its block `first` on, into these blocks of the pool, and forget it."""

    io: int
    id: int
    first: int
    blocks: tuple[int, ...]


@frozen
class SwapDrop:
    """Forget what was swapped out."""

    id: int


@frozen
class StoreBlock:
    """Write a full block to one of the request's kvstores; it stays as it is until it has `Ended`."""

    io: int
    id: int
    index: int
    """Of the block in the sequence."""
    block: int
    store: int
    """Which of the request's kvstores."""


@frozen
class LoadStoredBlocks:
    """Read the sequence's full blocks from `first` on from one of its kvstores into these blocks of the pool."""

    io: int
    id: int
    first: int
    """Of the blocks in the sequence."""
    blocks: tuple[int, ...]
    store: int
    """Which of the request's kvstores."""
    timeout_s: float
    """Seconds after which it must have ended."""


@frozen
class StopReceiving:
    """Write nothing more of what comes into the request's blocks, which stay its own until this has `Ended`."""

    io: int
    id: int


Action = (
    ReservationGranted
    | ReservationRefused
    | SetBlockTable
    | AppendBlock
    | StartRun
    | StopRun
    | FinishSequence
    | SelectBeams
    | BeamsRanked
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
    | LoadStoredBlocks
    | StopReceiving
    | KVDeleted
    | BlocksLent
)
