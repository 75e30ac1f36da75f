"""Instances in order of load, so that the best for a request is found without asking each.

Instances of about equal speed form a class; a class keeps its members sorted by load. For a request there is one cost
per class and length of prefix. They are tried from the cheapest on, and the search ends when a cost and the least load
together are no better than the eighth best found.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, log
from operator import itemgetter
from typing import NamedTuple

from moonpool.cost import Speeds
from moonpool.frozen import frozen
from services.conductor.core.sets import members

SHORTLIST = 8
"""Instances that a search finds; they are then compared by their own speeds."""
JOIN, LEAVE = 0.5, 0.75
"""An instance joins a class whose middle is at most half a class width from each of its speeds, and leaves it at three
quarters. In between it stays, so that a speed at a border does not move it with every report."""
FEW = 24
"""A set of so few instances is enumerated instead of walking its class in order."""

Levels = tuple[float | None, ...]


@frozen
class ClassKey:
    """What members of a class have in common. `levels`: its middle, in logarithms of typical times; None for 0."""

    levels: Levels
    stages: int = 1
    step_tokens: int = 0

    @property
    def kind(self) -> tuple[int, int]:
        """What must be equal."""
        return self.stages, self.step_tokens

    def distance(self, levels: Levels) -> float:
        """The largest distance from the middle, in class widths."""
        pairs = zip(self.levels, levels, strict=True)
        return max([0.0 if a is b else inf if a is None or b is None else abs(a - b) for a, b in pairs])


@dataclass(slots=True)
class RankClass:
    """Instances of about equal speed; `speeds` are those of the first, its middle, and stand for all in a search."""

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
        self._speeds: dict[int, tuple[Speeds, Sequence[float]]] = {}  # by which each was put into its class
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
        if before is not None and self._speeds[slot][0] is speeds:
            self.move(slot, load, turn)
            return
        seconds = self._typical(speeds)
        if before is not None and self._speeds[slot][1] == seconds:
            self._speeds[slot] = speeds, seconds
            self.move(slot, load, turn)
            return
        levels = tuple([log(it) / self._log_width if it > 0.0 else None for it in seconds])
        key = before[0].key if before is not None else None
        if key is not None and key.kind == (stages, step_tokens) and key.distance(levels) <= LEAVE:
            self.move(slot, load, turn)
        else:
            if before is not None:
                self.remove(slot)
            found = self._class_for(ClassKey(levels, stages, step_tokens), speeds)
            found.mask |= 1 << slot
            self.mask |= 1 << slot
            place = Place(load(found.speeds), turn, name, slot)
            insort(found.order, place)
            self._of[slot] = found, place
        self._speeds[slot] = speeds, seconds

    def _class_for(self, key: ClassKey, speeds: Speeds) -> RankClass:
        """The nearest class that an instance may join, or a new one."""
        alike = [one for one in self._classes.values() if one.key.kind == key.kind]
        nearest = min(alike, key=lambda one: one.key.distance(key.levels), default=None)
        if nearest is None or nearest.key.distance(key.levels) > JOIN:
            nearest = self._classes[key] = RankClass(key, speeds)
        return nearest

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
        worst_s = inf
        for seconds, blocks, found, mask in self._groups(allowed & self.mask, prefixes, cost):
            if seconds + wait(found.order[0].load) > worst_s:
                continue
            # A few slots are looked at each. In a class's order the rest cannot be better once one is not.
            few = mask.bit_count() <= FEW
            for place in [self._of[slot][1] for slot in members(mask)] if few else found.order:
                if not (few or mask >> place.slot & 1) or not (fits is None or fits(place.slot)):
                    continue
                one = Found(seconds + wait(place.load), place, blocks)
                if one.seconds <= worst_s and (len(best) < limit or one < best[-1]):
                    insort(best, one)
                    del best[limit:]
                    worst_s = best[-1].seconds if len(best) == limit else inf
                elif not few:
                    break
        return best

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
        groups.sort(key=itemgetter(0))
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

    def stages(self, slot: int) -> int:
        """Stages of an instance's pipeline."""
        return self._of[slot][0].key.stages

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
