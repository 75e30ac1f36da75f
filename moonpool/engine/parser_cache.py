"""Compiled grammars, and parsers that are kept behind answers to save time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import cached_property
from typing import NamedTuple, TypeVar

from llguidance import LLMatcher, LLTokenizer

from moonpool.base import world
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.grammar import LIMITS, SLICES, Grammar
from moonpool.base.kv.keys import tokens_from_bytes
from moonpool.base.malloc import release_memory
from moonpool.engine.processor_time import ProcessorTime

MAX_GRAMMARS = 64
MAX_PARSERS = 512
TOKEN_BYTES = 4
K = TypeVar("K")
V = TypeVar("V")


class ParserCache:
    """Grammars that are compiled, and parsers behind answers. Used by one thread; another one compiles.

    Args:
        load: gives the tokenizer; called on another thread.
        vocab_size: tokens of the model.
        end_token_ids: the model's.
        aside: that thread works within such a context.
        full: whether the process holds as much as allowed.
    """

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        aside: Callable[[], AbstractContextManager[None]],
        full: Callable[[], bool],
    ) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._ends = end_token_ids
        self._aside = aside
        self._full = full
        self._thread = world.thread_pool(1, "grammars")
        self._grammars: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._parsers: OrderedDict[tuple[Grammar, bytes], KeptParser] = OrderedDict()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Ask for this on the thread, or once there is a parser. Making it takes seconds; no other thread runs."""
        tokenizer = self._load()
        size = max(self._vocab_size, tokenizer.vocab_size)
        return LLTokenizer(tokenizer.definition(), n_vocab=size, eos_token=list(self._ends) or None, slices=SLICES)

    def known(self, grammar: Grammar, answer: bytes) -> KeptParser | None:
        """Take the parser kept behind an answer, or before the answer's last token.

        Args:
            grammar: that the answer follows.
            answer: tokens, little-endian int32.
        """
        found = self._parsers.pop((grammar, answer), None)
        if found is None and answer:
            found = self._parsers.pop((grammar, answer[:-TOKEN_BYTES]), None)
            if found is not None:
                found.parser.consume_token(int.from_bytes(answer[-TOKEN_BYTES:], "little"))
        return found

    def compiled(self, grammar: Grammar) -> Future[LLMatcher]:
        """The parser before the first token, as soon as the thread has made the parser.

        A grammar that failed is tried anew.
        """
        found = self._grammars.pop(grammar, None)
        if found is None or (found.done() and found.exception() is not None):
            self.make_room()
            found = self._thread.submit(self._compile, grammar)
        _keep_newest(self._grammars, grammar, found, MAX_GRAMMARS)
        return found

    def forget(self, grammar: Grammar, compiled: Future[LLMatcher]) -> None:
        """Drop a compiled grammar after a parser failed, and all its parsers, which share the failed state."""
        if self._grammars.get(grammar) is compiled:
            del self._grammars[grammar]
        for key in [key for key, kept in self._parsers.items() if kept.compiled is compiled]:
            del self._parsers[key]

    def keep(self, grammar: Grammar, answer: bytes, kept: KeptParser) -> None:
        """Keep a parser for sequences that continue the answer."""
        _keep_newest(self._parsers, (grammar, answer), kept, MAX_PARSERS)

    def make_room(self) -> bool:
        """Drop all if the process is near the memory limit; what is needed is made again.

        Return whether anything was dropped.
        """
        if not self._full():
            return False
        self._parsers.clear()
        self._grammars.clear()
        release_memory()
        return True

    def warm(self) -> None:
        """Make the tokenizer. If that fails, each grammar tries anew, and fails by itself."""
        wait([self._thread.submit(lambda: self.tokenizer)])

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """On the thread; also makes what the grammar's copies share and their first mask needs."""
        with self._aside():
            parser = LLMatcher(self.tokenizer, grammar.compiled(), log_level=0, limits=LIMITS)
            parser.deep_copy().compute_bitmask()
            return parser


class KeptParser(NamedTuple):
    """A parser behind an answer.

    Attributes:
        compiled: the parser's grammar.
        time: what the answer's masks took.
    """

    parser: LLMatcher
    compiled: Future[LLMatcher]
    time: ProcessorTime


def begun(compiled: LLMatcher, answer: bytes) -> LLMatcher:
    """A copy of a compiled grammar's parser that has read an answer."""
    parser = compiled.deep_copy()
    if answer:
        parser.consume_tokens(tokens_from_bytes(answer).tolist())
    return parser


def _keep_newest(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """As the newest of at most `most`."""
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)
