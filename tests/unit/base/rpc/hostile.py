"""Messages that are small on the wire and large in memory, or slow to read, for any message type."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.descriptor import Descriptor, FieldDescriptor

MIB = 1 << 20


def varint(value: int) -> bytes:
    """A varint's encoding."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field's encoding."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def _repeated(descriptor: Descriptor, unit: bytes) -> bytes:
    return unit * (MIB // len(unit))


def _nested(descriptor: Descriptor) -> bytes:
    """The deepest first sub-message, full of unknown fields."""
    inner = next((f for f in descriptor.fields if f.type == FieldDescriptor.TYPE_MESSAGE), None)
    if inner is None or inner.message_type is None:
        return b"\xf8\x7f\x01" * (MIB // 3)
    return field(inner.number, _nested(inner.message_type))


def _every_message(descriptor: Descriptor) -> bytes:
    """Empty sub-messages of every kind, over and over."""
    inner = [f for f in descriptor.fields if f.type == FieldDescriptor.TYPE_MESSAGE]
    unit = b"".join(field(f.number, b"") for f in inner) or b"\x70\x01"
    return unit * (MIB // len(unit))


OF_NO_TYPE: dict[str, Callable[[Descriptor], bytes]] = {
    "unknown_varints": lambda d: _repeated(d, b"\xf8\x7f\x01"),
    "unknown_strings": lambda d: _repeated(d, b"\xfa\x7f\x00"),
    "overlong_tags": lambda d: _repeated(d, b"\x80\x80\x80\x80\x10\x01"),
    "groups": lambda d: _repeated(d, b"\x73\x74"),
}
"""Attacks that are the same bytes, and mean the same, for every message type."""
OF_A_TYPE: dict[str, Callable[[Descriptor], bytes]] = {
    "known_fields": lambda d: _repeated(d, b"\x0a\x00\x12\x00"),
    "nested": _nested,
    "every_message": _every_message,
}
ATTACKS = OF_NO_TYPE | OF_A_TYPE
