"""Instances of one kind by id and by slot, and which of them can take a request of some size."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from moonpool.core.digest import digest_of
from services.conductor.core.facts import InstanceFacts, LoadFacts
from services.conductor.core.ranks import Ranks
from services.conductor.core.sets import members
from services.conductor.core.vigil import Vigil

DOUBT = 0.25
"""How much less is believed that an instance is slow which has served nothing, with each request that goes elsewhere,
counted per instance. Its speeds were measured at its start only, perhaps at a bad moment. Its first request has them
measured at work, so a bad measurement costs it one request."""
TRIED = 0.5
"""Factor of the predicted seconds of an instance that has its trial."""
TURNS = 4
"""So many times a request may go to each other instance before an instance counts as overlooked."""


class Pooled(Protocol):
    """What a pool needs to know of an instance."""

    slot: int
    load: LoadFacts
    turn: int
    vigil: Vigil

    @property
    def facts(self) -> InstanceFacts:
        """Who it is."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something that we have placed is there."""
        ...


I = TypeVar("I", bound=Pooled)  # noqa: E741


class Pool(Generic[I]):
    """Instances of one kind; `rank` of the subclass keeps the ranks.

    Attributes:
        ranks: their order.
        by_slot: instance at each slot.
        draining: mask of those that take nothing new.
        resting: mask of those that are slow and get nothing new where there are others (`Vigil`).
        largest_blocks: of the largest pool that has ever been here.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.by_slot: dict[int, I] = {}
        self.draining = self.resting = self._tried = 0
        self.largest_blocks = 0
        self._by_id: dict[str, I] = {}
        self._by_size: dict[int, int] = {}
        self._turn = 0
        self._unproven: dict[str, int] = {}  # those that served nothing yet, and the turn before which each joined

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[I]:
        """All, in order of joining."""
        return iter(self._by_id.values())

    @property
    def mask(self) -> int:
        """Slots of all."""
        return self.ranks.mask

    def rank(self, instance: I) -> None:
        """Ranks an instance anew."""
        raise NotImplementedError

    def get(self, instance_id: str) -> I | None:
        """The instance of that id."""
        return self._by_id.get(instance_id)

    def add(self, instance: I) -> None:
        """Takes an instance in."""
        blocks, bit = instance.facts.total_blocks, 1 << instance.slot
        self._by_id[instance.facts.id] = self.by_slot[instance.slot] = instance
        self._by_size[blocks] = self._by_size.get(blocks, 0) | bit
        self.largest_blocks = max(self.largest_blocks, blocks)
        if not instance.turn:
            self._unproven[instance.facts.id] = self._turn
        self.changed(instance)

    def remove(self, instance: I) -> None:
        """Takes an instance out."""
        blocks, bit = instance.facts.total_blocks, 1 << instance.slot
        del self._by_id[instance.facts.id], self.by_slot[instance.slot]
        self._unproven.pop(instance.facts.id, None)
        self._by_size[blocks] &= ~bit
        if not self._by_size[blocks]:
            del self._by_size[blocks]
        self.draining &= ~bit
        self.resting &= ~bit
        self._tried &= ~bit
        self.ranks.remove(instance.slot)

    def changed(self, instance: I) -> None:
        """Notes that load or speeds of an instance have changed."""
        bit = 1 << instance.slot
        self.draining = self.draining | bit if instance.load.draining else self.draining & ~bit
        tried = instance.vigil.trial and not instance.busy
        self._tried = self._tried | bit if tried else self._tried & ~bit
        self.resting = self.resting | bit if instance.vigil.slow and not tried else self.resting & ~bit
        self.rank(instance)

    def chose(self, instance: I) -> None:
        """Notes that a request goes to an instance."""
        self._turn += 1
        instance.turn = self._turn
        self._unproven.pop(instance.facts.id, None)
        self.changed(instance)

    def belief(self, instance: I) -> float:
        """Factor of an instance's predicted seconds: less than 1 when it has served nothing while others served much.

        Only use corrects what was measured at its start. So the more requests go elsewhere, the less is it believed
        that the instance is slow, until one goes there. Likewise one that has its trial gets a request soon.
        """
        if self._tried and self._tried >> instance.slot & 1:
            return TRIED
        since = self._unproven.get(instance.facts.id)
        if since is None:
            return 1.0
        elsewhere = (self._turn - since) / len(self._by_id) - TURNS
        return 1.0 / (1.0 + DOUBT * elsewhere) if elsewhere > 0.0 else 1.0

    def overlooked(self, allowed: int) -> int | None:
        """Slot of an allowed instance that others were preferred to for long, or that has its trial.

        A search may not find it.
        """
        if self._tried & allowed:
            return next(iter(members(self._tried & allowed)))
        unproven = (self._by_id[name] for name in self._unproven)
        instance = next((one for one in unproven if allowed >> one.slot & 1), None)
        return instance.slot if instance is not None and self.belief(instance) < 1.0 else None

    def move(self, instance: I, slot: int) -> None:
        """Gives an instance another slot."""
        self.remove(instance)
        instance.slot = slot
        self.add(instance)

    def able(self, blocks: int) -> int:
        """Mask of the instances that take requests and have pools of so many blocks; slow ones where all are."""
        mask = 0
        for size, slots in self._by_size.items():
            if size >= blocks:
                mask |= slots
        mask &= ~self.draining
        return mask & ~self.resting or mask

    def relieved(self, instance_id: str, leaving: int | None = None) -> bool:
        """Whether an instance is one of the mask `leaving`, by default the slow ones, and another one is well."""
        leaving = self.resting if leaving is None else leaving
        instance = self._by_id.get(instance_id) if leaving else None
        if instance is None:
            return False
        bit = 1 << instance.slot
        others = self.mask & ~self.draining & ~self.resting & ~bit
        return bool(others) and bool(leaving & bit) and not instance.vigil.trial

    def mask_of(self, ids: Iterable[str]) -> int:
        """Mask of those of these instances that are here."""
        return sum([1 << self._by_id[one].slot for one in ids if one in self._by_id])

    def digest(self) -> bytes:
        """Hash of the state."""
        classes = [(slot, self.ranks.levels(slot), self.ranks.class_speeds(slot)) for slot in self.by_slot]
        return digest_of(list(self._by_id.items()), classes, self.largest_blocks, self._turn, self._unproven)

    def check_invariants(self) -> None:
        """Asserts that ids, slots, sizes and ranks agree."""
        self.ranks.check_invariants()
        assert self.by_slot == {instance.slot: instance for instance in self._by_id.values()}
        assert self.mask == sum(1 << slot for slot in self.by_slot)
        assert self.draining == sum(1 << i.slot for i in self._by_id.values() if i.load.draining)
        assert self.resting & ~self.mask == 0
        assert all(self.by_slot[slot].vigil.slow for slot in members(self.resting))
        assert sum(self._by_size.values()) == self.mask
        assert self._unproven.keys() == {name for name, one in self._by_id.items() if not one.turn}
        for instance_id, instance in self._by_id.items():
            assert instance.facts.id == instance_id
            assert self._by_size[instance.facts.total_blocks] >> instance.slot & 1
            assert self.largest_blocks >= instance.facts.total_blocks


def blocks_at(prefixes: Sequence[tuple[int, int]], slot: int) -> int:
    """Leading blocks that a slot holds, by what `Forest.match` gives."""
    for blocks, mask in reversed(prefixes):  # the longest first
        if mask >> slot & 1:
            return blocks
    return 0
