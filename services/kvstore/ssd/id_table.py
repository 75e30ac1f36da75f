"""Small numbers for formats and tenants, and which of them the index must learn or may forget."""

import collections
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)


class IdChange(NamedTuple, Generic[Name]):
    """Ids that the index does not have, and those that it need not have any more."""

    new: dict[int, Name]
    unused: frozenset[int]


NO_CHANGE: IdChange[Any] = IdChange({}, frozenset())


class IdTable(Generic[Name]):
    """Ids of names, as long as some record uses them. An id is given once.

    A name stays as long as a record uses it, live or dead; so the disk bounds the names, however many clients invent.
    `known` are the ids that the index has; `by_id` are names in use, and those new since the last `settle`.
    """

    def __init__(self, known: Mapping[int, Name]) -> None:
        self.by_id: dict[int, Name] = dict(known)
        self._ids = {name: number for number, name in known.items()}
        self._uses: collections.Counter[int] = collections.Counter()
        self._idle = set(known)  # without a use
        self._surplus: set[int] = set()  # the index has them, and they have no use
        self._last = self._settled = max(known, default=0)

    def __getitem__(self, number: int) -> Name:
        return self.by_id[number]

    def id_of(self, name: Name) -> int:
        """The id of `name`; a new one if it has none."""
        number = self._ids.get(name)
        if number is None:
            number = self._last = self._last + 1
            self._ids[name] = number
            self.by_id[number] = name
            self._idle.add(number)
        return number

    def use(self, numbers: Iterable[int]) -> None:
        """Each of these is used once more, as often as it comes."""
        coming = collections.Counter(numbers)
        self._uses.update(coming)
        self._idle.difference_update(coming)

    def unuse(self, numbers: Iterable[int]) -> None:
        """The opposite of `use`."""
        for number, count in collections.Counter(numbers).items():
            self._uses[number] -= count
            assert self._uses[number] >= 0
            if not self._uses[number]:
                del self._uses[number]
                self._idle.add(number)

    def change(self) -> IdChange[Name]:
        """What the next transaction must say."""
        numbers = range(self._settled + 1, self._last + 1)
        new = {number: self.by_id[number] for number in numbers if number in self.by_id}
        return IdChange(new, frozenset(self._surplus))

    def settle(self, change: IdChange[Name], *, written: bool) -> set[Name]:
        """Forgets ids without a use, once the plan with `change` is over; their names. `written`: the index has it."""
        if written:
            self._surplus -= change.unused
            self._settled = self._last
        gone, self._idle = self._idle, set()
        names = {number: self.by_id.pop(number) for number in gone}
        for number, name in names.items():
            if self._ids.get(name) == number:  # else the name got another id before the index forgot this one
                del self._ids[name]
        self._surplus.update(number for number in gone if number <= self._settled)
        if not any(number in self.by_id for number in range(self._settled + 1, self._last + 1)):
            self._settled = self._last
        return set(names.values())

    def check_invariants(self, numbers: Iterable[int]) -> None:
        """Counts the uses anew; each used id has a name."""
        assert self._uses == collections.Counter(numbers)
        assert self._uses.keys() | self._idle == self.by_id.keys()
        assert all(self.by_id[number] == name for name, number in self._ids.items())
