"""The members of the cluster: what they report, the orders that they get, and the core's events about each change."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import session_order
from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.base.kv.keys import pack_keys, unpack_keys
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.core.actions import ChangeRole, InstanceOrder, Resync
from moonpool.conductor.core.events import (
    Event,
    InstanceJoined,
    InstanceLeft,
    KeysChanged,
    LoadReported,
    RoleChangeRequested,
)
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.retention import TellSession
from moonpool.conductor.core.tenant_activity import TellActivity
from moonpool.conductor.decode_streams import StepsPool
from moonpool.conductor.kv_watchers import KVWatchers
from moonpool.conductor.loras import LoraEngine
from moonpool.conductor.proto_conversion import activity_to_proto, instance_facts, kind_to_proto, load_facts
from moonpool.conductor.registry import ENGINES, ClusterMember, ModelIdentity, Registry
from moonpool.v1 import conductor_pb2, kv_pb2

log = get_logger(__name__)
MAX_EVENT_KEYS = 1 << 13
"""Most keys stored, removed or cooled in one message: a message is applied in one event loop turn."""


class ClusterMembers:
    """The members, what they report, and the orders they get.

    Args:
        served: the model that the cluster serves.
        channels: to the instances.
        post: hands an event to the core, and raises the core's exceptions: they end the stream of the event's instance.
        tell: hands an event to the core if an instance has left; exceptions end the conductor instead of being raised.
    """

    def __init__(
        self, served: ModelIdentity, channels: Channels, post: Callable[[Event], None], tell: Callable[[Event], None]
    ) -> None:
        self.registry = Registry(served)
        self.steps = StepsPool(channels, self._waited_s)
        self.probe = channels.probe
        self.watchers = KVWatchers()
        self._post = post
        self._tell = tell
        self._send: dict[str, Callable[[conductor_pb2.JoinResponse], None]] = {}  # by instance id

    def instances(self, kind: kv_pb2.InstanceKind.ValueType | None = None) -> list[kv_pb2.Instance]:
        """Return the members' instances, by kind or all, in order of joining."""
        return [member.instance for member in self.registry if kind in (None, member.kind)]

    def lora_engines(self) -> list[LoraEngine]:
        """Return the engines, and whether they take LoRA adapters."""
        return [LoraEngine(member.instance, member.takes_loras) for member in self.registry if member.kind in ENGINES]

    def find(self, instance_id: str) -> kv_pb2.Instance | None:
        member = self.registry.get(instance_id)
        return member.instance if member is not None else None

    def join(self, hello: conductor_pb2.JoinHello, send: Callable[[conductor_pb2.JoinResponse], None]) -> ClusterMember:
        """Add an instance (see `Registry.join`); `send` sends messages to the instance."""
        earlier = self.registry.get(hello.instance.id)
        member = self.registry.join(hello)
        self._send[member.id] = send
        if earlier is not None and earlier.instance.epoch != member.instance.epoch:
            self._lost(earlier, "was restarted")
        try:
            self._post(InstanceJoined(instance_facts(hello)))
        except Exception:  # the member's stream ends before membership
            self.leave(member, lost=False)
            raise
        self.watchers.joined(member.instance, member.model)
        return member

    def leave(self, member: ClusterMember, *, lost: bool) -> None:
        """Remove a member; with `lost` the member's requests fail now instead of with their streams.

        Does nothing if the member was replaced: the process has joined again, or was restarted.
        """
        if not self.registry.leave(member):
            return
        del self._send[member.id]
        self.watchers.left(member.id)
        if lost:
            self._lost(member, "is lost")
        else:
            self._tell(InstanceLeft(member.id, member.instance.epoch))
            self.steps.left(member.instance)

    def is_member(self, member: ClusterMember) -> bool:
        """Return whether the member has neither left nor been replaced."""
        return self.registry.get(member.id) is member

    def report(self, member: ClusterMember, load: conductor_pb2.LoadReport) -> None:
        facts = load_facts(load)
        load.ClearField("activities")  # tenants' names are not for all who see the cluster's state
        member.load = load
        self._post(LoadReported(member.id, facts))

    def events(self, member: ClusterMember, events: kv_pb2.KVEvents) -> None:
        stored = unpack_keys(events.stored_keys, "events.stored_keys", max_keys=MAX_EVENT_KEYS)
        removed = unpack_keys(events.removed_keys, "events.removed_keys", max_keys=MAX_EVENT_KEYS)
        cooled = unpack_keys(events.cooled_keys, "events.cooled_keys", max_keys=MAX_EVENT_KEYS)
        keys, ends = (tuple(stored), tuple(removed)), (events.snapshot_begin, events.snapshot_end)
        self._post(KeysChanged(member.id, events.sequence, *keys, *ends, tuple(cooled)))
        self.watchers.changed(member.id, events)

    def change_role(self, instance_id: str, kind: kv_pb2.InstanceKind.ValueType) -> None:
        """Request that an instance changes roles.

        Raises:
            NotFound: there is no such member.
            InvalidRequest: the instance cannot change to that role; names the field.
        """
        if kind not in ENGINES:
            raise InvalidRequest("kind", "must be prefill or decode")
        member = self.registry.get(instance_id)
        if member is None:
            raise NotFound(f"no instance {instance_id!r} has joined")
        if member.kind not in ENGINES or member.kind == kind:
            is_now = kv_pb2.InstanceKind.Name(member.kind)
            raise InvalidRequest("kind", f"must be the other of prefill and decode: {instance_id} is {is_now}")
        if member.computes_prompts:
            raise InvalidRequest("instance_id", f"{instance_id} has both roles, and keeps them")
        if not member.switches_role:
            raise InvalidRequest("instance_id", f"{instance_id} keeps its role: it was started without either_role")
        if not any(other is not member and not other.load.draining for other in self.registry.of_kind(member.kind)):
            raise InvalidRequest("instance_id", f"{instance_id} is the last one of its kind")
        self._post(RoleChangeRequested(instance_id))

    def drain(self, instance_id: str) -> None:
        """Order an instance to take nothing new.

        Raises:
            NotFound: there is no such member.
            InvalidRequest: the instance is the last engine of its kind; names the field.
        """
        member = self.registry.get(instance_id)
        if member is None:
            raise NotFound(f"no instance {instance_id!r} has joined")
        others = self.registry.of_kind(member.kind)
        if member.kind in ENGINES and not any(other is not member and not other.load.draining for other in others):
            raise InvalidRequest("instance_id", f"{instance_id} is the last one of its kind that takes requests")
        log.info("drain ordered", instance=instance_id)
        self._send[instance_id](conductor_pb2.JoinResponse(drain=conductor_pb2.DrainOrder()))

    def order(self, action: InstanceOrder) -> None:
        """Order an instance to send a snapshot of keys, replicate a prefix or change roles; or tell it something.

        Does nothing if the instance has left.
        """
        send = self._send.get(action.instance)
        if send is None:
            return
        match action:
            case Resync(instance):
                log.warning("snapshot of the KV keys asked for", instance=instance)
                self.watchers.dropped(instance)
                send(conductor_pb2.JoinResponse(resync=conductor_pb2.ResyncOrder()))
            case ReplicatePrefix(instance, keys, source, tenant):
                holder = self.find(source)
                if holder is not None:
                    log.info("copy ordered", instance=instance, source=source, blocks=len(keys))
                    order = conductor_pb2.ReplicateOrder(keys=pack_keys(keys), source=holder, tenant=tenant)
                    send(conductor_pb2.JoinResponse(replicate=order))
            case StopReplication(_, tail):
                send(conductor_pb2.JoinResponse(replicate=conductor_pb2.ReplicateOrder(keys=tail, cancel=True)))
            case TellSession(_, hint, prefetch):
                send(conductor_pb2.JoinResponse(session=session_order(hint, prefetch)))
            case TellActivity():
                send(conductor_pb2.JoinResponse(activity=activity_to_proto(action)))
            case ChangeRole(instance, _, kind):
                log.info("change of role ordered", instance=instance, to=kind.value)
                send(conductor_pb2.JoinResponse(role=conductor_pb2.RoleOrder(kind=kind_to_proto(kind))))

    def _waited_s(self, instance_id: str) -> float:
        """Return the seconds for which an instance has had no processor."""
        member = self.registry.get(instance_id)
        return world.waited_s(member.process) if member is not None else 0.0

    def _lost(self, member: ClusterMember, why: str) -> None:
        self._tell(InstanceLeft(member.id, member.instance.epoch, why))
        self.steps.lost(member.instance)
