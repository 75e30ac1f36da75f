"""Parsers behind answers of a given format, and the grammars that they come from.

A parser is a function of the grammar and the answer so far. It is kept only to save time: one that is missing is made
anew from the answer, so nothing is lost with a preempted or moved sequence, nor when all are given up because the
process holds too much.

The library learns as it goes: what it has found out about texts is shared by all parsers that come from one compiled
grammar, so later answers take it less time. But the states that it may know (`LIMITS`) are counted for all of them
together, too: when other answers have used them up, a grammar is compiled anew (`Parsers.anew`).

What takes long is done on a thread of its own, and native kernels leave that thread a core: compiling a grammar, and
reading the tokenizer, which takes up to a second and 150 MB with 152k tokens and is done for the first request with a
format.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from moonpool.checkpoint import Tokenizer
from moonpool.engine.footprint import give_back
from moonpool.grammar import LIMITS, Grammar
from moonpool.kv.keys import tokens_from_bytes

MAX_GRAMMARS = 64
MAX_PARSERS = 512
TOKEN_BYTES = 4
SLICES = [*LLTokenizer.general_slices(), *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (2, 3, 4, 6, 20))]
"""Tokens that match one of these expressions are allowed together where a format allows the expression; only the others
are looked at one by one. The library's own, and shorter texts: for those whose longest length is near."""

K = TypeVar("K")
V = TypeVar("V")


class Parsers:
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
        self._thread = ThreadPoolExecutor(1, "grammars")
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
        """Keeps a parser for those who go on with its answer."""
        _keep(self._parsers, (grammar, answer), parser, MAX_PARSERS)

    def make_room(self) -> bool:
        """Gives all up where the process holds too much: what is needed is made anew. Returns whether it did."""
        if not self._full():
            return False
        self._parsers.clear()
        self._grammars.clear()
        give_back()
        return True

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _begun(self, grammar: Grammar, answer: bytes) -> LLMatcher:
        """A copy of the compiled one that has read an answer."""
        parser = self._awaited(grammar).deep_copy()
        if answer:
            parser.consume_tokens(tokens_from_bytes(answer).tolist())
        return parser

    def _awaited(self, grammar: Grammar) -> LLMatcher:
        compiled, began_ns = self._compiled(grammar), time.monotonic_ns()
        try:
            return compiled.result()
        except Exception:
            del self._grammars[grammar]  # tried again for who asks next
            raise
        finally:
            self.waited_ns += time.monotonic_ns() - began_ns

    def _compiled(self, grammar: Grammar) -> Future[LLMatcher]:
        """The parser before the first token, as soon as the thread has made it."""
        found = self._grammars.pop(grammar, None)
        if found is None:
            self.make_room()
            found = self._thread.submit(self._compile, grammar)
        _keep(self._grammars, grammar, found, MAX_GRAMMARS)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """On the thread; also makes what its copies share and their first mask needs."""
        with self._aside():
            parser = LLMatcher(self.tokenizer, grammar.compiled(), log_level=0, limits=LIMITS)
            parser.deep_copy().compute_bitmask()
            return parser


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """As the newest of at most `most`."""
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)
