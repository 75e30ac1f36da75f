"""Whether an engine instance changes roles, by the two pools' pressure, with hysteresis.

A pool's *pressure* is the offered work as a share of the pool's capacity within the limits. For prefill: the share of
time in which instances compute, plus the queue. For decode: sequences' share of the step time that the TBT limit
leaves, or the share of blocks in use if that is more. Pressure falls as one over the number of instances, so the
pressure after a change can be predicted.

An instance goes to the other pool if that pool's pressure has been `ratio` times as high for `hold_s`, and both pools
gain: the giving pool stays below the limit, and below the other pool's pressure before. Then nothing changes until the
change has ended and the pressures are known anew. A draining instance that can switch roles counts as a change under
way: another conductor may have ordered the change. A pool that needs a further instance gets one after `SETTLE_S`; a
change back takes `hold_s` again. An instance that has changed stays for `dwell_s`. Instances in the role both are in
neither pool here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp
from statistics import fmean

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.actions import Action, ChangeRole
from moonpool.conductor.core.decode_instance import DecodeInstanceState
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind
from moonpool.conductor.core.load_forecast import load_now
from moonpool.conductor.core.prefill_instance import PrefillInstanceState
from moonpool.conductor.core.prefill_pool import PrefillPool

SAMPLE_S = 1.0
"""Seconds between two samples of the pressures, which are taken when instances report."""
MEMORY_S = 30.0
"""Seconds over which a pressure is averaged."""
MIN_PRESSURE = 0.5
"""Least pressure of a pool that needs an instance: a pool less than half used needs none."""
QUEUE_S = 10.0
"""Seconds of waiting prefill work that count as much as a pool that computes all the time."""
STEP_S = 0.1
"""Seconds of a step at which a decode instance counts as fully loaded."""
RATIO = 1.5
"""The other pool's pressure must be this many times as high: a change costs a process start and the pool (ADR 30)."""
HOLD_S = 10.0
"""Seconds for which the pressure must have been that high: hysteresis, as is `RATIO` (ADR 30, 80)."""
DWELL_S = 20.0
"""Seconds for which an instance keeps a new role, so that roles do not swing."""
SETTLE_S = 5.0
"""Seconds from a change's end to the next change to the same pool."""
CHANGE_S = 180.0
"""Seconds after which a change by another process that has not ended is given up."""
IN_PLACE_S = 60.0
"""The same for a change within the process, which takes the drain alone."""
OTHER_ROLE = {InstanceKind.PREFILL: InstanceKind.DECODE, InstanceKind.DECODE: InstanceKind.PREFILL}


