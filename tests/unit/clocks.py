"""Clocks for what looks at one."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from moonpool.base import world


def hurried() -> Callable[[], float]:
    """A clock of which every look is a second later."""
    seconds = count(1)
    return lambda: float(next(seconds))


class StandingClock:
    """Stands until a test puts it forward, however slow the machine is: what the running task begins looks at it.

    Attributes:
        now_s: what it shows, seconds.
    """

    def __init__(self) -> None:
        self.now_s = world.monotonic()
        here = world.CURRENT.get()
        world.CURRENT.set(replace(here, clock=replace(here.clock, monotonic=lambda: self.now_s)))
