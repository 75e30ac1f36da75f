"""Which tokens may follow in answers of a given format: worked out on a thread of its own while the engine computes.

What may follow depends on the tokens before it, which are known as soon as a step has chosen them. So the masks of a
run's next step are begun at once, beside what the engine does between two steps, and are there when the step has its
logits. The library writes them, without the interpreter's lock, to where the sampler reads them. While the thread
works, native kernels leave it a core: a team with more threads than cores waits at each barrier for one that does not
run. The first request with a format waits for the tokenizer, which takes up to a second and 150 MB with 152k tokens:
who asks for no format pays neither.

A mask is a function of the grammar and the answer so far. Parsers that stand behind an answer are kept only to save
time: one that is missing is made anew from the answer, so nothing is lost with a preempted or moved sequence, nor when
all are given up because the process holds too much.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from moonpool.checkpoint import Tokenizer
from moonpool.engine.footprint import give_back
from moonpool.grammar import LIMITS, Grammar
from moonpool.kv.keys import tokens_from_bytes
from moonpool.sched.steps import Step

MAX_GRAMMARS = 64
MAX_PARSERS = 512
TOKEN_BYTES = 4
WORD_BITS = 32
LOOKS = 16
"""Steps from one look at the process's memory to the next."""
SLICES = [*LLTokenizer.general_slices(), *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (2, 4, 6))]
"""Tokens that match one of these expressions are allowed together where a format allows the expression; only the others
are looked at one by one. The library's own, and shorter texts: for those whose longest length is near."""
_MAX_REASON = 300

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Allowed:
    """Which tokens may follow in a step, by index of the sequence.

    Attributes:
        masks: bit i (from the lowest bit of the first byte on) says whether token i may follow. In all steps of a run
            these are the same objects, whose bits change: they are to be read before the next step's are begun.
        failed: why there is no mask: a grammar is too complex at this place, or an answer does not fit it.
    """

    masks: dict[int, memoryview] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


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


@dataclass(slots=True)
class _Row:
    """A sequence of the step or run under way, and the parser behind its answer."""

    index: int
    grammar: Grammar
    answer: bytes
    """When the run began."""
    parser: LLMatcher
    bits: tuple[int, int]
    """Address and bytes of its mask."""
    later: list[int] = field(default_factory=list)
    """Tokens that the run has added to it."""

    def now(self) -> Wanted:
        """The mask that is wanted now."""
        return Wanted(self.index, self.grammar, self.answer + np.array(self.later, "<i4").tobytes())


class Masks:
    """Makes bit masks, of one step or run after the other.

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
        self._vocab_size = vocab_size
        self._ends = end_token_ids
        self._thread = ThreadPoolExecutor(1, "masks")
        self._goes_on = False
        # The thread's own:
        self._steps = 0
        self._rows: list[_Row] = []
        self._allowed = Allowed()
        self._grammars: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._parsers: OrderedDict[tuple[Grammar, bytes], LLMatcher] = OrderedDict()

    def begin(self, wanted: Sequence[Wanted]) -> Future[Allowed] | None:
        """Begins the masks of a step, which may begin a run; None where none is wanted."""
        self._goes_on = bool(wanted)
        return self._thread.submit(self._begin, wanted) if wanted else None

    def go_on(self, tokens: Sequence[int]) -> Future[Allowed] | None:
        """Begins those of the run's next step, when each sequence of the step has got its one of these tokens."""
        return self._thread.submit(self._go_on, tokens) if self._goes_on else None

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    # --- on the thread ---------------------------------------------------------------------------------------------

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = self._load()
        size = max(self._vocab_size, tokenizer.vocab_size)
        return LLTokenizer(tokenizer.definition(), n_vocab=size, eos_token=list(self._ends) or None, slices=SLICES)

    def _begin(self, wanted: Sequence[Wanted]) -> Allowed:
        with self._aside():
            self._close()
            self._look()
            self._open(wanted)
            for row in self._rows:
                self._find(row)
            return self._allowed

    def _go_on(self, tokens: Sequence[int]) -> Allowed:
        with self._aside():
            if self._look():
                self._open([row.now() for row in self._rows])
            for row in self._rows:
                row.later.append(tokens[row.index])
                row.parser.consume_token(tokens[row.index])
                self._find(row)
            return self._allowed

    def _look(self) -> bool:
        """Once in a while, whether the process held too much, and all has been given up."""
        self._steps += 1
        return self._steps % LOOKS == 0 and self._make_room()

    def _make_room(self) -> bool:
        """Gives all up where the process holds too much: what is needed is made anew."""
        if not self._full():
            return False
        self._parsers.clear()
        self._grammars.clear()
        give_back()
        return True

    def _close(self) -> None:
        """The run is over: its parsers are kept for those that go on with its sequences."""
        for row in self._rows:
            if row.index not in self._allowed.failed:
                now = row.now()
                _keep(self._parsers, (now.grammar, now.answer), row.parser, MAX_PARSERS)
        self._rows = []

    def _open(self, wanted: Sequence[Wanted]) -> None:
        """From now on these are the rows."""
        self._rows, self._allowed = [], Allowed()
        for it in wanted:
            try:
                parser, words = self._parser(it.grammar, it.answer), -(-self._tokenizer.vocab_size // WORD_BITS)
            except Exception as error:  # of the library, or the checkpoint has no tokenizer: other sequences go on
                self._allowed.failed[it.index] = _reason(it.grammar, repr(error))
                continue
            bits = np.zeros(words, np.uint32)
            self._allowed.masks[it.index] = bits.data.cast("B")
            self._rows.append(_Row(it.index, it.grammar, it.answer, parser, (bits.ctypes.data, bits.nbytes)))

    def _find(self, row: _Row) -> None:
        """Writes a row's mask."""
        row.parser.unsafe_compute_mask_ptr(*row.bits)
        if row.parser.is_error():
            self._allowed.failed[row.index] = _reason(row.grammar, row.parser.get_error())

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


def _reason(grammar: Grammar, error: str) -> str:
    return f"the {grammar.format} cannot be followed: {error}"[:_MAX_REASON]


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """As the newest of at most `most`."""
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)
