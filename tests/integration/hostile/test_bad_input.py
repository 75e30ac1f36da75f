"""Wrong requests and wrong peers: each is refused by name, and the stack is not harmed.

After each test of this file all processes live, a good request has its right answer, everything is at rest, and no log
has a traceback.
"""

import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client, InvalidRequest, Slo
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2
from tests.integration.conftest import BLOCK, tokens
from tests.integration.hostile.raw import METHODS, Outcome, Stack, request_class

CODES = grpc.StatusCode
INVALID, MISMATCH = CODES.INVALID_ARGUMENT, CODES.FAILED_PRECONDITION
LENGTH = 4096  # of the tiny model
VOCABULARY = 512
MESSAGE_LIMIT = 8 << 20
PROMPT = tokens(2 * BLOCK + 4, "bad")


# --- through the SDK -------------------------------------------------------------------------------------------------


def sampling(**values: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling": SamplingParams(**values)}


SDK: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", {"prompt": ""}, "must not be empty"),
    ("token_ids", {"token_ids": []}, "no tokens"),
    ("messages", {"messages": []}, "turns"),
    ("prompt", {}, "exactly one"),
    ("prompt", {"prompt": "a", "token_ids": [9]}, "exactly one"),
    ("messages", {"messages": [{"role": "user"}]}, "content"),
    ("messages", {"messages": [{"role": "user", "content": "a", "name": "b"}]}, "name"),
    ("token_ids", {"token_ids": [9, VOCABULARY]}, r"\[0, 512\)"),
    ("token_ids", {"token_ids": [9, -1]}, r"\[0, 512\)"),
    ("token_ids", {"token_ids": [1 << 40]}, ""),
    ("token_ids", {"token_ids": ["nine"]}, ""),
    ("token_ids", {"token_ids": [9] * LENGTH}, "4096 tokens"),
    ("prompt", {"prompt": "word " * LENGTH}, "4096"),
    ("prompt", {"prompt": "a" * (4 << 20)}, "has more than 4096 tokens"),
    ("token_ids", {"token_ids": [300] * (1 << 20)}, "tokens"),
    ("prompt", {"prompt": "a" * (100 << 20)}, "bytes"),
    ("messages", {"messages": [{"role": "user", "content": "a" * (100 << 20)}]}, "bytes"),
    ("sampling.max_tokens", sampling(max_tokens=-1), "at least 1"),
    ("sampling.max_tokens", sampling(max_tokens=0), "at least 1"),
    ("sampling.max_tokens", sampling(max_tokens=1 << 40), ""),
    ("sampling.min_tokens", sampling(min_tokens=9, max_tokens=8), "exceed"),
    ("sampling.temperature", sampling(temperature=float("nan")), "finite"),
    ("sampling.temperature", sampling(temperature=float("inf")), "finite"),
    ("sampling.temperature", sampling(temperature=-0.1), "at least 0"),
    ("sampling.temperature", sampling(temperature="hot"), ""),
    ("sampling.top_p", sampling(top_p=float("nan")), r"\(0, 1\]"),
    ("sampling.top_p", sampling(top_p=0.0), r"\(0, 1\]"),
    ("sampling.top_k", sampling(top_k=-1), "at least 0"),
    ("sampling.min_p", sampling(min_p=float("nan")), r"\[0, 1\]"),
    ("sampling.presence_penalty", sampling(presence_penalty=float("nan")), r"\[-2, 2\]"),
    ("sampling.frequency_penalty", sampling(frequency_penalty=3.0), r"\[-2, 2\]"),
    ("sampling.repetition_penalty", sampling(repetition_penalty=float("nan")), ""),
    ("sampling.repetition_penalty", sampling(repetition_penalty=1e-30), ""),
    ("sampling.logit_bias", sampling(logit_bias={VOCABULARY: 1.0}), r"\[0, 512\)"),
    ("sampling.logit_bias", sampling(logit_bias={9: float("nan")}), r"\[-100, 100\]"),
    ("sampling.logit_bias", sampling(logit_bias={9: 1e38}), r"\[-100, 100\]"),
    ("sampling.stop_token_ids", sampling(stop_token_ids=[VOCABULARY]), r"\[0, 512\)"),
    ("sampling.stop_token_ids", sampling(stop_token_ids=range(VOCABULARY), min_tokens=2), "no token is left"),
    ("sampling.stop", sampling(stop=[""]), "characters"),
    ("sampling.stop", sampling(stop=["a"] * 17), "at most 16"),
    ("sampling.seed", sampling(seed=-1), ""),
    ("sampling.seed", sampling(seed=1 << 64), ""),
    ("sampling.n", sampling(n=65), r"\[1, 64\]"),
    ("sampling.logprobs", sampling(logprobs=21), "must be in"),
    ("sampling.prompt_logprobs", sampling(prompt_logprobs=-1), "must be in"),
    ("sampling.response_format", sampling(response_format="xml"), "must be one of"),
    ("sampling.grammar", sampling(response_format="regex", grammar="(["), "regex"),
    ("slo.ttft_s", {"token_ids": PROMPT, "slo": Slo(ttft_s=float("nan"))}, "above 0"),
    ("slo.tbt_s", {"token_ids": PROMPT, "slo": Slo(tbt_s=-1.0)}, "above 0"),
    ("model", {"token_ids": PROMPT, "model": "another"}, "only 'tiny-llama' is served, not 'another'"),
    ("model", {"token_ids": PROMPT, "model": "模" * 4000}, "only 'tiny-llama' is served"),
    ("tenant", {"token_ids": PROMPT, "tenant": "t" * 257}, "at most 256"),
    ("tenant", {"token_ids": PROMPT, "tenant": "\ud800"}, ""),
    ("request_id", {"token_ids": PROMPT, "request_id": "a\nb"}, "printable"),
    ("request_id", {"token_ids": PROMPT, "request_id": "r" * 129}, "at most 128"),
]


