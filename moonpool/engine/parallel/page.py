"""A page of shared memory by which the ranks of a stage wait for each other. Torch-free.

Each word has one writer. A writer lets the kernel's scheduler run before a word changes, a reader after the word has
changed: `schedule()` is a full memory barrier, so that what was written before the word is seen behind the word.
"""

import mmap
import os
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import Unavailable

_LINE: Final = 16
"""Words from one rank's to the next one's: two cache lines."""
TOLD_WORDS: Final = 8192
"""Words that the first rank tells at a time, at most."""
SLOT_FLOATS: Final = 1 << 20
"""Numbers that a rank gives at a time, at most."""
_SPINS: Final = 200
_PAUSE_S: Final = 50e-6
_TELLINGS: Final = 2


def page_bytes(ranks: int) -> int:
    """Bytes of a page of so many ranks; memory is taken when a part is first used."""
    return 8 * (_LINE * (3 * ranks + 1) + _TELLINGS * TOLD_WORDS) + 4 * 2 * ranks * SLOT_FLOATS


class RankPage:
    """One rank's view of the page.

    Attributes:
        slots: what ranks give each other, float32 [2, ranks, SLOT_FLOATS]; meetings take turns with the first index.
        turn: meetings so far.
        timeout_s: as given.

    Args:
        fd: descriptor of `page_bytes` of shared memory, zeros at first; stays the caller's.
        rank: this rank.
        ranks: number of ranks.
        timeout_s: longest wait for another rank.
    """

    def __init__(self, fd: int, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = rank, ranks, timeout_s
        memory = mmap.mmap(fd, page_bytes(ranks), flags=mmap.MAP_SHARED)
        words = np.frombuffer(memory, np.int64, _LINE * (3 * ranks + 1) + _TELLINGS * TOLD_WORDS)
        self._came = [words[_LINE * other : _LINE * other + 1] for other in range(ranks)]
        self._heard = [words[_LINE * (ranks + other) :][:1] for other in range(ranks)]
        self._stored = [words[_LINE * (2 * ranks + other) :][:1] for other in range(ranks)]
        self._said = words[_LINE * 3 * ranks :][:1]
        self._told = words[_LINE * (3 * ranks + 1) :].reshape(_TELLINGS, TOLD_WORDS)
        self.slots = np.frombuffer(memory, np.float32, 2 * ranks * SLOT_FLOATS, words.nbytes)
        self.slots = self.slots.reshape(2, ranks, SLOT_FLOATS)
        self.turn = self._tellings = 0

    def meet(self) -> None:
        """Wait until all ranks have come here; what they wrote before is seen.

        Raises:
            Unavailable: a rank did not come in time; names the rank.
        """
        self.turn += 1
        os.sched_yield()
        self._came[self.rank][0] = self.turn
        for other in range(self.ranks):
            self._wait(self._came[other], self.turn, other)
        os.sched_yield()

    def stored(self) -> None:
        """Say that this rank has stored a batch of KV; the first rank waits until all have. A thread of its own calls.

        Raises:
            Unavailable: a rank did not store in time; names the rank.
        """
        stored = int(self._stored[self.rank][0]) + 1
        os.sched_yield()
        self._stored[self.rank][0] = stored
        for other in range(1, 1 if self.rank else self.ranks):
            self._wait(self._stored[other], stored, other)
        os.sched_yield()

    def tell(self, words: list[int]) -> None:
        """Tell the other ranks; the first rank's. Does not wait for those that have heard the last but one.

        Raises:
            Unavailable: a rank did not hear in time; names the rank.
        """
        assert self.rank == 0
        assert len(words) < TOLD_WORDS, f"{len(words)} words are too many"
        for other in range(1, self.ranks):
            self._wait(self._heard[other], self._tellings + 1 - _TELLINGS, other)
        place = self._told[self._tellings % _TELLINGS]
        place[1 : 1 + len(words)] = words
        place[0] = len(words)
        self._tellings += 1
        os.sched_yield()
        self._said[0] = self._tellings

    def hear(self) -> list[int]:
        """Return what the first rank tells next; another rank's.

        Raises:
            Unavailable: the first rank said nothing in time.
        """
        self._wait(self._said, self._tellings + 1, 0)
        os.sched_yield()
        place = self._told[self._tellings % _TELLINGS]
        words: list[int] = place[1 : 1 + int(place[0])].tolist()
        self._tellings += 1
        os.sched_yield()
        self._heard[self.rank][0] = self._tellings
        return words

    def _wait(self, word: NDArray[np.int64], value: int, other: int) -> None:
        spins, deadline = 0, 0.0
        while word[0] < value:
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            deadline = deadline or now + self.timeout_s
            if now > deadline:
                raise Unavailable(f"rank {other} of the stage was not heard for {self.timeout_s:g} s")
