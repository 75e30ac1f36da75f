"""The conductor's members and the streams to decode instances. Tells the core of each change."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.errors import InvalidRequest, NotFound
from moonpool.kv.keys import pack_keys, unpack_keys
from moonpool.rpc.channels import Channels
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.core.changes import ChangeRole, RoleAsked
from services.conductor.core.hot import Replicate
from services.conductor.core.messages import Event, Joined, KeysChanged, Left, Reported, Resync
from services.conductor.facts import instance_facts, kind_to_proto, load_facts
from services.conductor.registry import ENGINES, Member, Registry, ServedModel
from services.conductor.steps import StepsPool

log = get_logger(__name__)

MAX_EVENT_KEYS = 1 << 13
"""Keys stored, removed, or cooled in one message: one message is applied without a pause of the event loop."""


class Cluster:
    """Who is there.

    Args:
        served: what the cluster serves.
        channels: to the instances.
        post: hands an event to the core; what that meets is raised, which ends the stream of whose message it was.
        tell: the same for those who have left, from where nobody hears an exception: raises nothing.
    """

    def __init__(
        self, served: ServedModel, channels: Channels, post: Callable[[Event], None], tell: Callable[[Event], None]
    ) -> None:
        self.registry = Registry(served)
        self.steps = StepsPool(channels)
        self.probe = channels.probe
        self._post = post
        self._tell = tell
        self._orders: dict[str, Callable[[conductor_pb2.JoinResponse], None]] = {}

    def find(self, instance_id: str) -> kv_pb2.Instance | None:
        """The member of this id."""
        member = self.registry.get(instance_id)
        return member.instance if member is not None else None

    def join(self, hello: conductor_pb2.JoinHello, tell: Callable[[conductor_pb2.JoinResponse], None]) -> Member:
        """Take an instance in (see `Registry.join`); `tell` gives it orders."""
        earlier = self.registry.get(hello.instance.id)
        member = self.registry.join(hello)
        self._orders[member.id] = tell
        if earlier is not None and earlier.instance.incarnation != member.instance.incarnation:
            self._lost(earlier, "was restarted")
        try:
            self._post(Joined(instance_facts(hello)))
        except Exception:  # its stream ends, and has nobody yet who would leave
            self.leave(member, lost=False)
            raise
        return member

    def leave(self, member: Member, *, lost: bool) -> None:
        """Remove a member; with `lost` its requests fail now instead of with their streams.

        A stream that ends after its member was replaced says nothing new: its process has joined again on another
        stream, or has been restarted.
        """
        if not self.registry.leave(member):
            return
        del self._orders[member.id]
        if lost:
            self._lost(member, "is lost")
        else:
            self._tell(Left(member.id, member.instance.incarnation))
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
        cooled = unpack_keys(events.cooled_keys, "events.cooled_keys", max_keys=MAX_EVENT_KEYS)
        keys, ends = (tuple(stored), tuple(removed)), (events.snapshot_begin, events.snapshot_end)
        self._post(KeysChanged(member.id, events.sequence, *keys, *ends, tuple(cooled)))

    def change_role(self, instance_id: str, kind: kv_pb2.InstanceKind.ValueType) -> None:
        """Somebody wants an instance to change its role.

        Raises:
            NotFound: it is not here.
            InvalidRequest: it cannot become that; names the field.
        """
        if kind not in ENGINES:
            raise InvalidRequest("kind", "must be prefill or decode")
        member = self.registry.get(instance_id)
        if member is None:
            raise NotFound(f"no instance {instance_id!r} has joined")
        if member.kind not in ENGINES or member.kind == kind:
            is_now = kv_pb2.InstanceKind.Name(member.kind)
            raise InvalidRequest("kind", f"must be the other of prefill and decode: {instance_id} is {is_now}")
        if not member.either:
            raise InvalidRequest("instance_id", f"{instance_id} keeps its role: it was started without --either-role")
        if not any(other is not member and not other.load.draining for other in self.registry.of_kind(member.kind)):
            raise InvalidRequest("instance_id", f"{instance_id} is the last one of its kind")
        self._post(RoleAsked(instance_id))

    def order(self, action: Resync | Replicate | ChangeRole) -> None:
        """Tells an instance to send a snapshot of its keys, to copy hot blocks, or to change its role.

        Without effect where it has left.
        """
        tell = self._orders.get(action.instance)
        if tell is None:
            return
        match action:
            case Resync(instance):
                log.warning("snapshot of the KV keys asked for", instance=instance)
                tell(conductor_pb2.JoinResponse(resync=conductor_pb2.ResyncOrder()))
            case Replicate(instance, keys, source, tenant):
                holder = self.find(source)
                if holder is not None:
                    log.info("copy ordered", instance=instance, source=source, blocks=len(keys))
                    wanted = conductor_pb2.ReplicateOrder(keys=pack_keys(keys), source=holder, tenant=tenant)
                    tell(conductor_pb2.JoinResponse(replicate=wanted))
            case ChangeRole(instance, _, kind):
                log.info("change of role ordered", instance=instance, to=kind.value)
                tell(conductor_pb2.JoinResponse(role=conductor_pb2.RoleOrder(kind=kind_to_proto(kind))))

    def _lost(self, member: Member, why: str) -> None:
        self._tell(Left(member.id, member.instance.incarnation, why))
        self.steps.lost(member.instance)
