"""An event that happens once or fails: set by a stream's reader task, awaited by one other task."""

from __future__ import annotations

import asyncio


class Once:
    """Set by `done`, with or without an error; only the first time counts. An error is dropped if no task waits."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """It has happened, or failed."""
        return self._event.is_set()

    def done(self, error: Exception | None = None) -> None:
        """It has happened, or failed with `error`."""
        if not self._event.is_set():
            self._error = error
            self._event.set()

    async def wait(self) -> None:
        """Returns when it has happened; raises the error when it failed. The caller sets the deadline."""
        await self._event.wait()
        if self._error is not None:
            raise self._error
