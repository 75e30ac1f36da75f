"""The instances that have joined the conductor. Each reports keys and load soon after they change.

As the services' agents do (`moonpool.base.cluster.join`), an instance waits a little after a change, and between
reports. An instance without news sends no report: the simulator knows that the instance is alive.
"""

from collections.abc import Callable
from functools import partial

from moonpool.base.kv.blocks import KeyChanges, NetChanges
from moonpool.conductor.core.events import Event, InstanceJoined, InstanceLeft, KeysChanged, LoadReported
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.simulator.clock import ps
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.network import Calls, SimulatedLink

FLUSH_S = 0.02
"""Seconds from a change to the report."""
_FLUSH = ps(FLUSH_S)
_KINDS = {"p": InstanceKind.PREFILL, "d": InstanceKind.DECODE, "s": InstanceKind.KVSTORE}


class MemberInstance:
    """An instance, from joining to loss.

    Args:
        calls: carry the instance's messages.
        post: hands events to the conductor.
        name, epoch: the instance's.
        load: returns the current load.
        gap: between two reports, picoseconds.
    """

    def __init__(
        self,
        calls: Calls,
        post: Callable[[Event], None],
        name: str,
        epoch: int,
        load: Callable[[], LoadFacts],
        gap: int,
    ) -> None:
        self.epoch = epoch
        self._world, self._post, self._name, self._load = calls.world, post, name, load
        self._wire = SimulatedLink(calls, lambda: None)
        self._sequence = 1
        self._keys = NetChanges()
        self._gap, self._next_at = gap, 0
        self._armed = False

    def keys(self, changes: KeyChanges) -> None:
        """Note keys that came and left; only each key's final state is told."""
        self._keys.note(*changes)
        self.changed()

    def changed(self) -> None:
        """Load or keys are others now."""
        if not self._armed:
            self._armed = True
            self._world.at(max(self._world.now + _FLUSH, self._next_at), self._tell)

    def lose(self) -> None:
        """Stop all the instance's reports."""
        self._wire.close()

    def _tell(self, _: None) -> None:
        self._armed = False
        self._next_at = self._world.now + self._gap
        if self._wire.closed:
            return
        keys, report = self._news_of_keys(), LoadReported(self._name, self._load())
        news: list[Event] = [report] if keys is None else [keys, report]
        self._wire.send(partial(self._arrive, news), reliable=True)

    def _arrive(self, news: list[Event]) -> None:
        for event in news:
            self._post(event)

    def _news_of_keys(self) -> KeysChanged | None:
        if not self._keys:
            return None
        self._sequence += 1
        stored, removed, cooled = map(tuple, self._keys.take())
        return KeysChanged(self._name, self._sequence, stored, removed, False, False, cooled)


class Members:
    """All members. Instances are called "p3", "d0", "s1".

    Args:
        config: the cluster's.
        calls: carry their messages.
        post: hands events to the conductor.
    """

    def __init__(self, config: ClusterConfig, calls: Calls, post: Callable[[Event], None]) -> None:
        self._config, self._calls, self._post = config, calls, post
        self._shape = KVShape(config.block_size, config.profile.token_bytes, config.profile.layers, emulated=True)
        self._members: dict[str, MemberInstance] = {}

    def join(self, name: str, load: Callable[[], LoadFacts], held: KeyChanges, epoch: int) -> None:
        """Let an instance join with cached keys; an earlier instance with the name is lost."""
        self.leave(name, "was restarted")
        gap = ps(self._config.report_s)
        member = self._members[name] = MemberInstance(self._calls, self._post, name, epoch, load, gap)
        self._post(InstanceJoined(self.facts(name, member.epoch)))
        stored, removed, cooled = map(tuple, held)
        self._post(KeysChanged(name, 1, stored, removed, snapshot_begin=True, snapshot_end=True, cooled=cooled))
        self._post(LoadReported(name, load()))

    def silence(self, name: str) -> None:
        """Stop all messages from an instance."""
        member = self._members.get(name)
        if member is not None:
            member.lose()

    def abandon(self) -> None:
        """The conductor is lost."""
        for member in self._members.values():
            member.lose()
        self._members.clear()

    def leave(self, name: str, why: str) -> int:
        """An instance is lost; returns the instance's epoch, 0 if the instance was not here."""
        member = self._members.pop(name, None)
        if member is None:
            return 0
        member.lose()
        self._post(InstanceLeft(name, member.epoch, why))
        return member.epoch

    def epoch(self, name: str) -> int:
        """An instance's epoch; 0 = the instance is not here."""
        member = self._members.get(name)
        return member.epoch if member is not None else 0

    def keys(self, name: str, changes: KeyChanges) -> None:
        """An instance tells what came and what left; reports from an unjoined instance are ignored."""
        member = self._members.get(name)
        if member is not None:
            member.keys(changes)

    def changed(self, name: str) -> None:
        """Note that an instance's load or keys have changed."""
        member = self._members.get(name)
        if member is not None:
            member.changed()

    def facts(self, name: str, epoch: int) -> InstanceFacts:
        """What an instance reports when joining."""
        config, kind = self._config, _KINDS[name[0]]
        store = kind is InstanceKind.KVSTORE
        stages, both = config.stages_of(name) if kind is InstanceKind.PREFILL else 1, config.is_both(name)
        return InstanceFacts(
            id=name,
            epoch=epoch,
            kind=kind,
            total_blocks=0 if store else stages * config.blocks,
            shape=None if store else self._shape,
            speeds=config.profile.speeds,
            switches_role=config.roles.swap and not store,
            stages=stages,
            max_num_batched_tokens=config.max_num_batched_tokens,
            capacity_bytes=config.store_bytes if store else 0,
            computes_prompts=both,
            reports_ssd=store and config.disk_bytes > 0,
        )
