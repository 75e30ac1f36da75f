"""Instances as the conductor knows them: facts, load reports, health, and pools ranked by load."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf, log
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.latency_model import KVShape
from moonpool.conductor.core.prefix_index import slots_in
from moonpool.conductor.core.tenant_activity import ConductorActivity
from moonpool.conductor.placement.base import RankedInstance, make


class InstanceKind(Enum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"


@frozen
class InstanceFacts:
    """An instance's facts on joining.

    Attributes:
        id: stable name.
        epoch: changes at every start.
        kind: the instance's kind.
        total_blocks: blocks in the pool.
        shape: an engine's KV shape; None for a kvstore.
        speeds: first ones.
        stages: a prefill instance's pipeline stages; so many steps overlap.
        max_num_batched_tokens: a prefill step computes at most; 0 = a whole prompt.
        capacity_bytes: a kvstore's capacity; 0 = not known.
        either: an engine that comes back in the other role on order.
        reports_ssd: a kvstore that reports which blocks are on SSD only.
        kv_domain: KV goes only to and comes only from instances in this domain. Kvstores are in the domain "".
        unsupported: sampling options that the instance lacks.
        loras: options of the LoRA adapters (`lora_option`) that the instance serves if it lacks LORA.
        uses_kvstores: an engine in a domain that reads and writes kvstores by itself.
        arrival_order: a prefill instance that computes prompts as they come, whatever their place in the queue.
    """

    id: str
    epoch: int
    kind: InstanceKind
    total_blocks: int
    shape: KVShape | None = None
    speeds: Speeds = field(default_factory=Speeds)
    stages: int = 1
    max_num_batched_tokens: int = 0
    capacity_bytes: int = 0
    switches_role: bool = False
    reports_ssd: bool = False
    kv_domain: str = ""
    unsupported: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    uses_kvstores: bool = False
    arrival_order: bool = False

    def lacks(self, option: str) -> bool:
        """Whether the instance cannot serve requests with an option of a request."""
        return option.partition(":")[0] in self.unsupported and option not in self.loras

    @property
    def loads(self) -> bool:
        """Whether the instance loads prefixes that it lacks."""
        return not self.kv_domain or self.uses_kvstores


@frozen
class LoadFacts:
    """A load report.

    Attributes:
        running, waiting: requests, or sessions of a kvstore.
        free_blocks, cached_blocks, promised_blocks: of the pool; `promised_blocks` are free or cached and spoken for.
        context_tokens: total over all running sequences (decode).
        drain_s: predicted seconds of the queue (prefill); None = not reported.
        speeds: measured; None = as before.
        draining: takes no new requests.
        taken: prompts or promises so far: numbers up to `taken` are included (`ClusterView.acknowledged`).
        answer_tokens: expected length of a new answer, for which memory is kept (decode); 0 = not reported.
        queued_tokens: prompt tokens without KV (prefill).
        conductors: to which the instance reports; 0 = not told.
        activities: what other conductors have told the instance of their tenants.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    promised_blocks: int = 0
    context_tokens: int = 0
    drain_s: float | None = None
    speeds: Speeds | None = None
    draining: bool = False
    taken: int = 0
    answer_tokens: int = 0
    queued_tokens: int = 0
    conductors: int = 0
    activities: tuple[ConductorActivity, ...] = ()


MIN_REPORTS = 20
"""Reports with new speeds, about five seconds of work, before an instance is judged.

Speeds at joining are from few steps, or from a profile, and may be far off.
"""
SLOW_HOLD_S = 0.75
"""Seconds for which an instance must seem slow: a moment is no failure."""
MIN_SLOWDOWN_S = 0.05
"""Least seconds by which the typical work must take longer: very short work is easily many times slower."""
FOLLOW_SLOWER_S, FOLLOW_FASTER_S = 1800.0, 10.0
"""Seconds within which the usual speed follows the reported one, if that is slower or faster."""
RECOVERED_SHARE = 0.5
"""Share of the slow factor below which a slow instance has recovered."""
FIRST_TRIAL_S, LAST_TRIAL_S = 5.0, 60.0
"""Seconds until a slow instance gets a first trial, and at most; they double with each failed trial."""
TRIAL_S = 2.0
"""Seconds from a trial's first measurement to the verdict: the first measurements count little."""


