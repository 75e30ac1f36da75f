"""Recent answers of a tenant, found by their last tokens: agents repeat each other, and so do samples of one prompt.

Suffix decoding with a bounded index instead of a tree. A table says, by the hash of the last tokens, where they last
were in an answer. Whatever the table says is compared before use, so a hash that two runs of tokens share costs a
guess and no answer.

Answers of different roots of chains never meet. A root is that of a namespace, tenant, salt and LoRA adapter.
"""

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from zlib import crc32

import numpy as np

from moonpool.base.kv.delete_kv import KVSelection, ttl_of
from moonpool.base.kv.keys import BlockKey

MOST_MATCHED = 32
"""Agreeing tokens that are counted, at most."""
GRAMS = (3, 6, 12)
"""Numbers of last tokens that an answer is found by."""
LAG = 8
"""A place is found once so many tokens are behind. Samples of one prompt in step do not hide older answers so."""
READ_AT_ONCE = 1024
"""Places of an answer that are read in one go, at most: the last ones."""
FACTORS = tuple(crc32(bytes([number])) | 1 for number in range(GRAMS[-1]))
LOW_BITS = 0xFFFFFFFF
PLACE_BITS = 32

Rows = tuple[int, ...]
"""Rows of the table, by the number of tokens as in `GRAMS`."""


@dataclass(slots=True, eq=False)
class RecentAnswer:
    """One answer, running or ended.

    Attributes:
        root: root of the answer's chain.
        tenant: whose answer.
        tokens: prompt and answer; once ended, the answer and the last tokens of the prompt.
        first: place of the answer's first token.
        began: when the answer was added, seconds.
        dropped: tokens of the prompt that are not kept.
        ended: no more tokens come.
    """

    root: BlockKey
    tenant: str
    tokens: "array[int]"
    first: int
    began: float
    dropped: int = 0
    ended: bool = False
    read: int = 0
    """Places that were read."""
    number: int = 0
    pending: deque[tuple[int, Rows]] = field(default_factory=deque)
    """The last places, which are not found yet, and their rows."""


class RecentAnswers:
    """Finds what followed an answer's last tokens in other answers with the same root.

    Args:
        most_tokens: of all ended answers together; the oldest are dropped first. A running answer's tokens are the
            answer's own.
        clock: seconds.
    """

    def __init__(self, most_tokens: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most_tokens, clock
        self._bits = (len(GRAMS) * most_tokens - 1).bit_length()
        self._places = np.zeros(1 << self._bits, np.int64).data
        """By hash: the answer's number, and the place behind the tokens; 0 = none."""
        self._answers: dict[int, RecentAnswer] = {}
        self._ended: deque[int] = deque()
        """Ended answers' numbers, oldest first; some may have been deleted."""
        self._numbers = itertools.count(1)
        self.tokens = 0
        """Tokens of ended answers."""

    def __len__(self) -> int:
        """Answers, running and ended."""
        return len(self._answers)

    def add(self, root: BlockKey, tenant: str, tokens: "array[int]", first: int) -> RecentAnswer:
        """Add a running answer.

        Args:
            root: of the answer's chain.
            tenant: whose answer.
            tokens: prompt and answer; the owner appends to them.
            first: place of the answer's first token.
        """
        answer = RecentAnswer(root, tenant, tokens, first, self._clock(), number=next(self._numbers))
        answer.read = max(first, GRAMS[-1]) - 1
        self._answers[answer.number] = answer
        return answer

    def read(self, answer: RecentAnswer, place: int) -> Rows:
        """Read an answer's tokens up to `place`, the place behind the last token; return that place's rows."""
        rows: Rows = ()
        for at in range(max(answer.read + 1, place + 1 - READ_AT_ONCE), place + 1):
            rows = self._rows(answer, at)
            answer.pending.append((at, rows))
            if len(answer.pending) > LAG:
                self._write(answer, *answer.pending.popleft())
        answer.read = max(answer.read, place)
        return rows

    def find(self, answer: RecentAnswer, rows: Rows, place: int, matched: int) -> "tuple[array[int], int, int] | None":
        """Find where an answer's last tokens were before, with more agreeing tokens than `matched`.

        Returns:
            Tokens, the place behind the agreeing ones, and how many agree; None if nothing longer is found.
        """
        for gram, row in zip(reversed(GRAMS), reversed(rows), strict=False):
            if gram <= matched:
                break
            number, there = divmod(self._places[row], 1 << PLACE_BITS)
            other = self._answers.get(number)
            if other is None or other.root != answer.root:
                continue
            there -= other.dropped
            agree = agreeing(other.tokens, there, answer.tokens, place)
            if agree >= gram and (other is not answer or there < place):
                return other.tokens, there, agree
        return None

    def end(self, answer: RecentAnswer) -> None:
        """Keep an answer that has ended, without the prompt. Idempotent."""
        if answer.ended or self._answers.get(answer.number) is not answer:
            answer.ended = True
            return
        answer.ended = True
        self.read(answer, len(answer.tokens) - 1)  # nothing is behind the last place
        for at, rows in answer.pending:
            if at < len(answer.tokens):
                self._write(answer, at, rows)
        answer.pending.clear()
        answer.dropped = max(answer.first - MOST_MATCHED, 0)
        answer.tokens = answer.tokens[answer.dropped :]
        self.tokens += len(answer.tokens)
        self._ended.append(answer.number)
        while self.tokens > self._most:
            self._drop(self._ended.popleft())

    def delete(self, selection: KVSelection, *, everything: bool, ttl_s: Mapping[str, float]) -> None:
        """Drop the answers of which KV may be deleted: the named tenants'; those beyond their age; all, with keys.

        A running answer that is dropped gives nothing later, either.
        """
        every, now = everything or bool(selection.keys), self._clock()
        for number, answer in list(self._answers.items()):
            if every or answer.tenant in selection.tenants or now - answer.began > ttl_of(ttl_s, answer.tenant):
                self._drop(number)

    def _drop(self, number: int) -> None:
        answer = self._answers.pop(number, None)
        if answer is not None and answer.ended:
            self.tokens -= len(answer.tokens)

    def _write(self, answer: RecentAnswer, place: int, rows: Rows) -> None:
        """From now on `place` is found."""
        if answer.number in self._answers:
            for row in rows:
                self._places[row] = answer.number << PLACE_BITS | place

    def _rows(self, answer: RecentAnswer, place: int) -> Rows:
        last = answer.tokens[place - GRAMS[-1] : place][::-1]
        found, mixed, begin = [], crc32(answer.root), 0
        for gram in GRAMS:
            mixed += sum(map(mul, last[begin:gram], FACTORS[begin:gram])) + gram
            found.append((mixed & LOW_BITS) >> (32 - self._bits))
            begin = gram
        return tuple(found)


def agreeing(earlier: Sequence[int], there: int, tokens: Sequence[int], here: int) -> int:
    """Return how many tokens before place `there` of `earlier` agree with those before `here`, one after the other."""
    most = min(there, here, MOST_MATCHED)
    return next((n for n in range(most) if earlier[there - 1 - n] != tokens[here - 1 - n]), most)
