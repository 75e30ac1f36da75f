"""A list of numbers by last use."""

from array import array

from moonpool.base.scheduling.state_machine import digest_of

LRU_END = -1
"""No number."""


class LruList:
    """A list of numbers from the oldest to the newest, linked both ways in two arrays."""

    def __init__(self) -> None:
        self.oldest = LRU_END
        """The first; `NONE` when there is none."""
        self._newest = LRU_END
        self._older, self._newer = array("i"), array("i")

    def grow(self, more: int) -> None:
        """Make room for so many larger numbers."""
        for column in (self._older, self._newer):
            column.frombytes(bytes(more * column.itemsize))

    def add(self, number: int, *, oldest: bool = False) -> None:
        """Add a number that is not in the list, as the newest or the oldest."""
        before, after = (LRU_END, self.oldest) if oldest else (self._newest, LRU_END)
        self._older[number], self._newer[number] = before, after
        self._join(before, number)
        self._join(number, after)

    def remove(self, number: int) -> None:
        self._join(self._older[number], self._newer[number])

    def renew(self, number: int) -> None:
        """Make a number of the list the newest."""
        if number != self._newest:
            self.remove(number)
            self.add(number)

    def in_order(self) -> list[int]:
        """Return all numbers, from the oldest.

        Raises:
            AssertionError: the two directions contradict each other.
        """
        numbers, before, number = [], LRU_END, self.oldest
        while number != LRU_END:
            assert self._older[number] == before
            numbers.append(number)
            before, number = number, self._newer[number]
        assert self._newest == before
        return numbers

    def digest(self) -> bytes:
        """Return the hash of the order."""
        return digest_of(array("i", self.in_order()))

    def _join(self, older: int, newer: int) -> None:
        if older == LRU_END:
            self.oldest = newer
        else:
            self._newer[older] = newer
        if newer == LRU_END:
            self._newest = older
        else:
            self._older[newer] = older
