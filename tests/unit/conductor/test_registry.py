import pytest

from moonpool.base.errors import InvalidRequest, Mismatch
from moonpool.base.rpc.channels import Channels
from moonpool.conductor.cluster_members import ClusterMembers
from moonpool.conductor.core.events import Event, InstanceLeft
from moonpool.conductor.registry import ModelIdentity, Registry
from moonpool.v1 import conductor_pb2, kv_pb2

from .fakes import model_info

SERVED = ModelIdentity("tiny", b"c" * 32, 1000)
KINDS = {
    "prefill": kv_pb2.INSTANCE_KIND_PREFILL,
    "decode": kv_pb2.INSTANCE_KIND_DECODE,
    "kvstore": kv_pb2.INSTANCE_KIND_KVSTORE,
}


def hello(name: str, *, epoch: int = 1, model: conductor_pb2.ModelInfo | None = None) -> conductor_pb2.JoinHello:
    kind = name.split("-")[0]
    instance = kv_pb2.Instance(id=name, epoch=epoch, kind=KINDS[kind], address="127.0.0.1:1")
    message = conductor_pb2.JoinHello(instance=instance, total_blocks=10)
    if kind != "kvstore":
        message.model.CopyFrom(model or model_info())
    return message


def test_ready_needs_a_prefill_and_a_decode_that_take_requests() -> None:
    registry = Registry(SERVED)
    registry.join(hello("kvstore-0"))
    prefill = registry.join(hello("prefill-0"))
    assert not registry.ready
    registry.join(hello("decode-0"))
    assert registry.ready
    prefill.load = conductor_pb2.LoadReport(draining=True)
    assert not registry.ready
    registry.check_invariants()


def test_the_model_is_adopted_from_the_first_engine_and_stays_while_one_is_left() -> None:
    registry = Registry(SERVED)
    first = registry.join(hello("prefill-0", model=model_info(max_tokens=100)))
    second = registry.join(hello("decode-0", model=model_info(max_tokens=80)))
    assert registry.model is not None
    assert registry.model.max_tokens == 80
    assert registry.leave(first)
    other = model_info(namespace=b"o" * 32)
    with pytest.raises(Mismatch) as caught:
        registry.join(hello("prefill-1", model=other))
    assert caught.value.field == "model.namespace"
    assert registry.leave(second)
    assert registry.model is None
    registry.join(hello("prefill-1", model=other))
    registry.check_invariants()


def test_a_restarted_instance_replaces_its_earlier_self() -> None:
    registry = Registry(SERVED)
    old = registry.join(hello("decode-0", epoch=1))
    new = registry.join(hello("decode-0", epoch=2, model=model_info(namespace=b"n" * 32)))
    assert list(registry) == [new]
    assert not registry.leave(old)
    assert registry.get("decode-0") is new
    registry.check_invariants()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "other"}, "model.name"),
        ({"config_hash": b"x" * 32}, "model.config_hash"),
        ({"vocab_size": 7}, "model.vocab_size"),
        ({"head_dim": 32}, "model.layout.head_dim"),
        ({"dtype": "int8"}, "model.layout.dtype"),
        ({"namespace": b"x" * 32}, "model.namespace"),
    ],
)
def test_a_mismatch_names_the_field(change: dict[str, object], field: str) -> None:
    registry = Registry(SERVED)
    registry.join(hello("prefill-0"))
    with pytest.raises(Mismatch) as caught:
        registry.join(hello("decode-0", model=model_info(**change)))
    assert caught.value.field == field
    assert ("--kv-cache-dtype" in caught.value.message) == ("dtype" in change)
    assert [member.id for member in registry] == ["prefill-0"]


def test_incomplete_hellos_are_refused() -> None:
    registry = Registry(SERVED)
    bare = hello("prefill-0")
    bare.ClearField("model")
    nobody = hello("prefill-0")
    nobody.instance.id = ""
    unknown = hello("prefill-0")
    unknown.instance.kind = kv_pb2.INSTANCE_KIND_CONDUCTOR
    for message, field in ((bare, "model"), (nobody, "instance.id"), (unknown, "instance.kind")):
        with pytest.raises(InvalidRequest) as caught:
            registry.join(message)
        assert caught.value.field == field


def test_an_instance_at_whose_joining_the_core_fails_is_not_there() -> None:
    left: list[Event] = []

    def post(event: Event) -> None:
        raise ValueError("the core has a defect")

    cluster = ClusterMembers(SERVED, Channels(), post, left.append)
    with pytest.raises(ValueError, match="defect"):
        cluster.join(hello("prefill-0"), lambda message: None)
    assert (len(cluster.registry), cluster.find("prefill-0")) == (0, None)
    assert left == [InstanceLeft("prefill-0", 1)], "it may have got as far as the core's picture"
