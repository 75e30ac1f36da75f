"""Members of the cluster: joining, heartbeats, loss, the model they serve, and the core's events about each change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moonpool.base import world
from moonpool.base.checkpoint import ModelConfig, Tokenizer, config_hash, load_config, model_name, resolve
from moonpool.base.cluster.proto_conversion import check_instance, session_order
from moonpool.base.errors import InvalidRequest, Mismatch, NotFound, Unavailable
from moonpool.base.kv.keys import pack_keys, unpack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.connection_monitor import ProcessorWait
from moonpool.base.rpc.roles import require_role
from moonpool.base.rpc.stream_writes import bare_write
from moonpool.base.sampling_params import LORA
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.server_stream import ServerStream
from moonpool.conductor.core.events import (
    ChangeRole,
    Event,
    InstanceJoined,
    InstanceLeft,
    InstanceOrder,
    KeysChanged,
    LoadReported,
    Resync,
    RoleChangeRequested,
)
from moonpool.conductor.core.expected import TellSession
from moonpool.conductor.core.router import ReplicatePrefix, StopReplication
from moonpool.conductor.core.tenant_activity import TellActivity
from moonpool.conductor.decode_streams import StepsPool
from moonpool.conductor.kv_watchers import KVWatchers
from moonpool.conductor.loras import LoraEngine
from moonpool.conductor.proto_conversion import activity_to_proto, instance_facts, kind_to_proto, load_facts
from moonpool.v1 import conductor_pb2, kv_pb2

PREFILL = kv_pb2.INSTANCE_KIND_PREFILL
DECODE = kv_pb2.INSTANCE_KIND_DECODE
KVSTORE = kv_pb2.INSTANCE_KIND_KVSTORE
ENGINES = (PREFILL, DECODE)
NAMESPACE_BYTES = 32


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model of the conductor's checkpoint. Engines must serve the same."""

    name: str
    config_hash: bytes
    vocab_size: int


@dataclass(slots=True, eq=False)
class ClusterMember:
    """An instance during one epoch, while joined.

    `load` is the last report; `either`: the role can change; `process` names the instance's process on the machine;
    `http_address`: of an engine's own HTTP server.
    `takes_loras`: requests with a LoRA adapter may go there.
    """

    instance: kv_pb2.Instance
    total_blocks: int
    model: conductor_pb2.ModelInfo | None
    load: conductor_pb2.LoadReport
    either: bool = False
    process: str = ""
    http_address: str = ""
    takes_loras: bool = True

    @property
    def id(self) -> str:
        return self.instance.id

    @property
    def kind(self) -> kv_pb2.InstanceKind.ValueType:
        return self.instance.kind


class Registry:
    """The members, at most one per instance id: the last that joined."""

    def __init__(self, served: ModelIdentity) -> None:
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
        """Members with one kind, in order of joining."""
        return [member for member in self._members.values() if member.kind == kind]

    @property
    def model(self) -> conductor_pb2.ModelInfo | None:
        """The served model, None before the first engine. `max_tokens` is the smallest of all engines."""
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
        """The layout of the served KV, None before the first engine."""
        return self._layout

    @property
    def ready(self) -> bool:
        """Whether at least one prefill and one decode instance take requests."""
        return all(any(not member.load.draining for member in self.of_kind(kind)) for kind in ENGINES)

    def join(self, hello: conductor_pb2.JoinHello) -> ClusterMember:
        """Add an instance; an earlier member with the same id is replaced.

        Raises:
            InvalidRequest: the hello is incomplete.
            Mismatch: the instance serves another model than the conductor or the other engines; names the field.
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
            process=hello.process,
            http_address=hello.http_address,
            takes_loras=LORA not in hello.unsupported,
        )
        self._members[instance.id] = member
        return member

    def check(self, hello: conductor_pb2.JoinHello) -> None:
        """Raise as `join` would, without changes."""
        instance = hello.instance
        check_instance(instance)
        if instance.kind not in (*ENGINES, KVSTORE):
            raise InvalidRequest("instance.kind", "must be prefill, decode or kvstore")
        if instance.kind in ENGINES:
            self._check_model(hello)

    def leave(self, member: ClusterMember) -> bool:
        """Remove a member; returns False if the member was replaced by a later epoch, or had left."""
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
        found = self._layout.difference(layout)
        if found is not None:
            hint = "; --dtype and --kv-cache-dtype must be those of the cluster" if "dtype" in found.field else ""
            raise Mismatch(
                f"model.layout.{found.field}", f"the other engines have {found.here!r}, not {found.there!r}{hint}"
            )
        if model.namespace != self._model.namespace:
            raise Mismatch("model.namespace", "the weights, or their --dtype, differ from those of the other engines")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parts of a checkpoint that the conductor uses."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def load(cls, model: str, chat_template: Path | None = None) -> Checkpoint:
        """Load from a folder or hub id; `chat_template`: a file in place of the checkpoint's chat template.

        Raises:
            CheckpointError: the checkpoint is missing, damaged or not supported.
        """
        folder = resolve(model)
        return cls(model_name(model), load_config(folder), Tokenizer.load(folder, chat_template))

    def served(self) -> ModelIdentity:
        """What engines must serve to join."""
        return ModelIdentity(self.name, config_hash(self.config), self.config.vocab_size)


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
        """The members' instances, by kind or all, in order of joining."""
        return [member.instance for member in self.registry if kind in (None, member.kind)]

    def lora_engines(self) -> list[LoraEngine]:
        """The engines, and whether they take LoRA adapters."""
        return [LoraEngine(it.instance, it.takes_loras) for it in self.registry if it.kind in ENGINES]

    def find(self, instance_id: str) -> kv_pb2.Instance | None:
        """The member of this id."""
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
        """Whether the member has neither left nor been replaced."""
        return self.registry.get(member.id) is member

    def report(self, member: ClusterMember, load: conductor_pb2.LoadReport) -> None:
        """Handle a load report."""
        facts = load_facts(load)
        load.ClearField("activities")  # tenants' names are not for all who see the cluster's state
        member.load = load
        self._post(LoadReported(member.id, facts))

    def events(self, member: ClusterMember, events: kv_pb2.KVEvents) -> None:
        """Handle KV events."""
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
        if not member.either:
            raise InvalidRequest("instance_id", f"{instance_id} keeps its role: it was started without either_role")
        if not any(other is not member and not other.load.draining for other in self.registry.of_kind(member.kind)):
            raise InvalidRequest("instance_id", f"{instance_id} is the last one of its kind")
        self._post(RoleChangeRequested(instance_id))

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
        """Seconds for which an instance has had no processor."""
        member = self.registry.get(instance_id)
        return world.waited_s(member.process) if member is not None else 0.0

    def _lost(self, member: ClusterMember, why: str) -> None:
        self._tell(InstanceLeft(member.id, member.instance.epoch, why))
        self.steps.lost(member.instance)


