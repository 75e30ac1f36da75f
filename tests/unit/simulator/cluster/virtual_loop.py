"""An asyncio event loop whose time is virtual: when nobody has anything to do, the time of the next timer has come.

Time is counted as the simulator counts it, in whole picoseconds: a core is told the same time by both, to the last bit.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from simulator.clock import PS, not_before, ps


class _Selector(selectors.SelectSelector):
    """Does not wait: what would have been waited is added to the time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.settling: deque[asyncio.Future[None]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if self.settling and timeout != 0 and not found:
            self.settling.popleft().set_result(None)
        elif not found:
            assert timeout is not None, "everybody waits for ever"
            self.now += ps(timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for one thread without real I/O.

    Attributes:
        jobs: each of the next jobs for threads is over with one of these, in their order. They are done at once.
    """

    def __init__(self) -> None:
        self._virtual = _Selector()
        self.jobs: deque[asyncio.Future[Any]] = deque()
        super().__init__(self._virtual)
        self._clock_resolution = 0.5 / PS  # so much too early asyncio fires timers

    @property
    def now(self) -> int:
        """Picoseconds since the loop was made."""
        return self._virtual.now

    def time(self) -> float:
        return self.now / PS

    def call_at(self, when: float, *args: Any, **context: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        return super().call_at(not_before(when) / PS, *args, **context)

    async def until(self, when: int) -> None:
        """Waits until a time in picoseconds. A sum of seconds would be off by its rounding."""
        if when > self.now:
            come = self.create_future()
            self.call_at(when / PS, come.set_result, None)
            await come

    def settled(self) -> "asyncio.Future[None]":
        """Done as soon as nobody has anything left to do at this time."""
        done = self.create_future()
        self._virtual.settling.append(done)
        return done

    def run_in_executor(  # type: ignore[override]  # of any function, without the type variables
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        done, result = self.create_future(), func(*args)
        self.jobs.popleft().add_done_callback(lambda _: done.set_result(result))
        return done


def virtual_loop() -> VirtualLoop:
    """The loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)