@dataclass(slots=True)
class HealthMonitor:
    """Judges whether one instance is slow.

    Attributes:
        slow: the instance gets no new requests, except for a trial.
        trial: the instance gets one request.
        usual_s: seconds that the typical work usually takes.
        healthy_speeds: last reported speeds while the instance was not slow.
        reported_s: seconds of the typical work by the last report.
        reports: reports with new speeds so far.
    """

    slow: bool = False
    trial: bool = False
    usual_s: float = 0.0
    healthy_speeds: Speeds | None = None
    reported_s: float = 0.0
    reports: int = 0
    _at: float = 0.0
    _odd_since: float | None = None
    _trial_at: float = 0.0
    _pause_s: float = FIRST_TRIAL_S
    _measured_at: float | None = None

    def report(self, speeds: Speeds, seconds: float, now: float, factor: float, *, idle: bool) -> Speeds:
        """Takes a report.

        Args:
            speeds: as the instance reports them.
            seconds: seconds for the typical work at these speeds.
            now: seconds.
            factor: an instance this many times slower than usual is slow; 0 = no instance is.
            idle: no work is there.

        Returns:
            The speeds to predict with.
        """
        measured, self.reported_s = seconds != self.reported_s, seconds
        self.reports += measured
        if self.reports <= MIN_REPORTS or not factor:
            self.usual_s, self.healthy_speeds, self._at = seconds, speeds, now
            return speeds
        if not self.slow:
            self._look(speeds, seconds, now, factor)
        elif self._is_well(seconds, factor):
            self.slow = self.trial = False
            self.healthy_speeds, self._odd_since, self._pause_s = speeds, None, FIRST_TRIAL_S
        elif self.trial:
            return self._on_trial(speeds, now, measured=measured)
        elif idle and now >= self._trial_at:
            self.trial, self._measured_at = True, None
            return self.healthy_speeds or speeds
        self._follow(seconds, now)
        return speeds

    def _look(self, speeds: Speeds, seconds: float, now: float, factor: float) -> None:
        if seconds < factor * self.usual_s or seconds < self.usual_s + MIN_SLOWDOWN_S:
            self._odd_since = None
            if self._is_well(seconds, factor):
                self.healthy_speeds = speeds
        elif self._odd_since is None:
            self._odd_since = now
        elif now - self._odd_since >= SLOW_HOLD_S:
            self._found_slow(now)

    def _on_trial(self, speeds: Speeds, now: float, *, measured: bool) -> Speeds:
        if self._measured_at is None:
            if not measured:
                return self.healthy_speeds or speeds
            self._measured_at = now
        if now - self._measured_at >= TRIAL_S:
            self._pause_s = min(2 * self._pause_s, LAST_TRIAL_S)
            self._found_slow(now)
        return speeds

    def _found_slow(self, now: float) -> None:
        self.slow, self.trial, self._trial_at = True, False, now + self._pause_s

    def _is_well(self, seconds: float, factor: float) -> bool:
        return seconds <= max(RECOVERED_SHARE * factor, 1.0) * self.usual_s

    def _follow(self, seconds: float, now: float) -> None:
        within_s = FOLLOW_SLOWER_S if seconds > self.usual_s else FOLLOW_FASTER_S
        self.usual_s += (seconds - self.usual_s) * min(1.0, (now - self._at) / within_s)
        self._at = now


SHORTLIST = 8
"""Instances found by a search; they are then compared by their own speeds."""
CLASS_JOIN, CLASS_LEAVE = 0.5, 0.75
"""Distances, in class widths, at which an instance joins a speed class and leaves the class.

In between the instance stays, so that a speed at a border does not move the instance with every report.
"""
ENUMERATE_UP_TO = 24
"""A set with at most this many instances is enumerated instead of walking the class in order."""
SpeedLevels = tuple[float | None, ...]


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
        """The largest distance from the middle, in class widths."""
        pairs = zip(self.levels, levels, strict=True)
        return max([0.0 if a is b else inf if a is None or b is None else abs(a - b) for a, b in pairs])


@dataclass(slots=True)
class SpeedClass:
    """Instances of about equal speed; `speeds` are the first member's and stand for all members in a search."""

    key: SpeedClassKey
    speeds: Speeds
    mask: int = 0
    order: list[RankedInstance] = field(default_factory=list)


class RankedMatch(NamedTuple):
    """A result of a search: predicted seconds by the class, the rank, and the prefix in blocks."""

    seconds: float
    place: RankedInstance
    blocks: int


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
        """Adds an instance, or ranks one anew. `load` computes the load at the class's speeds."""
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
        """The nearest class that an instance may join, or a new one."""
        alike = [one for one in self._classes.values() if one.key.kind == key.kind]
        nearest = min(alike, key=lambda one: one.key.distance(key.levels), default=None)
        if nearest is None or nearest.key.distance(key.levels) > CLASS_JOIN:
            nearest = self._classes[key] = SpeedClass(key, speeds)
        return nearest

    def move(self, slot: int, load: Callable[[Speeds], float], turn: int) -> None:
        """Ranks an instance anew after the load has changed."""
        found, before = self._of[slot]
        place = make(RankedInstance, (load(found.speeds), turn, before.name, slot))
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
        cost: Callable[[SpeedClass, int], float],
        wait: Callable[[float], float],
        limit: int = SHORTLIST,
        fits: Callable[[int], bool] | None = None,
    ) -> list[RankedMatch]:
        """The best instances, best first: by seconds, then by rank.

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
                    one = make(RankedMatch, (one_s, place, blocks))
                    if len(best) < limit or one < best[-1]:
                        insort(best, one)
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
        """Groups by class and length of prefix that some allowed instance has.

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
        """The levels of an instance's class."""
        return self._of[slot][0].key.levels

    def place(self, slot: int) -> RankedInstance:
        """An instance's rank within the class."""
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
    def facts(self) -> InstanceFacts:
        """The instance's facts."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a request of this conductor is there."""
        ...


