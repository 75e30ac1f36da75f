"""Deadlines of waits: of one for an event, and of many short ones with one timer.

`Deadlines` does what `asyncio.timeout` does, without a timer for each wait. Most waits are over long before their
deadline. So the timer stays where it is when they end, looks when it goes off, and is set again for the earliest that
is left then.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


async def within(seconds: float, event: asyncio.Event) -> bool:
    """Waits for an event; False when that takes longer than `seconds`, which may be infinite."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


class Deadline:
    """One wait; a context manager that raises TimeoutError for what is cancelled in it because of the deadline."""

    __slots__ = ("_cancelling", "_deadlines", "_expired", "_task", "at")

    def __init__(self, deadlines: Deadlines, at: float) -> None:
        self.at = at
        self._deadlines = deadlines
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "deadlines are for tasks"
        self._task, self._cancelling = task, task.cancelling()
        self._deadlines.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.remove(self)
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from exc

    def expire(self) -> None:
        """It is time: cancels what waits."""
        self._expired = True
        self._task.cancel()


class Deadlines:
    """Those of one event loop's tasks that have something in common."""

    def __init__(self) -> None:
        self._open: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Waits under way."""
        return len(self._open)

    def within(self, seconds: float) -> Deadline:
        """A deadline so many seconds from now, to be entered with `with` by the task that waits."""
        return Deadline(self, asyncio.get_running_loop().time() + seconds)

    def add(self, deadline: Deadline) -> None:
        """For deadlines: one is entered."""
        self._open[deadline] = None
        timer = self._timer
        if timer is None or deadline.at < timer.when():
            self._set(deadline.at)

    def remove(self, deadline: Deadline) -> None:
        """For deadlines: one is left."""
        self._open.pop(deadline, None)

    def close(self) -> None:
        """Takes the timer down; none may be under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for deadline in [each for each in self._open if each.at <= now]:
            self.remove(deadline)
            deadline.expire()
        if self._open:
            self._set(min(deadline.at for deadline in self._open))
