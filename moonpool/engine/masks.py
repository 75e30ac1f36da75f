"""Which tokens may follow in answers of a given format: worked out on a thread of its own while the step computes.

What may follow depends on the tokens before it, which are known when a step begins. So the masks are there when the
step has its logits, and nothing waits for them that was not busy itself. While the thread works, native kernels leave
it a core: a team with more threads than cores waits at each barrier for one that does not run. The first request with a
format waits for the tokenizer, which takes up to a second and 150 MB with 152k tokens: who asks for no format pays
neither.

A mask is a function of the grammar and the answer so far. Parsers that stand behind an answer are kept only to save
time: one that is missing is made anew from the answer, so nothing is lost with a preempted or moved sequence, nor when
all are given up because the process holds too much.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from moonpool.checkpoint import Tokenizer
from moonpool.engine.footprint import give_back
from moonpool.grammar import LIMITS, Grammar
from moonpool.kv.keys import tokens_from_bytes
from moonpool.sched.steps import Step

MAX_GRAMMARS = 64
MAX_PARSERS = 512
TOKEN_BYTES = 4
LOOKS = 16
"""Steps from one look at the process's memory to the next."""
_MAX_REASON = 300

K = TypeVar("K")
V = TypeVar("V")


class CannotFollow(str):
    """Why there is no mask for an answer: its grammar is too complex at this place, or the answer does not fit it."""

    __slots__ = ()


Mask = bytes | CannotFollow
"""Bit i (from the lowest bit of the first byte on) says whether token i may follow; or why there is no mask."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A mask of a step."""

    index: int
    """Of the sequence in the step."""
    grammar: Grammar
    answer: bytes
    """The tokens so far, little-endian int32."""

    @classmethod
    def of(cls, step: Step) -> list[Wanted]:
        """Those of a step's sequences that sample with a format."""
        return [
            cls(index, grammar, sequence.sample.answer)
            for index, sequence in enumerate(step.sequences)
            if sequence.sample is not None and (grammar := Grammar.of(sequence.sample.params)) is not None
        ]

    def after(self, tokens: Sequence[int]) -> Wanted:
        """That of the run's next step, when this one's sequences have got these tokens."""
        answer = self.answer + tokens[self.index].to_bytes(TOKEN_BYTES, "little")
        return Wanted(self.index, self.grammar, answer)


class Masks:
    """Makes bit masks.

    Args:
        load: gives the tokenizer; called on the thread.
        vocab_size: tokens of the model.
        end_token_ids: of the model.
        aside: the thread works within such a context.
        full: whether the process holds as much as it may; asked for every `LOOKS` steps, and before a grammar is
            compiled.
    """

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._load = load
        self._aside = aside
        self._full = full
        self._steps = 0
        self._nothing = b""
        self._vocab_size = vocab_size
        self._ends = end_token_ids
        self._thread = ThreadPoolExecutor(1, "masks")
        self._grammars: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._parsers: OrderedDict[tuple[Grammar, bytes], LLMatcher] = OrderedDict()

    def begin(self, wanted: Sequence[Wanted]) -> Future[dict[int, Mask]] | None:
        """Begins a step's masks, each for its index; None where none is wanted."""
        return self._thread.submit(self._masks, wanted) if wanted else None

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    # --- on the thread ---------------------------------------------------------------------------------------------

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = self._load()
        size = max(self._vocab_size, tokenizer.vocab_size)
        return LLTokenizer(tokenizer.definition(), n_vocab=size, eos_token=list(self._ends) or None)

    def _masks(self, wanted: Sequence[Wanted]) -> dict[int, Mask]:
        with self._aside():
            self._steps += 1
            if self._steps % LOOKS == 0:
                self._make_room()
            return {it.index: self._mask(it.grammar, it.answer) for it in wanted}

    def _make_room(self) -> None:
        """Gives all up where the process holds too much: what is needed is made anew."""
        if self._full():
            self._parsers.clear()
            self._grammars.clear()
            give_back()

    def _mask(self, grammar: Grammar, answer: bytes) -> Mask:
        """What may follow."""
        try:
            parser = self._parser(grammar, answer)
            mask: bytes = parser.compute_bitmask()
        except Exception as error:  # of the library, or the checkpoint has no tokenizer: other sequences go on
            return CannotFollow(f"the {grammar.format} cannot be followed: {error!r}"[:_MAX_REASON])
        if len(self._nothing) != len(mask):
            self._nothing = bytes(len(mask))
        if mask == self._nothing or parser.is_error():
            return CannotFollow(f"the {grammar.format} cannot be followed: {parser.get_error()}"[:_MAX_REASON])
        _keep(self._parsers, (grammar, answer), parser, MAX_PARSERS)
        return mask

    def _parser(self, grammar: Grammar, answer: bytes) -> LLMatcher:
        """The parser behind an answer, at best the one that stood before its last token."""
        known = self._parsers.pop((grammar, answer), None)
        if known is not None:
            return known
        before = self._parsers.pop((grammar, answer[:-TOKEN_BYTES]), None) if answer else None
        if before is not None:
            before.consume_token(int.from_bytes(answer[-TOKEN_BYTES:], "little"))
            return before
        parser = self._compiled(grammar).deep_copy()
        if answer:
            parser.consume_tokens(tokens_from_bytes(answer).tolist())
        return parser

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        found = self._grammars.pop(grammar, None)
        if found is None:
            self._make_room()
            found = LLMatcher(self._tokenizer, grammar.compiled(), log_level=0, limits=LIMITS)
        _keep(self._grammars, grammar, found, MAX_GRAMMARS)
        return found


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """As the newest of at most `most`."""
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)
