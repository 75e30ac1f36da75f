"""The conductor's instances: registry, index, planner, streams to decode instances. Tells the core of changes."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.kv.keys import unpack_keys
from moonpool.rpc.channels import Channels
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.config import ConductorConfig
from services.conductor.core.messages import Event, Joined, Left, Reported
from services.conductor.index import Applied, PrefixIndex
from services.conductor.planner import Planner
from services.conductor.registry import DECODE, Member, Registry, ServedModel
from services.conductor.steps import StepsPool

MAX_EVENT_KEYS = 1 << 13
"""Keys stored, or removed, in one message: one message is applied without a pause of the event loop."""


class Cluster:
    """Everything the conductor knows of its instances. `post` hands events to the core."""

    def __init__(
        self, config: ConductorConfig, served: ServedModel, channels: Channels, post: Callable[[Event], None]
    ) -> None:
        self.registry = Registry(served)
        self.index = PrefixIndex(config.max_index_keys)
        self.planner = Planner(self.registry, self.index, config.balancing_threshold, config.kvstore_replicas)
        self.steps = StepsPool(channels)
        self._post = post

    def find(self, instance_id: str) -> kv_pb2.Instance | None:
        """The member of this id."""
        member = self.registry.get(instance_id)
        return member.instance if member is not None else None

    def join(self, hello: conductor_pb2.JoinHello, now: float) -> Member:
        """Take an instance in (see `Registry.join`)."""
        earlier = self.registry.get(hello.instance.id)
        member = self.registry.join(hello, now)
        if earlier is not None and earlier.instance.incarnation != member.instance.incarnation:
            self._lost(earlier, "was restarted")
        elif earlier is not None:  # the same process came back: its requests go on
            member.prefills, member.decodes, member.placed = earlier.prefills, earlier.decodes, earlier.placed
            member.loads = earlier.loads
        self.index.add_instance(member.id)
        self._post(Joined(member.id))
        return member

    def leave(self, member: Member, *, lost: bool) -> None:
        """Remove a member; with `lost` its requests fail now instead of with their streams.

        A stream that ends after its process has joined again on another one says nothing of the process.
        """
        if self.registry.leave(member):
            self.index.remove_instance(member.id)
        elif self._has_joined_again(member):
            return
        if lost:
            self._lost(member, "is lost")
        else:
            self._post(Left(member.id, member.instance.incarnation))
            self.steps.left(member.instance)

    def is_member(self, member: Member) -> bool:
        """Whether the member has neither left nor been replaced."""
        return self.registry.get(member.id) is member

    def report(self, member: Member, load: conductor_pb2.LoadReport, now: float) -> None:
        """Take a load report."""
        self.registry.report(member, load, now)
        if member.kind == DECODE:
            self._post(Reported(member.id))

    def events(self, member: Member, events: kv_pb2.KVEvents) -> bool:
        """Take KV events; True when a resync is wanted."""
        applied = self.index.apply(
            member.id,
            events.sequence,
            unpack_keys(events.stored_keys, "events.stored_keys", max_keys=MAX_EVENT_KEYS),
            unpack_keys(events.removed_keys, "events.removed_keys", max_keys=MAX_EVENT_KEYS),
            snapshot_begin=events.snapshot_begin,
            snapshot_end=events.snapshot_end,
        )
        return applied is Applied.RESYNC

    def _has_joined_again(self, member: Member) -> bool:
        present = self.registry.get(member.id)
        return present is not None and present.instance.incarnation == member.instance.incarnation

    def _lost(self, member: Member, why: str) -> None:
        self._post(Left(member.id, member.instance.incarnation, why))
        self.steps.lost(member.instance)
