"""A queue of tasks that wait for something scarce: credits, room, a turn. First come, first served, cancellable."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Wanted = TypeVar("Wanted")
Result = TypeVar("Result")


class WaiterQueue(Generic[Wanted, Result]):
    """Serves waiting tasks in the order of their priority (lowest number first), then of their arrival.

    Args:
        attempt: Takes what a task wants and returns it; None while the task has to wait. What it raises, the task
            raises. It must not call the queue.
        undo: Takes a result back whose task was cancelled before it could use it.
    """

    def __init__(
        self, attempt: Callable[[Wanted], Result | None], undo: Callable[[Wanted, Result], None] = lambda _, __: None
    ) -> None:
        self._attempt = attempt
        self._undo = undo
        self._lanes: dict[int, OrderedDict[asyncio.Future[Result], Wanted]] = {}
        self._closed: Exception | None = None

    def __len__(self) -> int:
        """Number of tasks that wait."""
        return sum(map(len, self._lanes.values()))

    def __bool__(self) -> bool:
        return bool(self._lanes)

    async def get(self, wanted: Wanted, *, priority: int = 0) -> Result:
        """Returns what the attempt gives, waiting for it behind all others. The caller sets the deadline.

        A cancelled call has taken nothing.

        Raises:
            Exception: What the attempt raised, or the error given to `close`.
        """
        if self._closed is not None:
            raise self._closed
        if not self._lanes and (result := self._attempt(wanted)) is not None:
            return result
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(priority, OrderedDict())[future] = wanted
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(wanted, future.result())
            self._remove(future, priority)
            self.notify()
            raise

    def notify(self) -> None:
        """What is waited for may be there: serves tasks from the front until one has to wait."""
        while self._lanes:
            priority = min(self._lanes)
            future, wanted = next(iter(self._lanes[priority].items()))
            if not future.done() and not self._serve(future, wanted):
                return
            self._remove(future, priority)

    def close(self, error: Exception) -> None:
        """Ends all waiting and later calls of `get` with `error`. Idempotent."""
        if self._closed is not None:
            return
        self._closed = error
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            for future in lane:
                if not future.done():
                    future.set_exception(error)

    def _serve(self, future: asyncio.Future[Result], wanted: Wanted) -> bool:
        try:
            result = self._attempt(wanted)
        except Exception as error:  # belongs to the waiting task
            future.set_exception(error)
            return True
        if result is None:
            return False
        future.set_result(result)
        return True

    def _remove(self, future: asyncio.Future[Result], priority: int) -> None:
        lane = self._lanes.get(priority)
        if lane is not None:
            lane.pop(future, None)
            if not lane:
                del self._lanes[priority]
