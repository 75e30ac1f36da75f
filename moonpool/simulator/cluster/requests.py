"""Requests, their sequences at engines, and tokens as they are made."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

from blake3 import blake3

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.engine.decode.core.actions import BeginPrompt
from moonpool.simulator.traces.mooncake import TraceRequest

DONE = "done"
REFUSED = "refused"
"""Early, for a limit, or because there was no room in time."""
TOO_LARGE = "too_large"
GIVEN_UP = "given_up"
"""After too many failures, or after the deadline."""


@dataclass(slots=True)
class TokenTimes:
    """One sequence's tokens in order, and their times. Picoseconds."""

    first: int
    gaps: list[int]
    """From each to the next."""
    last: int

    @property
    def count(self) -> int:
        """Tokens."""
        return 1 + len(self.gaps)

    def after(self, known: int) -> "TokenTimes | None":
        """The same tokens without the first, which are known; None if all are known."""
        if known <= 0:
            return self
        if known >= self.count:
            return None
        return TokenTimes(self.first + sum(self.gaps[:known]), self.gaps[known:], self.last)

    def add(self, first: int, gaps: Listed[int], last: int) -> None:
        """More of them."""
        self.gaps.append(first - self.last)
        self.gaps.extend(gaps)
        self.last = last


@dataclass(slots=True, eq=False)
class Answer:
    """A client's part of one answer. Times are picoseconds."""

    made: int = 0
    """Tokens."""
    first_at: int = 0
    last_at: int = 0
    intervals: list[int] = field(default_factory=list)
    """Between tokens."""

    def take(self, tokens: TokenTimes) -> None:
        """More of them."""
        if self.made:
            self.intervals.append(max(0, tokens.first - self.last_at))  # one that has moved may have been quicker
        else:
            self.first_at = tokens.first
        self.intervals.extend(tokens.gaps)
        self.made += tokens.count
        self.last_at = tokens.last


