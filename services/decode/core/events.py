"""Events of the decode core. Plain values: counts, keys and reasons, never tokens or bytes."""

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from moonpool.scheduling.block_manager import DeleteKV, LendBlocks, ReturnBlocks
from moonpool.scheduling.state_machine import IoEnded, Tick

BeamCandidates = tuple[tuple[float, bool], ...]
"""What may follow one beam: of each token its log probability and whether the sequence ends with it; the best first."""


@frozen
class BeamRules:
    """How the beams of a request are chosen; names as in `transformers`."""

    length_penalty: float
    """A hypothesis' score is the sum of its tokens' log probabilities over (their number ^ length_penalty)."""
    early_stopping: bool | str
    """True, False or "never"."""


@frozen
class ReserveBlocks:
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
    beams: BeamRules | None = None
    """The sequences are beams; None = each goes its own way."""
    resumable: bool = False
    """Another conductor may `Adopt` it: it outlives its own, and what it has said is kept for a while after its end."""
    fence: int = 0
    """How often its client has resumed it."""
    priority: int = 0
    """Lower ones go first."""
    tenant: str = ""
    """Whose KV it is."""
    transient: bool = False
    """None of its blocks is to be kept: its KV was deleted while it was on its way."""
    logprob_bytes: int = 0
    """Bytes of the log probabilities that are kept with each token of its answer."""


@frozen
class TransferOpened:
    """The KV begins to come: the promise becomes blocks, named by `Table`."""

    id: int
    older: bool = False
    """It may be older than a deletion of such blocks: nothing of the request is kept for others."""


@frozen
class TransferProgress:
    """Something of the transfer came: its lease is renewed."""

    id: int


@frozen
class TransferComplete:
    """All KV has come and was verified."""

    id: int


@frozen
class StartDecoding:
    """The first token is known."""

    id: int
    stream: int
    """The conductor's stream."""
    finish: int
    """Why the sequence has ended with its first token; 0 = it goes on."""
    others: tuple[int, ...] = ()
    """The same for the further sequences of a group."""
    candidates: BeamCandidates = ()
    """What may follow the prompt, where beams are wanted: there is no first token then."""
    known: tuple[int, ...] = ()
    """Of each sequence, tokens behind the first one that are known too; empty where there are none. Not of beams."""
    known_keys: tuple[tuple[BlockKey, ...], ...] = ()
    """Of the blocks that these fill, the last token left out."""
    patient: bool = False
    """Nobody waits for its single tokens."""


@frozen
class ComputePrompt:
    """No KV comes: what is not held of the prompt is computed here, and the first token with it."""

    id: int
    stream: int
    """The conductor's stream."""
    patient: bool = False
    """As in `Start`."""


@frozen
class AbortRequest:
    """The request is not wanted any more, or cannot go on."""

    id: int
    why: str
    leading: int = 0
    """Leading blocks that are whole, where its KV was still coming."""


@frozen
class AdoptRequest:
    """A conductor wants a started sequence, or what is kept of one; ignored when there is nothing of it."""

    id: int
    stream: int
    fence: int
    """The higher one wins."""
    positions: tuple[int, ...]
    """Of the first output token that is wanted of each answer."""


@frozen
class StreamOpened:
    """A conductor has opened a stream. While it has one, its promises do not run out.

    What it had on a stream that has closed ends: it forecasts, and has placed that anew.
    """

    stream: int
    conductor: str


@frozen
class StreamClosed:
    """The stream's sequences end.

    If it was its conductor's last one, those that may be adopted are orphans instead; what was not started ends too.
    """

    stream: int


@frozen
class RunProgress:
    """Some steps of the run are over, which goes on. Nobody ended in them."""

    step: int
    """The run's number."""
    steps: int
    seconds: float
    """Of all of them."""
    filled: tuple[tuple[int, BlockKey], ...] = ()
    """Sequences of which a block became full, with its key, in their order."""
    waited_s: float = 0.0
    """Before these seconds: patient steps let others of the host go first."""


@frozen
class RunDone:
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
    candidates: tuple[tuple[int, BeamCandidates], ...] = ()
    """What may follow each beam of the step."""
    waited_s: float = 0.0
    """As in `Stepped`."""


@frozen
class SwapEnd:
    """Result of `SwapOut` and `SwapIn`."""

    ok: bool
    seconds: float
    """Since it began or, if that was later, since the copy before it ended: waiting for others is left out."""


@frozen
class StoreEnd:
    """Result of `Store`."""

    ok: bool
    """The kvstore has the block now."""


@frozen
class LoadEnd:
    """Result of `Load`; comes within its time. Nothing is written into the blocks any more."""

    blocks: int
    """Leading ones of the blocks asked for that have come whole; fewer is a miss."""
    seconds: float
    """Since it began, however many others were under way."""
    failed: bool = False
    """For another reason than that blocks were missing: the store is not asked for this request again."""


@frozen
class ReceiveEnd:
    """Result of `StopReceiving`. Nothing is written into the blocks any more."""


@frozen
class EngineDied:
    """The engine computes no more; its step is over."""

    why: str


IoEnd = SwapEnd | StoreEnd | LoadEnd | ReceiveEnd


Event = (
    ReserveBlocks
    | TransferOpened
    | TransferProgress
    | TransferComplete
    | StartDecoding
    | ComputePrompt
    | AbortRequest
    | AdoptRequest
    | StreamOpened
    | StreamClosed
    | RunProgress
    | RunDone
    | EngineDied
    | DeleteKV
    | LendBlocks
    | ReturnBlocks
    | IoEnded[IoEnd]
    | Tick
)
