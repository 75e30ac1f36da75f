"""Every RPC of every service under messages made from the descriptors: the answer is always a clear status.

The same examples in every run. MOONPOOL_FUZZ_EXAMPLES sets how many there are per RPC, MOONPOOL_FUZZ_SEED draws others.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings

from moonpool.base.kv.layout import KVLayout
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2, prefill_pb2
from tests.examples import examples
from tests.integration.conftest import BLOCK, tokens
from tests.integration.hostile.fuzzing import TRUE, WRONG, Facts, conversations, requests
from tests.integration.hostile.raw import METHODS, SERVICES, Outcome, Stack, request_class

EXAMPLES = int(os.environ.get("MOONPOOL_FUZZ_EXAMPLES", examples(30)))
SEED = os.environ.get("MOONPOOL_FUZZ_SEED")
DEADLINE_S = 20.0
"""Longer than any call may take: deadlines of the stack itself end each before."""

CODES = grpc.StatusCode
CLEAR = {
    CODES.OK,
    CODES.INVALID_ARGUMENT,
    CODES.FAILED_PRECONDITION,
    CODES.NOT_FOUND,
    CODES.UNIMPLEMENTED,
    CODES.UNAVAILABLE,
    CODES.RESOURCE_EXHAUSTED,
    CODES.ABORTED,
    CODES.DATA_LOSS,
}
ENDLESS = {"kvstore.Watch", "conductor.WatchKV"}
"""Streams that go on for ever by their nature: one answer is taken."""


def test_every_rpc_is_covered() -> None:
    """What `test_rpc` runs over is all there is in the contract's files, but for adapters and proxies."""
    folder = Path(__file__).parents[3] / "protos" / "moonpool" / "v1"
    names = [path.name for path in folder.glob("*.proto") if path.stem not in ("adapter", "ext_proc")]
    files = [descriptor_pool.Default().FindFileByName(f"moonpool/v1/{name}") for name in names]
    methods = {method.full_name for file in files for each in file.services_by_name.values() for method in each.methods}
    assert methods == {method.full_name for method in METHODS.values()}
    assert len({name.rpartition(".")[0] for name in methods}) == len(SERVICES) + 1  # carried calls are every service's


