"""The prompts of a load: as conversations share beginnings, or as a trace has them."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.traces.mooncake import BLOCK_TOKENS, TraceRequest

ORDINARY_TOKENS = 16
"""Ids below are left to special tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens.

    Attributes:
        prompt_tokens: of each prompt; of a trace's at most so many, 0 = all.
        shared_tokens: of these, common to a conversation.
        conversations: how many there are.
        output_tokens: of each answer; of a trace's at most so many, 0 = all.
    """

    prompt_tokens: int
    shared_tokens: int
    conversations: int
    output_tokens: int


class Prompts:
    """The prompts of one load. The tokens of request `index` are a function of the seed."""

    def __init__(
        self,
        shape: Shape,
        trace: Sequence[TraceRequest],
        seed: int,
        vocab_size: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        """`trace` is empty for conversations; `block_tokens` are those of its blocks."""
        self._shape = shape
        self._trace = trace
        self._seed = seed
        self._block_tokens = block_tokens
        self.vocab_size = vocab_size

    def tokens(self, index: int) -> "array[int]":
        """The prompt of a request."""
        shape = self._shape
        if self._trace:
            return self._trace[index].tokens(self.vocab_size, self._block_tokens)[: shape.prompt_tokens or None]
        shared = self._random(shape.shared_tokens, "conversation", index % shape.conversations)
        return shared + self._random(shape.prompt_tokens - shape.shared_tokens, "turn", index)

    def output_tokens(self, index: int) -> int:
        """Tokens of its answer."""
        most = self._shape.output_tokens
        if not self._trace:
            return most
        wanted = self._trace[index].output_length
        return max(1, min(most or wanted, wanted))

    def _random(self, count: int, *name: object) -> "array[int]":
        generator = random.Random(f"{self._seed}/{name}")
        return array("i", generator.choices(range(ORDINARY_TOKENS, self.vocab_size), k=max(0, count)))
