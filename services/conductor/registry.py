"""Members of the cluster.

Joining, heartbeats, loss, the model they serve, and events to the core about each change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from moonpool.checkpoint import ModelConfig, Tokenizer, config_hash, load_config, model_name, resolve
from moonpool.cluster.proto_conversion import check_instance, finite_or_zero, speeds_from_proto
from moonpool.errors import InvalidRequest, Mismatch, NotFound, Unavailable
from moonpool.kv.keys import pack_keys, unpack_keys
from moonpool.kv.layout import KVLayout
from moonpool.rpc.auth import require_role
from moonpool.rpc.channels import Channels
from moonpool.telemetry.logs import get_logger
from moonpool.transport.streams import ServerStream
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.core.events import (
    ChangeRole,
    Event,
    InstanceJoined,
    InstanceLeft,
    KeysChanged,
    LoadReported,
    Resync,
    RoleChangeRequested,
)
from services.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from services.conductor.core.latency_model import KVShape
from services.conductor.core.router import ReplicatePrefix
from services.conductor.decode_streams import StepsPool

_INSTANCE_KINDS = {
    kv_pb2.INSTANCE_KIND_PREFILL: InstanceKind.PREFILL,
    kv_pb2.INSTANCE_KIND_DECODE: InstanceKind.DECODE,
    kv_pb2.INSTANCE_KIND_KVSTORE: InstanceKind.KVSTORE,
}


def instance_facts(hello: conductor_pb2.JoinHello) -> InstanceFacts:
    """What a checked hello says."""
    kind = _INSTANCE_KINDS[hello.instance.kind]
    return InstanceFacts(
        id=hello.instance.id,
        incarnation=hello.instance.incarnation,
        kind=kind,
        total_blocks=hello.total_blocks,
        shape=None if kind is InstanceKind.KVSTORE else _kv_shape(hello.model),
        speeds=speeds_from_proto(hello.speed),
        stages=max(hello.stages, 1),
        step_tokens=hello.step_tokens,
        capacity_bytes=hello.capacity_bytes,
        either=hello.either_role,
        host=hello.instance.address.rpartition(":")[0],
        tells_cold=hello.tells_cold,
    )


def kind_to_proto(kind: InstanceKind) -> kv_pb2.InstanceKind.ValueType:
    """A kind as the contract has it."""
    return next(proto for proto, plain in _INSTANCE_KINDS.items() if plain is kind)


def load_facts(load: conductor_pb2.LoadReport) -> LoadFacts:
    """What a load report says."""
    return LoadFacts(
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        promised_blocks=load.promised_blocks,
        context_tokens=load.context_tokens,
        drain_s=finite_or_zero(load.drain_s) if load.HasField("drain_s") else None,
        speeds=speeds_from_proto(load.speed) if load.HasField("speed") else None,
        draining=load.draining,
        taken=load.taken,
        answer_tokens=load.expected_answer_tokens,
    )


def _kv_shape(model: conductor_pb2.ModelInfo) -> KVShape:
    layout = KVLayout.from_proto(model.layout)
    return KVShape(layout.block_tokens, layout.token_bytes, layout.layers, model.emulated != "")


PREFILL = kv_pb2.INSTANCE_KIND_PREFILL


DECODE = kv_pb2.INSTANCE_KIND_DECODE


KVSTORE = kv_pb2.INSTANCE_KIND_KVSTORE


ENGINES = (PREFILL, DECODE)


NAMESPACE_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the conductor's own checkpoint says; engines must serve the same."""

    name: str
    config_hash: bytes
    vocab_size: int


@dataclass(slots=True, eq=False)
class ClusterMember:
    """One incarnation of one instance, while it is joined; `load` is its last report, `either`: its role can change."""

    instance: kv_pb2.Instance
    total_blocks: int
    model: conductor_pb2.ModelInfo | None
    load: conductor_pb2.LoadReport
    either: bool = False

    @property
    def id(self) -> str:
        return self.instance.id

    @property
    def kind(self) -> kv_pb2.InstanceKind.ValueType:
        return self.instance.kind


