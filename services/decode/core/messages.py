"""Events and actions of the decode core. Plain values: counts, keys and reasons, never tokens or bytes."""

from dataclasses import dataclass

from moonpool.core.kernel import Ended, Tick
from moonpool.kv.keys import BlockKey

Candidates = tuple[tuple[float, bool], ...]
"""What may follow one beam: of each token its log probability and whether the sequence ends with it; the best first."""


@dataclass(frozen=True, slots=True)
class Beams:
    """How the beams of a request are chosen; names as in `transformers`."""

    length_penalty: float
    """A hypothesis' score is the sum of its tokens' log probabilities over (their number ^ length_penalty)."""
    early_stopping: bool | str
    """True, False or "never"."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Room is asked for; answered by `Promised` or `Refused`."""

    id: int
    """Grows from request to request: who has a lower one came earlier. The sequences of a group have this id and the
    following ones; the next request's is higher than all of them."""
    keys: tuple[BlockKey, ...]
    """Of the full blocks of the tokens whose KV will come."""
    tokens: int
    """Tokens whose KV will come."""
    prompt_tokens: int
    """The original prompt's, at most `tokens`: the answer is what comes after them."""
    total_tokens: int
    """Longest that the sequence can become; more than `tokens`."""
    tbt_slo_s: float = 0.0
    """Seconds between tokens that must be kept; 0 = any."""
    conductor: str = ""
    """Who asks; "" when it does not say."""
    stores: int = 0
    """Copies of each full block of the answer that are to be written back."""
    width: int = 1
    """Sequences that begin with these tokens and run together."""
    starts_in_s: float = 0.0
    """Seconds until it is expected to start: the time between tokens is to be kept from then on."""
    beams: Beams | None = None
    """The sequences are beams; None = each goes its own way."""


@dataclass(frozen=True, slots=True)
class Open:
    """The KV begins to come: the promise becomes blocks, named by `Table`."""

    id: int


@dataclass(frozen=True, slots=True)
class Heard:
    """Something of the transfer came: its lease is renewed."""

    id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """All KV has come and was verified."""

    id: int


@dataclass(frozen=True, slots=True)
class Start:
    """The first token is known."""

    id: int
    stream: int
    """The conductor's stream; when it closes, the sequence ends."""
    finish: int
    """Why the sequence has ended with its first token; 0 = it goes on."""
    others: tuple[int, ...] = ()
    """The same for the further sequences of a group."""
    candidates: Candidates = ()
    """What may follow the prompt, where beams are wanted: there is no first token then."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The request is not wanted any more, or cannot go on."""

    id: int
    why: str


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A conductor has opened a stream. While it has one, its promises do not run out."""

    stream: int
    conductor: str


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream's sequences end; the conductor's unstarted requests too when it was its last stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """Some steps of the run are over, which goes on. Nobody ended in them, and no block became full."""

    step: int
    """The run's number."""
    steps: int
    seconds: float
    """Of all of them."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The run is over, and nothing writes to its blocks any more."""

    step: int
    """The run's number."""
    aborted: bool
    """Nothing was computed."""
    seconds: float
    ended: tuple[tuple[int, int], ...] = ()
    """Sequences that ended with the token of this step, with the reason."""
    filled: tuple[tuple[int, BlockKey], ...] = ()
    """Sequences whose last block became full, with its key."""
    steps: int = 1
    """Steps that took these seconds: those of the run that were not told by `Stepped`."""
    candidates: tuple[tuple[int, Candidates], ...] = ()
    """What may follow each beam of the step."""


@dataclass(frozen=True, slots=True)
class SwapEnd:
    """Result of `SwapOut` and `SwapIn`."""

    ok: bool
    seconds: float
    """Since it began or, if that was later, since the copy before it ended: waiting for others is left out."""


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """Result of `Store`."""

    ok: bool
    """The kvstore has the block now."""


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """Result of `Load`; comes within its time. Nothing is written into the blocks any more."""

    blocks: int
    """Leading ones of the blocks asked for that have come whole; fewer is a miss."""
    seconds: float
    """Since it began, however many others were under way."""
    failed: bool = False
    """For another reason than that blocks were missing: the store is not asked for this request again."""


@dataclass(frozen=True, slots=True)
class Died:
    """The engine computes no more; its step is over."""

    why: str


IoEnd = SwapEnd | StoreEnd | LoadEnd

Event = (
    Reserve
    | Open
    | Heard
    | Arrived
    | Start
    | Stop
    | StreamOpened
    | StreamClosed
    | Stepped
    | StepDone
    | Died
    | Ended[IoEnd]
    | Tick
)

# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promised:
    """Room is promised."""

    id: int
    held: int
    """Leading blocks that are here already and need not be sent."""
    tbt_s: float
    """Predicted seconds between tokens with the request in the batch."""


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no room, or the time between tokens could not be kept."""

    id: int
    reason: str
    """As in `Overloaded.reason`."""
    why: str
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Table:
    """A sequence's blocks from now on, in order."""

    id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grew:
    """One block more, behind the others."""

    id: int
    block: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that are computed (again) in a step."""

    id: int
    start: int
    count: int
    sample: bool
    """They are the last ones: the next token is sampled."""


@dataclass(frozen=True, slots=True)
class Run:
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


@dataclass(frozen=True, slots=True)
class Cut:
    """End the run with the step that is being computed: there is something to decide."""

    step: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The sequence has ended with its first token."""

    id: int
    reason: int


@dataclass(frozen=True, slots=True)
class Select:
    """The beams of a request go on: each takes the tokens of its parent and one more."""

    id: int
    beams: tuple[tuple[int, int], ...]
    """For each beam its parent, and which of the parent's candidates follows. None when the search is over."""
    ended: tuple[tuple[int, int, int], ...]
    """Hypotheses that ended: number, parent, candidate."""
    kept: tuple[int, ...]
    """The hypotheses that are not forgotten, by number."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A beam search is over."""

    id: int
    hypotheses: tuple[tuple[int, float], ...]
    """Number and score, the best first."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The request ends early: no KV is taken for it and no token told any more."""

    id: int
    why: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The request has ended and its blocks are not its any more."""

    id: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy the blocks out of the pool; they stay as they are until it has `Ended`."""

    io: int
    id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy what was swapped out, from its block `first` on, into these blocks of the pool, and forget it."""

    io: int
    id: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapDrop:
    """Forget what was swapped out."""

    id: int


@dataclass(frozen=True, slots=True)
class Store:
    """Write a full block to one of the request's kvstores; it stays as it is until it has `Ended`."""

    io: int
    id: int
    index: int
    """Of the block in the sequence."""
    block: int
    store: int
    """Which of the request's kvstores."""


@dataclass(frozen=True, slots=True)
class Load:
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


Action = (
    Promised
    | Refused
    | Table
    | Grew
    | Run
    | Cut
    | Finish
    | Select
    | Ranked
    | Ending
    | Gone
    | SwapOut
    | SwapIn
    | SwapDrop
    | Store
    | Load
)