Admit = Callable[[kv_pb2.Instance], Awaitable[None]]
HELLO_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 3.0
SILENT_HEARTBEATS = 3
QUIET_HEARTBEATS = 0.4
"""Silence, in heartbeats, after which an instance is probed. Instances report four times per heartbeat."""
PROBE_HEARTBEATS = 0.2
"""Timeout of a probe, in heartbeats."""
PROBES = 2
"""The conductor may be late itself, so an instance is lost only if this many probes get no answer."""


class JoinServer:
    """Serves the Join streams of all instances."""

    def __init__(self, cluster: ClusterMembers, heartbeat_s: float, admit: Admit) -> None:
        """`conductor` must be filled in before the first instance joins; `admit` raises if an instance must wait."""
        self._admit = admit
        self.conductor = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._cluster = cluster
        self._heartbeat_s = heartbeat_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End all streams: the conductor is leaving, and instances look for another one."""
        self._stopping.set()

    async def serve(self, requests: AsyncIterator[conductor_pb2.JoinRequest], context: object) -> None:
        """Serve one instance until the instance's stream ends.

        Raises:
            InvalidRequest: there was no valid hello.
            Mismatch: the instance serves another model, or another process has joined with the same id.
            Unavailable: the instance cannot be reached at the given address, or the conductor is leaving.
            DeadlineExceeded: the instance was silent for three heartbeats, or is silent and does not answer probes.
        """
        welcome = conductor_pb2.JoinWelcome(conductor=self.conductor, heartbeat_s=self._heartbeat_s)
        await JoinStream(self._cluster, welcome, self._stopping, self._admit).run(requests, bare_write(context))


class JoinStream(ServerStream[conductor_pb2.JoinRequest]):
    """One instance's stream."""

    def __init__(
        self, cluster: ClusterMembers, welcome: conductor_pb2.JoinWelcome, stopping: asyncio.Event, admit: Admit
    ) -> None:
        beat_s = welcome.heartbeat_s
        super().__init__(
            stopping,
            hello_timeout_s=HELLO_TIMEOUT_S,
            quiet_s=QUIET_HEARTBEATS * beat_s,
        )
        self._cluster = cluster
        self._welcome = welcome
        self._admit = admit
        self._member: ClusterMember
        self._left = False
        self._no_processor: ProcessorWait

    async def on_hello(self, message: conductor_pb2.JoinRequest) -> None:
        """Add an instance that serves the cluster's model and can be reached."""
        hello = message.hello
        self._cluster.registry.check(hello)
        require_role(kv_pb2.InstanceKind.Name(hello.instance.kind).removeprefix("INSTANCE_KIND_").lower())
        await self._cluster.probe(hello.instance.address, PROBE_TIMEOUT_S)
        await self._admit(hello.instance)
        self._member = self._cluster.join(hello, self.send_queue.post)
        self._no_processor = ProcessorWait(lambda: world.waited_s(self._member.process))
        self._no_processor.heard(asyncio.get_running_loop().time())
        emulated = {"emulated": hello.model.emulated} if hello.model.emulated else {}
        log.info("joined", instance=self._member.id, address=hello.instance.address, **emulated)
        self.send_queue.post(conductor_pb2.JoinResponse(welcome=self._welcome))

    def on_message(self, message: conductor_pb2.JoinRequest, payload: memoryview) -> None:
        """A load report, or KV events."""
        member = self._member
        self._no_processor.heard(self._heard_at)
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
        """Whether the instance was heard lately and answers a probe. Time without a processor does not count."""
        answers = await self._answers()
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        waited_s = self._no_processor.since_s()
        limit_s = (SILENT_HEARTBEATS if answers else QUIET_HEARTBEATS) * self._welcome.heartbeat_s
        if silent_s >= limit_s > silent_s - waited_s:
            log.warning("an instance gets no processor", instance=self._member.id, waited_s=round(waited_s, 2))
        return silent_s - waited_s < limit_s

    async def _answers(self) -> bool:
        for _ in range(PROBES):
            try:
                await self._cluster.probe(self._member.instance.address, PROBE_HEARTBEATS * self._welcome.heartbeat_s)
            except Unavailable:
                continue
            return True
        return False

    def end(self) -> None:
        """The instance has left, or is lost if silent."""
        if self._left:
            return
        self._left = True
        self._cluster.leave(self._member, lost=self.silent)
        write = log.warning if self.silent else log.info
        write("lost" if self.silent else "left", instance=self._member.id, address=self._member.instance.address)
