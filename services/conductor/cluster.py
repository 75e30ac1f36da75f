"""The conductor's members and the streams to decode instances. Tells the core of each change."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.kv.keys import pack_keys, unpack_keys
from moonpool.rpc.channels import Channels
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.core.hot import Replicate
from services.conductor.core.messages import Event, Joined, KeysChanged, Left, Reported, Resync
from services.conductor.facts import instance_facts, load_facts
from services.conductor.registry import Member, Registry, ServedModel
from services.conductor.steps import StepsPool

log = get_logger(__name__)

MAX_EVENT_KEYS = 1 << 13
"""Keys stored, or removed, in one message: one message is applied without a pause of the event loop."""


class Cluster:
    """Who is there. `post` hands events to the core."""

    def __init__(self, served: ServedModel, channels: Channels, post: Callable[[Event], None]) -> None:
        self.registry = Registry(served)
        self.steps = StepsPool(channels)
        self.probe = channels.probe
        self._post = post
        self._tell: dict[str, Callable[[conductor_pb2.JoinResponse], None]] = {}

    def find(self, instance_id: str) -> kv_pb2.Instance | None:
        """The member of this id."""
        member = self.registry.get(instance_id)
        return member.instance if member is not None else None

    def join(self, hello: conductor_pb2.JoinHello, tell: Callable[[conductor_pb2.JoinResponse], None]) -> Member:
        """Take an instance in (see `Registry.join`); `tell` gives it orders."""
        earlier = self.registry.get(hello.instance.id)
        member = self.registry.join(hello)
        self._tell[member.id] = tell
        if earlier is not None and earlier.instance.incarnation != member.instance.incarnation:
            self._lost(earlier, "was restarted")
        self._post(Joined(instance_facts(hello)))
        return member

    def leave(self, member: Member, *, lost: bool) -> None:
        """Remove a member; with `lost` its requests fail now instead of with their streams.

        A stream that ends after its member was replaced says nothing new: its process has joined again on another
        stream, or has been restarted.
        """
        if not self.registry.leave(member):
            return
        del self._tell[member.id]
        if lost:
            self._lost(member, "is lost")
        else:
            self._post(Left(member.id, member.instance.incarnation))
            self.steps.left(member.instance)

    def is_member(self, member: Member) -> bool:
        """Whether the member has neither left nor been replaced."""
        return self.registry.get(member.id) is member

    def report(self, member: Member, load: conductor_pb2.LoadReport) -> None:
        """Take a load report."""
        member.load = load
        self._post(Reported(member.id, load_facts(load)))

    def events(self, member: Member, events: kv_pb2.KVEvents) -> None:
        """Take KV events."""
        stored = unpack_keys(events.stored_keys, "events.stored_keys", max_keys=MAX_EVENT_KEYS)
        removed = unpack_keys(events.removed_keys, "events.removed_keys", max_keys=MAX_EVENT_KEYS)
        begins, ends = events.snapshot_begin, events.snapshot_end
        self._post(KeysChanged(member.id, events.sequence, tuple(stored), tuple(removed), begins, ends))

    def order(self, action: Resync | Replicate) -> None:
        """Tells an instance to send a snapshot of its keys, or to copy hot blocks; without effect where it has left."""
        tell = self._tell.get(action.instance)
        if tell is None:
            return
        match action:
            case Resync(instance):
                log.warning("resync", instance=instance)
                tell(conductor_pb2.JoinResponse(resync=conductor_pb2.ResyncOrder()))
            case Replicate(instance, keys, source, tenant):
                holder = self.find(source)
                if holder is not None:
                    log.info("copy ordered", instance=instance, source=source, blocks=len(keys))
                    wanted = conductor_pb2.ReplicateOrder(keys=pack_keys(keys), source=holder, tenant=tenant)
                    tell(conductor_pb2.JoinResponse(replicate=wanted))

    def _lost(self, member: Member, why: str) -> None:
        self._post(Left(member.id, member.instance.incarnation, why))
        self.steps.lost(member.instance)
