"""Protobuf messages whose `payload` field (number 15) is not copied more than needed.

Emits and reads exactly protobuf's encoding, so that any protobuf peer can take part; only the copies are saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.errors import FrameError, InvalidRequest
from moonpool.rpc.limits import UNCHECKED_BYTES, check_message, read_varint, skip_value

M = TypeVar("M", bound=Message)
Payload = memoryview | bytes | Sequence[memoryview]

PAYLOAD_FIELD = 15
_PAYLOAD_TAG = (PAYLOAD_FIELD << 3) | 2
_TAG_BYTE = bytes([_PAYLOAD_TAG])
_LENGTH = 2
_NBYTES = operator.attrgetter("nbytes")
MAX_TOP_FIELDS = 64
"""Top-level fields looked at for the payload; none of our messages has more than three."""


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
    return sum(map(_NBYTES, payload))


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

    The function raises FrameError on malformed input, and on what would cost too much to parse (limits.py).
    """

    def deserialize(data: bytes) -> PayloadMessage[M]:
        try:
            found = _find_payload(data)
            if found is None:
                return _by_protobuf(cls, data)
            tag, begin, end = found
            head = data[:tag] if end == len(data) else data[:tag] + data[end:]
            if len(head) > UNCHECKED_BYTES:
                check_message(cls, head)
            return PayloadMessage(cls.FromString(head), memoryview(data)[begin:end])
        except (DecodeError, UnicodeDecodeError, IndexError) as error:
            raise FrameError(f"malformed {cls.__name__}: {error}") from error
        except InvalidRequest as error:
            raise FrameError(error.message) from error

    return deserialize


def _by_protobuf(cls: type[M], data: bytes) -> PayloadMessage[M]:
    """The general case: no payload, several of them (the last counts), groups, or malformed input."""
    check_message(cls, data)
    message = cls.FromString(data)
    payload: bytes = getattr(message, "payload", b"")
    if payload:
        message.ClearField("payload")
    return PayloadMessage(message, memoryview(payload))


def _find_payload(data: bytes) -> tuple[int, int, int] | None:
    """Where the only payload lies: (its tag, its first byte, one past its last); None where protobuf must decide."""
    position, size, found = 0, len(data), None
    if not size:
        return None
    for _ in range(MAX_TOP_FIELDS):
        start = position
        tag, position = read_varint(data, position)
        if tag & 7 == _LENGTH:
            length, position = read_varint(data, position)
            if tag == _PAYLOAD_TAG:
                if found is not None:
                    return None
                found = (start, position, position + length)
            position += length
        else:
            after = skip_value(data, position, tag & 7)
            if after is None:
                return None
            position = after
        if position >= size:
            return found if position == size else None
    raise FrameError(f"more than {MAX_TOP_FIELDS} fields")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
