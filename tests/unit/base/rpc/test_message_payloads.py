"""The payload codec emits and reads exactly protobuf's encoding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import FrameError
from moonpool.base.rpc.messages import PayloadMessage, payload_bytes, payload_deserializer, serialize_payload
from moonpool.v1 import decode_pb2, kv_pb2, kvstore_pb2
from tests.examples import examples

SMALL = settings(max_examples=examples(60), database=None)
read_request = payload_deserializer(decode_pb2.ReceiveKVRequest)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
runs = st.builds(kv_pb2.SliceRun, layer=uint32, first_block=uint32, block_count=uint32, valid_tokens=uint32)
headers = st.builds(
    kv_pb2.FrameHeader, transfer=uint64, generation=uint32, runs=st.lists(runs, max_size=4), checksum=uint64
)
messages = st.one_of(
    st.builds(decode_pb2.ReceiveKVRequest, frame=headers),
    st.builds(decode_pb2.ReceiveKVRequest, open=st.builds(decode_pb2.TransferOpen, transfer_id=uint64)),
    st.just(decode_pb2.ReceiveKVRequest()),
)
payloads = st.binary(max_size=400)


@SMALL
@given(messages, payloads, st.integers(0, 400))
def test_equals_protobuf_both_ways(message: decode_pb2.ReceiveKVRequest, payload: bytes, cut: int) -> None:
    whole = decode_pb2.ReceiveKVRequest()
    whole.CopyFrom(message)
    whole.payload = payload
    expected = whole.SerializeToString()
    view = memoryview(payload)
    assert serialize_payload(PayloadMessage(message, payload)) == expected
    assert serialize_payload(PayloadMessage(message, view)) == expected
    assert serialize_payload(PayloadMessage(message, [view[:cut], view[cut:]])) == expected
    assert serialize_payload(expected) is expected
    received = read_request(expected)
    assert received.message == message
    assert bytes(received.payload) == payload  # type: ignore[arg-type]


@SMALL
@given(payloads)
def test_unknown_fields_and_any_order_are_read_as_protobuf_reads_them(payload: bytes) -> None:
    message = kvstore_pb2.GetResponse(done=kv_pb2.ReadDone(transfer=7))
    body = serialize_payload(PayloadMessage(kvstore_pb2.GetResponse(), payload))
    later = b"\x80\x01\x2a\x8d\x01\1\2\3\4\x91\x01\1\2\3\4\5\6\7\x08"  # varint 16, fixed32 17, fixed64 18
    data = body + message.SerializeToString() + later
    received = payload_deserializer(kvstore_pb2.GetResponse)(data)
    plain = kvstore_pb2.GetResponse.FromString(data)
    assert received.message.done.transfer == 7
    assert bytes(received.payload) == plain.payload == payload  # type: ignore[arg-type]


def test_the_payload_is_a_view_of_what_was_received() -> None:
    data = serialize_payload(
        PayloadMessage(decode_pb2.ReceiveKVRequest(frame=kv_pb2.FrameHeader(transfer=1)), b"x" * 300)
    )
    received = read_request(data)
    assert isinstance(received.payload, memoryview)
    assert received.payload.obj is data
    assert received.message.payload == b""


def test_of_several_payloads_the_last_counts() -> None:
    assert bytes(read_request(b"\x7a\x01a\x7a\x02bc").payload) == b"bc"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b"\x7a",  # no length
        b"\x7a\x05abc",  # too short
        b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # overlong length
        b"\x1a\x02\x08",  # truncated frame header
        b"\x1a\x02\xff\xff\x7a\x01x",  # damaged frame header
        b"\x00\x01",  # field number 0
        b"\x0c",  # end of a group that never began
        b"\x0f",  # wire type 7
        b"\x0d\x01",  # truncated fixed32
    ],
)
def test_malformed_input_is_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        read_request(data)


@SMALL
@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_protobuf_reads_them(data: bytes) -> None:
    try:
        plain = decode_pb2.ReceiveKVRequest.FromString(data)
    except Exception:
        with pytest.raises(FrameError):
            read_request(data)
        return
    received = read_request(data)
    assert bytes(received.payload) == plain.payload  # type: ignore[arg-type]
    plain.ClearField("payload")
    assert received.message == plain


def test_payload_bytes() -> None:
    assert payload_bytes(b"abc") == 3
    assert payload_bytes(memoryview(b"abc")) == 3
    assert payload_bytes([memoryview(b"abc"), memoryview(b"d")]) == 4
