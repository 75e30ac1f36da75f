"""Instances in order of load, so that the best for a request is found without asking each.

Instances of about equal speed form a class; a class keeps its members sorted by load. For a request there is one cost
per class and length of prefix. They are tried from the cheapest on, and the search ends when a cost and the least load
together are no better than the eighth best found.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

from moonpool.cost import Speeds
from services.conductor.core.sets import members

SHORTLIST = 8
"""Instances that a search finds; they are then compared by their own speeds."""
MARGIN = 0.75
"""An instance leaves its class when a speed is so many class widths from the class's middle; half a width has it join.
In between it stays, so that a speed at a border does not move it with every report."""
FEW = 24
"""A set of so few instances is enumerated instead of walking its class in order."""

Levels = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ClassKey:
    """What members of a class have in common. `levels`: logarithms of typical times, rounded; None for 0."""

    levels: Levels
    stages: int = 1
    step_tokens: int = 0


@dataclass(slots=True)
class RankClass:
    """Instances of about equal speed; `speeds` are those of the first, and stand for all in a search."""

    key: ClassKey
    speeds: Speeds
    mask: int = 0
    order: list["Place"] = field(default_factory=list)


class Place(NamedTuple):
    """An instance's rank in its class: the least load first, then who was chosen least recently, then by name."""

    load: float
    turn: int
    name: str
    slot: int


class Found(NamedTuple):
    """An instance that a search found: its predicted seconds by its class, its rank, and its prefix in blocks."""

    seconds: float
    place: Place
    blocks: int


