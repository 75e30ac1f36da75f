"""Sessions that wait for room in DRAM, first come, first served."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from moonpool.errors import DeadlineExceeded
from moonpool.streams.waiters import WaiterQueue

T = TypeVar("T")
_Wanted = tuple[Callable[[], Any], Callable[[Any], None]]


class RoomQueue:
    """At most `max_waiting` attempts to get room, in lanes: one lane does not keep another waiting."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lanes: dict[Hashable, WaiterQueue[_Wanted, Any]] = {}
        self._room = False
        self._serving = False

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def waits(self, lane: Hashable = None) -> bool:
        return lane in self._lanes

    async def get(
        self, attempt: Callable[[], T | None], undo: Callable[[T], None], timeout_s: float, *, lane: Hashable = None
    ) -> T:
        """The attempt's result, once there is one.

        `attempt` returns None while there is no room. `undo` takes back what came after the caller was cancelled.
        Raises DeadlineExceeded when there was no room within `timeout_s`, or too many wait already.
        """
        if len(self) >= self._max_waiting:
            raise DeadlineExceeded("no room, and many others wait for it")
        queue = self._lanes.setdefault(lane, WaiterQueue(lambda wanted: wanted[0](), lambda wanted, r: wanted[1](r)))
        try:
            async with asyncio.timeout(timeout_s):
                result: T = await queue.get((attempt, undo))
                return result
        except TimeoutError:
            raise DeadlineExceeded(f"no room within {timeout_s:g} s") from None
        finally:
            if not queue and self._lanes.get(lane) is queue:
                del self._lanes[lane]

    def notify(self) -> None:
        """There may be room: the first ones of all lanes try again. An attempt may call this too."""
        self._room = True
        if self._serving:
            return
        self._serving = True
        try:
            while self._room:
                self._room = False
                for queue in list(self._lanes.values()):
                    queue.notify()
        finally:
            self._serving = False