@dataclass(slots=True, eq=False)
class Request:
    """What a client wants, and what the client got. Times are picoseconds."""

    number: int
    arrived: int
    tokens: int
    """Of the prompt."""
    answer: int
    """Tokens wanted in each answer."""
    keys: tuple[BlockKey, ...]
    """Of the prompt's full blocks."""
    max_tokens: int = 0
    """Longest answer that was asked for; 0 = the answer's own length."""
    choices: int = 1
    """Answers wanted."""
    tenant: str = ""
    session: str = ""
    """Conversation or agent; empty = none is known."""
    name: str = ""
    """Name by which the trace's other requests wait for this request; empty = none does."""
    prompt_key: bytes = b""
    """Key for the whole prompt if the prompt has no full block; chooses the store; empty = no other request has the
    prompt.
    """
    attempts: int = 0
    """Placements."""
    resumed: int = 0
    """Conductors at which the request was resumed."""
    reused: int = 0
    """Prompt tokens that the last attempt did not compute."""
    prefill: str = ""
    """The first placement's instance; that placement's predictions follow."""
    predicted_queue_s: float = 0.0
    predicted_ttft_s: float = 0.0
    ended_at: int = 0
    outcome: str = ""
    """How the request ended; empty before."""
    answers: tuple[Answer, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = tuple([Answer() for _ in range(self.choices)])

    @property
    def made(self) -> int:
        """Tokens that the client has, in all answers."""
        return sum([answer.made for answer in self.answers])

    @property
    def whole(self) -> bool:
        """Whether the answer has all tokens."""
        return self.made == self.choices * self.answer

    @property
    def kept(self) -> int:
        """Tokens that prefill computes if the request is placed anew: for several answers decode does that."""
        return self.made if self.choices == 1 else 0

    @property
    def first_at(self) -> int:
        """The first token's time; 0 = no token yet."""
        return min([answer.first_at for answer in self.answers if answer.made], default=0)

    @property
    def intervals(self) -> list[int]:
        """Gaps between tokens, in each answer."""
        return [interval for answer in self.answers for interval in answer.intervals]

    @property
    def longest(self) -> int:
        """Tokens in prompt and answer that room may be needed for."""
        return self.tokens + (self.max_tokens or self.answer)

    def take(self, tokens: TokenTimes, choice: int = 0) -> None:
        """Give the client more tokens of an answer."""
        self.answers[choice].take(tokens)


@dataclass(slots=True, eq=False)
class PlacedSequence:
    """A placed request as engines see the request: the prompt and the client's part of the answer."""

    request: Request
    id: str
    tokens: int
    left: int
    """The answer's tokens that were still to be made at placement."""
    fence: int = 0
    """How often the client had resumed the request."""
    width: int = 1
    """Answers that begin with the same prompt and run together."""

    @property
    def continued(self) -> int:
        """The answer's tokens that were there at placement."""
        return self.request.answer - self.left

    def keys(self, block_size: int) -> tuple[BlockKey, ...]:
        """Keys for full blocks with KV from prefill."""
        return keys_of_chain(self.request, self.tokens // block_size)


def keys_of(request: TraceRequest, block_size: int) -> tuple[BlockKey, ...]:
    """Block keys for a trace request's full blocks, uniform bytes like real keys; no two tenants share."""
    full = request.hash_ids[: request.input_length // block_size]
    return tuple([_key_of(hash_id, request.tenant) for hash_id in full])


def prompt_key_of(request: TraceRequest, block_size: int) -> bytes:
    """Key for a prompt without a full block, by the prompt's first block id; empty if no key is needed."""
    if request.input_length >= block_size or not request.hash_ids:
        return b""
    return _key_of(request.hash_ids[0], request.tenant)


def _key_of(hash_id: int, tenant: str) -> BlockKey:
    return BlockKey(blake3(hash_id.to_bytes(16, "little") + tenant.encode()).digest())


def answer_key(request: Request, index: int, choice: int = 0) -> BlockKey:
    """Key for a full block with answer tokens: no trace names the block, and no other request has the block."""
    whose = b"answer".ljust(12, b"\0") + choice.to_bytes(4, "little")
    return BlockKey(whose + (request.number << 32 | index).to_bytes(16, "little"))


def keys_of_chain(request: Request, blocks: int, choice: int = 0) -> tuple[BlockKey, ...]:
    """Keys for the leading blocks in a request's prompt and one answer."""
    keys = request.keys
    return (*keys[:blocks], *(answer_key(request, index, choice) for index in range(len(keys), blocks)))


@dataclass(slots=True)
class DecodeUse:
    """What an instance did."""

    steps: int = 0
    sequence_steps: int = 0
    busy: int = 0
    most_sequences: int = 0
    sequences_time: float = 0.0
    """Sequences times picoseconds."""
    slots_time: float = 0.0
    """Slots in the batch's blocks, times picoseconds."""
    tokens_time: float = 0.0
    """Of these, slots with a token."""

    def count(self, steps: int, batch: int, elapsed: int) -> None:
        """Steps over a batch are over."""
        self.steps += steps
        self.sequence_steps += steps * batch
        self.busy += elapsed
        self.sequences_time += elapsed * batch
        self.most_sequences = max(self.most_sequences, batch)


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One sequence at a decode instance."""

    sequence: PlacedSequence
    number: int
    """The sequence's name in the core, and the transfer's name."""
    stores: tuple[str, ...]
    """That the answer's blocks are written to."""
    tokens: int
    """Tokens in prompt and answer, the latest included."""
    left: int
    """Tokens that the sequence still makes."""
    keys: int
    """Full blocks with keys that the core knows."""
    heard_at: int
    """When the core was last told that the transfer lives."""
    choice: int = 0
    """The answer's number within the request."""
    blocks: int = 0
    stream: int = 0
    """The conductor's stream that the sequence was started on; 0 = no conductor wants the tokens (any more)."""
    why: str = ""
    """The core has ended the sequence early."""
    started: bool = False
    """The conductor has told the sequence to begin."""
    whole: bool = False
    """All the prompt's KV has come; set at the first of several sequences."""
    made: TokenTimes | None = None
    """Tokens that the conductor has not been told yet."""
    told: bool = False
    """Notes that the conductor was told some tokens."""
    queued_at: int = 0
    """When the whole prompt came into the queue."""
    prompt: "PromptReport | None" = None
    """How the whole prompt was computed; None: not begun, or told."""

    def advance(self, first: int, gaps: Listed[int], last: int) -> None:
        """Add tokens: at `first`, then after each of `gaps`, until `last`."""
        count = 1 + len(gaps)
        self.tokens += count
        self.left -= count
        if self.made is None:
            self.made = TokenTimes(first, list(gaps), last)
        else:
            self.made.add(first, gaps, last)

    def begin_with_prompt(self, block_size: int) -> None:
        """The first token is not known, and made here. A last block that is full has a key."""
        self.tokens -= 1
        self.left += 1
        self.keys = min(self.keys, (self.tokens - 1) // block_size)

    def begin_behind(self, known: int, block_size: int) -> tuple[BlockKey, ...]:
        """Take so many tokens behind the first token as known; return keys for the blocks that these tokens fill."""
        before, self.tokens, self.left = self.keys, self.tokens + known, self.left - known
        self.keys = max(before, (self.tokens - 1) // block_size)
        return self.chain(self.keys)[before:]

    def again(self, position: int, stream: int, now: int) -> TokenTimes | None:
        """The answer's tokens from a position on, for a stream that has not seen these tokens: all come now."""
        lacking = self.tokens - self.sequence.request.tokens - position
        self.made, self.told, self.stream = None, True, stream
        return TokenTimes(now, [0] * (lacking - 1), now) if lacking > 0 else None

    def until_filled(self, block_size: int) -> int:
        """Steps until a block becomes full."""
        return block_size - (self.tokens - 1) % block_size

    def filled(self, block_size: int) -> BlockKey | None:
        """Key for the block that became full with the last step; None if no block did."""
        index, rest = divmod(self.tokens - 1, block_size)
        if rest or index <= self.keys:
            return None
        self.keys = index
        return self.chain(index)[-1]

    def chain(self, blocks: int) -> tuple[BlockKey, ...]:
        """Keys for the leading blocks."""
        return keys_of_chain(self.sequence.request, blocks, self.choice)


@frozen
class Resume:
    """A conductor wants a request, each answer from a position on; the higher fence wins."""

    transfer: int
    sequence: str
    positions: tuple[int, ...]
    fence: int


@frozen
class PromptReport:
    """How an instance in the role both has computed a prompt.

    Attributes:
        begun: how the prompt began: what was cached and loaded, and what was missing.
        there_s: seconds from the order to the first token.
    """

    begun: BeginPrompt
    there_s: float = 0.0


@frozen
class SequenceReport:
    """What the conductor is told about a sequence: tokens, and whether these tokens end the sequence.

    Attributes:
        prompt: with the first tokens behind a prompt that was computed there.
    """

    number: int
    made: TokenTimes | None
    over: bool
    prompt: PromptReport | None = None
