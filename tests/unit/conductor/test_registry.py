import pytest

from moonpool.cost import Speeds
from moonpool.errors import InvalidRequest, Mismatch, Unavailable
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.index import PrefixIndex
from services.conductor.planner import Planner
from services.conductor.registry import Registry, ServedModel

from .fakes import BLOCK_TOKENS, model_info

SERVED = ServedModel("tiny", b"c" * 32, 1000)
KINDS = {
    "prefill": kv_pb2.INSTANCE_KIND_PREFILL,
    "decode": kv_pb2.INSTANCE_KIND_DECODE,
    "kvstore": kv_pb2.INSTANCE_KIND_KVSTORE,
}


def hello(name: str, *, incarnation: int = 1, model: conductor_pb2.ModelInfo | None = None) -> conductor_pb2.JoinHello:
    kind = name.split("-")[0]
    instance = kv_pb2.Instance(id=name, incarnation=incarnation, kind=KINDS[kind], address="127.0.0.1:1")
    message = conductor_pb2.JoinHello(instance=instance, total_blocks=10)
    if kind != "kvstore":
        message.model.CopyFrom(model or model_info())
    return message


def test_ready_needs_a_prefill_and_a_decode_that_take_requests() -> None:
    registry = Registry(SERVED)
    registry.join(hello("kvstore-0"), 0.0)
    prefill = registry.join(hello("prefill-0"), 0.0)
    assert not registry.ready
    registry.join(hello("decode-0"), 0.0)
    assert registry.ready
    registry.report(prefill, conductor_pb2.LoadReport(draining=True), 1.0)
    assert not registry.ready
    registry.check_invariants()


def test_the_model_is_adopted_from_the_first_engine_and_stays_while_one_is_left() -> None:
    registry = Registry(SERVED)
    first = registry.join(hello("prefill-0", model=model_info(max_tokens=100)), 0.0)
    second = registry.join(hello("decode-0", model=model_info(max_tokens=80)), 0.0)
    assert registry.model is not None
    assert registry.model.max_tokens == 80
    assert registry.leave(first)
    other = model_info(namespace=b"o" * 32)
    with pytest.raises(Mismatch) as caught:
        registry.join(hello("prefill-1", model=other), 0.0)
    assert caught.value.field == "model.namespace"
    assert registry.leave(second)
    assert registry.model is None
    registry.join(hello("prefill-1", model=other), 0.0)
    registry.check_invariants()


def test_a_restarted_instance_replaces_its_earlier_self() -> None:
    registry = Registry(SERVED)
    old = registry.join(hello("decode-0", incarnation=1), 0.0)
    new = registry.join(hello("decode-0", incarnation=2, model=model_info(namespace=b"n" * 32)), 1.0)
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
        ({"dtype": "bfloat16"}, "model.layout.dtype"),
        ({"namespace": b"x" * 32}, "model.namespace"),
    ],
)
def test_a_mismatch_names_the_field(change: dict[str, object], field: str) -> None:
    registry = Registry(SERVED)
    registry.join(hello("prefill-0"), 0.0)
    with pytest.raises(Mismatch) as caught:
        registry.join(hello("decode-0", model=model_info(**change)), 0.0)
    assert caught.value.field == field
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
            registry.join(message, 0.0)
        assert caught.value.field == field


def test_reported_speeds_replace_corrections() -> None:
    registry = Registry(SERVED)
    member = registry.join(hello("prefill-0"), 0.0)
    speeds = Speeds(prefill_base_s=2.0)
    registry.report(member, conductor_pb2.LoadReport(speed=speeds.to_proto()), 1.0)
    assert member.tracker.speeds == speeds
    assert member.last_heard == 1.0


class TestPlanner:
    def plan(self, registry: Registry, index: PrefixIndex, **kwargs: object) -> object:
        arguments: dict[str, object] = {
            "tokens": 2 * BLOCK_TOKENS,
            "answer_tokens": 8,
            "keys": [b"k" * 32],
            "prompt_key": b"p",
            "now": 0.0,
        }
        return Planner(registry, index, 1.0).plan(**{**arguments, **kwargs})  # type: ignore[arg-type]

    def test_unavailable_says_who_is_missing(self) -> None:
        registry = Registry(SERVED)
        registry.join(hello("prefill-0"), 0.0)
        with pytest.raises(Unavailable, match=r"missing: decode"):
            self.plan(registry, PrefixIndex())

    def test_what_fits_nowhere_is_invalid(self) -> None:
        registry = Registry(SERVED)
        registry.join(hello("prefill-0"), 0.0)
        registry.join(hello("decode-0"), 0.0)
        with pytest.raises(InvalidRequest) as caught:
            self.plan(registry, PrefixIndex(), answer_tokens=10 * BLOCK_TOKENS)
        assert caught.value.field == "sampling.max_tokens"
        with pytest.raises(InvalidRequest) as caught:
            self.plan(registry, PrefixIndex(), tokens=11 * BLOCK_TOKENS)
        assert caught.value.field == "prompt"

    def test_a_burst_spreads_by_the_counters_of_what_is_in_flight(self) -> None:
        registry = Registry(SERVED)
        speeds = Speeds(prefill_per_token_s=1.0, decode_per_sequence_s=1.0)
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            registry.report(
                registry.join(hello(name), 0.0),
                conductor_pb2.LoadReport(speed=speeds.to_proto(), free_blocks=10),
                0.0,
            )
        chosen = []
        for number in range(4):
            plan = Planner(registry, PrefixIndex(), 1.0).plan(
                tokens=32, answer_tokens=8, keys=[], prompt_key=b"p", now=0.0
            )
            prefill, decode = registry.get(plan.prefill.id), registry.get(plan.decodes[0].id)
            assert prefill is not None
            assert decode is not None
            prefill.prefills.begin(str(number), plan.prefill.busy_s, 0.0)
            decode.decodes.begin(str(number), 32, 3)
            chosen.append((prefill.id, decode.id))
        assert chosen == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")] * 2

    def test_one_token_needs_no_decode(self) -> None:
        registry = Registry(SERVED)
        registry.join(hello("prefill-0"), 0.0)
        registry.join(hello("decode-0"), 0.0)
        plan = Planner(registry, PrefixIndex(), 1.0).plan(tokens=5, answer_tokens=1, keys=[], prompt_key=b"p", now=0.0)
        assert plan.decodes == ()
