"""Small numbers in the order of their last use: each step costs the same, and a number costs eight bytes."""

from array import array

from moonpool.core.digest import digest_of

NONE = -1
"""No number."""


class Ages:
    """A list of numbers from the oldest to the newest, linked both ways in two arrays."""

    def __init__(self) -> None:
        self.oldest = NONE
        """The first; `NONE` when there is none."""
        self._newest = NONE
        self._older, self._newer = array("i"), array("i")

    def grow(self, more: int) -> None:
        """Makes room for so many larger numbers."""
        for column in (self._older, self._newer):
            column.frombytes(bytes(more * column.itemsize))

    def add(self, number: int, *, oldest: bool = False) -> None:
        """Adds a number that is not in the list, as the newest or the oldest."""
        before, after = (NONE, self.oldest) if oldest else (self._newest, NONE)
        self._older[number], self._newer[number] = before, after
        self._join(before, number)
        self._join(number, after)

    def remove(self, number: int) -> None:
        """Takes a number out."""
        self._join(self._older[number], self._newer[number])

    def renew(self, number: int) -> None:
        """Makes a number of the list the newest."""
        if number != self._newest:
            self.remove(number)
            self.add(number)

    def in_order(self) -> list[int]:
        """All numbers, from the oldest.

        Raises:
            AssertionError: the two directions contradict each other.
        """
        numbers, before, number = [], NONE, self.oldest
        while number != NONE:
            assert self._older[number] == before
            numbers.append(number)
            before, number = number, self._newer[number]
        assert self._newest == before
        return numbers

    def digest(self) -> bytes:
        """Hash of the order."""
        return digest_of(array("i", self.in_order()))

    def _join(self, older: int, newer: int) -> None:
        if older == NONE:
            self.oldest = newer
        else:
            self._newer[older] = newer
        if newer == NONE:
            self._newest = older
        else:
            self._older[newer] = older
