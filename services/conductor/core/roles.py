"""Whether an engine instance is to change its role, by the pressure of the two pools, with hysteresis.

The *pressure* of a pool is the work that is offered to it as a share of what it can do within the limits: the share of
the time for which prefill instances compute, and what waits there on top; the share of a decode step that its
sequences take, of that which a step at the TBT limit leaves them, or of its blocks if that is more. So it grows as one
over the number of instances, and what it will be after a change can be told.

An instance goes to the other pool when that one's pressure has been so many times as high (`ratio`) for `hold_s`, and
both pools are better off: the pool that gives one stays below its limit, and below what the other one had. Then
nothing is changed until the change is over and the pressures are known anew. An instance that drains and can change is
taken for a change under way, as another conductor may have ordered it. A pool that needs one more gets it after
`SETTLE_S`, the other way it takes `hold_s` again. Who has changed stays for `dwell_s`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp
from statistics import fmean

from moonpool.frozen import frozen
from moonpool.scheduling.latency import decode_step_seconds
from moonpool.scheduling.state_machine import digest_of
from services.conductor.core.decode_pool import DecodeInstanceState, DecodePool, load_now
from services.conductor.core.events import Action, ChangeRole
from services.conductor.core.instances import InstanceFacts, InstanceKind
from services.conductor.core.prefill_pool import PrefillInstanceState, PrefillPool

SAMPLE_S = 1.0
"""Pressures are looked at so often, when instances report."""


MEMORY_S = 30.0
"""A pressure is a mean over about so many seconds."""


MIN_PRESSURE = 0.5
"""A pool that is less than half used needs no help, however much less the other one is."""


SETTLE_S = 40.0
"""From a change's end to the next one to the same pool."""


CHANGE_S = 180.0
"""A change that has not ended after so long is not waited for any more."""


OTHER_ROLE = {InstanceKind.PREFILL: InstanceKind.DECODE, InstanceKind.DECODE: InstanceKind.PREFILL}


@frozen
class RoleLimits:
    """When roles change.

    Attributes:
        swap: they change at all without being told.
        ttft_s: so much waiting work counts as much as a pool that is busy all the time.
        tbt_s: the step of a decode instance that is full.
        ratio, hold_s, dwell_s: see above.
    """

    swap: bool = False
    ttft_s: float = 10.0
    tbt_s: float = 0.1
    ratio: float = 1.5
    hold_s: float = 60.0
    dwell_s: float = 300.0


FIXED_ROLES = RoleLimits()


@dataclass(slots=True)
class RoleChange:
    """An instance is on its way to another pool."""

    instance: str
    kind: InstanceKind
    since: float


@dataclass(slots=True)
class PoolPressure:
    """Of one pool, as a running mean; `since` when it began to be so much higher than the other's."""

    value: float = 0.0
    since: float | None = None