@pytest.mark.parametrize("name", METHODS)
def test_rpc(stack: Stack, name: str) -> None:
    """Every answer is clear, and afterwards the stack is as it was."""
    method = METHODS[name]
    proper = proper_requests(stack, name)
    make = conversations if method.client_streaming else requests

    @settings(
        max_examples=EXAMPLES,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(make(method.input_type, proper))
    def attempt(drawn: Any) -> None:
        facts = facts_of(stack)
        sent = [facts.adapt(message) for message in (drawn if method.client_streaming else [drawn])]
        outcome = stack.call(name, *sent, answers=1 if name in ENDLESS else 1000, timeout_s=DEADLINE_S)
        assert_clear(outcome)

    (attempt if SEED is None else seed(int(SEED))(attempt))()


def assert_clear(outcome: Outcome) -> None:
    """A status that says what was wrong, with its structured detail."""
    assert outcome.code in CLEAR, outcome
    if outcome.code is not CODES.OK:
        assert outcome.text, outcome
        assert outcome.detail is not None, outcome
        assert not any(word in outcome.text for word in ("Error(", "Exception", "Traceback")), outcome


def facts_of(stack: Stack) -> Facts:
    """Facts that know how to get a live transfer."""

    def reserve() -> kv_pb2.TransferTarget:
        return stack.reserve(stack.spec("live", tokens(BLOCK + 4, "fuzz")))

    decode = stack.instances["decode-0"]
    return Facts(stack.model.namespace, stack.model.layout, decode.epoch, reserve)


def proper_requests(stack: Stack, name: str) -> list[Message]:
    """Requests that are right, for unary calls one or another, for streams one after another.

    Where fuzzing.py's numbers stand for live things, `Facts` puts these in.
    """
    fields = PROPER.get(name)
    cls = request_class(METHODS[name])
    return [cls(**values) for values in fields(stack)] if fields is not None else [cls()]


def _generates(stack: Stack) -> Iterable[dict[str, Any]]:
    sampling = kv_pb2.Sampling(max_tokens=2)
    yield {"tokens": conductor_pb2.TokenPrompt(token_ids=tokens(BLOCK + 4, "fuzz")), "sampling": sampling}
    yield {"text": "hello", "sampling": sampling, "slo": conductor_pb2.Slo(ttft_s=5, tbt_s=5)}
    turns = [conductor_pb2.ChatMessage(role="user", content="hello")]
    yield {"chat": conductor_pb2.ChatPrompt(messages=turns), "sampling": sampling, "tenant": "fuzz"}


def _joins(stack: Stack) -> Iterable[dict[str, Any]]:
    kind, address = kv_pb2.INSTANCE_KIND_KVSTORE, stack.address("kvstore")
    hello = conductor_pb2.JoinHello(instance=kv_pb2.Instance(id="raw", epoch=1, kind=kind, address=address))
    yield {"hello": hello}
    yield {"events": kv_pb2.KVEvents(sequence=1, snapshot_begin=True, snapshot_end=True, stored_keys=bytes(64))}
    yield {"load": conductor_pb2.LoadReport(running=1)}
    yield {"events": kv_pb2.KVEvents(sequence=2, removed_keys=bytes(32))}


def _prefills(stack: Stack) -> Iterable[dict[str, Any]]:
    spec, store = stack.spec("fuzz", tokens(2 * BLOCK + 4, "fuzz")), stack.instances["kvstore-0"]
    yield {"sequence": spec, "source": prefill_pb2.PrefixSource(instance=store, blocks=1), "write_back": store}
    target = kv_pb2.TransferTarget(decode=stack.instances["decode-0"], transfer_id=TRUE, generation=TRUE)
    yield {"sequence": stack.spec("live", tokens(BLOCK + 4, "fuzz")), "target": target}


def _reserves(stack: Stack) -> Iterable[dict[str, Any]]:
    store = stack.instances["kvstore-0"]
    yield {"sequence": stack.spec("fuzz", tokens(2 * BLOCK, "fuzz")), "tbt_slo_s": 5, "write_back": store}


def _frames(stack: Stack, blocks: int, last_valid: int) -> Iterable[dict[str, Any]]:
    layout = KVLayout.from_proto(stack.model.layout)
    for layer in range(layout.layers):
        run = kv_pb2.SliceRun(layer=layer, block_count=blocks, head_end=layout.head_shares, valid_tokens=last_valid)
        header = kv_pb2.FrameHeader(transfer=TRUE, generation=TRUE, runs=[run])
        yield {"frame": header, "payload": bytes(blocks * layout.slice_bytes(0))}


def _receives(stack: Stack) -> Iterable[dict[str, Any]]:
    yield {"hello": stack.hello()}
    yield {"open": decode_pb2.TransferOpen(transfer_id=TRUE, generation=TRUE, decode_epoch=TRUE)}
    yield from _frames(stack, 2, 4)
    yield {"close": decode_pb2.TransferClose(transfer_id=TRUE, generation=TRUE)}


def _steps(stack: Stack) -> Iterable[dict[str, Any]]:
    yield {"hello": decode_pb2.StepsHello(conductor=kv_pb2.Instance(id="raw", epoch=1))}
    names: dict[str, Any] = {"request_id": "live", "transfer_id": TRUE, "generation": TRUE}
    yield {"start": decode_pb2.StartSequence(first_token_id=9, **names)}
    yield {"cancel": decode_pb2.CancelSequence(**names)}


def _puts(stack: Stack) -> Iterable[dict[str, Any]]:
    layout, keys = stack.model.layout, bytes([7]) * 32 + bytes([8]) * 32
    yield {"hello": stack.hello()}
    ranges: dict[str, Any] = {"layer_end": layout.layers, "head_end": layout.kv_heads}
    yield {"open": kvstore_pb2.PutOpen(transfer=TRUE, keys=keys, parent_keys=bytes(64), tenant="raw", **ranges)}
    for frame in _frames(stack, 2, BLOCK):
        yield frame
        whole = kvstore_pb2.PutOpen(transfer=TRUE, keys=keys, parent_keys=bytes(64), frame=frame["frame"], **ranges)
        yield {"open": whole, "payload": frame["payload"]}
    yield {"close": kvstore_pb2.PutClose(transfer=TRUE)}


def _gets(stack: Stack) -> Iterable[dict[str, Any]]:
    layout, keys = stack.model.layout, bytes([7]) * 32 + bytes([8]) * 32
    yield {"hello": stack.hello()}
    yield {"credit": kv_pb2.Credit(bytes=1 << 20)}
    yield {"open": kv_pb2.ReadOpen(transfer=TRUE, keys=keys, layer_end=layout.layers, head_end=layout.kv_heads)}
    yield {"credit": kv_pb2.Credit(bytes=1 << 20)}
    whole = kv_pb2.ReadOpen(transfer=TRUE, keys=keys, layer_end=layout.layers, head_end=layout.kv_heads)
    whole.takes_frame = True
    yield {"open": whole}
    yield {"close": kv_pb2.ReadClose(transfer=WRONG)}


PROPER: dict[str, Callable[[Stack], Iterable[dict[str, Any]]]] = {
    "conductor.Generate": _generates,
    "conductor.Join": _joins,
    "prefill.Prefill": _prefills,
    "prefill.ReadKV": _gets,
    "decode.Reserve": _reserves,
    "decode.ReceiveKV": _receives,
    "decode.ReadKV": _gets,
    "decode.Steps": _steps,
    "kvstore.Put": _puts,
    "kvstore.Get": _gets,
    "kvstore.MatchPrefix": lambda stack: [{"keys": bytes([7]) * 32}],
}
