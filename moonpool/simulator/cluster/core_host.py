"""Drives a service's core in virtual time, as `moonpool.base.runtime.driver` does on an event loop."""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from moonpool.base.scheduling.state_machine import Core, Tick
from moonpool.simulator.clock import PS, SimulatedWorld, not_before

E = TypeVar("E")
A = TypeVar("A")


class CoreHost(Generic[E, A]):
    """Owns one core: events in, actions done, ticks when they are due.

    Args:
        world: the time.
        core: decides.
        perform: does one action; may post.
        before_tick: called before the core is told the time; may post.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        core: Core[E, A],
        perform: Callable[[A], None],
        before_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = core
        self._world, self._perform, self._before_tick = world, perform, before_tick
        self.heard: Callable[[float, E | Tick, list[A]], None] | None = None
        """Called with (seconds, event, actions) for each event, before the actions are done."""
        self._events: deque[E | Tick] = deque()
        self._draining = False
        self._armed: int | None = None
        self._due = inf  # for which that is
        self.closed = False

    def post(self, event: E | Tick) -> None:
        """Hand an event to the core, after events posted before. Ignored after `close`."""
        if self.closed:
            return
        events = self._events
        events.append(event)
        if self._draining:
            return
        self._draining = True
        while events:
            event, now = events.popleft(), self._world.now / PS
            actions: list[A] = []
            self.core.handle(now, event, actions)
            if self.heard is not None:
                self.heard(now, event, actions)
            for action in actions:
                self._perform(action)
        self._draining = False
        self._arm()

    def close(self) -> None:
        """Take no more events."""
        self.closed = True
        self._events.clear()

    def _arm(self) -> None:
        due = None if self.closed else self.core.due()
        if due is None or due >= self._due:
            return
        at = max(self._world.now, not_before(due))
        if self._armed is None or at < self._armed:
            self._armed, self._due = at, due
            self._world.at(at, self._tick, at)

    def _tick(self, at: int) -> None:
        if at != self._armed or self.closed:
            return
        self._armed, self._due = None, inf
        due = self.core.due()
        if due is not None and due <= self._world.seconds:
            self._before_tick()
            self.post(Tick())
        else:
            self._arm()
