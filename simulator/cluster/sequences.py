"""Sequences at a simulated decode instance, the tokens that they make, and what the instance did in all."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from simulator.cluster.requests import Made, Sequence, keys_of_chain


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
    """Slots of the batch's blocks times picoseconds."""
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

    sequence: Sequence
    number: int
    """Its name in the core, and its transfer's."""
    stores: tuple[str, ...]
    """That the answer's blocks are written to."""
    tokens: int
    """Of prompt and answer, the latest one included."""
    left: int
    """Tokens that it still makes."""
    keys: int
    """Full blocks whose keys the core knows."""
    heard_at: int
    """When the core was last told that its transfer lives."""
    choice: int = 0
    """Which of its request's answers it is."""
    blocks: int = 0
    stream: int = 0
    """The conductor's stream that it was started on; 0 = nobody wants its tokens (any more)."""
    why: str = ""
    """The core has ended it early."""
    started: bool = False
    """Its conductor has told it to begin."""
    whole: bool = False
    """All of its prompt's KV has come; the first one of several knows."""
    made: Made | None = None
    """Tokens that the conductor was not told of yet."""
    told: bool = False
    """It was told of some."""

    def advance(self, first: int, gaps: Listed[int], last: int) -> None:
        """More tokens are made: at `first`, and after the `gaps` behind it, until `last`."""
        count = 1 + len(gaps)
        self.tokens += count
        self.left -= count
        if self.made is None:
            self.made = Made(first, list(gaps), last)
        else:
            self.made.add(first, gaps, last)

    def begin_with_prompt(self, block_tokens: int) -> None:
        """The first token is not known: it is made here. A last block that is full has its key with it."""
        self.tokens -= 1
        self.left += 1
        self.keys = min(self.keys, (self.tokens - 1) // block_tokens)

    def begin_behind(self, known: int, block_tokens: int) -> tuple[BlockKey, ...]:
        """So many tokens behind the first one are known; returns the keys of the blocks that they fill."""
        before, self.tokens, self.left = self.keys, self.tokens + known, self.left - known
        self.keys = max(before, (self.tokens - 1) // block_tokens)
        return self.chain(self.keys)[before:]

    def again(self, position: int, stream: int, now: int) -> Made | None:
        """The tokens of the answer from a position on, for a stream that has not heard of them: all come now."""
        lacking = self.tokens - self.sequence.request.tokens - position
        self.made, self.told, self.stream = None, True, stream
        return Made(now, [0] * (lacking - 1), now) if lacking > 0 else None

    def until_filled(self, block_tokens: int) -> int:
        """Steps until a block becomes full."""
        return block_tokens - (self.tokens - 1) % block_tokens

    def filled(self, block_tokens: int) -> BlockKey | None:
        """Key of the block that became full with the last step; None when none did."""
        index, rest = divmod(self.tokens - 1, block_tokens)
        if rest or index <= self.keys:
            return None
        self.keys = index
        return self.chain(index)[-1]

    def chain(self, blocks: int) -> tuple[BlockKey, ...]:
        """Keys of its leading blocks."""
        return keys_of_chain(self.sequence.request, blocks, self.choice)


@frozen
class Resume:
    """A conductor wants a request, each answer from a position on; the higher fence has it."""

    transfer: int
    sequence: str
    positions: tuple[int, ...]
    fence: int


@frozen
class Told:
    """What the conductor is told of a sequence: tokens, and whether it has ended with them."""

    number: int
    made: Made | None
    over: bool