I = TypeVar("I", bound=PoolInstance)  # noqa: E741
K = TypeVar("K")


class InstancePool(Generic[I]):
    """Instances with the same role; `rank` of the subclass keeps the ranks.

    Attributes:
        ranks: their order.
        by_slot: instance at each slot.
        draining_mask: mask of instances that take nothing new.
        slow_mask: mask of slow instances, which get nothing new while others are there (`HealthMonitor`).
        largest_blocks: largest pool that was ever here, blocks.
    """

    def __init__(self, ranks: LoadRanking) -> None:
        self.ranks = ranks
        self.by_slot: dict[int, I] = {}
        self.draining_mask = self.slow_mask = self._tried = 0
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
        _add_bit(self._by_size, blocks, bit)
        _add_bit(self._by_domain, instance.facts.kv_domain, bit)
        for option in instance.facts.unsupported:
            _add_bit(self._lacking, option, bit)
        for option in instance.facts.loras:
            _add_bit(self._with_lora, option, bit)
        self.largest_blocks = max(self.largest_blocks, blocks)
        if not instance.turn:
            self._unproven[instance.facts.id] = self._turn
        self.changed(instance)

    def remove(self, instance: I) -> None:
        """Takes an instance out."""
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
        self._tried &= ~bit
        self.ranks.remove(instance.slot)

    def changed(self, instance: I) -> None:
        """Notes that load or speeds of an instance have changed."""
        bit = 1 << instance.slot
        self.draining_mask = self.draining_mask | bit if instance.load.draining else self.draining_mask & ~bit
        tried = instance.health.trial and not instance.busy
        self._tried = self._tried | bit if tried else self._tried & ~bit
        self.slow_mask = self.slow_mask | bit if instance.health.slow and not tried else self.slow_mask & ~bit
        self.rank(instance)

    def chose(self, instance: I) -> None:
        """Notes that a request goes to an instance."""
        self._turn += 1
        instance.turn = self._turn
        self._unproven.pop(instance.facts.id, None)
        self.changed(instance)

    def optimism_factor(self, instance: I) -> float:
        """Factor on an instance's predicted seconds: below 1 if others served much and the instance nothing.

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
        instance = next((one for one in unproven if allowed >> one.slot & 1), None)
        return instance.slot if instance is not None and self.optimism_factor(instance) < 1.0 else None

    def move(self, instance: I, slot: int) -> None:
        """Gives an instance another slot."""
        self.remove(instance)
        instance.slot = slot
        self.add(instance)

    @property
    def domains(self) -> Iterable[str]:
        """KV domains of the instances."""
        return self._by_domain

    def domain_mask(self, domain: str) -> int:
        """Mask of the instances in a KV domain."""
        return self._by_domain.get(domain, 0)

    def lacking_mask(self, needs: Iterable[str]) -> int:
        """Mask of the instances that lack one of these sampling options."""
        mask = 0
        for option in needs:
            mask |= self._without(option)
        return mask

    def nobody_has(self, needs: Iterable[str]) -> str:
        """The first of these sampling options that no instance has; "" = there is none."""
        return next((option for option in needs if self.mask and self._without(option) == self.mask), "")

    def _without(self, option: str) -> int:
        """Mask of the instances that lack an option of a request."""
        return self._lacking.get(option.partition(":")[0], 0) & ~self._with_lora.get(option, 0)

    def eligible_mask(self, blocks: int, needs: Iterable[str] = (), within: int = ~0) -> int:
        """Mask of the instances that take a request.

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
        return mask & ~self.slow_mask or mask

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
        """Mask of the instances with these ids, as far as they are here."""
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
        assert self.draining_mask == sum(1 << i.slot for i in self._by_id.values() if i.load.draining)
        assert self.slow_mask & ~self.mask == 0
        assert all(self.by_slot[slot].health.slow for slot in slots_in(self.slow_mask))
        assert sum(self._by_size.values()) == sum(self._by_domain.values()) == self.mask
        for option, slots in self._lacking.items():
            assert slots == sum(1 << one.slot for one in self._by_id.values() if option in one.facts.unsupported)
        for option, slots in self._with_lora.items():
            assert slots == sum(1 << one.slot for one in self._by_id.values() if option in one.facts.loras)
        assert self._unproven.keys() == {name for name, one in self._by_id.items() if not one.turn}
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


def blocks_at(prefixes: Sequence[tuple[int, int]], slot: int) -> int:
    """Leading blocks that a slot holds, by the result of `BlockTrie.match`."""
    for blocks, mask in reversed(prefixes):  # the longest first
        if mask >> slot & 1:
            return blocks
    return 0
