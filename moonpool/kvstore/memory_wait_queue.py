"""Who waits for room in DRAM, in order."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from moonpool.base.errors import DeadlineExceeded
from moonpool.base.transport.async_utils import WaiterQueue

T = TypeVar("T")
_Attempt = tuple[Callable[[], Any], Callable[[Any], None]]


class MemoryWaitQueue:
    """At most `max_waiting` attempts to get DRAM, in groups: no group waits for another."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._groups: dict[Hashable, WaiterQueue[_Attempt, Any]] = {}
        self._room = False
        self._serving = False

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def waits(self, group: Hashable = None) -> bool:
        return group in self._groups

    async def get(
        self, attempt: Callable[[], T | None], undo: Callable[[T], None], timeout_s: float, *, group: Hashable = None
    ) -> T:
        """Run `attempt` until there is room, which is when the result is not None; return the result.

        `undo` takes back a result that came after the caller was cancelled.

        Raises:
            DeadlineExceeded: there was no room within `timeout_s`, or too many callers wait already.
        """
        if len(self) >= self._max_waiting:
            raise DeadlineExceeded("no room, and many others wait for it")
        queue = self._groups.setdefault(group, WaiterQueue(lambda wanted: wanted[0](), lambda wanted, r: wanted[1](r)))
        try:
            async with asyncio.timeout(timeout_s):
                result: T = await queue.get((attempt, undo))
                return result
        except TimeoutError:
            raise DeadlineExceeded(f"no room within {timeout_s:g} s") from None
        finally:
            if not queue and self._groups.get(group) is queue:
                del self._groups[group]

    def notify(self) -> None:
        """There may be room: the first attempts of all groups run again. An attempt may call this too."""
        self._room = True
        if self._serving:
            return
        self._serving = True
        try:
            while self._room:
                self._room = False
                for queue in list(self._groups.values()):
                    queue.notify()
        finally:
            self._serving = False
