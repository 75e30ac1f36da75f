"""How messages are encoded: payloads without extra copies, and bounds checked before a message is parsed.

A message with a bytes field `payload` numbered 15 travels as `PayloadMessage`: exactly protobuf's encoding, so any
protobuf peer can take part, with fewer copies. All others are plain protobuf.

Protobuf turns two bytes into an object with some dozens: an 8 MiB message can become hundreds of MiB, and seconds of
Python. So a message has bounds on fields, repeated numbers and characters; what is smaller than `UNCHECKED_BYTES`
cannot exceed them by much and is not checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from moonpool.base.errors import FrameError, InvalidRequest


class _EndOfStream:
    """The type of `END_OF_STREAM`."""

    def __repr__(self) -> str:
        return "END_OF_STREAM"


END_OF_STREAM = _EndOfStream()
"""What reading a stream gives after the last message."""
MESSAGE_BYTES = 8 << 20
"""Largest message that is received at all. Our largest message has a frame near 1 MiB, or a million token ids."""
UNCHECKED_BYTES = 128 << 10
"""Messages up to this size are parsed unseen: they become at most some 3 MiB."""
MAX_FIELDS = 1 << 14
"""Fields in a larger message, inner messages' fields included."""
MAX_NUMBERS = 1 << 20
"""Elements of packed repeated numbers: token ids, above all."""
MAX_TEXT_BYTES = 4 << 20
"""Bytes of text; Python may need four times as much for the text."""
MAX_DEPTH = 100
"""Messages within messages; protobuf's own limit."""
FIELDS_OF = {
    # Answers about whole clusters, which a conductor gives and no service reads.
    "moonpool.v1.ClusterStateResponse": 1 << 18,
    "moonpool.v1.ExplainResponse": 1 << 18,
}
"""MAX_FIELDS for messages that need more."""
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_ENUM,
    FieldDescriptor.CPPTYPE_BOOL,
}
_CONTINUED = bytes(range(128, 256))


class _KnownField(NamedTuple):
    """What the scan must know about a length-delimited field: the inner message, or how the field's bytes count."""

    message: dict[int, _KnownField] | None = None
    numbers: bool = False
    text: bool = False


