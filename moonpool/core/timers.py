"""Deadlines of a core: when the next one is, and which are over."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from moonpool.core.digest import digest_of

K = TypeVar("K", bound=Hashable)

_MIN_TO_SWEEP = 64


def earliest(one: float | None, other: float | None) -> float | None:
    """The first of two deadlines; None where there is none."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class Timers(Generic[K]):
    """One deadline per key. Each call costs O(log n); equal deadlines come in the order of setting."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._valid: dict[K, tuple[float, int, K]] = {}  # of the heap's entries those that count
        self._count = 0

    def __len__(self) -> int:
        return len(self._valid)

    def set(self, key: K, at: float) -> None:
        """Sets or moves the deadline of `key`."""
        self._count += 1
        entry = self._valid[key] = at, self._count, key
        heappush(self._heap, entry)
        if len(self._heap) > _MIN_TO_SWEEP and len(self._heap) > 2 * len(self._valid):
            self._sweep()

    def clear(self, key: K) -> None:
        """Forgets the deadline of `key`, if there is one."""
        self._valid.pop(key, None)

    def at(self, key: K) -> float | None:
        """The deadline of `key`; None without one."""
        entry = self._valid.get(key)
        return None if entry is None else entry[0]

    def next(self) -> float | None:
        """The earliest deadline; None without any."""
        heap, valid = self._heap, self._valid
        while heap:
            entry = heap[0]
            if valid.get(entry[2]) is entry:
                return entry[0]
            heappop(heap)
        return None

    def pop_due(self, now: float) -> K | None:
        """Takes the earliest deadline that is not after `now`; None when none is over."""
        if not self._heap or self._heap[0][0] > now:
            return None
        at = self.next()
        if at is None or at > now:
            return None
        key = heappop(self._heap)[2]
        del self._valid[key]
        return key

    def digest(self) -> bytes:
        """Hash of all deadlines."""
        return digest_of({key: (at, count) for key, (at, count, _) in self._valid.items()})

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) is entry]
        heapify(self._heap)
