"""Structured output: grammars, their parsers, and the token masks of a step.

A parser is a function of the grammar and the answer so far. A parser is kept only to save time: a missing parser is
made again from the answer, so nothing is lost when a sequence is preempted or moved. Threads compile grammars and make
the masks. A step waits for them for a bounded time: a sequence with a slower mask goes without a token in this step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLMatcher

from moonpool.base import world
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.grammar import Grammar
from moonpool.base.scheduling.steps import Step
from moonpool.engine.parser_cache import MAX_PARSERS, TOKEN_BYTES, KeptParser, ParserCache, begun
from moonpool.engine.processor_time import ProcessorTime

WORD_BITS = 32
STEPS_PER_MEMORY_CHECK = 16
"""Steps from one look at the process's memory to the next."""
_MAX_REASON = 300
MASK_WAIT_S = 0.01
"""Longest wait of a step for masks that were quick before, seconds."""
ALONE_WAIT_S = 0.05
"""The same where every sequence of the step would go without a token."""
QUICK_THREADS = 2
SLOW_NICE = 10
"""Priority of the thread that makes slow masks, which no step waits for: on busy cores, steps and services go first."""


class MaskBuilder:
    """Makes bit masks, for one step or run after the other, on separate threads.

    A step waits for masks for a bounded time. A sequence that may go without a token does so while the sequence's mask
    is made.

    Args:
        load: gives the tokenizer; called on another thread.
        vocab_size: tokens of the model.
        end_token_ids: the model's.
        aside: the threads work within such a context.
        full: whether the process holds as much as allowed; asked for every `STEPS_PER_MEMORY_CHECK` steps, and before a
            grammar is compiled.
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
        self._quick = world.thread_pool(QUICK_THREADS, "masks")
        self._slow = world.thread_pool(1, "slow-masks")
        self._slow.submit(_work_behind_others)
        self._aside = aside
        self._steps = 0
        self._rows: list[_MaskRow] = []
        self._unfinished: OrderedDict[tuple[Grammar, bytes], list[_MaskRow]] = OrderedDict()
        self._later: list[Sequence[int]] = []
        """Each step's tokens since the rows began."""
        self._allowed = TokenMasks()
        self._goes_on = self._alone = False

    def begin(self, wanted: Sequence[MaskRequest], *, alone: bool = False) -> PendingMasks | None:
        """Begin the masks of a step, which may begin a run; None where none is wanted.

        `alone`: no sequence of the step goes on without a mask.
        """
        self._goes_on, self._alone = bool(wanted), alone
        if not wanted:
            return None
        self._close()
        self._look()
        self._rows, self._later, self._allowed = [], [], TokenMasks()
        for request in wanted:
            self._rows.append(self._row(request, self._rows[-1] if self._rows else None))
        needed = [row.compiled for row in self._rows if row.parser is None and not row.wanted.may_skip]
        return PendingMasks(self._made, needed)

    def advance(self, tokens: Sequence[int]) -> PendingMasks | None:
        """Begin the masks for the run's next step, when each sequence in the step has got a token."""
        return PendingMasks(partial(self._next, tokens)) if self._goes_on else None

    def warm(self) -> None:
        """Make what the first grammar needs; call this before the engine serves, whose steps would stand still."""
        self._parsers.warm()

    def close(self) -> None:
        self._parsers.close()
        for threads in (self._quick, self._slow):
            threads.shutdown(cancel_futures=True)

    def _next(self, tokens: Sequence[int]) -> TokenMasks:
        self._allowed.waited_ns = 0
        self._later.append(tokens)
        if self._look():
            wanted, self._later = [row.after(self._later) for row in self._rows], []
            self._rows, self._allowed = [self._row(request) for request in wanted], TokenMasks()
            return self._made()
        for row in self._rows:
            assert row.parser is not None, "a run goes on from masks"
            row.parser.consume_token(tokens[row.index])
            row.work = None
        return self._made()

    def _look(self) -> bool:
        """Once in a while, whether the process held too much, and all has been given up."""
        self._steps += 1
        return self._steps % STEPS_PER_MEMORY_CHECK == 0 and self._parsers.make_room()

    def _close(self) -> None:
        """The run is over: the run's parsers are kept for runs that continue the sequences."""
        for row in self._rows:
            if row.index in self._allowed.failed:
                continue
            now = row.after(self._later)
            if row.work is not None and row.index in self._allowed.late:
                self._unfinished.setdefault((now.grammar, now.answer), []).append(row)
            elif row.parser is not None:
                self._parsers.keep(now.grammar, now.answer, KeptParser(row.parser, row.compiled, row.time))
        while len(self._unfinished) > MAX_PARSERS:
            self._unfinished.popitem(last=False)
        self._rows = []

    def _row(self, wanted: MaskRequest, before: _MaskRow | None = None) -> _MaskRow:
        """Return a mask's row: with a mask being made, or with a kept parser, or with neither.

        `before`: the step's row before. If the answer is that row's with a token more (a guess that the step checks),
        the parser follows from that row's.
        """
        key = wanted.grammar, wanted.answer
        if waiting := self._unfinished.get(key):
            row = waiting.pop()
            if not waiting:
                del self._unfinished[key]
            row.wanted = wanted
            return row
        if before is not None and before.parser is not None and before.leads_to(wanted):
            return before.behind_guess(wanted)
        known, bits = self._parsers.known(*key), np.empty(0, np.uint32)
        if known is not None:
            return _MaskRow(wanted, known.compiled, known.parser, bits, known.time)
        return _MaskRow(wanted, self._parsers.compiled(wanted.grammar), None, bits, ProcessorTime())

    def _made(self) -> TokenMasks:
        """Return the masks of the rows, as far as they are made in time."""
        began_ns = world.monotonic_ns()
        answers = {row.index: row.after(self._later).answer for row in self._rows}
        for row in self._rows:
            if row.parser is None and not row.wanted.may_skip:
                wait([row.compiled])
            self._submit(row, answers[row.index])
        self._wait()
        for row in self._rows:
            self._collect(row, answers[row.index])
        self._allowed.waited_ns += world.monotonic_ns() - began_ns
        return self._allowed

    def _submit(self, row: _MaskRow, answer: bytes) -> None:
        """Begin to write a row's mask, unless begun, or unless the grammar is not compiled yet."""
        if row.work is not None or (row.parser is None and not row.compiled.done()):
            return
        row.fresh = row.parser is None
        if row.fresh and (error := row.compiled.exception()) is not None:
            row.work = Future()
            row.work.set_exception(error)
            return
        if not row.bits.size:
            row.bits = np.zeros(-(-self._parsers.tokenizer.vocab_size // WORD_BITS), np.uint32)
        row.work = (self._quick if row.time.quick else self._slow).submit(self._write, row, answer)

    def _write(self, row: _MaskRow, answer: bytes) -> None:
        with self._aside():
            row.write(answer)

    def _wait(self) -> None:
        """Wait for masks: without a limit for those that a sequence cannot go without, else for a while."""
        begun = [row for row in self._rows if row.work is not None]
        wait([row.work for row in begun if row.work is not None and not row.wanted.may_skip])
        quick = [(row, row.work) for row in begun if row.work is not None and row.time.quick]
        wait([work for _, work in quick], timeout=MASK_WAIT_S)
        for row, work in quick:
            if not work.done():
                row.time.is_late()
        if self._alone and not any(row.work is not None and row.work.done() for row in self._rows):
            waiting: list[Future[Any]] = [row.work or row.compiled for row in self._rows]
            wait(waiting, timeout=ALONE_WAIT_S, return_when=FIRST_COMPLETED)

    def _collect(self, row: _MaskRow, answer: bytes) -> None:
        """Take a row's mask.

        Other answers may have used up a library limit: only a failure of a freshly compiled grammar counts.
        """
        allowed, index = self._allowed, row.index
        while row.work is not None and row.work.done():
            if (error := row.work.exception()) is not None:  # of the library, or the checkpoint has no tokenizer
                allowed.failed[index] = _failure_reason(row.wanted.grammar, repr(error))
                return
            assert row.parser is not None
            if row.time.is_over(len(answer) // TOKEN_BYTES):
                allowed.failed[index] = _failure_reason(row.wanted.grammar, _too_slow(row.time, answer))
                return
            if not row.parser.is_error():
                allowed.masks.setdefault(index, row.bits.data.cast("B"))
                return
            if row.fresh:
                allowed.failed[index] = _failure_reason(row.wanted.grammar, row.parser.get_error())
                return
            self._parsers.forget(row.wanted.grammar, row.compiled)
            row.parser, row.work, row.compiled = None, None, self._parsers.compiled(row.wanted.grammar)
            if not row.wanted.may_skip:
                wait([row.compiled])
                self._submit(row, answer)
                if row.work is not None:
                    wait([row.work])
        allowed.late.add(index)


def _work_behind_others() -> None:
    """Let this thread's work wait for others' on busy cores, where threads have own priorities (Linux)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(SLOW_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


@dataclass(slots=True)
class TokenMasks:
    """Which tokens may follow in a step, by index of the sequence.

    Attributes:
        masks: bit i (from the lowest bit of the first byte on) says whether token i may follow. In all steps of a run
            these are the same objects with changing bits: read them before the next step's masks are made.
        failed: why there is no mask: a grammar is too complex at this place, or an answer does not fit the grammar.
        late: sequences whose mask takes longer than the step waits. They go without a token.
        waited_ns: for grammars and masks, in this step.
    """

    masks: dict[int, memoryview] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """A mask of a step."""

    index: int
    """Of the sequence in the step."""
    grammar: Grammar
    answer: bytes
    """The tokens so far, little-endian int32."""
    may_skip: bool = False
    """Whether the sequence may go without a token, for a mask that takes long."""

    @classmethod
    def of(cls, step: Step) -> list[MaskRequest]:
        """Those of a step's sequences that sample with a format."""
        return [
            cls(index, grammar, sequence.sample.answer, sequence.may_skip)
            for index, sequence in enumerate(step.sequences)
            if sequence.sample is not None and (grammar := Grammar.of(sequence.sample.params)) is not None
        ]


class PendingMasks:
    """Makes the masks of a step, once. A run continues only from a step whose masks were made.

    Args:
        make: makes them.
        grammars: grammars that may have to be waited for.
    """

    def __init__(self, make: Callable[[], TokenMasks], grammars: Sequence[Future[LLMatcher]] = ()) -> None:
        self._make, self._grammars = make, grammars
        self._made: TokenMasks | None = None

    @property
    def waits(self) -> bool:
        """Whether a grammar has to be waited for."""
        return not all(grammar.done() for grammar in self._grammars)

    def early(self) -> None:
        """Make them, unless a grammar has to be waited for."""
        if not self.waits:
            self.now()

    def in_time(self) -> bool:
        """Make them, unless a grammar has to be waited for; return whether no sequence goes without."""
        self.early()
        return self._made is not None and not self._made.late

    def now(self) -> TokenMasks:
        """Return the masks."""
        if self._made is None:
            self._made = self._make()
        return self._made


@dataclass(slots=True, eq=False)
class _MaskRow:
    """A sequence in the step or run under way, and the parser behind the answer.

    Attributes:
        wanted: the mask that was asked for when the run began.
        compiled: the sequence's grammar.
        parser: behind the answer so far; None: to be begun.
        bits: the sequence's mask.
        work: writes the mask, on another thread; None: not begun.
        fresh: the parser was begun anew for this mask.
    """

    wanted: MaskRequest
    compiled: Future[LLMatcher]
    parser: LLMatcher | None
    bits: np.ndarray[tuple[int], np.dtype[np.uint32]]
    time: ProcessorTime
    work: Future[None] | None = None
    fresh: bool = False

    @property
    def index(self) -> int:
        """Of the sequence in the step."""
        return self.wanted.index

    def after(self, later: Sequence[Sequence[int]]) -> MaskRequest:
        """Return the mask that is wanted after these steps' tokens."""
        tokens = array("i", [tokens_of_step[self.index] for tokens_of_step in later])
        return replace(self.wanted, answer=self.wanted.answer + tokens.tobytes())

    def leads_to(self, wanted: MaskRequest) -> bool:
        """Tell whether another mask is that of this row's answer with one token more."""
        same = wanted.grammar == self.wanted.grammar
        return same and len(wanted.answer) >= TOKEN_BYTES and wanted.answer[:-TOKEN_BYTES] == self.wanted.answer

    def behind_guess(self, wanted: MaskRequest) -> _MaskRow:
        """Return the row of that mask: a guess that does not fit leaves nothing to choose, and no mask."""
        assert self.parser is not None
        token = int.from_bytes(wanted.answer[-TOKEN_BYTES:], "little")
        parser, work = self.parser.deep_copy(), None
        if not parser.consume_token(token):
            work = Future[None]()
            work.set_exception(ValueError("a guess does not fit"))
        return _MaskRow(wanted, self.compiled, parser, np.empty(0, np.uint32), self.time, work)

    def write(self, answer: bytes) -> None:
        """Write the mask; on another thread. The library lets others run meanwhile."""
        began_ns = time.thread_time_ns()
        try:
            if self.parser is None:
                self.parser = begun(self.compiled.result(), answer)
            self.parser.unsafe_compute_mask_ptr(self.bits.ctypes.data, self.bits.nbytes)
        finally:
            self.time.add(time.thread_time_ns() - began_ns)


def _too_slow(spent: ProcessorTime, answer: bytes) -> str:
    tokens = len(answer) // TOKEN_BYTES
    return f"it took {spent.spent_ns / 1e9:.1f} s of processor time for {tokens} tokens, which is too much"


def _failure_reason(grammar: Grammar, error: str) -> str:
    return f"the {grammar.format} cannot be followed: {error}"[:_MAX_REASON]
