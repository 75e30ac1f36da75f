"""Protobuf messages whose `payload` field (number 15) is not copied more than needed.

Emits and reads exactly protobuf's encoding, so that any protobuf peer can take part; only the copies are saved. Must
not know what the messages mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.errors import FrameError

M = TypeVar("M", bound=Message)
Payload = memoryview | bytes | Sequence[memoryview]

PAYLOAD_FIELD = 15
_PAYLOAD_TAG = (PAYLOAD_FIELD << 3) | 2
_TAG_BYTE = bytes([_PAYLOAD_TAG])
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


@dataclass(slots=True)
class PayloadMessage(Generic[M]):
    """A message beside its payload; the message's own `payload` field stays empty.

    Received payloads are memoryviews of the received bytes. Sent ones may be given in pieces.
    """

    message: M
    payload: Payload = b""


def payload_bytes(payload: Payload) -> int:
    """Number of bytes in a payload."""
    if isinstance(payload, bytes):
        return len(payload)
    if isinstance(payload, memoryview):
        return payload.nbytes
    return sum(piece.nbytes for piece in payload)


def serialize(value: PayloadMessage[M] | bytes) -> bytes:
    """The protobuf encoding, field 15 last, the payload copied once. Bytes are taken for an encoding already made."""
    if isinstance(value, bytes):
        return value
    head = value.message.SerializeToString()
    size = payload_bytes(value.payload)
    if not size:
        return head
    pieces = (value.payload,) if isinstance(value.payload, bytes | memoryview) else value.payload
    return b"".join((head, _TAG_BYTE, _varint(size), *pieces))


def deserializer(cls: type[M]) -> Callable[[bytes], PayloadMessage[M]]:
    """A function that decodes messages of class `cls`; the payload is a view of the bytes it was given.

    The function raises FrameError on malformed input.
    """

    def deserialize(data: bytes) -> PayloadMessage[M]:
        try:
            found = _find_payload(data)
            if found is None:
                return _by_protobuf(cls, data)
            tag, begin, end = found
            head = data[:tag] if end == len(data) else data[:tag] + data[end:]
            return PayloadMessage(cls.FromString(head), memoryview(data)[begin:end])
        except (DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"malformed {cls.__name__}: {error}") from error

    return deserialize


def _by_protobuf(cls: type[M], data: bytes) -> PayloadMessage[M]:
    """The general case: no payload, several of them (the last counts), groups, or malformed input."""
    message = cls.FromString(data)
    payload: bytes = getattr(message, "payload", b"")
    if payload:
        message.ClearField("payload")
    return PayloadMessage(message, memoryview(payload))


def _find_payload(data: bytes) -> tuple[int, int, int] | None:
    """Where the only payload lies: (its tag, its first byte, one past its last); None where protobuf must decide."""
    position, size, found = 0, len(data), None
    while position < size:
        start = position
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _read_varint(data, position)
            if tag == _PAYLOAD_TAG:
                if found is not None:
                    return None
                found = (start, position, position + length)
            position += length
        elif kind == _VARINT:
            _, position = _read_varint(data, position)
        elif kind == _FIXED64:
            position += 8
        elif kind == _FIXED32:
            position += 4
        else:
            return None
    return found if position == size else None


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(position, min(position + _MAX_VARINT_BYTES, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise DecodeError("truncated or overlong varint")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
