"""Hash of a core's state or of its actions: equal for equal values, in every process and under every hash seed."""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 16


def digest_of(*values: object) -> bytes:
    """A 16-byte hash of plain values.

    Takes None, bool, int, float, str, bytes, enums, arrays, dataclasses, tuples, lists, deques, sets (in any order),
    mappings (in their order, which is part of the state), and objects with a method `digest() -> bytes`.

    Raises:
        TypeError: a value is of another kind.
    """
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        _feed(hasher.update, value)
    return hasher.digest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    match value:
        case Enum():
            _text(update, b"e", f"{type(value).__name__}.{value.name}".encode())
        case None | bool() | int() | float():
            _text(update, b"p", repr(value).encode())
        case str():
            _text(update, b"s", value.encode())
        case bytes() | bytearray() | memoryview():
            _text(update, b"b", bytes(value))
        case array():
            _text(update, b"a" + value.typecode.encode(), value.tobytes())
        case tuple() | list() | deque():
            _each(update, b"l", value)
        case Mapping():
            _each(update, b"m", [part for item in value.items() for part in item])
        case Set():
            _each(update, b"t", sorted(map(digest_of, value)))
        case _ if hasattr(value, "digest"):
            _text(update, b"d", value.digest())
        case _ if is_dataclass(value):
            _text(update, b"c", type(value).__name__.encode())
            _each(update, b"f", [getattr(value, field.name) for field in fields(value)])
        case _:
            raise TypeError(f"{type(value).__name__} has no digest")


def _text(update: Callable[[bytes], None], kind: bytes, data: bytes) -> None:
    update(kind + len(data).to_bytes(8, "little"))
    update(data)


def _each(update: Callable[[bytes], None], kind: bytes, values: Any) -> None:
    update(kind + len(values).to_bytes(8, "little"))
    for value in values:
        _feed(update, value)
