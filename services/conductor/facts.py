"""Translates the contract's messages to the plain values that the core's picture takes."""

from moonpool.cluster.speeds import sane, speeds_from_proto
from moonpool.kv.layout import KVLayout
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.core.facts import InstanceFacts, Kind, LoadFacts, Shape

_KINDS = {
    kv_pb2.INSTANCE_KIND_PREFILL: Kind.PREFILL,
    kv_pb2.INSTANCE_KIND_DECODE: Kind.DECODE,
    kv_pb2.INSTANCE_KIND_KVSTORE: Kind.KVSTORE,
}


def instance_facts(hello: conductor_pb2.JoinHello) -> InstanceFacts:
    """What a checked hello says."""
    kind = _KINDS[hello.instance.kind]
    return InstanceFacts(
        id=hello.instance.id,
        incarnation=hello.instance.incarnation,
        kind=kind,
        total_blocks=hello.total_blocks,
        shape=None if kind is Kind.KVSTORE else _shape(hello.model),
        speeds=speeds_from_proto(hello.speed),
        stages=max(hello.stages, 1),
        step_tokens=hello.step_tokens,
        capacity_bytes=hello.capacity_bytes,
        either=hello.either_role,
        host=hello.instance.address.rpartition(":")[0],
        tells_cold=hello.tells_cold,
    )


def kind_to_proto(kind: Kind) -> kv_pb2.InstanceKind.ValueType:
    """A kind as the contract has it."""
    return next(proto for proto, plain in _KINDS.items() if plain is kind)


def load_facts(load: conductor_pb2.LoadReport) -> LoadFacts:
    """What a load report says."""
    return LoadFacts(
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        promised_blocks=load.promised_blocks,
        context_tokens=load.context_tokens,
        drain_s=sane(load.drain_s) if load.HasField("drain_s") else None,
        speeds=speeds_from_proto(load.speed) if load.HasField("speed") else None,
        draining=load.draining,
        taken=load.taken,
        answer_tokens=load.expected_answer_tokens,
    )


def _shape(model: conductor_pb2.ModelInfo) -> Shape:
    layout = KVLayout.from_proto(model.layout)
    return Shape(layout.block_tokens, layout.token_bytes, layout.layers, model.emulated != "")
