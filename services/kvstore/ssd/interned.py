"""Small numbers for large names.

Owns the numbers, and how often each is borne. Must not know what the names are.
"""

import collections
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Interned(Generic[Name]):
    """Small numbers for things that are named often, as long as something bears them. A number is given once.

    Attributes:
        by_number: all of them.
        last: the largest number given.
    """

    def __init__(self, known: Mapping[int, Name]) -> None:
        self.by_number: dict[int, Name] = dict(known)
        self._numbers = {name: number for number, name in known.items()}
        self._uses: collections.Counter[int] = collections.Counter()
        self._unused = set(known)
        self.last = max(known, default=0)

    def number(self, name: Name) -> int:
        """The number of `name`; a new one if it has none."""
        number = self._numbers.get(name)
        if number is None:
            number = self.last = self.last + 1
            self._numbers[name] = number
            self.by_number[number] = name
            self._unused.add(number)
        return number

    def __getitem__(self, number: int) -> Name:
        return self.by_number[number]

    def since(self, number: int) -> dict[int, Name]:
        """Those whose numbers are larger, by number; in the time it takes to count from there to the last."""
        return {later: self.by_number[later] for later in range(number + 1, self.last + 1) if later in self.by_number}

    def use(self, numbers: Iterable[int]) -> None:
        """Something bears each of these, as often as it comes."""
        coming = collections.Counter(numbers)
        self._uses.update(coming)
        self._unused.difference_update(coming)

    def unuse(self, numbers: Iterable[int]) -> None:
        """The opposite."""
        for number, count in collections.Counter(numbers).items():
            self._uses[number] -= count
            assert self._uses[number] >= 0
            if not self._uses[number]:
                del self._uses[number]
                self._unused.add(number)

    def drop_unused(self) -> dict[int, Name]:
        """Forgets the names that nothing bears, and returns them."""
        gone = {number: self.by_number.pop(number) for number in self._unused if number in self.by_number}
        for number, name in gone.items():
            if self._numbers[name] == number:
                del self._numbers[name]
        self._unused.clear()
        return gone

    def check_invariants(self, numbers: Iterable[int]) -> None:
        """What is borne, counted anew, is what was counted, and all of it has a name."""
        assert self._uses == collections.Counter(numbers)
        assert self._uses.keys() | self._unused >= self.by_number.keys() >= self._uses.keys()
