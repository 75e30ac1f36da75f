"""The instances that have joined, and the model that they must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.base.cluster.proto_conversion import check_instance
from moonpool.base.errors import InvalidRequest, Mismatch
from moonpool.base.kv.layout import KVLayout
from moonpool.base.sampling_params import LORA
from moonpool.base.version import installed_version, version_conflict
from moonpool.v1 import conductor_pb2, kv_pb2

PREFILL = kv_pb2.INSTANCE_KIND_PREFILL
DECODE = kv_pb2.INSTANCE_KIND_DECODE
KVSTORE = kv_pb2.INSTANCE_KIND_KVSTORE
ENGINES = (PREFILL, DECODE)
NAMESPACE_BYTES = 32


class Registry:
    """The members, at most one per instance id: the last that joined."""

    def __init__(self, served: ModelIdentity) -> None:
        self._served = served
        self._members: dict[str, ClusterMember] = {}
        self._model: conductor_pb2.ModelInfo | None = None
        self._layout: KVLayout | None = None

    def __iter__(self) -> Iterator[ClusterMember]:
        """Return all members, in order of joining."""
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, instance_id: str) -> ClusterMember | None:
        return self._members.get(instance_id)

    def of_kind(self, kind: kv_pb2.InstanceKind.ValueType) -> list[ClusterMember]:
        """Return the members with one kind, in order of joining."""
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
        """Whether prompts and answers can be computed: an instance in the role both is enough."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """Roles that no member has which takes requests."""
        serving = [member for member in self._members.values() if not member.load.draining]
        decodes = [member for member in serving if member.kind == DECODE]
        prompts = any(member.kind == PREFILL or member.computes_prompts for member in serving)
        return [role for role, there in (("prefill", prompts), ("decode", decodes)) if not there]

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
            switches_role=hello.either_role,
            process=hello.process,
            http_address=hello.http_address,
            takes_loras=LORA not in hello.unsupported,
            computes_prompts=hello.computes_prompts and instance.kind == DECODE,
            version=hello.version,
            commit=hello.commit,
        )
        self._members[instance.id] = member
        return member

    def check(self, hello: conductor_pb2.JoinHello) -> None:
        """Raise as `join` would, without changes."""
        instance = hello.instance
        check_instance(instance)
        if instance.kind not in (*ENGINES, KVSTORE):
            raise InvalidRequest("instance.kind", "must be prefill, decode or kvstore")
        if conflict := version_conflict(installed_version(), hello.version):
            raise Mismatch("version", conflict)
        if instance.kind in ENGINES:
            self._check_model(hello)

    def leave(self, member: ClusterMember) -> bool:
        """Remove a member; return False if the member was replaced by a later epoch, or had left."""
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


@dataclass(slots=True, eq=False)
class ClusterMember:
    """An instance during one epoch, while joined.

    `load` is the last report; `switches_role`: comes back in the other role on order;
    `process` names the instance's process on the machine; `http_address`: of an engine's own HTTP server.
    `takes_loras`: requests with a LoRA adapter may go there. `computes_prompts`: in the role both.
    `version`, `commit`: of the instance's program; "" if not told.
    """

    instance: kv_pb2.Instance
    total_blocks: int
    model: conductor_pb2.ModelInfo | None
    load: conductor_pb2.LoadReport
    switches_role: bool = False
    process: str = ""
    http_address: str = ""
    takes_loras: bool = True
    computes_prompts: bool = False
    version: str = ""
    commit: str = ""

    @property
    def id(self) -> str:
        return self.instance.id

    @property
    def kind(self) -> kv_pb2.InstanceKind.ValueType:
        return self.instance.kind


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model of the conductor's checkpoint. Engines must serve the same."""

    name: str
    config_hash: bytes
    vocab_size: int
