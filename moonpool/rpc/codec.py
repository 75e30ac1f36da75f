"""Which (de)serialiser a message class gets on our channels and servers.

A message with a bytes field `payload` numbered 15 travels as `moonpool.rpc.wire.PayloadMessage`, whose bytes are the
very same protobuf encoding but made with fewer copies. All others are plain protobuf. One rule for both ends.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from moonpool.rpc import wire
from moonpool.rpc.limits import check_message

PAYLOAD_FIELD_NUMBER = 15

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
        return wire.serialize
    return cls.SerializeToString


def deserializer(cls: type[Message]) -> Callable[[bytes], Any]:
    """The inverse of `serializer`. What would cost too much to parse is refused (limits.py)."""
    return wire.deserializer(cls) if has_payload(cls) else plain_deserializer(cls)


def plain_deserializer(cls: type[Message]) -> Callable[[bytes], Any]:
    """As `deserializer`, but whole messages even of classes that carry a payload, as generated stubs give them."""

    def deserialize(data: bytes) -> Any:
        check_message(cls, data)
        return cls.FromString(data)

    return deserialize
