"""Whole writes to a gRPC stream, even if the writing task is cancelled.

A call cannot be ended with a status during a write: the status gets lost and the peer waits for ever. So a task that is
cancelled in a write lets the write end first, for a short time at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

CANCEL_GRACE_S = 2.0
T = TypeVar("T")
Message = TypeVar("Message", covariant=True)


async def write_whole(write: Callable[[Any], Awaitable[None]], message: Any, stall_s: float | None = None) -> None:
    """Write a message; if the task is cancelled, the write is finished first if the peer takes the message soon.

    Raises:
        TimeoutError: The write took longer than `stall_s`.
        Exception: Whatever `write` raises.
    """
    writing = asyncio.ensure_future(write(message))
    writing.add_done_callback(_retrieve_failure)
    try:
        if stall_s is None:
            await asyncio.shield(writing)
            return
        done, _ = await asyncio.wait((writing,), timeout=stall_s)
    except asyncio.CancelledError:
        await asyncio.wait((writing,), timeout=CANCEL_GRACE_S)
        writing.cancel()
        raise
    if not done:
        writing.cancel()
        raise TimeoutError
    writing.result()


def _retrieve_failure(writing: asyncio.Future[None]) -> None:
    """Retrieve a task's failure, which asyncio would report as never retrieved."""
    if not writing.cancelled():
        writing.exception()


def bare_write(context: Any) -> Callable[[Any], Awaitable[None]]:
    """The stream's gRPC write, which takes less time: for `write_each`, which never cancels a write early."""
    write: Callable[[Any], Awaitable[None]] = context.bare_write
    return write


class MessageSource(Protocol[Message]):
    """What a stream's messages come from, for `write_all`."""

    def listen(self, news: Callable[[], object]) -> None:
        """Call `news` now and whenever `take` may have something, or the source has ended."""

    def take(self) -> Message | None:
        """Return the next message, None if there is none now."""

    def over(self) -> bool:
        """Return whether nothing more comes; raises how the source has failed."""

    async def next(self) -> Message | None:
        """Wait for the next message; None after the last."""


async def write_all(context: Any, source: MessageSource[Any]) -> None:
    """Write what a source gives, until its end; as `write_whole` for each message.

    A call that is carried takes messages only when they are sent with those of other calls, so that the source may
    merge what comes in between.

    Raises:
        Exception: How the source or a write has failed.
    """
    feed: Callable[[MessageSource[Any]], Awaitable[None]] | None = getattr(context, "feed", None)
    await (write_each(bare_write(context), source.next) if feed is None else feed(source))


async def write_each(
    write: Callable[[T], Awaitable[None]], take: Callable[[], Awaitable[T | None]], stall_s: float | None = None
) -> None:
    """Write what `take` gives until None; as `write_whole` for each message, but one task for all messages.

    Raises:
        TimeoutError: A write took longer than `stall_s`.
        Exception: Whatever `write` or `take` raises.
    """
    watch = _WriteWatch(stall_s)
    writer = asyncio.ensure_future(_write_each(write, take, watch))
    writer.add_done_callback(_retrieve_failure)
    try:
        await asyncio.wait((writer, watch.stalled), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        watch.leaving = True
        if watch.writing:
            await asyncio.wait((writer,), timeout=CANCEL_GRACE_S)
        writer.cancel()
        raise
    finally:
        watch.close()
    if not writer.done():
        writer.cancel()
        raise TimeoutError
    writer.result()


async def _write_each(
    write: Callable[[T], Awaitable[None]], take: Callable[[], Awaitable[T | None]], watch: _WriteWatch
) -> None:
    while not watch.leaving and (message := await take()) is not None:
        watch.begin()
        await write(message)
        watch.writing = False


class _WriteWatch:
    """Notices a write that takes too long. One timer for many writes: the timer looks when the first would be due."""

    def __init__(self, stall_s: float | None) -> None:
        self.stalled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.writing = False
        self.leaving = False
        self._loop = asyncio.get_running_loop()
        self._stall_s = stall_s
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.writing = True
        self._began = self._loop.time()
        if self._timer is None and self._stall_s is not None:
            self._timer = self._loop.call_later(self._stall_s, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.stalled.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self.writing or self.stalled.done() or self._stall_s is None:
            return
        left = self._began + self._stall_s - self._loop.time()
        if left <= 0:
            self.stalled.set_result(None)
        else:
            self._timer = self._loop.call_later(left, self._look)