class Registry:
    """The members, at most one per instance id: the last that joined."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._members: dict[str, ClusterMember] = {}
        self._model: conductor_pb2.ModelInfo | None = None
        self._layout: KVLayout | None = None

    def __iter__(self) -> Iterator[ClusterMember]:
        """All members, in order of joining."""
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, instance_id: str) -> ClusterMember | None:
        return self._members.get(instance_id)

    def of_kind(self, kind: kv_pb2.InstanceKind.ValueType) -> list[ClusterMember]:
        """Members of one kind, in order of joining."""
        return [member for member in self._members.values() if member.kind == kind]

    @property
    def model(self) -> conductor_pb2.ModelInfo | None:
        """What is served, or None before the first engine; `max_tokens` is the least of all engines'."""
        if self._model is None:
            return None
        lengths = [m.model.max_tokens for m in self._members.values() if m.model is not None]
        model = conductor_pb2.ModelInfo()
        model.CopyFrom(self._model)
        model.max_tokens = min(lengths)
        return model

    @property
    def emulated(self) -> bool:
        """Whether compute is emulated; emulated and real engines never share a namespace."""
        return self._model is not None and self._model.emulated != ""

    @property
    def layout(self) -> KVLayout | None:
        """Layout of the KV that is served, or None before the first engine."""
        return self._layout

    @property
    def ready(self) -> bool:
        """Whether at least one prefill and one decode instance take requests."""
        return all(any(not member.load.draining for member in self.of_kind(kind)) for kind in ENGINES)

    def join(self, hello: conductor_pb2.JoinHello) -> ClusterMember:
        """Take an instance in; an earlier member of its id is replaced.

        Raises:
            InvalidRequest: the hello is incomplete.
            Mismatch: it serves another model than the conductor or the other engines; names the field.
        """
        instance = hello.instance
        self.check(hello)
        self._members.pop(instance.id, None)
        self._forget_model_without_engines()
        model = hello.model if instance.kind in ENGINES else None
        if model is not None and self._model is None:
            self._model = model
            self._layout = KVLayout.from_proto(model.layout)
        member = ClusterMember(
            instance=instance,
            total_blocks=hello.total_blocks,
            model=model,
            load=conductor_pb2.LoadReport(free_blocks=hello.total_blocks, speed=hello.speed),
            either=hello.either_role,
        )
        self._members[instance.id] = member
        return member

    def check(self, hello: conductor_pb2.JoinHello) -> None:
        """Raise as `join` would, and change nothing."""
        instance = hello.instance
        check_instance(instance)
        if instance.kind not in (*ENGINES, KVSTORE):
            raise InvalidRequest("instance.kind", "must be prefill, decode or kvstore")
        if instance.kind in ENGINES:
            self._check_model(hello)

    def leave(self, member: ClusterMember) -> bool:
        """Remove a member; False when it was replaced by a later incarnation or had left."""
        if self._members.get(member.id) is not member:
            return False
        del self._members[member.id]
        self._forget_model_without_engines()
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError when members and model contradict each other."""
        engines = [member for member in self._members.values() if member.kind in ENGINES]
        assert (self._model is None) == (self._layout is None) == (not engines)
        for instance_id, member in self._members.items():
            assert member.id == instance_id
            assert (member.model is None) == (member.kind == KVSTORE)
            if member.model is not None:
                assert self._model is not None
                assert member.model.namespace == self._model.namespace

    def _forget_model_without_engines(self) -> None:
        if not any(member.kind in ENGINES for member in self._members.values()):
            self._model = self._layout = None

    def _check_model(self, hello: conductor_pb2.JoinHello) -> None:
        model = hello.model
        if not hello.HasField("model"):
            raise InvalidRequest("model", "an engine must say what it serves")
        if len(model.namespace) != NAMESPACE_BYTES:
            raise InvalidRequest("model.namespace", f"must be {NAMESPACE_BYTES} bytes")
        if model.max_tokens < 1:
            raise InvalidRequest("model.max_tokens", "must be positive")
        if hello.total_blocks < 1:
            raise InvalidRequest("total_blocks", "must be positive")
        layout = KVLayout.from_proto(model.layout)
        if model.name != self._served.name:
            raise Mismatch("model.name", f"this cluster serves {self._served.name!r}, not {model.name!r}")
        if model.config_hash != self._served.config_hash:
            raise Mismatch("model.config_hash", "the conductor's checkpoint has another configuration")
        if model.vocab_size != self._served.vocab_size:
            raise Mismatch("model.vocab_size", f"must be {self._served.vocab_size}, is {model.vocab_size}")
        others = [m for m in self._members.values() if m.kind in ENGINES and m.id != hello.instance.id]
        if not others or self._model is None or self._layout is None:
            return
        field_name = self._layout.difference(layout)
        if field_name is not None:
            ours, theirs = getattr(self._layout, field_name), getattr(layout, field_name)
            flags = "; --dtype and --kv-dtype must be those of the cluster" if field_name == "dtype" else ""
            raise Mismatch(f"model.layout.{field_name}", f"the other engines have {ours!r}, not {theirs!r}{flags}")
        if model.namespace != self._model.namespace:
            raise Mismatch("model.namespace", "the weights, or their --dtype, differ from those of the other engines")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as the conductor uses it."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def load(cls, model: str) -> Checkpoint:
        """Load from a folder or hub id.

        Raises:
            CheckpointError: there is none, or it is damaged or not supported.
        """
        folder = resolve(model)
        return cls(model_name(model), load_config(folder), Tokenizer.load(folder))

    def served(self) -> ServedModel:
        """What engines must serve to join."""
        return ServedModel(self.name, config_hash(self.config), self.config.vocab_size)


log = get_logger(__name__)


MAX_EVENT_KEYS = 1 << 13
"""Keys stored, removed, or cooled in one message: one message is applied without a pause of the event loop."""


class ClusterMembers:
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

    def join(self, hello: conductor_pb2.JoinHello, tell: Callable[[conductor_pb2.JoinResponse], None]) -> ClusterMember:
        """Take an instance in (see `Registry.join`); `tell` gives it orders."""
        earlier = self.registry.get(hello.instance.id)
        member = self.registry.join(hello)
        self._orders[member.id] = tell
        if earlier is not None and earlier.instance.incarnation != member.instance.incarnation:
            self._lost(earlier, "was restarted")
        try:
            self._post(InstanceJoined(instance_facts(hello)))
        except Exception:  # its stream ends, and has nobody yet who would leave
            self.leave(member, lost=False)
            raise
        return member

    def leave(self, member: ClusterMember, *, lost: bool) -> None:
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
            self._tell(InstanceLeft(member.id, member.instance.incarnation))
            self.steps.left(member.instance)

    def is_member(self, member: ClusterMember) -> bool:
        """Whether the member has neither left nor been replaced."""
        return self.registry.get(member.id) is member

    def report(self, member: ClusterMember, load: conductor_pb2.LoadReport) -> None:
        """Take a load report."""
        member.load = load
        self._post(LoadReported(member.id, load_facts(load)))

    def events(self, member: ClusterMember, events: kv_pb2.KVEvents) -> None:
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
        self._post(RoleChangeRequested(instance_id))

    def order(self, action: Resync | ReplicatePrefix | ChangeRole) -> None:
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
            case ReplicatePrefix(instance, keys, source, tenant):
                holder = self.find(source)
                if holder is not None:
                    log.info("copy ordered", instance=instance, source=source, blocks=len(keys))
                    wanted = conductor_pb2.ReplicateOrder(keys=pack_keys(keys), source=holder, tenant=tenant)
                    tell(conductor_pb2.JoinResponse(replicate=wanted))
            case ChangeRole(instance, _, kind):
                log.info("change of role ordered", instance=instance, to=kind.value)
                tell(conductor_pb2.JoinResponse(role=conductor_pb2.RoleOrder(kind=kind_to_proto(kind))))

    def _lost(self, member: ClusterMember, why: str) -> None:
        self._tell(InstanceLeft(member.id, member.instance.incarnation, why))
        self.steps.lost(member.instance)


Admit = Callable[[kv_pb2.Instance], Awaitable[None]]


HELLO_TIMEOUT_S = 5.0


PROBE_TIMEOUT_S = 3.0


SILENT_HEARTBEATS = 3


QUIET, ASKED = 0.4, 0.2
"""Heartbeats; instances report four times in each. One of which nothing came for the first is asked `ASKS` times if
it is there, each time for the second. We may be late ourselves: so its answer counts, and it has two chances."""


ASKS = 2


class JoinServer:
    """Serves the Join streams of all instances."""

    def __init__(self, cluster: ClusterMembers, heartbeat_s: float, admit: Admit) -> None:
        """Wire the server; `conductor` must be set before the first instance joins.

        `admit` raises when an instance may not join yet.
        """
        self._admit = admit
        self.conductor = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._cluster = cluster
        self._heartbeat_s = heartbeat_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End all streams: the conductor is leaving, instances look for the next one."""
        self._stopping.set()

    async def serve(self, requests: AsyncIterator[conductor_pb2.JoinRequest], context: object) -> None:
        """Serve one instance until its stream ends.

        Raises:
            InvalidRequest: no proper hello came.
            Mismatch: it serves something else, or another process took its name.
            Unavailable: it cannot be reached at the address it tells, or the conductor is leaving.
            DeadlineExceeded: it was silent for three heartbeats, or is silent and does not answer.
        """
        welcome = conductor_pb2.JoinWelcome(conductor=self.conductor, heartbeat_s=self._heartbeat_s)
        await JoinStream(self._cluster, welcome, self._stopping, self._admit).run(requests, context)