@pytest.mark.parametrize(("field", "request_", "says"), SDK, ids=[f"{i}-{case[0]}" for i, case in enumerate(SDK)])
def test_sdk(stack: Stack, field: str, request_: dict[str, Any], says: str) -> None:
    """The error names the field as the contract spells it."""
    with pytest.raises(InvalidRequest, match=says or None) as caught:
        stack.client.generate(**request_)
    assert caught.value.field == field


def test_unknown_parameter(stack: Stack) -> None:
    """Python says so for the SDK's own parameters; on the wire a field that is not known here is not passed over."""
    client: Any = stack.client
    with pytest.raises(TypeError, match="top_x"):
        SamplingParams(top_x=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temperatur"):
        client.generate(prompt="a", temperatur=0.5)
    unknown = b"\xf8\x07\x01"  # field 127, a varint
    request = conductor_pb2.GenerateRequest(tokens=conductor_pb2.TokenPrompt(token_ids=PROMPT)).SerializeToString()
    assert stack.call("conductor.Generate", request + unknown).text == "has field number 127, which is not known here"
    nested = request + b"\x32\x03" + unknown  # in `sampling`
    outcome = stack.call("conductor.Generate", nested)
    assert (outcome.code, outcome.field) == (INVALID, "sampling")


def test_a_wrong_request_beside_good_ones(stack: Stack) -> None:
    """What is refused takes nothing from a stream that runs."""
    with stack.client.stream(token_ids=PROMPT, sampling=SamplingParams(max_tokens=40, ignore_eos=True)) as stream:
        for event in stream:
            if event.position % 10 == 0:
                with pytest.raises(InvalidRequest):
                    stack.client.generate(token_ids=[VOCABULARY])
    assert stream.result is not None
    assert len(stream.result.token_ids) == 40


def test_a_request_id_in_use(stack: Stack) -> None:
    """Two requests of one id at one time would be told each other's tokens."""
    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    with (
        stack.client.stream(token_ids=PROMPT, sampling=params, request_id="twin") as stream,
        Client(stack.address("conductor")) as other,
    ):
        events = iter(stream)
        next(events)
        with pytest.raises(InvalidRequest, match="running already") as caught:
            other.generate(token_ids=PROMPT, request_id="twin")
    assert caught.value.field == "request_id"


# --- what is not even a message --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_malformed_and_truncated(stack: Stack, name: str) -> None:
    """Bytes that are no message of the method's class, as first message and after a proper one."""
    for data in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"):
        outcome = stack.call(name, data)
        assert outcome.code in (INVALID, CODES.DATA_LOSS), outcome
        assert outcome.text.startswith(f"malformed {request_class(METHODS[name]).__name__}")
        if METHODS[name].client_streaming:
            later = stack.call(name, stack.first_message(name), data)
            assert (later.code, later.text) == (outcome.code, outcome.text)


@pytest.mark.parametrize("name", ["conductor.Generate", "prefill.Prefill", "decode.ReceiveKV", "kvstore.Put"])
def test_a_message_of_100_mb(stack: Stack, name: str) -> None:
    """gRPC itself refuses it, from its length, and says the limit."""
    outcome = stack.call(name, b"\x7a" + b"\x80\x80\x80\x32" + bytes(100 << 20))
    assert outcome.code is CODES.RESOURCE_EXHAUSTED
    assert str(MESSAGE_LIMIT) in outcome.text


def test_no_grpc_at_all(stack: Stack) -> None:
    """Something that speaks another protocol is sent away."""
    for kind in ("conductor", "prefill", "decode", "kvstore"):
        host, port = stack.address(kind).rsplit(":", 1)
        for data in (
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            bytes(1000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
        ):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                with pytest.MonkeyPatch.context():
                    try:
                        while connection.recv(4096):
                            pass
                    except ConnectionError:
                        pass


# --- empty messages and wrong beginnings -----------------------------------------------------------------------------

EMPTY: dict[str, tuple[grpc.StatusCode, str]] = {
    "conductor.Generate": (INVALID, "prompt"),
    "conductor.Explain": (CODES.NOT_FOUND, ""),
    "conductor.ClusterState": (CODES.OK, ""),
    "conductor.CreateContext": (INVALID, "messages"),
    "conductor.UpdateContext": (CODES.NOT_FOUND, ""),
    "conductor.ListContexts": (CODES.OK, ""),
    "conductor.DeleteContext": (CODES.NOT_FOUND, ""),
    "conductor.DeleteKV": (INVALID, "selection"),
    "conductor.UpdateSession": (INVALID, "session.id"),
    "conductor.AnnouncePrompts": (CODES.OK, ""),
    "conductor.ChangeRole": (INVALID, "kind"),
    "conductor.DrainInstance": (CODES.NOT_FOUND, ""),
    "conductor.ConductorStats": (CODES.OK, ""),
    "conductor.LoadLoraAdapter": (INVALID, "lora_name"),
    "conductor.UnloadLoraAdapter": (CODES.NOT_FOUND, ""),
    "conductor.WatchKV": (CODES.OK, ""),
    "conductor.Join": (INVALID, "hello"),
    "prefill.Prefill": (INVALID, "sequence.request_id"),
    "prefill.ReadKV": (INVALID, "hello"),
    "prefill.Cancel": (CODES.OK, ""),
    "prefill.Forget": (CODES.OK, ""),
    "prefill.LoadLora": (INVALID, "lora.id"),
    "prefill.UnloadLora": (INVALID, "id"),
    "prefill.PrefillStats": (CODES.OK, ""),
    "decode.Reserve": (INVALID, "sequence.request_id"),
    "decode.ReceiveKV": (INVALID, "hello"),
    "decode.ReadKV": (INVALID, "hello"),
    "decode.Steps": (INVALID, "hello"),
    "decode.Forget": (CODES.OK, ""),
    "decode.LoadLora": (INVALID, "lora.id"),
    "decode.UnloadLora": (INVALID, "id"),
    "decode.DecodeStats": (CODES.OK, ""),
    "kvstore.Put": (INVALID, "hello"),
    "kvstore.Get": (INVALID, "hello"),
    "kvstore.MatchPrefix": (CODES.OK, ""),
    "kvstore.Find": (CODES.OK, ""),
    "kvstore.Remove": (CODES.OK, ""),
    "kvstore.Pin": (INVALID, "name"),
    "kvstore.Unpin": (CODES.OK, ""),
    "kvstore.Watch": (CODES.OK, ""),
    "kvstore.Compact": (CODES.OK, ""),
    "kvstore.Warm": (CODES.OK, ""),
    "kvstore.ReuseCurve": (CODES.OK, ""),
    "kvstore.Forget": (CODES.OK, ""),
    "kvstore.SyncRecords": (CODES.OK, ""),
    "kvstore.KVStoreStats": (CODES.OK, ""),
    "conductor.Carry": (CODES.OK, ""),
}


@pytest.mark.parametrize("name", METHODS)
def test_empty_message(stack: Stack, name: str) -> None:
    """All of the contract's methods, with nothing said."""
    outcome = stack.call(name, b"", answers=1)
    assert (outcome.code, outcome.field) == EMPTY[name], outcome


STREAMS = {name for name, method in METHODS.items() if method.client_streaming} - {"conductor.Carry"}
"""Those that begin with a hello."""


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_streams_begin_and_go_on_properly(stack: Stack, name: str) -> None:
    """A second hello or an empty message ends a stream; one on which nothing was said ends in peace."""
    assert stack.call(name).code is CODES.OK
    hello = stack.first_message(name)
    assert stack.call(name, hello).code is CODES.OK
    for wrong in (hello, b""):
        outcome = stack.call(name, hello, wrong)
        assert (outcome.code, outcome.field) == (INVALID, "message"), outcome


@pytest.mark.parametrize("name", ["decode.ReceiveKV", "prefill.ReadKV", "decode.ReadKV", "kvstore.Put", "kvstore.Get"])
def test_hello_of_another_kv(stack: Stack, name: str) -> None:
    """KV streams say what KV they speak of; the first difference is named."""

    def answer(change: Callable[[kv_pb2.StreamHello], None]) -> Outcome:
        message: Any = stack.first_message(name)
        change(message.hello)
        return stack.call(name, message)

    def layout(**values: Any) -> Callable[[kv_pb2.StreamHello], None]:
        return lambda hello: hello.layout.MergeFrom(kv_pb2.KVLayout(**values))

    def namespace(value: bytes) -> Callable[[kv_pb2.StreamHello], None]:
        return lambda hello: setattr(hello, "namespace", value)

    wrong = {
        "namespace": namespace(bytes(31)),
        "layout.dtype": layout(dtype="float8"),
        "layout.layers": lambda hello: hello.layout.ClearField("layers"),
        "layout.block_size": layout(block_size=17),
        "layout.version": layout(version=9),
    }
    if not name.startswith("kvstore."):
        wrong |= {"namespace": namespace(bytes(32)), "layout.kv_heads": layout(kv_heads=8)}
    else:
        wrong |= {"layout.layers": layout(layers=(1 << 32) - 1)}
    for field, change in wrong.items():
        outcome = answer(change)
        assert (outcome.code, outcome.field) == (MISMATCH, field), outcome


# --- sequences at the engines ----------------------------------------------------------------------------------------


def with_tokens(stack: Stack, spec: kv_pb2.SequenceSpec, token_ids: list[int]) -> None:
    spec.CopyFrom(stack.spec("raw", token_ids))


SPECS: list[tuple[str, Callable[[Stack, Any], None]]] = [
    ("request_id", lambda stack, spec: spec.ClearField("request_id")),
    ("request_id", lambda stack, spec: setattr(spec, "request_id", "r" * 1000)),
    ("tenant", lambda stack, spec: setattr(spec, "tenant", "t" * 1000)),
    ("token_ids", lambda stack, spec: spec.ClearField("token_ids")),
    ("token_ids", lambda stack, spec: setattr(spec, "token_ids", spec.token_ids[:-1])),
    ("token_ids", lambda stack, spec: with_tokens(stack, spec, [9, VOCABULARY])),
    ("token_ids", lambda stack, spec: with_tokens(stack, spec, [9, -1])),
    ("token_ids", lambda stack, spec: setattr(spec, "token_ids", bytes(4 << 20))),
    ("prompt_tokens", lambda stack, spec: setattr(spec, "prompt_tokens", 0)),
    ("prompt_tokens", lambda stack, spec: setattr(spec, "prompt_tokens", (1 << 32) - 1)),
    ("block_keys", lambda stack, spec: spec.ClearField("block_keys")),
    ("block_keys", lambda stack, spec: setattr(spec, "block_keys", spec.block_keys[:-1])),
    ("block_keys", lambda stack, spec: setattr(spec, "block_keys", bytes(len(spec.block_keys)))),
    ("block_keys", lambda stack, spec: setattr(spec, "token_ids", tokens_to_bytes(PROMPT[::-1]))),
    ("chain_root", lambda stack, spec: setattr(spec, "chain_root", bytes(32))),
    ("chain_root", lambda stack, spec: setattr(spec, "chain_root", b"")),
    ("chain_root", lambda stack, spec: setattr(spec, "tenant", "another")),
    ("end_token_ids", lambda stack, spec: spec.end_token_ids.append(VOCABULARY)),
    ("end_token_ids", lambda stack, spec: spec.end_token_ids.extend([9] * 600)),
    ("sampling.max_tokens", lambda stack, spec: setattr(spec.sampling, "max_tokens", -5)),
    ("sampling.temperature", lambda stack, spec: setattr(spec.sampling, "temperature", float("nan"))),
    ("sampling.logit_bias", lambda stack, spec: spec.sampling.logit_bias.update({VOCABULARY: 1.0})),
    ("sampling.stop_token_ids", lambda stack, spec: spec.sampling.stop_token_ids.append(-1)),
]


@pytest.mark.parametrize(("field", "change"), SPECS, ids=[f"{i}-{case[0]}" for i, case in enumerate(SPECS)])
def test_sequences_at_the_engines(stack: Stack, field: str, change: Callable[[Stack, Any], None]) -> None:
    """Both engines check for themselves what the conductor sends: one bad row would take a whole batch with it."""
    spec = stack.spec("raw", PROMPT)
    change(stack, spec)
    for name in ("prefill.Prefill", "decode.Reserve"):
        outcome = stack.call(name, request_class(METHODS[name])(sequence=spec))
        assert (outcome.code, outcome.field) == (INVALID, f"sequence.{field}"), outcome


@pytest.mark.parametrize(
    "address", ["", "nowhere", "127.0.0.1:0", "0.0.0.0:9", "a b:9", "unix:/x", "h\0:9", "x" * 600 + ":9"]
)
def test_addresses_that_cannot_be(stack: Stack, address: str) -> None:
    """Who is to be connected to must have an address, before anybody connects."""
    spec, peer = stack.spec("raw", PROMPT), kv_pb2.Instance(id="peer", address=address)
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "target.decode.address": ("prefill.Prefill", {"target": kv_pb2.TransferTarget(decode=peer)}),
        "source.instance.address": ("prefill.Prefill", {"source": prefill_pb2.PrefixSource(instance=peer)}),
        "write_back.address": ("prefill.Prefill", {"write_back": peer}),
    }
    for field, (name, values) in requests.items():
        outcome = stack.call(name, request_class(METHODS[name])(sequence=spec, **values))
        assert (outcome.code, outcome.field) == (INVALID, field), outcome
    outcome = stack.call("decode.Reserve", decode_pb2.ReserveRequest(sequence=spec, write_back=peer))
    assert (outcome.code, outcome.field) == (INVALID, "write_back.address"), outcome


def test_a_target_without_a_service(stack: Stack) -> None:
    """The prefill fails within its deadlines and gives everything back."""
    absent = kv_pb2.Instance(id="absent", epoch=1, address="127.0.0.1:1")
    target = kv_pb2.TransferTarget(decode=absent, transfer_id=1, generation=1)
    outcome = stack.call(
        "prefill.Prefill", prefill_pb2.PrefillRequest(sequence=stack.spec("raw", PROMPT), target=target)
    )
    assert outcome.code is CODES.UNAVAILABLE, outcome
    wrong = kv_pb2.TransferTarget(decode=stack.instances["decode-0"], transfer_id=12345, generation=1)
    outcome = stack.call(
        "prefill.Prefill", prefill_pb2.PrefillRequest(sequence=stack.spec("raw", PROMPT), target=wrong)
    )
    assert outcome.code is CODES.ABORTED
    assert "no such transfer" in outcome.text
    held = kv_pb2.TransferTarget(decode=absent, held_blocks=(1 << 32) - 1)
    outcome = stack.call("prefill.Prefill", prefill_pb2.PrefillRequest(sequence=stack.spec("raw", PROMPT), target=held))
    assert (outcome.code, outcome.field) == (INVALID, "target.held_blocks")
