"""How long answers become, from those that have ended."""

from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 512
"""Answers that are remembered."""
FEW = 16
"""With fewer than so many, what was assumed at the start is believed."""
PERCENT = 75
"""Share of answers that are to be no longer than expected, where room is kept for them."""
TYPICAL = 50
"""The same, where it is to be known how many there will be."""


class AnswerLengths:
    """A running quantile over the last answers, in tokens.

    Args:
        assumed: length that is expected as long as few answers have ended.
    """

    def __init__(self, assumed: int) -> None:
        self._assumed = assumed
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, tokens: int) -> None:
        """An answer has ended by itself."""
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def expected(self, so_far: int, percent: int = PERCENT) -> int:
        """Length that an answer of `so_far` tokens is expected to reach; more than `so_far`.

        `percent` of the answers that were so long have been no longer.

        Where no answer was as long, as much again.
        """
        if len(self._sorted) < FEW:
            return max(self._assumed, 2 * so_far)
        first = bisect_right(self._sorted, so_far)
        longer = len(self._sorted) - first
        return self._sorted[first + longer * percent // 100] if longer else 2 * so_far + 1

    def digest(self) -> bytes:
        """For the core's digest: the sorted ones follow from the recent ones."""
        return b"".join(tokens.to_bytes(8, "little") for tokens in self._recent)
