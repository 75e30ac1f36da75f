"""Events of the decode scheduler. Plain values: counts, keys and reasons, never tokens or bytes."""

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import LendBlocks, ReturnBlocks
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import IoEnded, Tick
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadEnded

Candidates = tuple[tuple[float, bool], ...]
"""Tokens that may follow one sequence, best first: log probability, and whether the sequence ends with the token."""


@frozen
class SearchRules:
    """How a search chooses sequences; names as in `transformers`.

    Attributes:
        length_penalty: a hypothesis' score is the sum of log probabilities over (number of tokens ^ this).
        early_stopping: True, False or "never".
    """

    length_penalty: float
    early_stopping: bool | str


@frozen
class ReserveBlocks:
    """Asks for blocks. Answered by `ReservationGranted` or `ReservationRefused`.

    Attributes:
        id: grows from request to request. A group's sequences have this id and the following ids; the next request's id
            is higher than all these ids.
        request: what is asked for.
        total_tokens: most tokens in a sequence; more than the request's `tokens`.
        tbt_slo_s: longest time between tokens, seconds; 0 = no limit.
        conductor: identity of the conductor; "" = unknown.
        stores: kvstores that get each full block of the answer.
        starts_in_s: seconds until the request is expected to start; the time between tokens is kept from then on.
        search: rules if candidates are chosen together; None = independent sequences.
        resumable: another conductor may take the request over (`AdoptRequest`): the request outlives the conductor, and
            the output is kept for a while after the end.
        fence: how often the client has resumed the request.
        computes_prompt: the whole prompt is computed here (`QueuePrompt`); the request waits for its turn.
        reuse: cached blocks of the prompt may be used; otherwise every token is computed.
        max_queue_s: with `computes_prompt`, refuse if the prompts here take longer than this, seconds; None = any time.
    """

    id: int
    request: EngineRequest
    total_tokens: int
    tbt_slo_s: float = 0.0
    conductor: str = ""
    stores: int = 0
    starts_in_s: float = 0.0
    search: SearchRules | None = None
    resumable: bool = False
    fence: int = 0
    computes_prompt: bool = False
    reuse: bool = True
    max_queue_s: float | None = None


@frozen
class TransferOpened:
    """KV begins to arrive: the promised blocks are bound, and named by `SetBlockTable`.

    Attributes:
        older: the KV may be older than a deletion of such blocks: no block is kept for other requests.
    """

    id: int
    older: bool = False


@frozen
class TransferProgress:
    """A part of the KV has arrived: the lease is renewed."""

    id: int


@frozen
class TransferComplete:
    """All KV has arrived and was verified."""

    id: int


@frozen
class StartDecoding:
    """The first token is known.

    Attributes:
        stream: the conductor's stream.
        finish: why the sequence has ended with the first token; 0 = continues.
        others: the same for a group's further sequences.
        candidates: for a search, tokens that may follow the prompt, in place of a first token.
        known: for each sequence, tokens known behind the first token; empty if no tokens are known. Not for a search.
        known_keys: keys of the blocks that these tokens fill, without the last token.
        patient: no client waits for single tokens.
    """

    id: int
    stream: int
    finish: int
    others: tuple[int, ...] = ()
    candidates: Candidates = ()
    known: tuple[int, ...] = ()
    known_keys: tuple[tuple[BlockKey, ...], ...] = ()
    patient: bool = False


@frozen
class ComputePrompt:
    """No KV arrives: decode computes the prompt's uncached part and the first token.

    Attributes:
        stream: the conductor's stream.
        patient: no client waits for single tokens.
    """

    id: int
    stream: int
    patient: bool = False


@frozen
class QueuePrompt:
    """No KV arrives: the whole prompt waits for its turn to be computed here (`ReserveBlocks.computes_prompt`).

    Attributes:
        stream: the conductor's stream.
        patient: no client waits for single tokens.
        delay_s: the prompt stands so many seconds behind in its tenant's order.
        held: for each kvstore, leading blocks that it is believed to hold; None = unknown. Missing values are None.
        sources: where a prefix may be loaded from, the best first.
    """

    id: int
    stream: int
    patient: bool = False
    delay_s: float = 0.0
    held: tuple[int | None, ...] = ()
    sources: tuple[KVSource, ...] = ()