class _MessageBudget:
    """What a message may still have."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields = FIELDS_OF.get(name, MAX_FIELDS)
        self.numbers = MAX_NUMBERS
        self.text_bytes = MAX_TEXT_BYTES
        self.depth = MAX_DEPTH

    def too_many(self, what: str) -> InvalidRequest:
        return InvalidRequest("", f"{self.name.rpartition('.')[2]} has too many {what}")


def check_message(cls: type[Message], data: bytes) -> None:
    """Refuse an encoded message that would cost too much to parse and to read.

    Raises:
        InvalidRequest: The message has too many fields, numbers, characters or levels, or a group.
        DecodeError: The message is malformed.
    """
    if len(data) <= UNCHECKED_BYTES:
        return
    left = _MessageBudget(cls.DESCRIPTOR.full_name)
    try:
        _check_fields(data, 0, len(data), _checked_fields(cls.DESCRIPTOR), left)
    except IndexError:
        raise DecodeError("truncated message") from None


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A varint and the position after the varint."""
    if (value := data[position]) < 0x80:
        return value, position + 1
    value = shift = 0
    for index in range(position, min(position + _MAX_VARINT_BYTES, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise DecodeError("truncated or overlong varint")


def skip_value(data: bytes, position: int, kind: int) -> int | None:
    """The position after a value that is not length-delimited; None for a group."""
    if kind == _VARINT:
        return read_varint(data, position)[1]
    if kind == _FIXED64:
        return position + 8
    return position + 4 if kind == _FIXED32 else None


def _check_fields(data: bytes, position: int, end: int, table: dict[int, _KnownField], left: _MessageBudget) -> None:
    while position < end:
        left.fields -= 1
        if left.fields < 0:
            raise left.too_many("fields")
        tag, position = (data[position], position + 1) if data[position] < 0x80 else read_varint(data, position)
        if tag & 7 == _LENGTH_DELIMITED:
            length, position = (data[position], position + 1) if data[position] < 0x80 else read_varint(data, position)
            if position + length > end:
                raise DecodeError("truncated field")
            known = table.get(tag)
            if known is not None:
                _check_value(data, position, position + length, known, left)
            position += length
        else:
            after = skip_value(data, position, tag & 7)
            if after is None:
                raise left.too_many("groups")
            position = after
    if position != end:
        raise DecodeError("truncated field")


def _check_value(data: bytes, begin: int, end: int, known: _KnownField, left: _MessageBudget) -> None:
    if known.message is not None:
        left.depth -= 1
        if left.depth < 0:
            raise left.too_many("levels")
        _check_fields(data, begin, end, known.message, left)
        left.depth += 1
    elif known.text:
        left.text_bytes -= end - begin
        if left.text_bytes < 0:
            raise left.too_many("characters")
    else:
        left.numbers -= len(data[begin:end].translate(None, _CONTINUED))
        if left.numbers < 0:
            raise left.too_many("numbers")


_TABLES: dict[str, dict[int, _KnownField]] = {}
"""What `_checked_fields` has found, by the message's name."""


def _checked_fields(descriptor: Any) -> dict[int, _KnownField]:
    """The length-delimited fields that the scan must look into, by tag."""
    if (known := _TABLES.get(descriptor.full_name)) is not None:
        return known
    table = _TABLES[descriptor.full_name] = {}  # before its fields: a message may hold messages of its own kind
    for field in descriptor.fields:
        if field.message_type is not None:
            table[field.number << 3 | _LENGTH_DELIMITED] = _KnownField(message=_checked_fields(field.message_type))
        elif field.type == FieldDescriptor.TYPE_STRING:
            table[field.number << 3 | _LENGTH_DELIMITED] = _KnownField(text=True)
        elif field.is_repeated and field.cpp_type in _NUMBERS:
            table[field.number << 3 | _LENGTH_DELIMITED] = _KnownField(numbers=True)
    return table


M = TypeVar("M", bound=Message)
Payload = memoryview | bytes | Sequence[memoryview]
PAYLOAD_FIELD_NUMBER = 15
_PAYLOAD_TAG = (PAYLOAD_FIELD_NUMBER << 3) | _LENGTH_DELIMITED
_TAG_BYTE = bytes([_PAYLOAD_TAG])
_NBYTES = operator.attrgetter("nbytes")
MAX_TOP_FIELDS = 64
"""Top-level fields looked at for the payload; no message of ours has more than three."""


@dataclass(slots=True)
class PayloadMessage(Generic[M]):
    """A message beside the message's payload; the message's own `payload` field stays empty.

    Received payloads are memoryviews into the received bytes. Payloads to send may be given in pieces.
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


def serialize_payload(value: PayloadMessage[M] | bytes) -> bytes:
    """The protobuf encoding, field 15 last, the payload copied once. Bytes are taken for an encoding already made."""
    if isinstance(value, bytes):
        return value
    head = value.message.SerializeToString()
    size = payload_bytes(value.payload)
    if not size:
        return head
    pieces = (value.payload,) if isinstance(value.payload, bytes | memoryview) else value.payload
    return b"".join((head, _TAG_BYTE, _varint(size), *pieces))


def payload_deserializer(cls: type[M]) -> Callable[[bytes], PayloadMessage[M]]:
    """A function that decodes messages of class `cls`; the payload is a view into the given bytes.

    The function raises FrameError on malformed input, and on input that would cost too much to parse.
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
    """The general case: no payload, several payloads (the last counts), groups, or malformed input."""
    check_message(cls, data)
    message = cls.FromString(data)
    payload: bytes = getattr(message, "payload", b"")
    if payload:
        message.ClearField("payload")
    return PayloadMessage(message, memoryview(payload))


def _find_payload(data: bytes) -> tuple[int, int, int] | None:
    """Where the only payload lies: (tag, first byte, one past the last byte); None where protobuf must decide."""
    position, size, found = 0, len(data), None
    if not size:
        return None
    for _ in range(MAX_TOP_FIELDS):
        start = position
        tag, position = read_varint(data, position)
        if tag & 7 == _LENGTH_DELIMITED:
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


_CARRIES: dict[type[Message], bool] = {}
"""What `has_payload` has found."""


def has_payload(cls: type[Message]) -> bool:
    """Whether a message class carries a payload."""
    known = _CARRIES.get(cls)
    if known is None:
        known = _CARRIES[cls] = _carries(cls)
    return known


def _carries(cls: type[Message]) -> bool:
    field = cls.DESCRIPTOR.fields_by_name.get("payload")
    return field is not None and field.number == PAYLOAD_FIELD_NUMBER and field.type == FieldDescriptor.TYPE_BYTES


def serializer(cls: type[Message]) -> Callable[[Any], bytes]:
    """Bytes of a message (`PayloadMessage` when the class carries a payload)."""
    if has_payload(cls):
        return serialize_payload
    return cls.SerializeToString


def deserializer(cls: type[Message]) -> Callable[[bytes], Any]:
    """The inverse of `serializer`. Input that would cost too much to parse is refused."""
    return payload_deserializer(cls) if has_payload(cls) else plain_deserializer(cls)


def plain_deserializer(cls: type[Message]) -> Callable[[bytes], Any]:
    """As `deserializer`, but whole messages even of classes that carry a payload, as generated stubs give them."""

    def deserialize(data: bytes) -> Any:
        check_message(cls, data)
        return cls.FromString(data)

    return deserialize
