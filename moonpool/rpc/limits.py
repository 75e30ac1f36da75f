"""Bounds on what one message of a peer may cost, checked before it is parsed.

Protobuf turns two bytes into an object of some dozens: an 8 MiB message can become hundreds of MiB, and seconds of
Python. A message may therefore have at most so many fields, repeated numbers and characters. What is smaller than
`UNCHECKED_BYTES` cannot do harm and is not looked at, so that frames cost nothing more.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from moonpool.errors import InvalidRequest

MESSAGE_BYTES = 8 << 20
"""Largest message that is received at all. The largest of ours has a frame near 1 MiB, or a million token ids."""
UNCHECKED_BYTES = 128 << 10
"""Messages up to this size are parsed unseen: they become at most some 3 MiB."""
MAX_FIELDS = 1 << 14
"""Fields in a larger message, those of messages within it included."""
MAX_NUMBERS = 1 << 20
"""Elements of packed repeated numbers: token ids, above all."""
MAX_TEXT_BYTES = 4 << 20
"""Bytes of text; Python may need four times as much for it."""
FIELDS_OF = {
    # Answers about whole clusters, which a conductor gives and no service reads.
    "moonpool.v1.ClusterStateResponse": 1 << 18,
    "moonpool.v1.ExplainResponse": 1 << 18,
}
"""MAX_FIELDS of messages that need more."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
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


class _Known(NamedTuple):
    """What the scan must know of a length-delimited field: the message within it, or how its bytes count."""

    message: dict[int, _Known] | None = None
    numbers: bool = False
    text: bool = False


class _Left:
    """What a message may still have."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields = FIELDS_OF.get(name, MAX_FIELDS)
        self.numbers = MAX_NUMBERS
        self.text_bytes = MAX_TEXT_BYTES

    def too_many(self, what: str) -> InvalidRequest:
        return InvalidRequest("", f"{self.name.rpartition('.')[2]} has too many {what}")


def check_message(cls: type[Message], data: bytes) -> None:
    """Refuses an encoded message that would cost too much to parse and to read.

    Raises:
        InvalidRequest: It has too many fields, numbers or characters, or a group.
        DecodeError: It is malformed.
    """
    if len(data) <= UNCHECKED_BYTES:
        return
    left = _Left(cls.DESCRIPTOR.full_name)
    try:
        _scan(data, 0, len(data), _table(cls.DESCRIPTOR), left)
    except IndexError:
        raise DecodeError("truncated message") from None


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A varint and the position after it."""
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


def _scan(data: bytes, position: int, end: int, table: dict[int, _Known], left: _Left) -> None:
    while position < end:
        left.fields -= 1
        if left.fields < 0:
            raise left.too_many("fields")
        tag, position = (data[position], position + 1) if data[position] < 0x80 else read_varint(data, position)
        if tag & 7 == _LENGTH:
            length, position = (data[position], position + 1) if data[position] < 0x80 else read_varint(data, position)
            if position + length > end:
                raise DecodeError("truncated field")
            known = table.get(tag)
            if known is not None:
                _inside(data, position, position + length, known, left)
            position += length
        else:
            after = skip_value(data, position, tag & 7)
            if after is None:
                raise left.too_many("groups")
            position = after
    if position != end:
        raise DecodeError("truncated field")


def _inside(data: bytes, begin: int, end: int, known: _Known, left: _Left) -> None:
    if known.message is not None:
        _scan(data, begin, end, known.message, left)
    elif known.text:
        left.text_bytes -= end - begin
        if left.text_bytes < 0:
            raise left.too_many("characters")
    else:
        left.numbers -= len(data[begin:end].translate(None, _CONTINUED))
        if left.numbers < 0:
            raise left.too_many("numbers")


@cache
def _table(descriptor: Descriptor) -> dict[int, _Known]:
    """The length-delimited fields that the scan must look into, by tag."""
    table = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            table[field.number << 3 | _LENGTH] = _Known(message=_table(field.message_type))
        elif field.type == FieldDescriptor.TYPE_STRING:
            table[field.number << 3 | _LENGTH] = _Known(text=True)
        elif field.is_repeated and field.cpp_type in _NUMBERS:
            table[field.number << 3 | _LENGTH] = _Known(numbers=True)
    return table
