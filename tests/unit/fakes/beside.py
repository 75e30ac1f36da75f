"""An executor whose work is done when a test says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Held(Executor):
    """Holds work until `release`, which does it on the calling thread.

    Attributes:
        on: work is held; otherwise it is done at once.
        waiting: what is held.
        came: set when there is some.
        defect: met by the work that is done next, instead of doing it.
    """

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self.waiting: deque[Callable[[], None]] = deque()
        self.came = asyncio.Event()
        self.defect: Exception | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Holds a piece of work, or does it."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            defect, self.defect = self.defect, None
            try:
                if defect is not None:
                    raise defect
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.waiting.append(work)
        self.came.set()
        if not self.on:
            self.release()
        return future

    def release(self, pieces: int = 0) -> None:
        """Does so many held pieces, the oldest first; 0 = all of them."""
        for _ in range(pieces or len(self.waiting)):
            self.waiting.popleft()()
