"""An event that happens once or fails: set by whoever handles a stream's messages, awaited by one other task."""

from __future__ import annotations

import asyncio


class Once:
    """Set by `done`, with or without an error; only the first time counts. An error is dropped if no task waits.

    Attributes:
        is_done: it has happened, or failed.
    """

    __slots__ = ("_error", "_waiter", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def done(self, error: Exception | None = None) -> None:
        """It has happened, or failed with `error`."""
        if self.is_done:
            return
        self.is_done, self._error = True, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when it has happened; raises the error when it failed. The caller sets the deadline."""
        if not self.is_done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
