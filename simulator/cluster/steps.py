"""Times of decode steps, so many at once as nothing happens between them.

A step's time grows by a fixed amount with each step, as every sequence's context grows by one token. All times are
whole picoseconds, so k steps at once take exactly as long as k steps one by one.
"""

from math import isqrt

from moonpool.cost import Speeds
from moonpool.frozen import frozen
from simulator.kernel.clock import ps


@frozen
class StepTimes:
    """Picoseconds of decode steps, from an instance's speeds."""

    base: int
    per_sequence: int
    per_context_token: int

    @classmethod
    def of(cls, speeds: Speeds) -> "StepTimes":
        """Those of an instance."""
        return cls(ps(speeds.decode_base_s), ps(speeds.decode_per_sequence_s), ps(speeds.decode_per_context_token_s))

    def step(self, sequences: int, context: int) -> int:
        """The time of one step over so many sequences with so many tokens of context in all."""
        return self.base + self.per_sequence * sequences + self.per_context_token * context


@frozen
class Leap:
    """Steps over the same sequences. The first takes `first`, each further one `more` longer than the one before."""

    start: int
    steps: int
    first: int
    more: int

    def time_of(self, steps: int) -> int:
        """When the first `steps` of them are over."""
        return self.start + steps * self.first + self.more * (steps * (steps - 1) // 2)

    @property
    def end(self) -> int:
        """When all are over."""
        return self.time_of(self.steps)

    def over_by(self, now: int) -> int:
        """Steps that are over by a time."""
        elapsed = max(0, now - self.start)
        if self.more:  # the largest k with more k (k - 1) / 2 + first k <= elapsed
            linear = 2 * self.first - self.more
            over = (isqrt(linear * linear + 8 * self.more * elapsed) - linear) // (2 * self.more)
        else:
            over = elapsed // self.first
        return min(over, self.steps)

    def durations(self, begin: int, end: int) -> range | list[int]:
        """The times of steps `begin` to `end` of this leap."""
        if not self.more:
            return [self.first] * (end - begin)
        return range(self.first + begin * self.more, self.first + end * self.more, self.more)
