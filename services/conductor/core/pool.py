"""Instances of one kind by id and by slot, and which of them can take a request of some size."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from moonpool.core.digest import digest_of
from services.conductor.core.facts import InstanceFacts, LoadFacts
from services.conductor.core.ranks import Ranks


class Seated(Protocol):
    """What a pool needs to know of an instance."""

    slot: int
    load: LoadFacts

    @property
    def facts(self) -> InstanceFacts:
        """Who it is."""
        ...


I = TypeVar("I", bound=Seated)  # noqa: E741


class Pool(Generic[I]):
    """Instances of one kind; `rank` of the subclass keeps the ranks.

    Attributes:
        ranks: their order.
        by_slot: instance at each slot.
        draining: mask of those that take nothing new.
        largest_blocks: of the largest pool that has ever been here.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.by_slot: dict[int, I] = {}
        self.draining = 0
        self.largest_blocks = 0
        self._by_id: dict[str, I] = {}
        self._by_size: dict[int, int] = {}

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
        self.changed(instance)

    def remove(self, instance: I) -> None:
        """Takes an instance out."""
        blocks, bit = instance.facts.total_blocks, 1 << instance.slot
        del self._by_id[instance.facts.id], self.by_slot[instance.slot]
        self._by_size[blocks] &= ~bit
        if not self._by_size[blocks]:
            del self._by_size[blocks]
        self.draining &= ~bit
        self.ranks.remove(instance.slot)

    def changed(self, instance: I) -> None:
        """Notes that load or speeds of an instance have changed."""
        bit = 1 << instance.slot
        self.draining = self.draining | bit if instance.load.draining else self.draining & ~bit
        self.rank(instance)

    def move(self, instance: I, slot: int) -> None:
        """Gives an instance another slot."""
        self.remove(instance)
        instance.slot = slot
        self.add(instance)

    def able(self, blocks: int) -> int:
        """Mask of the instances that take requests and have pools of so many blocks."""
        mask = 0
        for size, slots in self._by_size.items():
            if size >= blocks:
                mask |= slots
        return mask & ~self.draining

    def mask_of(self, ids: Iterable[str]) -> int:
        """Mask of those of these instances that are here."""
        return sum(1 << self._by_id[one].slot for one in ids if one in self._by_id)

    def digest(self) -> bytes:
        """Hash of the state."""
        classes = [(slot, self.ranks.levels(slot), self.ranks.class_speeds(slot)) for slot in self.by_slot]
        return digest_of(list(self._by_id.items()), classes, self.largest_blocks)

    def check_invariants(self) -> None:
        """Asserts that ids, slots, sizes and ranks agree."""
        self.ranks.check_invariants()
        assert self.by_slot == {instance.slot: instance for instance in self._by_id.values()}
        assert self.mask == sum(1 << slot for slot in self.by_slot)
        assert self.draining == sum(1 << i.slot for i in self._by_id.values() if i.load.draining)
        assert sum(self._by_size.values()) == self.mask
        for instance_id, instance in self._by_id.items():
            assert instance.facts.id == instance_id
            assert self._by_size[instance.facts.total_blocks] >> instance.slot & 1
            assert self.largest_blocks >= instance.facts.total_blocks


def blocks_at(prefixes: Sequence[tuple[int, int]], slot: int) -> int:
    """Leading blocks that a slot holds, by what `Forest.match` gives."""
    return max((blocks for blocks, mask in prefixes if mask >> slot & 1), default=0)