@dataclass(slots=True)
class RoleBalancer:
    """The decision which instance changes roles.

    Args:
        limits: when roles change.
        prefills, decodes: the pools.
    """

    limits: RoleLimits
    prefills: PrefillPool
    decodes: DecodePool
    change: RoleChange | None = None
    """The change under way; None = none is."""
    pressures: dict[InstanceKind, PoolPressure] = field(
        default_factory=lambda: {kind: PoolPressure() for kind in OTHER_ROLE}
    )
    _stays_until: dict[str, float] = field(default_factory=dict)
    _hung: set[str] = field(default_factory=set)
    """Instances that drain, and whose changes have not ended in time."""
    _sampled_at: float | None = None

    def order(self, now: float, instance: str, out: list[Action]) -> None:
        """Order an instance to change roles, whatever the pressures; unknown ids, and the role both, are fine."""
        place: PrefillInstanceState | DecodeInstanceState | None = self.prefills.get(instance) or self.decodes.get(
            instance
        )
        if place is not None and not place.facts.computes_prompts:
            kind = OTHER_ROLE[place.facts.kind]
            self.change = RoleChange(instance, kind, now, in_place=place.facts.in_place_role)
            self._restart_holds()
            out.append(ChangeRole(instance, place.facts.epoch, kind))

    def joined(self, now: float, facts: InstanceFacts) -> None:
        """An instance has joined, which may end the change under way."""
        if self.change is not None and self.change.is_ended_by(facts):
            self.change = None
            self._stays_until = {name: until for name, until in self._stays_until.items() if until > now}
            self._stays_until[facts.id] = now + self.limits.dwell_s
            self._restart_holds()
            self._foresee(facts.kind)
            # The need of this pool is proven: a further instance waits for the pressures to settle, not for all of
            # `hold_s`. The way back takes `hold_s`.
            self.pressures[facts.kind].since = now + min(SETTLE_S - self.limits.hold_s, 0.0)

    def _foresee(self, kind: InstanceKind) -> None:
        """Set the mean pressures to those with the instance that has come to a pool from the other one."""
        # The means remember the time before for longer than `SETTLE_S`: a further instance would follow for nothing.
        takes, gives = len(self._usable(kind)), len(self._usable(OTHER_ROLE[kind]))
        if takes > 1 and gives:
            self.pressures[kind].value *= (takes - 1) / takes
            self.pressures[OTHER_ROLE[kind]].value *= (gives + 1) / gives

    def load_reported(self, now: float, out: list[Action]) -> None:
        """An instance has reported: samples the pressures, and orders a change that pays."""
        if not self.limits.swap or (self._sampled_at is not None and now - self._sampled_at < SAMPLE_S):
            return
        self._sample(now)
        if self._under_way(now):
            return
        for kind, pressure in self.pressures.items():
            if pressure.since is not None and now - pressure.since >= self.limits.hold_s:
                chosen = self._pick(OTHER_ROLE[kind], now)
                if chosen is not None:
                    self.order(now, chosen, out)
                    return

    def _under_way(self, now: float) -> bool:
        """Return whether a change is under way, ordered by this conductor or, it seems, by another."""
        drain = {
            instance.facts.id: instance.facts
            for kind in OTHER_ROLE
            for instance in self._members(kind)
            if instance.facts.switches_role and instance.load.draining
        }
        # An instance that hangs on its way must not stop all later changes.
        if self.change is not None and now - self.change.since >= self.change.limit_s:
            self._hung.add(self.change.instance)
            self.change = None
        self._hung.intersection_update(drain)
        if self.change is None and (new := drain.keys() - self._hung):  # another conductor's order, or a person's
            facts = drain[min(new)]
            self.change = RoleChange(facts.id, OTHER_ROLE[facts.kind], now, in_place=facts.in_place_role)
            self._restart_holds()
        return self.change is not None

    def _sample(self, now: float) -> None:
        """Average the current pressures in, and note since when a pool is in need."""
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
        """Return whether a pool needs an instance more than the other pool, which can give one."""
        needs, gives = self.pressures[kind].value, self.pressures[OTHER_ROLE[kind]].value
        givers = len(self._usable(OTHER_ROLE[kind]))
        if needs < MIN_PRESSURE or needs < self.limits.ratio * gives or givers < 2:
            return False
        return gives * givers / (givers - 1) < min(1.0, needs)

    def _prefill_pressure(self, now: float) -> float:
        pool = [prefill for prefill in self.prefills if not _stands_apart(prefill)]
        return fmean([self.busy(instance, now) for instance in pool]) if pool else 0.0

    def busy(self, instance: PrefillInstanceState, now: float, limit_s: float | None = None) -> float:
        """Return the pressure of one instance by the prompts there; 1 = computes all the time.

        As much again is a queue of `limit_s` seconds; None = of those of the settings.
        """
        waiting_s = max(0.0, instance.free_at - now)
        return 0.0 if not waiting_s else 1.0 + waiting_s / (limit_s or self.limits.ttft_s)

    def _decode_pressure(self) -> float:
        pool = [decode for decode in self.decodes if not _stands_apart(decode)]
        return fmean([self.utilization(instance) for instance in pool]) if pool else 0.0

    def utilization(self, instance: DecodeInstanceState) -> float:
        """Return the pressure of one instance by the answers there; 1 = full."""
        now, base_s = load_now(instance), instance.speeds.decode_base_s
        step_s = decode_step_seconds(instance.speeds, now.sequences, now.context_tokens)
        at_limit = max(1.0 - base_s / self.limits.tbt_s, 0.1)
        # Reserved blocks are not in use: prompts that wait for prefill would make decode seem full.
        used = 1.0 - (instance.load.free_blocks + instance.load.cached_blocks) / instance.facts.total_blocks
        return max((1.0 - base_s / step_s) / at_limit if step_s else 0.0, used)

    def _pick(self, kind: InstanceKind, now: float) -> str | None:
        """Return the least loaded instance of a pool that can change and has stayed long enough."""
        able = [
            instance
            for instance in self._usable(kind)
            if instance.facts.switches_role and self._stays_until.get(instance.facts.id, now) <= now
        ]
        return min(able, key=lambda instance: (_work(instance, now), instance.facts.id)).facts.id if able else None

    def _usable(self, kind: InstanceKind) -> list[PrefillInstanceState | DecodeInstanceState]:
        return [instance for instance in self._members(kind) if not _stands_apart(instance)]

    def _members(self, kind: InstanceKind) -> Iterable[PrefillInstanceState | DecodeInstanceState]:
        return self.prefills if kind is InstanceKind.PREFILL else self.decodes

    def _restart_holds(self) -> None:
        for pressure in self.pressures.values():
            pressure.since = None

    def digest(self) -> bytes:
        return digest_of(self.change, self.pressures, self._stays_until, self._hung, self._sampled_at)


@frozen
class RoleLimits:
    """When roles change.

    Attributes:
        swap: roles change without an order.
        ttft_s: seconds of queue that count as much as a pool that is busy all the time.
        tbt_s: seconds for a step at a full decode instance.
        ratio, hold_s, dwell_s: see the module.
    """

    swap: bool = False
    ttft_s: float = QUEUE_S
    tbt_s: float = STEP_S
    ratio: float = RATIO
    hold_s: float = HOLD_S
    dwell_s: float = DWELL_S


FIXED_ROLES = RoleLimits()


@dataclass(slots=True)
class RoleChange:
    """An instance on the way to another pool; `in_place`: the same process joins there, under the same id."""

    instance: str
    kind: InstanceKind
    since: float
    in_place: bool = False

    @property
    def limit_s(self) -> float:
        """Seconds after which the change is given up."""
        return IN_PLACE_S if self.in_place else CHANGE_S

    def is_ended_by(self, facts: InstanceFacts) -> bool:
        """Whether the change is over with an instance's joining."""
        return facts.kind is self.kind and (not self.in_place or facts.id == self.instance)


@dataclass(slots=True)
class PoolPressure:
    """One pool's pressure, a running mean; `since`: time since which the pressure is `ratio` times the other pool's."""

    value: float = 0.0
    since: float | None = None


def _stands_apart(instance: PrefillInstanceState | DecodeInstanceState) -> bool:
    """Whether an instance is no part of the balance: it drains, or has both roles and keeps them."""
    return instance.load.draining or instance.facts.computes_prompts


def _work(instance: PrefillInstanceState | DecodeInstanceState, now: float) -> float:
    """Return the seconds of queue, or sequences."""
    return max(0.0, instance.free_at - now) if isinstance(instance, PrefillInstanceState) else float(instance.sequences)
