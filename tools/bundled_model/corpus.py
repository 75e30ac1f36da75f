"""The training text as tokens: what an epoch holds, and the rows that are drawn from it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.bundled_model.chat import conversations
from tools.bundled_model.text import Document
from tools.bundled_model.tokenizer import encode_conversation, encode_document


class Corpus:
    """The training text as token lists, and the epochs drawn from it."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, test_share: float) -> None:
        """Encode ``documents`` and their conversations; ``test_share`` is the part of the test suite per epoch."""
        self.test_share = test_share
        self.library: list[list[int]] = []
        self.tests: list[list[int]] = []
        self.chats: list[list[int]] = []
        for document in documents:
            ids = encode_document(tokenizer, document.text)
            (self.tests if document.is_test else self.library).append(ids)
            self.chats += [encode_conversation(tokenizer, turns) for turns in conversations(document)]

    def epoch(self, rng: random.Random) -> Tensor:
        """Return one shuffled epoch: the library, its conversations and a part of the test suite."""
        tests = list(self.tests)
        rng.shuffle(tests)
        parts = self.library + self.chats + tests[: round(len(tests) * self.test_share)]
        rng.shuffle(parts)
        return torch.tensor([token for ids in parts for token in ids], dtype=torch.int32)

    def rows(self, length: int, seed: int) -> Iterator[Tensor]:
        """Yield rows of ``length + 1`` tokens for ever; rows of one epoch come in random order.

        Raises:
            ValueError: an epoch has no whole row.
        """
        rng = random.Random(seed)
        while True:
            stream = self.epoch(rng)
            count = (len(stream) - 1) // length
            if count < 1:
                raise ValueError(f"length: {length} tokens, but an epoch has only {len(stream)}")
            shift = rng.randrange(len(stream) - count * length)
            order = list(range(count))
            rng.shuffle(order)
            for index in order:
                start = shift + index * length
                yield stream[start : start + length + 1].long()
