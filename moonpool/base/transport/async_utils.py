"""Helpers for asyncio: deadlines, events, waiter queues, steps, and work handed to threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar


async def wait_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait for an event; False when that takes longer than `seconds`, which may be infinite."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


T = TypeVar("T")
OFFLOAD_LEAST_BYTES = 256 << 10
OFFLOAD_LEAST_TOKENS = 1 << 10


class Deadline:
    """One wait; a context manager that raises TimeoutError if the deadline cancels the body."""

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
        """The time is over: cancels the waiting call."""
        self._expired = True
        self._task.cancel()


class Deadlines:
    """Deadlines for a group of tasks on one event loop."""

    def __init__(self) -> None:
        self._open: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def within(self, seconds: float) -> Deadline:
        """A deadline so many seconds from now, to be entered with `with` by the task that waits."""
        return Deadline(self, asyncio.get_running_loop().time() + seconds)

    def add(self, deadline: Deadline) -> None:
        """Called by a deadline on entering."""
        self._open[deadline] = None
        timer = self._timer
        if timer is None or deadline.at < timer.when():
            self._set(deadline.at)

    def remove(self, deadline: Deadline) -> None:
        """Called by a deadline on leaving."""
        self._open.pop(deadline, None)

    def close(self) -> None:
        """Take the timer down; none may be under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for deadline in [deadline for deadline in self._open if deadline.at <= now]:
            self.remove(deadline)
            deadline.expire()
        if self._open:
            self._set(min(deadline.at for deadline in self._open))


class OneTimeEvent:
    """Set by `done`, with or without an error; only the first time counts. An error is dropped if no task waits.

    Attributes:
        is_done: the event has happened, or failed.
    """

    __slots__ = ("_error", "_waiter", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def done(self, error: Exception | None = None) -> None:
        """The event has happened, or failed with `error`."""
        if self.is_done:
            return
        self.is_done, self._error = True, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return after the event; raise the error if the event failed. The caller sets the deadline."""
        if not self.is_done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error


async def run_in_steps(steps: Generator[None, None, T]) -> T:
    """The result of `steps`; other tasks have a turn before each step."""
    while True:
        await asyncio.sleep(0)
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


Wanted = TypeVar("Wanted")
Result = TypeVar("Result")


class WaiterQueue(Generic[Wanted, Result]):
    """Serves waiting tasks by priority (lowest number first), then by arrival.

    Args:
        attempt: Takes and returns what a task wants; None while the task has to wait. What `attempt` raises, the task
            raises. `attempt` must not call the queue.
        undo: Takes a result back if the task was cancelled before using the result.
    """

    def __init__(
        self, attempt: Callable[[Wanted], Result | None], undo: Callable[[Wanted, Result], None] = lambda _, __: None
    ) -> None:
        self._attempt = attempt
        self._undo = undo
        self._queues: dict[int, OrderedDict[asyncio.Future[Result], Wanted]] = {}
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    async def get(self, wanted: Wanted, *, priority: int = 0) -> Result:
        """Return the attempt's result, waiting behind all others. The caller sets the deadline.

        A cancelled call has taken no item.

        Raises:
            Exception: What the attempt raised, or the error given to `close`.
        """
        if self._closed is not None:
            raise self._closed
        if not self._queues and (result := self._attempt(wanted)) is not None:
            return result
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(priority, OrderedDict())[future] = wanted
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(wanted, future.result())
            self._remove(future, priority)
            self.notify()
            raise

    def notify(self) -> None:
        """Serve waiting tasks from the front until a task still has to wait."""
        while self._queues:
            priority = min(self._queues)
            future, wanted = next(iter(self._queues[priority].items()))
            if not future.done() and not self._serve(future, wanted):
                return
            self._remove(future, priority)

    def close(self, error: Exception) -> None:
        """End all waiting and later calls of `get` with `error`. Idempotent."""
        if self._closed is not None:
            return
        self._closed = error
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            for future in queue:
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
        queue = self._queues.get(priority)
        if queue is not None:
            queue.pop(future, None)
            if not queue:
                del self._queues[priority]


class ThreadOffload(NamedTuple):
    """Where work goes that would keep the loop from dispatching steps.

    Handing work over and hearing about the end costs the loop 30 to 40 us. What is smaller is done there (ADR 28).

    Attributes:
        executor: does the work; several pieces may be done at once.
        least_bytes: smaller payloads land on the loop.
        least_tokens: requests with fewer tokens are read on the loop.
    """

    executor: Executor
    least_bytes: int = OFFLOAD_LEAST_BYTES
    least_tokens: int = OFFLOAD_LEAST_TOKENS
