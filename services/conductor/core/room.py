"""Requests that wait for room at decode, in fair order, and which of them a report wakes.

Freed room wakes the first that fit, so one request that is too big for the room of now does not make the others wait.
Not for ever the other way round: for one that has waited for `HOLD_AFTER_S`, an instance is held free.
"""

from collections.abc import Callable

from moonpool.core.fair import FairQueue, Place, Shares
from moonpool.frozen import frozen
from services.conductor.core.cost import Need
from services.conductor.core.crowd import left_free

HOLD_AFTER_S = 5.0
LOOKS = 64
"""So many at most that do not fit into the room of now are looked at for one report. One after the other of them gets
an instance that is held free, so nobody behind them waits for ever. Those that an instance is too small for do not
count: it is never held for them, so they would keep it from the others for as long as they wait."""


@frozen
class Waiter:
    """A request, what room it needs, what it is predicted to cost, and since when it has waited."""

    place: Place
    need: Need
    since: float
    cost: float = 0.0


class RoomQueue:
    """The waiting requests.

    A report costs at most `LOOKS` looks, one for each that it wakes, and a comparison for each that the instance is too
    small for.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._queue = FairQueue(shares)
        self._waiters: dict[int, Waiter] = {}
        self._holds: dict[str, int] = {}
        self._refused: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, number: int) -> bool:
        return number in self._waiters

    def count(self) -> dict[str, int]:
        """How many wait, by tenant."""
        return self._queue.count()

    def add(self, waiter: Waiter) -> None:
        """Lets a request wait at its place."""
        self._queue.add(waiter.place, waiter.cost)
        self._waiters[waiter.place.number] = waiter

    def remove(self, number: int) -> None:
        """The request waits no more; unknown numbers are fine."""
        if self._waiters.pop(number, None) is None:
            return
        self._queue.remove(number)
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

    def free_to(self, decode: str, place: Place) -> bool:
        """Whether the instance is not held for a request that goes before."""
        holder = self._holds.get(decode)
        if holder is None or holder == place.number:
            return True
        return self._shares.key(place) < self._shares.key(self._waiters[holder].place)

    def woken(
        self,
        decode: str,
        room: int,
        total: int,
        needs: Callable[[Need], int],
        leaves_room: Callable[[Place], bool],
        now: float,
    ) -> list[int]:
        """Those who fit into the room of one instance, in fair order; to be called when it has reported.

        Args:
            decode: the instance.
            room: blocks that it could promise.
            total: blocks of its pool.
            needs: blocks that a request is expected to need there.
            leaves_room: whether it leaves some to other tenants.
            now: seconds.

        Where room that seemed to be there was refused, and nothing has changed since, one at a time finds out.
        """
        found: list[int] = []
        looks = LOOKS
        most = 1 if self._refused.get(decode) == room else len(self._waiters)
        if not total:
            return found
        for number in self._queue:
            if len(found) >= most:
                break
            waiter = self._waiters[number]
            if waiter.need.longest > total:
                continue
            blocks = needs(waiter.need)
            left = left_free(blocks, total) if leaves_room(waiter.place) else 0
            if blocks + left <= room and self.free_to(decode, waiter.place):
                found.append(number)
                room -= blocks
                continue
            looks -= 1
            if self._holds_now(waiter, decode, now) or not looks:
                break
        return found

    def check_invariants(self) -> None:
        """Asserts order, and that instances are held for those who wait."""
        self._queue.check_invariants()
        assert sorted(self._queue) == sorted(self._waiters)
        assert set(self._holds.values()) <= set(self._waiters)
        assert len(set(self._holds.values())) == len(self._holds)

    def state(self) -> object:
        """All of it, for a digest."""
        return self._waiters, self._holds, self._refused

    def _holds_now(self, waiter: Waiter, decode: str, now: float) -> bool:
        """Whether the instance is held for this one, who has waited for long and is too big for its room of now."""
        number = waiter.place.number
        if now - waiter.since >= HOLD_AFTER_S and number not in self._holds.values():
            self._holds.setdefault(decode, number)
        return self._holds.get(decode) == number