class JoinStream(ServerStream[conductor_pb2.JoinRequest]):
    """One instance's stream."""

    def __init__(
        self, cluster: ClusterMembers, welcome: conductor_pb2.JoinWelcome, stopping: asyncio.Event, admit: Admit
    ) -> None:
        beat_s = welcome.heartbeat_s
        super().__init__(
            stopping, hello_timeout_s=HELLO_TIMEOUT_S, silence_s=SILENT_HEARTBEATS * beat_s, quiet_s=QUIET * beat_s
        )
        self._cluster = cluster
        self._welcome = welcome
        self._admit = admit
        self._member: ClusterMember
        self._left = False

    async def on_hello(self, message: conductor_pb2.JoinRequest) -> None:
        """Takes an instance that serves what the others do and can be reached."""
        hello = message.hello
        self._cluster.registry.check(hello)
        require_role(kv_pb2.InstanceKind.Name(hello.instance.kind).removeprefix("INSTANCE_KIND_").lower())
        await self._cluster.probe(hello.instance.address, PROBE_TIMEOUT_S)
        await self._admit(hello.instance)
        self._member = self._cluster.join(hello, self.outbox.post)
        emulated = {"emulated": hello.model.emulated} if hello.model.emulated else {}
        log.info("joined", instance=self._member.id, address=hello.instance.address, **emulated)
        self.outbox.post(conductor_pb2.JoinResponse(welcome=self._welcome))

    def on_message(self, message: conductor_pb2.JoinRequest, payload: memoryview) -> None:
        """A report, or events."""
        member = self._member
        if not self._cluster.is_member(member):
            raise Mismatch("instance.id", f"another process has joined as {member.id}")
        match message.WhichOneof("message"):
            case "load":
                self._cluster.report(member, message.load)
            case "events":
                self._cluster.events(member, message.events)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    async def is_there(self) -> bool:
        """Whether it answers at its address."""
        for _ in range(ASKS):
            try:
                await self._cluster.probe(self._member.instance.address, ASKED * self._welcome.heartbeat_s)
            except Unavailable:
                continue
            return True
        return False

    def end(self) -> None:
        """The instance has left, or is lost when it was silent."""
        if self._left:
            return
        self._left = True
        self._cluster.leave(self._member, lost=self.silent)
        tell = log.warning if self.silent else log.info
        tell("lost" if self.silent else "left", instance=self._member.id, address=self._member.instance.address)
