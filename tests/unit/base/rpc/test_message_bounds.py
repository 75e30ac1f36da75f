"""What one message may cost: bounded before it is parsed, for every message type of every service."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from moonpool.base.errors import FrameError, InvalidRequest, Overloaded
from moonpool.base.rpc import messages
from moonpool.base.rpc.messages import MAX_FIELDS, MAX_NUMBERS, MAX_TEXT_BYTES, MESSAGE_BYTES, UNCHECKED_BYTES
from moonpool.base.rpc.peer_calls import CallLimits, PeerCalls
from moonpool.v1 import conductor_pb2, decode_pb2, ext_proc_pb2, kv_pb2, kvstore_pb2, prefill_pb2
from tests.examples import each
from tests.unit.base.rpc.hostile import ATTACKS, OF_A_TYPE, OF_NO_TYPE, field, varint

FILES = (conductor_pb2, decode_pb2, ext_proc_pb2, kvstore_pb2, prefill_pb2)
METHODS = [m for file in FILES for service in file.DESCRIPTOR.services_by_name.values() for m in service.methods]
TYPES: dict[str, Descriptor] = {t.full_name: t for m in METHODS for t in (m.input_type, m.output_type)}
GENERATE, RECEIVE = "moonpool.v1.GenerateRequest", "moonpool.v1.ReceiveKVRequest"
"""A message type without a payload, and a type with one."""


class Counting:
    """Bytes of which the scan's steps are counted."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.looked_at = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: Any) -> Any:
        self.looked_at += 1
        return self.data[key]


def refused(cls: type[Message], data: bytes) -> str:
    with pytest.raises((InvalidRequest, FrameError)) as caught:
        messages.deserializer(cls)(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        *each((name for name in TYPES if name not in messages.FIELDS_OF), OF_A_TYPE),
        *itertools.product((GENERATE, RECEIVE), OF_NO_TYPE),
    ],
)
def test_no_message_type_lets_a_peer_hold_the_loop_with_tiny_fields(name: str, attack: str) -> None:
    """An attack on every type is refused after a bounded number of fields, before anything is parsed."""
    cls = message_factory.GetMessageClass(TYPES[name])
    data = Counting(ATTACKS[attack](TYPES[name]))
    assert len(data) > UNCHECKED_BYTES
    if messages.has_payload(cls):
        refused(cls, data.data)
        return
    with pytest.raises((InvalidRequest, DecodeError)):
        messages.check_message(cls, data)  # type: ignore[arg-type]
    assert data.looked_at <= 8 * MAX_FIELDS


def test_of_a_payload_message_few_fields_are_looked_at() -> None:
    data = Counting(b"\x70\x01" * (4 << 20))
    with pytest.raises(FrameError, match="more than 64 fields"):
        messages.payload_deserializer(decode_pb2.ReceiveKVRequest)(data)  # type: ignore[arg-type]
    assert data.looked_at <= 8 * messages.MAX_TOP_FIELDS


def test_empty_runs_are_refused_before_they_are_objects() -> None:
    runs = field(3, b"\x1a\x00" * (1 << 20))
    assert "too many fields" in refused(decode_pb2.ReceiveKVRequest, runs)
    assert "too many fields" in refused(decode_pb2.ReceiveKVRequest, runs + field(15, b"payload"))


def test_groups_hide_nothing() -> None:
    data = b"\x73\x74" + b"\x1a\x00\x12\x00" * (1 << 20)
    assert "groups" in refused(decode_pb2.ReceiveKVRequest, data)
    assert "groups" in refused(kvstore_pb2.MatchPrefixRequest, data)


def test_numbers_and_characters_are_bounded() -> None:
    tokens = conductor_pb2.GenerateRequest(tokens=conductor_pb2.TokenPrompt(token_ids=[1] * (MAX_NUMBERS + 1)))
    assert "too many numbers" in refused(conductor_pb2.GenerateRequest, tokens.SerializeToString())
    text = conductor_pb2.GenerateRequest(text="x" * (MAX_TEXT_BYTES + 1))
    assert "too many characters" in refused(conductor_pb2.GenerateRequest, text.SerializeToString())


