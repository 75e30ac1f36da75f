"""Messages between hosts as bytes. The schema is the messages' own: dataclasses with their annotations.

A message is the number of its class, then the fields in their order, each as its annotation says. Reading makes values
of just these types, through the classes' own constructors, and never more items than bytes are there. So no bytes name
a class or run code. Both ends must have the same schema (`Schema.fingerprint`).
"""

import dataclasses
import hashlib
import struct
import sys
import types
import typing
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Union

from moonpool.base.errors import MoonpoolError
from moonpool.base.scheduling.steps import TokenHistory
from moonpool.engine.emulated.profile import EmulatedCompute

_U32: Final = struct.Struct("<I")
_REAL: Final = struct.Struct("<d")
_STAYS: Final = (TokenHistory, EmulatedCompute)
"""Classes of what stays on its host; None arrives."""
_PACKED: Final = {int: "q", float: "d"}
"""Numbers that lie side by side in a sequence, 8 bytes each."""
_PACKED_BYTES: Final = 8
_INT_BYTES: Final = 16
_ARRAYS: Final = "fIi"
_ARRAY_BYTES: Final = 4


class SchemaError(ValueError):
    """Bytes are no message."""


@dataclass(slots=True)
class _Reader:
    data: memoryview
    at: int = 0

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.data):
            raise SchemaError(f"{size} bytes are wanted at byte {self.at} of {len(self.data)}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def count(self) -> int:
        """A number of items, which have a byte each at least."""
        (found,) = _U32.unpack(self.take(_U32.size))
        if found > len(self.data) - self.at:
            raise SchemaError(f"{found} items in {len(self.data) - self.at} bytes")
        return int(found)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How values of an annotation are written.

    Attributes:
        text: the annotation, for the schema's fingerprint.
        write: append a value.
        read: the next value.
        fits: whether a value is of the annotation, among others in a union.
    """

    text: str
    write: Callable[[Any, bytearray], None]
    read: Callable[[_Reader], Any]
    fits: Callable[[Any], bool]


def _sized(data: bytes, out: bytearray) -> None:
    out += _U32.pack(len(data))
    out += data


def _write_int(value: int, out: bytearray) -> None:
    size = value.bit_length() // 8 + 1
    assert size <= _INT_BYTES, "too large a number for a message"
    out.append(size)
    out += value.to_bytes(size, "little", signed=True)


def _read_int(reader: _Reader) -> int:
    size = reader.byte()
    if size > _INT_BYTES:
        raise SchemaError(f"a number of {size} bytes")
    return int.from_bytes(reader.take(size), "little", signed=True)


def _read_bool(reader: _Reader) -> bool:
    found = reader.byte()
    if found > 1:
        raise SchemaError(f"a truth value of {found}")
    return bool(found)


def _write_array(value: "array[Any]", out: bytearray) -> None:
    out.append(ord(value.typecode))
    _sized(value.tobytes(), out)


def _read_array(reader: _Reader) -> "array[Any]":
    code = chr(reader.byte())
    if code not in _ARRAYS:
        raise SchemaError(f"an array of {code!r}")
    data = reader.take(reader.count())
    if len(data) % _ARRAY_BYTES:
        raise SchemaError(f"an array of {len(data)} bytes")
    found = array(code)
    found.frombytes(data)
    return found


_PLAIN: Final[Mapping[Any, _Kind]] = {
    int: _Kind("int", _write_int, _read_int, lambda value: type(value) is int),
    bool: _Kind("bool", lambda value, out: out.append(bool(value)), _read_bool, lambda value: isinstance(value, bool)),
    float: _Kind(
        "float",
        lambda value, out: out.extend(_REAL.pack(value)),
        lambda reader: _REAL.unpack(reader.take(_REAL.size))[0],
        lambda value: isinstance(value, float),
    ),
    str: _Kind(
        "str",
        lambda value, out: _sized(value.encode("utf-8", "surrogatepass"), out),
        lambda reader: str(reader.take(reader.count()), "utf-8", "surrogatepass"),
        lambda value: isinstance(value, str),
    ),
    bytes: _Kind(
        "bytes",
        _sized,
        lambda reader: bytes(reader.take(reader.count())),
        lambda value: isinstance(value, bytes),
    ),
    array: _Kind("array", _write_array, _read_array, lambda value: isinstance(value, array)),
    type(None): _Kind("None", lambda value, out: None, lambda reader: None, lambda value: value is None),
}


class Schema:
    """The messages that go one way.

    Args:
        messages: their classes, dataclasses; a message's number is the class's place.
    """

    def __init__(self, messages: Sequence[type]) -> None:
        self._records: dict[type, _Kind] = {}
        self._described: list[str] = []
        self._kinds = [self._record(cls) for cls in messages]
        self._numbers = {cls: number for number, cls in enumerate(messages)}
        self.names = [cls.__name__ for cls in messages]
        text = "\n".join([*self._described, *self.names])
        self.fingerprint = hashlib.sha256(text.encode()).digest()
        """32 bytes that differ wherever messages, fields, order or types differ."""

    def encode(self, message: object) -> bytes:
        """Return a message's bytes."""
        number = self._numbers[type(message)]
        out = bytearray((number,))
        self._kinds[number].write(message, out)
        return bytes(out)

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the message of these bytes.

        Raises:
            SchemaError: they are none.
        """
        reader = _Reader(memoryview(data))
        number = reader.byte()
        if number >= len(self._kinds):
            raise SchemaError(f"a message of the unknown kind {number}")
        name = self.names[number]
        try:
            message = self._kinds[number].read(reader)
        except SchemaError as error:
            raise SchemaError(f"{name}: {error}") from error
        except (MoonpoolError, ValueError, TypeError, RecursionError) as error:  # what a constructor refuses
            raise SchemaError(f"{name}: {type(error).__name__}: {error}") from error
        if reader.at != len(reader.data):
            raise SchemaError(f"{name}: ends at byte {reader.at} of {len(reader.data)}")
        return message

    # --- annotations -----------------------------------------------------------------------------------------------

    def _kind(self, hint: Any) -> _Kind:
        if hint in _PLAIN:
            return _PLAIN[hint]
        if dataclasses.is_dataclass(hint):
            return self._record(typing.cast("type", hint))
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin is array:
            return _PLAIN[array]
        if origin is Literal:
            return _literal(parts)
        if origin in (Union, types.UnionType):
            return self._union(parts)
        if origin is tuple and parts[-1] is not Ellipsis:
            return _fixed([self._kind(part) for part in parts])
        if origin in (tuple, Sequence):
            return self._many(parts[0], tuple)
        if origin is frozenset:
            return self._many(parts[0], frozenset)
        if origin is Mapping:
            return _mapping(self._kind(parts[0]), self._kind(parts[1]))
        raise TypeError(f"{hint!r} has no place in a message between hosts")

    def _record(self, cls: type) -> _Kind:
        """Return the kind of a dataclass, which may hold itself."""
        if cls in self._records:
            return self._records[cls]
        names: list[str] = []
        kinds: list[_Kind] = []

        def write(value: Any, out: bytearray) -> None:
            for name, kind in zip(names, kinds, strict=True):
                kind.write(getattr(value, name), out)

        def read(reader: _Reader) -> Any:
            return cls(**{name: kind.read(reader) for name, kind in zip(names, kinds, strict=True)})

        self._records[cls] = _Kind(cls.__name__, write, read, lambda value: isinstance(value, cls))
        hints = typing.get_type_hints(cls, vars(sys.modules[cls.__module__]) | {"array": _AnyArray})
        for field in dataclasses.fields(cls):
            if field.init:
                names.append(field.name)
                kinds.append(self._kind(hints[field.name]))
        fields = ", ".join(f"{name}: {kind.text}" for name, kind in zip(names, kinds, strict=True))
        self._described.append(f"{cls.__name__}({fields})")
        return self._records[cls]

    def _union(self, parts: Sequence[Any]) -> _Kind:
        kinds = [self._kind(part) for part in parts if part not in _STAYS]
        if len(kinds) == 1:  # None
            return _Kind("stays", lambda value, out: None, lambda reader: None, lambda value: True)

        def write(value: Any, out: bytearray) -> None:
            number = next(number for number, kind in enumerate(kinds) if kind.fits(value))
            out.append(number)
            kinds[number].write(value, out)

        def read(reader: _Reader) -> Any:
            number = reader.byte()
            if number >= len(kinds):
                raise SchemaError(f"choice {number} of {len(kinds)}")
            return kinds[number].read(reader)

        text = " | ".join(kind.text for kind in kinds)
        return _Kind(text, write, read, lambda value: any(kind.fits(value) for kind in kinds))

    def _many(self, item: Any, made: type[tuple[Any, ...]] | type[frozenset[Any]]) -> _Kind:
        kind, packed = self._kind(item), _PACKED.get(item)

        def write(values: Any, out: bytearray) -> None:
            if packed:
                _sized(struct.pack(f"<{len(values)}{packed}", *values), out)
                return
            out += _U32.pack(len(values))
            for value in values:
                kind.write(value, out)

        def read(reader: _Reader) -> Any:
            count = reader.count()
            if packed:
                if count % _PACKED_BYTES:
                    raise SchemaError(f"numbers of {count} bytes")
                return made(struct.unpack(f"<{count // _PACKED_BYTES}{packed}", reader.take(count)))
            return made([kind.read(reader) for _ in range(count)])

        accepted = (frozenset,) if made is frozenset else (tuple, list)
        return _Kind(f"{made.__name__}[{kind.text}]", write, read, lambda value: isinstance(value, accepted))


class _AnyArray:
    """Stands for `array` in annotations: at run time `array[int]` is an error."""

    def __class_getitem__(cls, item: object) -> type:
        return array


def _literal(values: Sequence[Any]) -> _Kind:
    def read(reader: _Reader) -> Any:
        number = reader.byte()
        if number >= len(values):
            raise SchemaError(f"choice {number} of {list(values)}")
        return values[number]

    return _Kind(repr(values), lambda value, out: out.append(values.index(value)), read, lambda value: value in values)


def _fixed(kinds: Sequence[_Kind]) -> _Kind:
    def write(values: Any, out: bytearray) -> None:
        for kind, value in zip(kinds, values, strict=True):
            kind.write(value, out)

    text = ", ".join(kind.text for kind in kinds)
    return _Kind(
        f"({text})",
        write,
        lambda reader: tuple([kind.read(reader) for kind in kinds]),
        lambda value: isinstance(value, tuple),
    )


def _mapping(key: _Kind, item: _Kind) -> _Kind:
    def write(values: Any, out: bytearray) -> None:
        out += _U32.pack(len(values))
        for name, value in values.items():
            key.write(name, out)
            item.write(value, out)

    def read(reader: _Reader) -> Any:
        return {key.read(reader): item.read(reader) for _ in range(reader.count())}

    return _Kind(f"{{{key.text}: {item.text}}}", write, read, lambda value: isinstance(value, Mapping))
