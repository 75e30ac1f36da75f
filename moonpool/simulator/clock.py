"""Virtual time: a heap with events ordered by time, and by creation if times are equal.

Times are whole picoseconds, so that sums over many steps are exact: k steps at once end when k single steps do.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

PS = 10**12
"""Picoseconds in a second."""
Target = Callable[[Any], None]
"""Takes an event at the event's time."""


def ps(seconds: float) -> int:
    """Seconds as picoseconds, rounded."""
    return round(seconds * PS)


def not_before(seconds: float) -> int:
    """The first picosecond that is not before a time in seconds, as `SimulatedWorld.seconds` tells times."""
    at = ps(seconds)
    return at if at / PS >= seconds else at + 1


class SimulatedWorld:
    """The time and what is going to happen.

    Attributes:
        now: picoseconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, bool, int, Target, Any]] = []
        self._made = 0

    def __len__(self) -> int:
        """Events to come."""
        return len(self._heap)

    @property
    def events(self) -> int:
        """Events that have happened."""
        return self._made - len(self._heap)

    @property
    def seconds(self) -> float:
        """The time in seconds; never goes back."""
        return self.now / PS

    def at(self, when: int, target: Target, event: Any = None, *, first: bool = False) -> None:
        """Hand `event` to `target` at a time that is not over; `first`: before what else happens at that time."""
        assert when >= self.now, "an event lies in the past"
        self._made += 1
        heappush(self._heap, (when, not first, self._made, target, event))

    def after(self, delay: int, target: Target, event: Any = None) -> None:
        """Hand `event` to `target` after a number of picoseconds."""
        assert delay >= 0, "an event lies in the past"
        self._made += 1
        heappush(self._heap, (self.now + delay, True, self._made, target, event))

    def run(self, until: int | None = None) -> None:
        """Let events happen until there are none, or none before or at `until`."""
        heap, last = self._heap, inf if until is None else until
        while heap and heap[0][0] <= last:
            self.now, _, _, target, event = heappop(heap)
            target(event)
        if until is not None:
            self.now = max(self.now, until)
