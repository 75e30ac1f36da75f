"""Waiting for room in DRAM, first come first served.

Owns the queue of those that wait. Must not know what room is: an attempt either succeeds or says "not yet".
"""

import asyncio
import collections
from collections.abc import Callable
from typing import Any, TypeVar

from moonpool.errors import DeadlineExceeded

T = TypeVar("T")


class RoomQueue:
    """Those who wait for room.

    Args:
        max_waiting: more are turned away at once.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: collections.deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def get(self, attempt: Callable[[], T | None], undo: Callable[[T], None], timeout_s: float) -> T:
        """The attempt's result, once there is one.

        Args:
            attempt: returns None while there is no room.
            undo: takes a result back that came when nobody wanted it any more.
            timeout_s: longest wait.

        Raises:
            DeadlineExceeded: there was no room within `timeout_s`, or too many wait already.
            Exception: what the attempt raises.
        """
        if not self._waiting and (result := attempt()) is not None:
            return result
        if len(self._waiting) >= self._max_waiting:
            raise DeadlineExceeded("no room, and many others wait for it")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((attempt, future))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                undo(future.result())
            future.cancel()
            self.poke()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no room within {timeout_s:g} s") from None
            raise

    def poke(self) -> None:
        """There may be room: those in front try again."""
        while self._waiting:
            attempt, future = self._waiting[0]
            if not future.done():
                try:
                    result = attempt()
                except Exception as error:  # handed to the one who waits
                    future.set_exception(error)
                else:
                    if result is None:
                        return
                    future.set_result(result)
            self._waiting.popleft()
