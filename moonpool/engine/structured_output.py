"""Structured output: grammars, their parsers, and the token masks of a step.

A parser is a function of the grammar and the answer so far. It is kept only to save time: a missing parser is made
again from the answer, so nothing is lost when a sequence is preempted or moved. The thread that runs the step makes
the masks; only new grammars are compiled in another thread.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from moonpool import world
from moonpool.checkpoint import Tokenizer
from moonpool.engine.footprint import release_memory
from moonpool.grammar import LIMITS, Grammar
from moonpool.kv.keys import tokens_from_bytes
from moonpool.scheduling.steps import Step

MAX_GRAMMARS = 64
MAX_PARSERS = 512
TOKEN_BYTES = 4
SLICES = [*LLTokenizer.general_slices(), *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (2, 3, 4, 6, 20))]
"""Tokens that match one of these expressions are allowed together where a format allows the expression; only the others
are looked at one by one. The library's own, and shorter texts: for those whose longest length is near."""
K = TypeVar("K")
V = TypeVar("V")


class ParserCache:
    """See the module.

    Args:
        load: gives the tokenizer; called on another thread.
        vocab_size: tokens of the model.
        end_token_ids: of the model.
        aside: that thread works within such a context.
        full: whether the process holds as much as it may.

    Attributes:
        waited_ns: for the thread, in all.
    """

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        aside: Callable[[], AbstractContextManager[None]],
        full: Callable[[], bool],
    ) -> None:
        self.waited_ns = 0
        self._load = load
        self._vocab_size = vocab_size
        self._ends = end_token_ids
        self._aside = aside
        self._full = full
        self._thread = world.thread_pool(1, "grammars")
        self._grammars: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._parsers: OrderedDict[tuple[Grammar, bytes], LLMatcher] = OrderedDict()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """To be asked for here only when there is a parser, which is made with it on the thread."""
        tokenizer = self._load()
        size = max(self._vocab_size, tokenizer.vocab_size)
        return LLTokenizer(tokenizer.definition(), n_vocab=size, eos_token=list(self._ends) or None, slices=SLICES)

    def prepare(self, grammar: Grammar, answer: bytes) -> Future[LLMatcher] | None:
        """Begins to compile the grammar where `take` will need that; returns what it may have to wait for."""
        known = (grammar, answer) in self._parsers or (grammar, answer[:-TOKEN_BYTES]) in self._parsers
        return None if known else self._compiled(grammar)

    def take(self, grammar: Grammar, answer: bytes) -> LLMatcher:
        """The parser behind an answer, at best the one that was kept there or before its last token.

        Args:
            grammar: that the answer follows.
            answer: its tokens, little-endian int32.

        Raises:
            Exception: any of the library's, or the checkpoint has no tokenizer.
        """
        known = self._parsers.pop((grammar, answer), None)
        if known is not None:
            return known
        before = self._parsers.pop((grammar, answer[:-TOKEN_BYTES]), None) if answer else None
        if before is not None:
            before.consume_token(int.from_bytes(answer[-TOKEN_BYTES:], "little"))
            return before
        return self._begun(grammar, answer)

    def anew(self, grammar: Grammar, answer: bytes) -> LLMatcher:
        """As `take`, where the parser that it gave has failed: of the grammar compiled anew, for this answer.

        Those that are kept share what has failed: they go with it.
        """
        self._grammars.pop(grammar, None)
        for key in [key for key in self._parsers if key[0] == grammar]:
            del self._parsers[key]
        return self._begun(grammar, answer)

    def keep(self, grammar: Grammar, answer: bytes, parser: LLMatcher) -> None:
        """Keep a parser for sequences that continue its answer."""
        _keep_newest(self._parsers, (grammar, answer), parser, MAX_PARSERS)

    def make_room(self) -> bool:
        """Drop all if the process is near its memory limit; what is needed is made again. Return whether it did."""
        if not self._full():
            return False
        self._parsers.clear()
        self._grammars.clear()
        release_memory()
        return True

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _begun(self, grammar: Grammar, answer: bytes) -> LLMatcher:
        """Return a copy of the compiled parser that has read an answer."""
        parser = self._awaited(grammar).deep_copy()
        if answer:
            parser.consume_tokens(tokens_from_bytes(answer).tolist())
        return parser

    def _awaited(self, grammar: Grammar) -> LLMatcher:
        compiled, began_ns = self._compiled(grammar), world.monotonic_ns()
        try:
            return compiled.result()
        except Exception:
            del self._grammars[grammar]  # the next request tries again
            raise
        finally:
            self.waited_ns += world.monotonic_ns() - began_ns

    def _compiled(self, grammar: Grammar) -> Future[LLMatcher]:
        """The parser before the first token, as soon as the thread has made it."""
        found = self._grammars.pop(grammar, None)
        if found is None:
            self.make_room()
            found = self._thread.submit(self._compile, grammar)
        _keep_newest(self._grammars, grammar, found, MAX_GRAMMARS)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """On the thread; also makes what its copies share and their first mask needs."""
        with self._aside():
            parser = LLMatcher(self.tokenizer, grammar.compiled(), log_level=0, limits=LIMITS)
            parser.deep_copy().compute_bitmask()
            return parser


