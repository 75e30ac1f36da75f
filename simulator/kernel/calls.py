"""Calls between services: each takes a random time, and may be lost or late. All by seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.draws import draw_unit
from simulator.kernel.clock import World, ps


@dataclass(frozen=True, slots=True)
class CallDelays:
    """How long a message takes.

    Attributes:
        least_s: seconds that each takes.
        more_s: mean of what comes on top; exponential.
        prompt_s: seconds that the message with a prompt takes longer: tokenising, hashing, planning, a promise of room.
        drop_share: messages that are lost.
        late_share: messages that take `late_s` longer.
    """

    least_s: float = 0.0003
    more_s: float = 0.0002
    prompt_s: float = 0.0
    drop_share: float = 0.0
    late_share: float = 0.0
    late_s: float = 5.0


class Calls:
    """Sends messages; the fate of the n-th depends on the seed and n alone.

    Attributes:
        sent, dropped, late: messages so far.
    """

    def __init__(self, world: World, delays: CallDelays, seed: int) -> None:
        self._world = world
        self._delays = delays
        self._seed = seed
        self.sent = self.dropped = self.late = 0

    def send(self, deliver: Callable[[], None], *, reliable: bool = False, longer_s: float = 0.0) -> None:
        """Calls `deliver` after the message's delay, unless it is lost. A reliable one is never lost."""
        self.sent += 1
        delays, fate = self._delays, draw_unit(self._seed, self.sent, 1)
        if fate < delays.drop_share and not reliable:
            self.dropped += 1
            return
        delay = longer_s + delays.least_s - delays.more_s * math.log(1.0 - draw_unit(self._seed, self.sent, 2))
        if delays.drop_share <= fate < delays.drop_share + delays.late_share:
            self.late += 1
            delay += delays.late_s
        self._world.after(ps(delay), _deliver, deliver)


def _deliver(deliver: Callable[[], None]) -> None:
    deliver()
