"""Which tokens may follow in answers of a given format.

What may follow depends on the tokens before it, so a step's masks can be made as soon as the step before has chosen.
They are made by the thread that runs the step: on a CPU before the layers, where another thread would take a core from
those that compute them; on a device when the sampler asks for them, while it computes. Only grammars that are new are
compiled on another thread, while the step's layers run (`moonpool.engine.parsers`). The library writes masks to where
the sampler reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from llguidance import LLMatcher

from moonpool.checkpoint import Tokenizer
from moonpool.engine.parsers import Parsers
from moonpool.grammar import Grammar
from moonpool.sched.steps import Step

WORD_BITS = 32
LOOKS = 16
"""Steps from one look at the process's memory to the next."""
_MAX_REASON = 300


@dataclass(slots=True)
class Allowed:
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


class Making:
    """Makes the masks of a step, once. A run goes on only from a step whose masks were made.

    Args:
        make: makes them.
        grammars: that it may have to wait for.
    """

    def __init__(self, make: Callable[[], Allowed], grammars: Sequence[Future[LLMatcher]] = ()) -> None:
        self._make, self._grammars = make, grammars
        self._made: Allowed | None = None

    @property
    def waits(self) -> bool:
        """Whether a grammar has to be waited for."""
        return not all(it.done() for it in self._grammars)

    def early(self) -> None:
        """Makes them, unless a grammar has to be waited for."""
        if not self.waits:
            self.now()

    def now(self) -> Allowed:
        """The masks."""
        if self._made is None:
            self._made = self._make()
        return self._made


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

    def after(self, later: Sequence[Sequence[int]]) -> Wanted:
        """The mask that is wanted after these steps' tokens."""
        tokens = array("i", [its[self.index] for its in later])
        return Wanted(self.index, self.grammar, self.answer + tokens.tobytes())

    def write(self) -> bool:
        """Writes its mask; False where there is none."""
        self.parser.unsafe_compute_mask_ptr(*self.bits)
        return not self.parser.is_error()


class Masks:
    """Makes bit masks, of one step or run after the other.

    Args:
        load: gives the tokenizer; called on another thread.
        vocab_size: tokens of the model.
        end_token_ids: of the model.
        aside: that thread works within such a context.
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
        self._parsers = Parsers(load, vocab_size, end_token_ids, aside, full)
        self._steps = 0
        self._rows: list[_Row] = []
        self._later: list[Sequence[int]] = []
        """Each step's tokens since the rows began."""
        self._allowed = Allowed()
        self._goes_on = False

    def begin(self, wanted: Sequence[Wanted]) -> Making | None:
        """Begins the masks of a step, which may begin a run; None where none is wanted."""
        self._goes_on = bool(wanted)
        if not wanted:
            return None
        self._close()
        self._look()
        needed = [self._parsers.prepare(it.grammar, it.answer) for it in wanted]
        return Making(partial(self._first, wanted), [it for it in needed if it is not None])

    def go_on(self, tokens: Sequence[int]) -> Making | None:
        """Begins those of the run's next step, when each sequence of the step has got its one of these tokens."""
        return Making(partial(self._next, tokens)) if self._goes_on else None

    def close(self) -> None:
        """Ends the thread."""
        self._parsers.close()

    def _first(self, wanted: Sequence[Wanted]) -> Allowed:
        self._open(wanted)
        for row in self._rows:
            self._find(row)
        return self._allowed

    def _next(self, tokens: Sequence[int]) -> Allowed:
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
        return self._steps % LOOKS == 0 and self._parsers.make_room()

    def _close(self) -> None:
        """The run is over: its parsers are kept for those that go on with its sequences."""
        for row in self._rows:
            if row.index not in self._allowed.failed:
                now = row.after(self._later)
                self._parsers.keep(now.grammar, now.answer, row.parser)
        self._rows = []

    def _open(self, wanted: Sequence[Wanted]) -> None:
        """From now on these are the rows."""
        self._rows, self._later, self._allowed = [], [], Allowed()
        for it in wanted:
            parser = self._taken(it, self._parsers.take)
            if parser is None:
                continue
            bits = np.zeros(-(-self._parsers.tokenizer.vocab_size // WORD_BITS), np.uint32)
            self._allowed.masks[it.index] = bits.data.cast("B")
            self._rows.append(_Row(it.index, it.grammar, it.answer, parser, (bits.ctypes.data, bits.nbytes)))

    def _taken(self, it: Wanted, take: Callable[[Grammar, bytes], LLMatcher]) -> LLMatcher | None:
        """A sequence's parser; None where there is none, which fails the sequence."""
        waited_ns = self._parsers.waited_ns
        try:
            return take(it.grammar, it.answer)
        except Exception as error:  # of the library, or the checkpoint has no tokenizer: other sequences go on
            self._allowed.failed[it.index] = _reason(it.grammar, repr(error))
            return None
        finally:
            self._allowed.waited_ns += self._parsers.waited_ns - waited_ns

    def _find(self, row: _Row) -> None:
        """Writes a row's mask. Other answers may have used up a limit: only a failure of a grammar made anew counts."""
        if row.write() or (parser := self._taken(row.after(self._later), self._parsers.anew)) is None:
            return
        row.parser = parser
        if not row.write():
            self._allowed.failed[row.index] = _reason(row.grammar, parser.get_error())


def _reason(grammar: Grammar, error: str) -> str:
    return f"the {grammar.format} cannot be followed: {error}"[:_MAX_REASON]
