"""An asyncio event loop whose time is virtual: when nobody has anything to do, the time of the next timer has come."""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any


class _Selector(selectors.SelectSelector):
    """Does not wait: what would have been waited is added to the time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.settling: deque[asyncio.Future[None]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if self.settling and timeout != 0 and not found:
            self.settling.popleft().set_result(None)
        elif not found:
            assert timeout is not None, "everybody waits for ever"
            self.now += max(0.0, timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for one thread without real I/O.

    Attributes:
        jobs: when each of the next jobs for threads is over, in their order. They are done at once.
    """

    def __init__(self) -> None:
        self._virtual = _Selector()
        self.jobs: deque[float] = deque()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def settled(self) -> "asyncio.Future[None]":
        """Done as soon as nobody has anything left to do at this time."""
        done = self.create_future()
        self._virtual.settling.append(done)
        return done

    def run_in_executor(  # type: ignore[override]  # of any function, without the type variables
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        done = self.create_future()
        self.call_at(self.jobs.popleft(), done.set_result, func(*args))
        return done


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)