class Ranks:
    """All instances of one kind.

    Args:
        width: ratio of speeds within one class.
        typical: seconds by which speeds are compared.
    """

    def __init__(self, width: float, typical: Callable[[Speeds], Sequence[float]]) -> None:
        self._log_width = log(width)
        self._typical = typical
        self._classes: dict[ClassKey, RankClass] = {}
        self._of: dict[int, tuple[RankClass, Place]] = {}
        self._speeds: dict[int, Speeds] = {}  # by which each was put into its class
        self.mask = 0
        """Slots of all instances."""

    def __len__(self) -> int:
        return len(self._of)

    def put(
        self,
        slot: int,
        speeds: Speeds,
        load: Callable[[Speeds], float],
        turn: int,
        name: str = "",
        stages: int = 1,
        step_tokens: int = 0,
    ) -> None:
        """Adds an instance, or ranks one anew. `load` computes its load with its class's speeds."""
        before = self._of.get(slot)
        if before is not None and self._speeds[slot] is speeds:
            self.move(slot, load, turn)
            return
        key = ClassKey(self._levels(speeds, before[0].key.levels if before else ()), stages, step_tokens)
        if before is None or before[0].key != key:
            if before is not None:
                self.remove(slot)
            found = self._classes.get(key)
            if found is None:
                found = self._classes[key] = RankClass(key, speeds)
            found.mask |= 1 << slot
            self.mask |= 1 << slot
            place = Place(load(found.speeds), turn, name, slot)
            insort(found.order, place)
            self._of[slot] = found, place
        else:
            self.move(slot, load, turn)
        self._speeds[slot] = speeds

    def move(self, slot: int, load: Callable[[Speeds], float], turn: int) -> None:
        """Ranks an instance anew after its load has changed."""
        found, before = self._of[slot]
        place = Place(load(found.speeds), turn, before.name, slot)
        if place != before:
            del found.order[bisect_left(found.order, before)]
            insort(found.order, place)
            self._of[slot] = found, place

    def remove(self, slot: int) -> None:
        """Takes an instance out."""
        found, place = self._of.pop(slot)
        del self._speeds[slot]
        del found.order[bisect_left(found.order, place)]
        found.mask &= ~(1 << slot)
        self.mask &= ~(1 << slot)
        if not found.order:
            del self._classes[found.key]

    def search(
        self,
        allowed: int,
        prefixes: Sequence[tuple[int, int]],
        cost: Callable[[RankClass, int], float],
        wait: Callable[[float], float],
        limit: int = SHORTLIST,
        fits: Callable[[int], bool] | None = None,
    ) -> list[Found]:
        """The best instances, best first: by seconds, then by rank.

        Args:
            allowed: mask of the instances that may be chosen.
            prefixes: (blocks, mask) as `Forest.match` gives them.
            cost: seconds of the request on an idle member of a class that holds so many leading blocks.
            wait: seconds that an instance's load adds; must not fall when load grows.
            limit: so many at most.
            fits: tells of a slot whether it may be chosen; None = all allowed ones.
        """
        best: list[Found] = []
        for seconds, blocks, found, mask in self._groups(allowed & self.mask, prefixes, cost):
            if len(best) == limit and seconds + wait(found.order[0].load) > best[-1].seconds:
                continue
            if mask.bit_count() <= FEW:
                for slot in members(mask):
                    if fits is None or fits(slot):
                        place = self._of[slot][1]
                        _keep(best, Found(seconds + wait(place.load), place, blocks), limit)
            else:
                self._walk(best, found, mask, seconds, blocks, wait, limit, fits)
        return best

    def _walk(
        self,
        best: list[Found],
        found: RankClass,
        mask: int,
        seconds: float,
        blocks: int,
        wait: Callable[[float], float],
        limit: int,
        fits: Callable[[int], bool] | None,
    ) -> None:
        """Tries a class's members in order until they cannot be better any more."""
        for place in found.order:
            if not mask >> place.slot & 1 or (fits is not None and not fits(place.slot)):
                continue
            if not _keep(best, Found(seconds + wait(place.load), place, blocks), limit):
                return

    def _groups(
        self, allowed: int, prefixes: Sequence[tuple[int, int]], cost: Callable[[RankClass, int], float]
    ) -> list[tuple[float, int, RankClass, int]]:
        """(seconds, blocks, class, mask) for each class and length of prefix that some allowed instance has."""
        exact: list[tuple[int, int]] = []
        for blocks, mask in reversed(prefixes):
            if here := mask & allowed:
                exact.append((blocks, here))
                allowed ^= here
        if allowed:
            exact.append((0, allowed))
        groups = [
            (cost(found, blocks), blocks, found, here)
            for found in self._classes.values()
            for blocks, mask in exact
            if (here := mask & found.mask)
        ]
        groups.sort(key=lambda group: group[0])
        return groups

    def levels(self, slot: int) -> Levels:
        """The levels of an instance's class."""
        return self._of[slot][0].key.levels

    def place(self, slot: int) -> Place:
        """An instance's rank in its class."""
        return self._of[slot][1]

    def class_speeds(self, slot: int) -> Speeds:
        """The speeds that stand for an instance's class."""
        return self._of[slot][0].speeds

    def _levels(self, speeds: Speeds, before: Levels) -> Levels:
        return tuple(
            self._level(seconds, before[at] if at < len(before) else None)
            for at, seconds in enumerate(self._typical(speeds))
        )

    def _level(self, seconds: float, before: int | None) -> int | None:
        if seconds <= 0.0:
            return None
        exact = log(seconds) / self._log_width
        return before if before is not None and abs(exact - before) <= MARGIN else round(exact)

    def check_invariants(self) -> None:
        """Asserts that classes, orders and masks agree."""
        seen = 0
        for key, found in self._classes.items():
            assert found.key == key
            assert found.order
            assert found.order == sorted(found.order)
            assert found.mask == sum(1 << place.slot for place in found.order)
            assert not seen & found.mask
            seen |= found.mask
            assert all(self._of[place.slot] == (found, place) for place in found.order)
        assert seen == self.mask
        assert len(self._of) == seen.bit_count()
        assert self._speeds.keys() == self._of.keys()


def _keep(best: list[Found], found: Found, limit: int) -> bool:
    """Puts an instance among the best, if it is one of them; False when it is not."""
    if len(best) < limit:
        insort(best, found)
        return True
    if found >= best[-1]:
        return False
    insort(best, found)
    best.pop()
    return True
