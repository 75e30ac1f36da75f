"""Those who wait for room at decode, in order of arrival, and which of them a report wakes.

Freed room wakes the first that fit, so one request that is too big for the room of now does not make the others wait.
Not for ever the other way round: for one that has waited for `HOLD_AFTER_S`, an instance is held free.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from services.conductor.core.cost import Need

HOLD_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, order=True)
class Waiter:
    """A request and what room it needs; lower numbers came first."""

    number: int
    need: Need
    since: float


class RoomQueue:
    """The waiting requests. Its cost per report is at most one look at each."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._holds: dict[str, int] = {}
        self._refused: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, number: int) -> bool:
        at = self._at(number)
        return at < len(self._waiters) and self._waiters[at].number == number

    def add(self, waiter: Waiter) -> None:
        """Lets a request wait at its place, which is that of its number."""
        assert waiter.number not in self, f"{waiter.number} waits already"
        insort(self._waiters, waiter)

    def remove(self, number: int) -> None:
        """The request waits no more; unknown numbers are fine."""
        if number not in self:
            return
        del self._waiters[self._at(number)]
        self._holds = {decode: holder for decode, holder in self._holds.items() if holder != number}

    def refused(self, decode: str, room: int) -> None:
        """A decode instance had no room although it seemed to have `room` blocks."""
        self._refused[decode] = room

    def promised(self, decode: str) -> None:
        """A decode instance had room."""
        self._refused.pop(decode, None)

    def forget(self, decode: str) -> None:
        """The instance is not there any more."""
        self._refused.pop(decode, None)
        self._holds.pop(decode, None)

    def free_to(self, decode: str, number: int) -> bool:
        """Whether the instance is not held for a request that came earlier."""
        return self._holds.get(decode, number) >= number

    def woken(self, decode: str, room: int, total: int, needs: Callable[[Need], int], now: float) -> list[int]:
        """Those who fit into the room of one instance, first come first; to be called when it has reported.

        Args:
            decode: the instance.
            room: blocks that it could promise.
            total: blocks of its pool.
            needs: blocks that a request is expected to need there.
            now: seconds.

        Where room that seemed to be there was refused, and nothing has changed since, one at a time finds out.
        """
        found: list[int] = []
        most = 1 if self._refused.get(decode) == room else len(self._waiters)
        for waiter in self._waiters:
            if len(found) >= most:
                break
            blocks = needs(waiter.need)
            if blocks <= room and waiter.need.longest <= total and self.free_to(decode, waiter.number):
                found.append(waiter.number)
                room -= blocks
            elif self._holds_now(waiter, decode, total, now):
                break
        return found

    def check_invariants(self) -> None:
        """Asserts order, and that instances are held for those who wait."""
        numbers = [waiter.number for waiter in self._waiters]
        assert numbers == sorted(set(numbers))
        assert set(self._holds.values()) <= set(numbers)
        assert len(set(self._holds.values())) == len(self._holds)

    def state(self) -> object:
        """All of it, for a digest."""
        return self._waiters, self._holds, self._refused

    def _at(self, number: int) -> int:
        return bisect_left(self._waiters, number, key=lambda waiter: waiter.number)

    def _holds_now(self, waiter: Waiter, decode: str, total: int, now: float) -> bool:
        """Whether the instance is held for this one, who has waited for long and is too big for its room of now."""
        if (
            waiter.need.longest <= total
            and now - waiter.since >= HOLD_AFTER_S
            and waiter.number not in self._holds.values()
        ):
            self._holds.setdefault(decode, waiter.number)
        return self._holds.get(decode) == waiter.number
