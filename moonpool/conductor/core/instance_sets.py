"""Interned sets of instances, as bit masks over slots."""

from collections.abc import Iterable, Iterator

EMPTY_SET = 0
"""Number of the set without members."""
_MAX_REMEMBERED = 1 << 18


class InstanceSets:
    """Interned bit masks with remembered transitions."""

    def __init__(self) -> None:
        self.masks = [0]
        """Bit mask of each set, by number."""
        self._numbers = {0: EMPTY_SET}
        self._with: list[dict[int, int]] = []
        self._without: list[dict[int, int]] = []
        self._common: dict[tuple[int, int], int] = {}
        self._remembered = 0

    def __len__(self) -> int:
        return len(self.masks)

    def number(self, mask: int) -> int:
        """Return the number of the set with this mask."""
        found = self._numbers.get(mask)
        if found is None:
            found = self._numbers[mask] = len(self.masks)
            self.masks.append(mask)
        return found

    def additions(self, slot: int) -> dict[int, int]:
        """Set -> the set with `slot`, as far as `add` was asked; for loops that look up often."""
        return _set_table(self._with, slot)

    def removals(self, slot: int) -> dict[int, int]:
        """Set -> the set without `slot`, as far as `remove` was asked."""
        return _set_table(self._without, slot)

    def add(self, number: int, slot: int) -> int:
        self._remember()
        return _set_table(self._with, slot).setdefault(number, self.number(self.masks[number] | 1 << slot))

    def remove(self, number: int, slot: int) -> int:
        """Return the set without `slot`."""
        self._remember()
        return _set_table(self._without, slot).setdefault(number, self.number(self.masks[number] & ~(1 << slot)))

    def common(self, number: int, other: int) -> int:
        """Return the set of what both have."""
        if number == other:
            return number
        found = self._common.get((number, other))
        if found is None:
            self._remember()
            found = self._common[number, other] = self.number(self.masks[number] & self.masks[other])
        return found

    def keep(self, used: Iterable[int]) -> dict[int, int]:
        """Forget all sets but these and the empty one; return the new number of each."""
        kept = sorted({EMPTY_SET, *used})
        self.masks = [self.masks[number] for number in kept]
        self._numbers = {mask: number for number, mask in enumerate(self.masks)}
        self._forget()
        return {before: number for number, before in enumerate(kept)}

    def check_invariants(self) -> None:
        """Assert that every mask has one number."""
        assert self.masks[EMPTY_SET] == 0
        assert self._numbers == {mask: number for number, mask in enumerate(self.masks)}

    def _remember(self) -> None:
        """Keep what is remembered within bounds."""
        self._remembered += 1
        if self._remembered > _MAX_REMEMBERED:
            self._forget()

    def _forget(self) -> None:
        for table in (*self._with, *self._without):
            table.clear()
        self._common.clear()
        self._remembered = 0


def _set_table(tables: list[dict[int, int]], slot: int) -> dict[int, int]:
    while len(tables) <= slot:
        tables.append({})
    return tables[slot]


def slots_in(mask: int) -> Iterator[int]:
    """Return the slots of a mask, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