def _keep_newest(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """As the newest of at most `most`."""
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)


WORD_BITS = 32
STEPS_PER_MEMORY_CHECK = 16
"""Steps from one look at the process's memory to the next."""
_MAX_REASON = 300


@dataclass(slots=True)
class TokenMasks:
    """Which tokens may follow in a step, by index of the sequence.

    Attributes:
        masks: bit i (from the lowest bit of the first byte on) says whether token i may follow. In all steps of a run
            these are the same objects, whose bits change: they are to be read before the next step's are made.
        failed: why there is no mask: a grammar is too complex at this place, or an answer does not fit it.
        waited_ns: for a tokenizer and for grammars, in this step.
    """

    masks: dict[int, memoryview] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """A mask of a step."""

    index: int
    """Of the sequence in the step."""
    grammar: Grammar
    answer: bytes
    """The tokens so far, little-endian int32."""

    @classmethod
    def of(cls, step: Step) -> list[MaskRequest]:
        """Those of a step's sequences that sample with a format."""
        return [
            cls(index, grammar, sequence.sample.answer)
            for index, sequence in enumerate(step.sequences)
            if sequence.sample is not None and (grammar := Grammar.of(sequence.sample.params)) is not None
        ]


class PendingMasks:
    """Makes the masks of a step, once. A run goes on only from a step whose masks were made.

    Args:
        make: makes them.
        grammars: that it may have to wait for.
    """

    def __init__(self, make: Callable[[], TokenMasks], grammars: Sequence[Future[LLMatcher]] = ()) -> None:
        self._make, self._grammars = make, grammars
        self._made: TokenMasks | None = None

    @property
    def waits(self) -> bool:
        """Whether a grammar has to be waited for."""
        return not all(it.done() for it in self._grammars)

    def early(self) -> None:
        """Makes them, unless a grammar has to be waited for."""
        if not self.waits:
            self.now()

    def now(self) -> TokenMasks:
        """The masks."""
        if self._made is None:
            self._made = self._make()
        return self._made


@dataclass(slots=True)
class _MaskRow:
    """A sequence of the step or run under way, and the parser behind its answer."""

    index: int
    grammar: Grammar
    answer: bytes
    """When the run began."""
    parser: LLMatcher
    bits: tuple[int, int]
    """Address and bytes of its mask."""

    def after(self, later: Sequence[Sequence[int]]) -> MaskRequest:
        """The mask that is wanted after these steps' tokens."""
        tokens = array("i", [its[self.index] for its in later])
        return MaskRequest(self.index, self.grammar, self.answer + tokens.tobytes())

    def write(self) -> bool:
        """Writes its mask; False where there is none."""
        self.parser.unsafe_compute_mask_ptr(*self.bits)
        return not self.parser.is_error()


