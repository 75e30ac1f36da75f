"""A pool: all instances of a role, ranked."""

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.health_monitor import HealthMonitor
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.load_ranking import LoadRanking

K = TypeVar("K")
UNPROVEN_DOUBT = 0.25
"""How much less an unproven instance is taken to be slow with each request that goes elsewhere, per instance.

The instance was measured only at the start, perhaps at a bad moment. The first request measures the instance at work,
so a bad measurement costs the instance one request.
"""
TRIAL_FACTOR = 0.5
"""Factor on an instance's predicted seconds during a trial."""
STARVED_TURNS = 4
"""Requests that each other instance may get before an unproven instance counts as starved."""


class PoolInstance(Protocol):
    """What a pool needs to know of an instance."""

    slot: int
    load: LoadFacts
    turn: int
    health: HealthMonitor

    @property
    def facts(self) -> InstanceFacts: ...

    @property
    def busy(self) -> bool:
        """Whether a request of this conductor is there."""
        ...


I = TypeVar("I", bound=PoolInstance)  # noqa: E741


class InstancePool(Generic[I]):
    """Instances with the same role; `rank` of the subclass keeps the ranks.

    Attributes:
        ranks: their order.
        by_slot: instance at each slot.
        draining_mask: mask of instances that take nothing new.
        slow_mask: mask of slow instances, which get nothing new while others are there (`HealthMonitor`).
        both_mask: mask of decode instances that compute whole prompts, too: they are in both pools, at the same slot.
        largest_blocks: largest pool that was ever here, blocks.
    """

    def __init__(self, ranks: LoadRanking) -> None:
        self.ranks = ranks
        self.by_slot: dict[int, I] = {}
        self.draining_mask = self.slow_mask = self.both_mask = self._tried = 0
        self.largest_blocks = 0
        self._by_id: dict[str, I] = {}
        self._by_size: dict[int, int] = {}
        self._by_domain: dict[str, int] = {}
        self._lacking: dict[str, int] = {}  # by sampling option, mask of instances that lack the option
        self._with_lora: dict[str, int] = {}  # by option, mask of instances that have a LoRA adapter but no others
        self._turn = 0
        self._unproven: dict[str, int] = {}  # instances that served nothing yet, and the turn before which each joined

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[I]:
        return iter(self._by_id.values())

    @property
    def mask(self) -> int:
        return self.ranks.mask

    def rank(self, instance: I) -> None:
        """Rank an instance anew."""
        raise NotImplementedError

    def get(self, instance_id: str) -> I | None:
        return self._by_id.get(instance_id)

    def add(self, instance: I) -> None:
        blocks, bit = instance.facts.total_blocks, 1 << instance.slot
        self._by_id[instance.facts.id] = self.by_slot[instance.slot] = instance
        _add_bit(self._by_size, blocks, bit)
        _add_bit(self._by_domain, instance.facts.kv_domain, bit)
        for option in instance.facts.unsupported:
            _add_bit(self._lacking, option, bit)
        for option in instance.facts.loras:
            _add_bit(self._with_lora, option, bit)
        self.both_mask |= bit if instance.facts.computes_prompts else 0
        self.largest_blocks = max(self.largest_blocks, blocks)
        if not instance.turn:
            self._unproven[instance.facts.id] = self._turn
        self.changed(instance)

    def remove(self, instance: I) -> None:
        blocks, bit = instance.facts.total_blocks, 1 << instance.slot
        del self._by_id[instance.facts.id], self.by_slot[instance.slot]
        self._unproven.pop(instance.facts.id, None)
        _remove_bit(self._by_size, blocks, bit)
        _remove_bit(self._by_domain, instance.facts.kv_domain, bit)
        for option in instance.facts.unsupported:
            _remove_bit(self._lacking, option, bit)
        for option in instance.facts.loras:
            _remove_bit(self._with_lora, option, bit)
        self.draining_mask &= ~bit
        self.slow_mask &= ~bit
        self.both_mask &= ~bit
        self._tried &= ~bit
        self.ranks.remove(instance.slot)

    def changed(self, instance: I) -> None:
        """Note that load or speeds of an instance have changed."""
        bit = 1 << instance.slot
        self.draining_mask = self.draining_mask | bit if instance.load.draining else self.draining_mask & ~bit
        tried = instance.health.trial and not instance.busy
        self._tried = self._tried | bit if tried else self._tried & ~bit
        self.slow_mask = self.slow_mask | bit if instance.health.slow and not tried else self.slow_mask & ~bit
        self.rank(instance)

    def chose(self, instance: I) -> None:
        """Note that a request goes to an instance."""
        self._turn += 1
        instance.turn = self._turn
        self._unproven.pop(instance.facts.id, None)
        self.changed(instance)

    def optimism_factor(self, instance: I) -> float:
        """Return the factor on an instance's predicted seconds: below 1 if others served much and the instance nothing.

        Only use corrects the measurement from the start. So the more requests go elsewhere, the faster the instance is
        taken to be, until a request goes there. An instance on trial gets a request soon likewise.
        """
        if self._tried and self._tried >> instance.slot & 1:
            return TRIAL_FACTOR
        since = self._unproven.get(instance.facts.id) if self._unproven else None
        if since is None:
            return 1.0
        elsewhere = (self._turn - since) / len(self._by_id) - STARVED_TURNS
        return 1.0 / (1.0 + UNPROVEN_DOUBT * elsewhere) if elsewhere > 0.0 else 1.0

    def starved_slot(self, allowed: int) -> int | None:
        """Slot of an allowed instance that has starved or is on trial, which a search may not find; None = none."""
        if self._tried & allowed:
            return next(iter(slots_in(self._tried & allowed)))
        unproven = (self._by_id[name] for name in self._unproven)
        instance = next((instance for instance in unproven if allowed >> instance.slot & 1), None)
        return instance.slot if instance is not None and self.optimism_factor(instance) < 1.0 else None

    def move(self, instance: I, slot: int) -> None:
        """Give an instance another slot."""
        self.remove(instance)
        instance.slot = slot
        self.add(instance)

    @property
    def domains(self) -> Iterable[str]:
        return self._by_domain

    def domain_mask(self, domain: str) -> int:
        """Return the mask of the instances in a KV domain."""
        return self._by_domain.get(domain, 0)

    def lacking_mask(self, needs: Iterable[str]) -> int:
        """Return the mask of the instances that lack one of these sampling options."""
        mask = 0
        for option in needs:
            mask |= self._without(option)
        return mask

    def nobody_has(self, needs: Iterable[str]) -> str:
        """Return the first of these sampling options that no instance has; "" = there is none."""
        return next((option for option in needs if self.mask and self._without(option) == self.mask), "")

    def _without(self, option: str) -> int:
        """Return the mask of the instances that lack an option of a request."""
        return self._lacking.get(option.partition(":")[0], 0) & ~self._with_lora.get(option, 0)

    def eligible_mask(self, blocks: int, needs: Iterable[str] = (), within: int = ~0) -> int:
        """Return the mask of the instances that take a request.

        Slow instances are in the mask only if all are slow.

        Args:
            blocks: they have so many blocks or more.
            needs: sampling options that they have.
            within: mask of those that count.
        """
        mask = 0
        for size, slots in self._by_size.items():
            if size >= blocks:
                mask |= slots
        mask &= ~self.draining_mask & ~self.lacking_mask(needs) & within
        return mask & ~self.slow_mask or mask  # slow is better than nothing

    def should_drain(self, instance_id: str, leaving: int | None = None) -> bool:
        """Whether an instance is in the mask `leaving`, by default the slow ones, and another instance is healthy."""
        leaving = self.slow_mask if leaving is None else leaving
        instance = self._by_id.get(instance_id) if leaving else None
        if instance is None:
            return False
        bit = 1 << instance.slot
        others = self.mask & ~self.draining_mask & ~self.slow_mask & ~bit
        return bool(others) and bool(leaving & bit) and not instance.health.trial

    def mask_of(self, ids: Iterable[str]) -> int:
        """Return the mask of the instances with these ids, as far as they are here."""
        return sum([1 << self._by_id[name].slot for name in ids if name in self._by_id])

    def digest(self) -> bytes:
        classes = [(slot, self.ranks.levels(slot), self.ranks.class_speeds(slot)) for slot in self.by_slot]
        return digest_of(list(self._by_id.items()), classes, self.largest_blocks, self._turn, self._unproven)

    def check_invariants(self) -> None:
        """Assert that ids, slots, sizes and ranks agree."""
        self.ranks.check_invariants()
        assert self.by_slot == {instance.slot: instance for instance in self._by_id.values()}
        assert self.mask == sum(1 << slot for slot in self.by_slot)
        assert self.draining_mask == sum(1 << i.slot for i in self._by_id.values() if i.load.draining)
        assert self.slow_mask & ~self.mask == 0
        assert self.both_mask == sum(1 << i.slot for i in self._by_id.values() if i.facts.computes_prompts)
        assert all(self.by_slot[slot].health.slow for slot in slots_in(self.slow_mask))
        assert sum(self._by_size.values()) == sum(self._by_domain.values()) == self.mask
        for option, slots in self._lacking.items():
            assert slots == sum(
                1 << instance.slot for instance in self._by_id.values() if option in instance.facts.unsupported
            )
        for option, slots in self._with_lora.items():
            assert slots == sum(
                1 << instance.slot for instance in self._by_id.values() if option in instance.facts.loras
            )
        assert self._unproven.keys() == {name for name, instance in self._by_id.items() if not instance.turn}
        for instance_id, instance in self._by_id.items():
            assert instance.facts.id == instance_id
            assert self._by_size[instance.facts.total_blocks] >> instance.slot & 1
            assert self.largest_blocks >= instance.facts.total_blocks


def _add_bit(masks: dict[K, int], key: K, bit: int) -> None:
    masks[key] = masks.get(key, 0) | bit


def _remove_bit(masks: dict[K, int], key: K, bit: int) -> None:
    masks[key] &= ~bit
    if not masks[key]:
        del masks[key]
