"""How long answers become: by the last answers that have ended."""

from bisect import bisect_left, bisect_right, insort
from collections import deque

LENGTH_WINDOW = 512
"""Answers with remembered lengths."""
FEW_LENGTHS = 16
"""With fewer answers than this, the assumed length is used."""
RESERVED_PERCENTILE = 75
"""Percentage of answers expected to be no longer than forecast, for reserving blocks."""
MEDIAN_PERCENTILE = 50
"""The same, for forecasting how many answers are still running."""


class OutputLengths:
    """Running quantile over the last answers' lengths, in tokens.

    Args:
        assumed: expected length until enough answers have ended.
    """

    def __init__(self, assumed: int) -> None:
        self._assumed = assumed
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, tokens: int) -> None:
        """Record the length after an answer ended normally."""
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        if len(self._recent) > LENGTH_WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def expected(self, so_far: int, percent: int = RESERVED_PERCENTILE, *, told: int = 0) -> int:
        """Return length that an answer of `so_far` tokens is expected to reach; more than `so_far`.

        Out of the longer answers, `percent` were no longer than this. If no answer was longer, `so_far` is doubled.
        `told`: length that the client expects, which counts until the answer has it; 0 = not told.
        """
        if told > so_far:
            return told
        if len(self._sorted) < FEW_LENGTHS:
            return max(self._assumed, 2 * so_far)
        first = bisect_right(self._sorted, so_far)
        longer = len(self._sorted) - first
        return self._sorted[first + longer * percent // 100] if longer else 2 * so_far + 1

    def digest(self) -> bytes:
        """Return a hash input: the recent lengths, from which the sorted lengths follow."""
        return b"".join(tokens.to_bytes(8, "little") for tokens in self._recent)