@frozen
class AbortRequest:
    """The request is cancelled, or cannot continue.

    Attributes:
        leading: leading blocks that have arrived whole, if KV was still arriving.
    """

    id: int
    why: str
    leading: int = 0


@frozen
class AdoptRequest:
    """A conductor takes over a started request, or the request's retained output. Ignored if there is neither.

    Attributes:
        fence: the higher fence wins.
        positions: for each answer, position of the first output token that is wanted.
    """

    id: int
    stream: int
    fence: int
    positions: tuple[int, ...]


@frozen
class StreamOpened:
    """A conductor has opened a stream. A conductor's promises do not run out during a stream.

    The conductor's requests on a closed stream end: the conductor lives, and has placed these requests anew.
    """

    stream: int
    conductor: str


@frozen
class StreamClosed:
    """A conductor's stream has closed; the stream's requests end.

    If no other stream of the conductor is open, resumable requests become orphans instead, and promises end too.
    """

    stream: int


@frozen
class CheckedDraft:
    """Guesses for one sequence's next tokens that a step checked (`StartRun.drafts`).

    Attributes:
        id: the sequence.
        tokens: guessed tokens.
        accepted: further tokens that the sequence got behind the step's own, because as many guesses were right.
    """

    id: int
    tokens: int
    accepted: int


@frozen
class FirstTokens:
    """The first token of each answer, sampled with the last chunk of a prompt that `ReserveBlocks.computes_prompt`.

    Attributes:
        id: the request.
        finishes: for each answer, why it has ended with these tokens; 0 = continues. One value for a search.
        candidates: for a search, tokens that may follow the prompt, in place of first tokens.
        known: for each answer, tokens known behind the first token; empty if no tokens are known.
        known_keys: keys of the blocks that these tokens fill, without the last token.
    """

    id: int
    finishes: tuple[int, ...]
    candidates: Candidates = ()
    known: tuple[int, ...] = ()
    known_keys: tuple[tuple[BlockKey, ...], ...] = ()


@frozen
class RunProgress:
    """Some of the run's steps have ended; the run continues. No sequence ended in these steps.

    Attributes:
        step: number of the run.
        seconds: seconds for all these steps.
        filled: sequences with a block that became full, with the block's key, in order.
        waited_s: seconds before these steps, in which patient steps yielded to other work on the host.
    """

    step: int
    steps: int
    seconds: float
    filled: tuple[tuple[int, BlockKey], ...] = ()
    waited_s: float = 0.0


@frozen
class RunDone:
    """The run has ended, and no longer writes to the run's blocks.

    Attributes:
        step: number of the run.
        aborted: no token was computed.
        ended: sequences that ended with the last step's token, with the reason.
        filled: sequences whose last block became full, with the block's key.
        steps: steps that took `seconds`: steps not reported by `RunProgress`.
        candidates: tokens that may follow each sequence in a search.
        waited_s: as in `RunProgress`.
        late: running sequences that got no token in the last step; they ask again.
        drafts: guesses that the step checked.
        first_tokens: of the prompts whose last chunk the run computed.
    """

    step: int
    aborted: bool
    seconds: float
    ended: tuple[tuple[int, int], ...] = ()
    filled: tuple[tuple[int, BlockKey], ...] = ()
    steps: int = 1
    candidates: tuple[tuple[int, Candidates], ...] = ()
    waited_s: float = 0.0
    late: tuple[int, ...] = ()
    drafts: tuple[CheckedDraft, ...] = ()
    first_tokens: tuple[FirstTokens, ...] = ()


@frozen
class SwapEnd:
    """Result of `SwapOut` and `SwapIn`.

    Attributes:
        seconds: since the copy began or, if later, since the copy before ended; waiting does not count.
    """

    ok: bool
    seconds: float


@frozen
class StoreEnd:
    """Result of `StoreBlock`. `ok`: the kvstore has the block now."""

    ok: bool


@frozen
class ReceiveEnd:
    """Result of `StopReceiving`. No more writes into the blocks follow."""


@frozen
class EngineDied:
    """The engine has died; the engine's run is over."""

    why: str


IoEnd = SwapEnd | StoreEnd | ReceiveEnd | LoadEnded
Event = (
    ReserveBlocks
    | TransferOpened
    | TransferProgress
    | TransferComplete
    | StartDecoding
    | ComputePrompt
    | QueuePrompt
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
