"""Prompts of a load."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.simulator.traces.mooncake import BLOCK_SIZE, TraceRequest

ORDINARY_TOKENS = 16
"""Ids below are left to special tokens."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Lengths in tokens.

    Attributes:
        prompt_tokens: per prompt; of a trace's at most so many, 0 = all.
        shared_tokens: part shared by a conversation.
        conversations: how many there are.
        output_tokens: per answer; of a trace's at most so many, 0 = all.
    """

    prompt_tokens: int
    shared_tokens: int
    conversations: int
    output_tokens: int


class PromptSource:
    """One load's prompts. Request `index`'s tokens are a function of the seed."""

    def __init__(
        self,
        shape: PromptShape,
        trace: Sequence[TraceRequest],
        seed: int,
        vocab_size: int,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """`trace` is empty for conversations; `block_size`: tokens per trace block."""
        self._shape = shape
        self._trace = trace
        self._seed = seed
        self._block_size = block_size
        self.vocab_size = vocab_size

    def tokens(self, index: int) -> "array[int]":
        """A request's prompt."""
        shape = self._shape
        if self._trace:
            return self._trace[index].tokens(self.vocab_size, self._block_size)[: shape.prompt_tokens or None]
        shared = self._random(shape.shared_tokens, "conversation", index % shape.conversations)
        return shared + self._random(shape.prompt_tokens - shape.shared_tokens, "turn", index)

    def output_tokens(self, index: int) -> int:
        """Tokens in the request's answer."""
        most = self._shape.output_tokens
        if not self._trace:
            return most
        wanted = self._trace[index].output_length
        return max(1, min(most or wanted, wanted))

    def _random(self, count: int, *name: object) -> "array[int]":
        generator = random.Random(f"{self._seed}/{name}")
        return array("i", generator.choices(range(ORDINARY_TOKENS, self.vocab_size), k=max(0, count)))