@dataclass(slots=True)
class RoleBalancer:
    """Decides about roles.

    Args:
        limits: when.
        prefills, decodes: the pools.
    """

    limits: RoleLimits
    prefills: PrefillPool
    decodes: DecodePool
    change: RoleChange | None = None
    """What is under way."""
    pressures: dict[InstanceKind, PoolPressure] = field(
        default_factory=lambda: {kind: PoolPressure() for kind in OTHER_ROLE}
    )
    _stays_until: dict[str, float] = field(default_factory=dict)
    _hung: set[str] = field(default_factory=set)
    """Instances that drain, but their changes have not ended in time."""
    _sampled_at: float | None = None

    def order(self, now: float, instance: str, out: list[Action]) -> None:
        """An instance is told to change its role, whatever the pressures are; unknown ones are fine."""
        place: PrefillInstanceState | DecodeInstanceState | None = self.prefills.get(instance) or self.decodes.get(
            instance
        )
        if place is not None:
            kind = OTHER_ROLE[place.facts.kind]
            self.change = RoleChange(instance, kind, now)
            self._anew()
            out.append(ChangeRole(instance, place.facts.incarnation, kind))

    def joined(self, now: float, facts: InstanceFacts) -> None:
        """An instance has joined: perhaps the one that has changed."""
        if self.change is not None and facts.kind is self.change.kind:
            self.change = None
            self._stays_until = {name: until for name, until in self._stays_until.items() if until > now}
            self._stays_until[facts.id] = now + self.limits.dwell_s
            self._anew()
            self.pressures[facts.kind].since = now + min(SETTLE_S - self.limits.hold_s, 0.0)

    def look(self, now: float, out: list[Action]) -> None:
        """An instance has reported: perhaps one is to change its role."""
        if not self.limits.swap or (self._sampled_at is not None and now - self._sampled_at < SAMPLE_S):
            return
        self._sample(now)
        if self._under_way(now):
            return
        for kind, pressure in self.pressures.items():
            if pressure.since is not None and now - pressure.since >= self.limits.hold_s:
                chosen = self._chosen(OTHER_ROLE[kind], now)
                if chosen is not None:
                    self.order(now, chosen, out)
                    return

    def _under_way(self, now: float) -> bool:
        """Whether a change is waited for: one of ours, or one that another conductor seems to have ordered."""
        pools: tuple[Iterable[PrefillInstanceState | DecodeInstanceState], ...] = self.prefills, self.decodes
        drain = {
            it.facts.id: it.facts.kind for pool in pools for it in pool if it.facts.switches_role and it.load.draining
        }
        if self.change is not None and now - self.change.since >= CHANGE_S:
            self._hung.add(self.change.instance)
            self.change = None
        self._hung.intersection_update(drain)
        if self.change is None and (new := drain.keys() - self._hung):
            instance = min(new)
            self.change = RoleChange(instance, OTHER_ROLE[drain[instance]], now)
            self._anew()
        return self.change is not None

    def _sample(self, now: float) -> None:
        """Takes the pressures of now into the means, and notes since when one pool is in need."""
        share = 1.0 if self._sampled_at is None else 1.0 - exp((self._sampled_at - now) / MEMORY_S)
        self._sampled_at = now
        for kind, value in (
            (InstanceKind.PREFILL, self._prefill_pressure(now)),
            (InstanceKind.DECODE, self._decode_pressure()),
        ):
            pressure = self.pressures[kind]
            pressure.value += (value - pressure.value) * share
        for kind, pressure in self.pressures.items():
            if not self._in_need(kind):
                pressure.since = None
            elif pressure.since is None:
                pressure.since = now

    def _in_need(self, kind: InstanceKind) -> bool:
        """Whether a pool needs an instance more than the other one, which can give it."""
        needs, gives = self.pressures[kind].value, self.pressures[OTHER_ROLE[kind]].value
        givers = len(self._usable(OTHER_ROLE[kind]))
        if needs < MIN_PRESSURE or needs < self.limits.ratio * gives or givers < 2:
            return False
        return gives * givers / (givers - 1) < min(1.0, needs)

    def _prefill_pressure(self, now: float) -> float:
        pool = [one for one in self.prefills if not one.load.draining]
        return fmean([self._busy(one, now) for one in pool]) if pool else 0.0

    def _busy(self, one: PrefillInstanceState, now: float) -> float:
        waiting_s = max(0.0, one.free_at - now)
        return 0.0 if not waiting_s else 1.0 + waiting_s / self.limits.ttft_s

    def _decode_pressure(self) -> float:
        pool = [one for one in self.decodes if not one.load.draining]
        return fmean([self._crowded(one) for one in pool]) if pool else 0.0

    def _crowded(self, one: DecodeInstanceState) -> float:
        now, base_s = load_now(one), one.speeds.decode_base_s
        step_s = decode_step_seconds(one.speeds, now.sequences, now.context_tokens)
        at_limit = max(1.0 - base_s / self.limits.tbt_s, 0.1)
        # What is promised is not in use: prompts that wait for prefill would make decode seem full.
        used = 1.0 - (one.load.free_blocks + one.load.cached_blocks) / one.facts.total_blocks
        return max((1.0 - base_s / step_s) / at_limit if step_s else 0.0, used)

    def _chosen(self, kind: InstanceKind, now: float) -> str | None:
        """The instance of a pool that has least to do, of those that can change and have stayed long enough."""
        able = [
            one
            for one in self._usable(kind)
            if one.facts.switches_role and self._stays_until.get(one.facts.id, now) <= now
        ]
        return min(able, key=lambda one: (_work(one, now), one.facts.id)).facts.id if able else None

    def _usable(self, kind: InstanceKind) -> list[PrefillInstanceState | DecodeInstanceState]:
        pool: Iterable[PrefillInstanceState | DecodeInstanceState] = (
            self.prefills if kind is InstanceKind.PREFILL else self.decodes
        )
        return [one for one in pool if not one.load.draining]

    def _anew(self) -> None:
        for pressure in self.pressures.values():
            pressure.since = None

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self.change, self.pressures, self._stays_until, self._hung, self._sampled_at)


def _work(one: PrefillInstanceState | DecodeInstanceState, now: float) -> float:
    """Seconds of queue, or sequences."""
    return max(0.0, one.free_at - now) if isinstance(one, PrefillInstanceState) else float(one.sequences)