class MaskBuilder:
    """Makes bit masks, of one step or run after the other.

    Args:
        load: gives the tokenizer; called on another thread.
        vocab_size: tokens of the model.
        end_token_ids: of the model.
        aside: that thread works within such a context.
        full: whether the process holds as much as it may; asked for every `STEPS_PER_MEMORY_CHECK` steps, and before
            a grammar is compiled.
    """

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._parsers = ParserCache(load, vocab_size, end_token_ids, aside, full)
        self._steps = 0
        self._rows: list[_MaskRow] = []
        self._later: list[Sequence[int]] = []
        """Each step's tokens since the rows began."""
        self._allowed = TokenMasks()
        self._goes_on = False

    def begin(self, wanted: Sequence[MaskRequest]) -> PendingMasks | None:
        """Begins the masks of a step, which may begin a run; None where none is wanted."""
        self._goes_on = bool(wanted)
        if not wanted:
            return None
        self._close()
        self._look()
        needed = [self._parsers.prepare(it.grammar, it.answer) for it in wanted]
        return PendingMasks(partial(self._first, wanted), [it for it in needed if it is not None])

    def advance(self, tokens: Sequence[int]) -> PendingMasks | None:
        """Begins those of the run's next step, when each sequence of the step has got its one of these tokens."""
        return PendingMasks(partial(self._next, tokens)) if self._goes_on else None

    def close(self) -> None:
        """Ends the thread."""
        self._parsers.close()

    def _first(self, wanted: Sequence[MaskRequest]) -> TokenMasks:
        self._open(wanted)
        for row in self._rows:
            self._find(row)
        return self._allowed

    def _next(self, tokens: Sequence[int]) -> TokenMasks:
        self._allowed.waited_ns = 0
        self._later.append(tokens)
        if self._look():
            return self._first([row.after(self._later) for row in self._rows])
        for row in self._rows:
            row.parser.consume_token(tokens[row.index])
            self._find(row)
        return self._allowed

    def _look(self) -> bool:
        """Once in a while, whether the process held too much, and all has been given up."""
        self._steps += 1
        return self._steps % STEPS_PER_MEMORY_CHECK == 0 and self._parsers.make_room()

    def _close(self) -> None:
        """The run is over: its parsers are kept for those that go on with its sequences."""
        for row in self._rows:
            if row.index not in self._allowed.failed:
                now = row.after(self._later)
                self._parsers.keep(now.grammar, now.answer, row.parser)
        self._rows = []

    def _open(self, wanted: Sequence[MaskRequest]) -> None:
        """From now on these are the rows."""
        self._rows, self._later, self._allowed = [], [], TokenMasks()
        for it in wanted:
            parser = self._taken(it, self._parsers.take)
            if parser is None:
                continue
            bits = np.zeros(-(-self._parsers.tokenizer.vocab_size // WORD_BITS), np.uint32)
            self._allowed.masks[it.index] = bits.data.cast("B")
            self._rows.append(_MaskRow(it.index, it.grammar, it.answer, parser, (bits.ctypes.data, bits.nbytes)))

    def _taken(self, it: MaskRequest, take: Callable[[Grammar, bytes], LLMatcher]) -> LLMatcher | None:
        """A sequence's parser; None where there is none, which fails the sequence."""
        waited_ns = self._parsers.waited_ns
        try:
            return take(it.grammar, it.answer)
        except Exception as error:  # of the library, or the checkpoint has no tokenizer: other sequences go on
            self._allowed.failed[it.index] = _failure_reason(it.grammar, repr(error))
            return None
        finally:
            self._allowed.waited_ns += self._parsers.waited_ns - waited_ns

    def _find(self, row: _MaskRow) -> None:
        """Writes a row's mask. Other answers may have used up a limit: only a failure of a grammar made anew counts."""
        if row.write() or (parser := self._taken(row.after(self._later), self._parsers.anew)) is None:
            return
        row.parser = parser
        if not row.write():
            self._allowed.failed[row.index] = _failure_reason(row.grammar, parser.get_error())


def _failure_reason(grammar: Grammar, error: str) -> str:
    return f"the {grammar.format} cannot be followed: {error}"[:_MAX_REASON]
