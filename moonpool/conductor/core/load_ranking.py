"""Instances by speed and load: finds the best without looking at all."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, log
from operator import itemgetter
from typing import NamedTuple

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.placement.base import RankedInstance, make

SHORTLIST = 8
"""Instances found by a search; they are then compared by their own speeds."""
CLASS_JOIN, CLASS_LEAVE = 0.5, 0.75
"""Distances, in class widths, at which an instance joins a speed class and leaves the class.

In between the instance stays, so that a speed at a border does not move the instance with every report.
"""
ENUMERATE_UP_TO = 24
"""A set with at most this many instances is enumerated instead of walking the class in order."""
SpeedLevels = tuple[float | None, ...]


class LoadRanking:
    """All instances with the same role.

    Args:
        width: ratio of speeds within one class.
        typical: seconds by which speeds are compared.
    """

    def __init__(self, width: float, typical: Callable[[Speeds], Sequence[float]]) -> None:
        self._log_width = log(width)
        self._typical = typical
        self._classes: dict[SpeedClassKey, SpeedClass] = {}
        self._of: dict[int, tuple[SpeedClass, RankedInstance]] = {}
        self._speeds: dict[int, tuple[Speeds, Sequence[float]]] = {}  # by which each was put into a class
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
        max_num_batched_tokens: int = 0,
    ) -> None:
        """Add an instance, or rank one anew. `load` computes the load at the class's speeds."""
        before = self._of.get(slot)
        if before is not None and self._speeds[slot][0] is speeds:
            self.move(slot, load, turn)
            return
        seconds = self._typical(speeds)
        if before is not None and self._speeds[slot][1] == seconds:
            self._speeds[slot] = speeds, seconds
            self.move(slot, load, turn)
            return
        levels = tuple([log(typical_s) / self._log_width if typical_s > 0.0 else None for typical_s in seconds])
        key = before[0].key if before is not None else None
        if key is not None and key.kind == (stages, max_num_batched_tokens) and key.distance(levels) <= CLASS_LEAVE:
            self.move(slot, load, turn)
        else:
            if before is not None:
                self.remove(slot)
            found = self._class_for(SpeedClassKey(levels, stages, max_num_batched_tokens), speeds)
            found.mask |= 1 << slot
            self.mask |= 1 << slot
            place = RankedInstance(load(found.speeds), turn, name, slot)
            insort(found.order, place)
            self._of[slot] = found, place
        self._speeds[slot] = speeds, seconds

    def _class_for(self, key: SpeedClassKey, speeds: Speeds) -> SpeedClass:
        """Return the nearest class that an instance may join, or a new one."""
        alike = [found for found in self._classes.values() if found.key.kind == key.kind]
        nearest = min(alike, key=lambda found: found.key.distance(key.levels), default=None)
        if nearest is None or nearest.key.distance(key.levels) > CLASS_JOIN:
            nearest = self._classes[key] = SpeedClass(key, speeds)
        return nearest

    def move(self, slot: int, load: Callable[[Speeds], float], turn: int) -> None:
        """Rank an instance anew after the load has changed."""
        found, before = self._of[slot]
        place = make(RankedInstance, (load(found.speeds), turn, before.name, slot))
        if place != before:
            del found.order[bisect_left(found.order, before)]
            insort(found.order, place)
            self._of[slot] = found, place

    def remove(self, slot: int) -> None:
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
        cost: Callable[[SpeedClass, int], float],
        wait: Callable[[float], float],
        limit: int = SHORTLIST,
        fits: Callable[[int], bool] | None = None,
    ) -> list[RankedMatch]:
        """Return the best instances, best first: by seconds, then by rank.

        Args:
            allowed: mask of the instances that may be chosen.
            prefixes: (blocks, mask) as `BlockTrie.match` gives them.
            cost: seconds for the request on an idle member of a class, with that many leading blocks there.
            wait: seconds that an instance's load adds; must not fall when load grows.
            limit: so many at most.
            fits: whether a slot may be chosen; None = every allowed slot.
        """
        best: list[RankedMatch] = []
        worst_s = inf
        for least_s, seconds, blocks, found, mask in self._groups(allowed & self.mask, prefixes, cost, wait):
            if least_s > worst_s:
                break
            # A few slots are looked at each. In a class's order the rest cannot be better once one is not.
            few = mask.bit_count() <= ENUMERATE_UP_TO
            for place in [self._of[slot][1] for slot in slots_in(mask)] if few else found.order:
                if not (few or mask >> place.slot & 1) or not (fits is None or fits(place.slot)):
                    continue
                one_s = seconds + wait(place.load)
                if one_s <= worst_s:
                    match = make(RankedMatch, (one_s, place, blocks))
                    if len(best) < limit or match < best[-1]:
                        insort(best, match)
                        del best[limit:]
                        worst_s = best[-1].seconds if len(best) == limit else inf
                        continue
                if not few:
                    break
        return best

    def _groups(
        self,
        allowed: int,
        prefixes: Sequence[tuple[int, int]],
        cost: Callable[[SpeedClass, int], float],
        wait: Callable[[float], float],
    ) -> list[tuple[float, float, int, SpeedClass, int]]:
        """Return the groups by class and length of prefix that some allowed instance has.

        A group is (least seconds with the wait at the class's freest, seconds, blocks, class, mask), least ones first.
        """
        exact: list[tuple[int, int]] = []
        for blocks, mask in reversed(prefixes):
            if here := mask & allowed:
                exact.append((blocks, here))
                allowed ^= here
        if allowed:
            exact.append((0, allowed))
        groups = []
        for found in self._classes.values():
            wait_s, members = wait(found.order[0].load), found.mask
            for blocks, mask in exact:
                if here := mask & members:
                    seconds = cost(found, blocks)
                    groups.append((seconds + wait_s, seconds, blocks, found, here))
        groups.sort(key=itemgetter(0))
        return groups

    def levels(self, slot: int) -> SpeedLevels:
        """Return the levels of an instance's class."""
        return self._of[slot][0].key.levels

    def place(self, slot: int) -> RankedInstance:
        """Return an instance's rank within the class."""
        return self._of[slot][1]

    def class_speeds(self, slot: int) -> Speeds:
        """Return the speeds that stand for an instance's class."""
        return self._of[slot][0].speeds

    def stages(self, slot: int) -> int:
        """Return the stages of an instance's pipeline."""
        return self._of[slot][0].key.stages

    def check_invariants(self) -> None:
        """Assert that classes, orders and masks agree."""
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


class RankedMatch(NamedTuple):
    """A result of a search: predicted seconds by the class, the rank, and the prefix in blocks."""

    seconds: float
    place: RankedInstance
    blocks: int


@dataclass(slots=True)
class SpeedClass:
    """Instances of about equal speed; `speeds` are the first member's and stand for all members in a search."""

    key: SpeedClassKey
    speeds: Speeds
    mask: int = 0
    order: list[RankedInstance] = field(default_factory=list)


@frozen
class SpeedClassKey:
    """What members of a class have in common.

    `levels`: the class's middle, as logarithms of typical times; None for 0.
    """

    levels: SpeedLevels
    stages: int = 1
    max_num_batched_tokens: int = 0

    @property
    def kind(self) -> tuple[int, int]:
        """What must be equal."""
        return self.stages, self.max_num_batched_tokens

    def distance(self, levels: SpeedLevels) -> float:
        """Return the largest distance from the middle, in class widths."""
        pairs = zip(self.levels, levels, strict=True)
        return max([0.0 if a is b else inf if a is None or b is None else abs(a - b) for a, b in pairs])
