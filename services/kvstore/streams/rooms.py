"""Waiting for room in DRAM, first come first served.

Owns the queue of those that wait. Must not know what room is: an attempt either succeeds or says "not yet".
"""

import asyncio
import collections
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from moonpool.errors import DeadlineExceeded

T = TypeVar("T")


class RoomQueue:
    """Those who wait for room, in lanes: who waits in one does not keep those in another.

    Args:
        max_waiting: more are turned away at once.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lanes: dict[Hashable, collections.deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def waits(self, lane: Hashable = None) -> bool:
        """Whether somebody waits in a lane."""
        return lane in self._lanes

    async def get(
        self, attempt: Callable[[], T | None], undo: Callable[[T], None], timeout_s: float, *, lane: Hashable = None
    ) -> T:
        """The attempt's result, once there is one.

        Args:
            attempt: returns None while there is no room.
            undo: takes a result back that came when nobody wanted it any more.
            timeout_s: longest wait.
            lane: in which to wait.

        Raises:
            DeadlineExceeded: there was no room within `timeout_s`, or too many wait already.
            Exception: what the attempt raises.
        """
        if not self.waits(lane) and (result := attempt()) is not None:
            return result
        if len(self) >= self._max_waiting:
            raise DeadlineExceeded("no room, and many others wait for it")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(lane, collections.deque()).append((attempt, future))
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
        for lane in list(self._lanes):
            self._poke(lane)

    def _poke(self, lane: Hashable) -> None:
        while waiting := self._lanes.get(lane):
            attempt, future = waiting[0]
            if not future.done():
                try:
                    result = attempt()
                except Exception as error:  # handed to the one who waits
                    future.set_exception(error)
                else:
                    if result is None:
                        return
                    future.set_result(result)
            waiting.popleft()
            if not waiting:
                del self._lanes[lane]
