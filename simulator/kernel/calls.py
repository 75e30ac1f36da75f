"""Calls between services: each takes a random time, and may be lost or late. All by seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.draws import draw_unit
from simulator.kernel.clock import World, ps

NOTICED_S = 1.0
"""Until both ends of a connection notice that a message on it was lost."""


@dataclass(frozen=True, slots=True)
class CallDelays:
    """How long a message takes.

    Attributes:
        least_s: seconds that each takes.
        more_s: mean of what comes on top; exponential.
        prompt_s: seconds until the conductor plans a request that has come: tokenising and hashing.
        run_s: mean of the seconds that a run of decode's steps takes to the engine and back; exponential.
        drop_share: messages that are lost.
        late_share: messages that take `late_s` longer.
    """

    least_s: float = 0.0003
    more_s: float = 0.0002
    prompt_s: float = 0.0
    run_s: float = 0.0
    drop_share: float = 0.0
    late_share: float = 0.0
    late_s: float = 5.0


def exponential(mean_s: float, seed: int, *counters: int) -> float:
    """Seconds by chance, of this mean."""
    return -mean_s * math.log(1.0 - draw_unit(seed, *counters)) if mean_s else 0.0


class Calls:
    """Sends messages; the fate of the n-th depends on the seed and n alone.

    Attributes:
        world: the time.
        sent, dropped, late: messages so far.
    """

    def __init__(self, world: World, delays: CallDelays, seed: int) -> None:
        self.world = world
        self._delays = delays
        self._seed = seed
        self._faulty = delays.drop_share > 0.0 or delays.late_share > 0.0
        self.sent = self.dropped = self.late = 0

    def send(self, deliver: Callable[[], None], *, reliable: bool = False) -> None:
        """Calls `deliver` after the message's delay, unless it is lost. A reliable one is never lost."""
        arrives = self.arrival(reliable=reliable)
        if arrives is not None:
            self.world.at(arrives, _deliver, deliver)

    def arrival(self, *, reliable: bool = False) -> int | None:
        """When a message that is sent now arrives, picoseconds; None when it is lost."""
        self.sent += 1
        delays = self._delays
        delay = delays.least_s + exponential(delays.more_s, self._seed, self.sent, 2)
        if self._faulty:
            fate = draw_unit(self._seed, self.sent, 1)
            if fate < delays.drop_share and not reliable:
                self.dropped += 1
                return None
            if delays.drop_share <= fate < delays.drop_share + delays.late_share:
                self.late += 1
                delay += delays.late_s
        return self.world.now + ps(delay)


class Wire:
    """A connection: messages arrive in the order of their sending, in each direction.

    Where one is lost the connection breaks: nothing that is sent after it arrives, and after a while both ends notice.

    Args:
        calls: carries the messages.
        broken: called when both ends notice; not after `close`.
    """

    __slots__ = ("_broken", "_calls", "_latest", "_lost", "closed")

    def __init__(self, calls: Calls, broken: Callable[[], None]) -> None:
        self._calls, self._broken = calls, broken
        self._latest = [0, 0]
        self._lost = False
        self.closed = False

    def send(self, deliver: Callable[[], None], *, back: bool = False, reliable: bool = False) -> None:
        """Calls `deliver` when the message arrives at the other end, or with `back` at this one."""
        if self._lost or self.closed:
            return
        arrives, world = self._calls.arrival(reliable=reliable), self._calls.world
        if arrives is None:
            self._lost = True
            world.after(ps(NOTICED_S), self._break)
            return
        self._latest[back] = max(arrives, self._latest[back])
        world.at(self._latest[back], self._arrive, deliver)

    def close(self) -> None:
        """Nothing arrives any more."""
        self.closed = True

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if not self.closed:
            deliver()

    def _break(self, _: None) -> None:
        if not self.closed:
            self.closed = True
            self._broken()


def _deliver(deliver: Callable[[], None]) -> None:
    deliver()