@pytest.mark.parametrize(
    "message",
    [
        conductor_pb2.GenerateRequest(tokens=conductor_pb2.TokenPrompt(token_ids=[152_000] * MAX_NUMBERS)),
        conductor_pb2.GenerateRequest(text="é" * (MAX_TEXT_BYTES // 2)),
        conductor_pb2.GenerateRequest(
            chat=conductor_pb2.ChatPrompt(messages=[conductor_pb2.ChatMessage(role="user", content="x" * 300)] * 4000)
        ),
        kvstore_pb2.MatchPrefixRequest(keys=bytes(32 << 17)),
        decode_pb2.ReserveRequest(sequence=kv_pb2.SequenceSpec(token_ids=bytes(4 << 20), block_keys=bytes(32 << 14))),
        decode_pb2.StepsResponse(tokens=[decode_pb2.SequenceTokens(request_id="x" * 40, token_ids=[7])] * 4000),
        conductor_pb2.ClusterStateResponse(
            instances=[
                conductor_pb2.InstanceState(
                    instance=kv_pb2.Instance(id="prefill-1234", epoch=1 << 60, address="10.0.0.1:50051"),
                    load=conductor_pb2.LoadReport(running=1, speed=conductor_pb2.SpeedReport(prefill_base_s=1.0)),
                )
            ]
            * 4000
        ),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_the_largest_messages_that_we_send_pass(message: Message) -> None:
    data = message.SerializeToString()
    assert UNCHECKED_BYTES < len(data) <= MESSAGE_BYTES
    assert messages.deserializer(type(message))(data) == message


def test_keys_and_a_frame_pass_in_one_message() -> None:
    header = kv_pb2.FrameHeader(transfer=1, runs=[kv_pb2.SliceRun(layer=300, first_block=300, block_count=1)] * 1024)
    opening = kvstore_pb2.PutOpen(transfer=1, keys=bytes(32 << 14), parent_keys=bytes(32 << 14), frame=header)
    sent = messages.PayloadMessage(kvstore_pb2.PutRequest(open=opening), bytes(1 << 20))
    received = messages.deserializer(kvstore_pb2.PutRequest)(messages.serialize_payload(sent))
    assert received.message == sent.message


@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
def test_truncated_messages_are_malformed(cut: int) -> None:
    data = conductor_pb2.GenerateRequest(text="x" * 200_000, tenant="t" * 40).SerializeToString()[:-cut]
    with pytest.raises(DecodeError):
        messages.deserializer(conductor_pb2.GenerateRequest)(data)


def test_a_peer_has_so_many_calls_and_streams_and_no_more() -> None:
    calls = PeerCalls(CallLimits(calls=3, streams=1))
    with calls.call("ipv4:10.0.0.1:5", stream=True), calls.call("ipv4:10.0.0.1:6", stream=False):
        with (
            pytest.raises(Overloaded, match=r"1 streams of ipv4:10\.0\.0\.1"),
            calls.call("ipv4:10.0.0.1:7", stream=True),
        ):
            pass
        with calls.call("ipv4:10.0.0.1:7", stream=False):
            with pytest.raises(Overloaded, match="3 calls"), calls.call("ipv4:10.0.0.1:8", stream=False):
                pass
            with calls.call("ipv4:10.0.0.2:8", stream=True):
                assert calls.open == 4
    assert calls.open == 0
    with calls.call("ipv4:10.0.0.1:5", stream=True):
        assert calls.open == 1


def nested(levels: int, text: str = "") -> bytes:
    """A message of Envoy's with a struct within a struct and so on."""
    message = ext_proc_pb2.ProcessingRequest()
    inner = message.metadata_context.filter_metadata["x"].fields["x"]
    inner.string_value = text
    data = inner.SerializeToString()
    for _ in range(levels):
        value = field(1, field(1, b"x") + field(2, data))  # a struct's one field
        data = field(5, value)
    return field(8, field(1, field(1, b"x") + field(2, field(1, field(1, b"x") + field(2, data)))))


def test_types_that_hold_their_own_kind_are_read_and_their_levels_bounded() -> None:
    cls = ext_proc_pb2.ProcessingRequest
    read = messages.deserializer(cls)(nested(10, "y" * UNCHECKED_BYTES))
    assert "y" * 100 in str(read)
    assert "levels" in refused(cls, nested(2000, "y" * UNCHECKED_BYTES))
    messages.check_message(cls, nested(31, "y" * UNCHECKED_BYTES))  # 5 levels, and 3 for each struct
    assert "levels" in refused(cls, nested(32, "y" * UNCHECKED_BYTES))


def test_as_many_fields_as_are_allowed_pass_and_numbers_of_four_bytes_are_skipped() -> None:
    unknown, cls = 500 << 3, conductor_pb2.GenerateRequest
    text = cls(text="x" * UNCHECKED_BYTES).SerializeToString()
    messages.check_message(cls, text + varint(unknown | 5) + b"abcd")
    with pytest.raises(DecodeError):
        messages.check_message(cls, text + varint(unknown | 5) + b"abc")
    messages.check_message(cls, text + varint(16 << 3) + b"\x01")  # the least tag of two bytes
    many = text + (varint(unknown) + b"\x01") * (MAX_FIELDS - 1)
    messages.check_message(cls, many)
    assert "too many fields" in refused(cls, many + varint(unknown) + b"\x01")
