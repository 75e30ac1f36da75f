"""A request at a decode instance with what the core never sees: its tokens, its transfer, and whom to tell."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moonpool.engine.incoming import IncomingRequest
from moonpool.kv.keys import BlockKey, block_keys, tokens_to_bytes
from moonpool.kv.layout import KVLayout
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import History, SequenceStep
from moonpool.streams.transfer import InboundTransfer, TransferState
from moonpool.v1 import kv_pb2
from services.decode.subscriber import Subscriber

MAX_GENERATION = (1 << 32) - 1


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One answer to a request.

    Attributes:
        request: which.
        choice: which of its answers.
        keys: of its full blocks, the answer's too.
        sampling: how its tokens are chosen.
        table: its blocks, as the core has said.
        tokens: prompt and answer, once it was started; grows by each step.
        history: the same for engines that check what blocks hold.
        finish: why it has ended by itself.
        stopped: the conductor has all that it wants of it: it is told no more, and ends with its next token.
    """

    request: "LiveRequest"
    choice: int
    keys: list[BlockKey]
    sampling: SequenceSampling
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    table: tuple[int, ...] = ()
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    history: History | None = None
    stopped: bool = False

    @property
    def id(self) -> int:
        """The core's name for it."""
        return self.request.id + self.choice

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.sampling.prompt_tokens

    def begin(self, first_token: int) -> None:
        """Takes the first token."""
        self.tokens = array("i", self.request.incoming.token_ids)
        self.tokens.append(first_token)
        self.history = self.request.incoming.history(self.tokens)

    def append(self, token: int, max_tokens: int) -> kv_pb2.FinishReason.ValueType:
        """Takes the next token; returns why the answer ends with it, unspecified when it goes on."""
        self.tokens.append(token)
        self.finish = kv_pb2.FINISH_REASON_STOP if self.stopped else self.sampling.finish(self.tokens, max_tokens)
        return self.finish

    def bound(self, blocks: tuple[int, ...]) -> None:
        """Has these blocks now."""
        self.table, transfer = blocks, self.request.transfer
        if transfer.state is TransferState.PROMISED:
            transfer.bind(blocks)

    def parent(self, index: int) -> BlockKey:
        """Key of the block before the one at `index`."""
        return self.keys[index - 1] if index else self.request.incoming.chain_root

    def filled(self, block_tokens: int) -> BlockKey | None:
        """Key of the block that became full when all tokens so far were computed; None when none did."""
        index, rest = divmod(len(self.tokens), block_tokens)
        if rest or index <= len(self.keys):
            return None
        [key] = block_keys(self.parent(index - 1), self.tokens[-block_tokens:], block_tokens)
        self.keys.append(key)
        return key

    def step(self, start: int, count: int, block_tokens: int, *, sample: bool) -> SequenceStep:
        """Its share of a step: `count` tokens from `start` on; the last ones of the sequence when it samples."""
        return SequenceStep(
            token_ids=tokens_to_bytes(self.tokens[start : start + count]),
            start=start,
            block_table=self.table[: -(-(start + count) // block_tokens)],
            sample=self.sampling.at(self.tokens) if sample else None,
            history=self.history,
        )

    def tell(self, position: int, token_ids: list[int]) -> None:
        """Tells the conductor of tokens, and of the end if it has come, if it wants them."""
        request = self.request
        if request.subscriber is not None and not self.stopped:
            request.subscriber.tokens(request.request_id, position, token_ids, self.finish, self.choice)
            request.subscriber.flush()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request.

    Attributes:
        incoming: what was asked for.
        stores: kvstores for the answer's full blocks.
        transfer: the KV that comes.
        heard_at: when the core was last told that its transfer lives.
        secret: who knows it may resume the request; b"" = nobody. One with several answers has none.
        sequences: its answers.
        ending: the core lets it go: nothing is taken for it and nothing told any more.
        why: it ends early.
        subscriber: gets its tokens; set when it is started.
        send_verdict: tells the sender of the KV how the transfer has ended; set when the blocks are bound.
    """

    incoming: IncomingRequest
    stores: Sequence[kv_pb2.Instance]
    transfer: InboundTransfer
    heard_at: float
    secret: bytes = b""
    sequences: list[LiveSequence] = field(default_factory=list)
    ending: bool = False
    why: str = ""
    subscriber: Subscriber | None = None
    send_verdict: Callable[[InboundTransfer], None] | None = None

    def __post_init__(self) -> None:
        for choice in range(self.incoming.choices):
            sampling = replace(self.incoming.sampling, sample_index=choice)
            self.sequences.append(LiveSequence(self, choice, list(self.incoming.keys), sampling))

    @property
    def id(self) -> int:
        """The core's name for it."""
        return self.transfer.transfer_id

    @property
    def request_id(self) -> str:
        """The conductor's name for it."""
        return self.incoming.request_id

    @property
    def table(self) -> tuple[int, ...]:
        """The blocks that its prompt's KV goes to."""
        return self.sequences[0].table

    @property
    def complete(self) -> bool:
        """Whether all its KV has come."""
        return self.transfer.state is TransferState.COMPLETE

    @property
    def started(self) -> bool:
        """Whether its first tokens are known."""
        return bool(self.sequences[0].tokens)

    def end(self, why: str) -> None:
        """Ends early, and tells whoever waits for it."""
        self.ending, self.why = True, why
        self.transfer.fail(why)
        if self.send_verdict is not None and not self.complete:
            self.send_verdict(self.transfer)
        if self.subscriber is not None:
            self.subscriber.failed(self.request_id, why)
            self.subscriber = None


class LiveRequests:
    """The requests that run, and their sequences, by the core's names."""

    def __init__(self) -> None:
        self.requests: dict[int, LiveRequest] = {}
        self.sequences: dict[int, LiveSequence] = {}

    def add(self, live: LiveRequest) -> None:
        """One more."""
        self.requests[live.id] = live
        self.sequences |= {sequence.id: sequence for sequence in live.sequences}

    def take(self, number: int) -> LiveRequest:
        """One less."""
        live = self.requests.pop(number)
        for sequence in live.sequences:
            del self.sequences[sequence.id]
        return live


def promised_transfer(layout: KVLayout, number: int, tokens: int, held: int) -> InboundTransfer:
    """The transfer of a request's KV, of which `held` leading blocks are there."""
    blocks = layout.blocks_for(tokens)
    last = layout.valid_tokens(tokens, blocks - 1)
    return InboundTransfer(number, number % MAX_GENERATION + 1, layout, blocks, held, last)
