"""What an answer's masks took, and whether a step should wait for the next mask."""

from __future__ import annotations

from dataclasses import dataclass

QUICK_NS = 5_000_000
"""Processor time of a mask that a step waits for, nanoseconds."""
SLOW_MASKS = 16
"""After a late mask, this many masks of the sequence are not waited for."""
ALLOWED_NS, ALLOWED_TOKEN_NS = 1_000_000_000, 10_000_000
"""Processor time for one answer's masks: at the beginning, and more for each token."""


@dataclass(slots=True)
class ProcessorTime:
    """Time that one answer's masks took.

    Attributes:
        spent_ns: total over all masks, nanoseconds.
    """

    spent_ns: int = 0
    _slow_left: int = 0

    @property
    def quick(self) -> bool:
        """Whether the next mask is likely to be quick."""
        return not self._slow_left

    def add(self, took_ns: int) -> None:
        """Count a mask."""
        self.spent_ns += took_ns
        if took_ns > QUICK_NS:
            self.is_late()
        else:
            self._slow_left = max(0, self._slow_left - 1)

    def is_late(self) -> None:
        """A step waited for a mask in vain."""
        self._slow_left = SLOW_MASKS

    def is_over(self, tokens: int) -> bool:
        """Whether an answer with `tokens` tokens has taken more than allowed."""
        return self.spent_ns > ALLOWED_NS + ALLOWED_TOKEN_NS * tokens
