"""Values of cores as bytes, without pickle: what a journal keeps of a core's state and events.

Values are plain ones (None, bool, int, float, str, bytes), containers of the standard library, and objects of classes
that the reader is given. Bytes name a class by a string that is looked up in a table: no name is imported, no attribute
is followed, and of a class nothing is called but what makes an empty object, and hashes. An object that occurs twice in
a value is one object again, so a state with circles is kept as it is.

A value is a tag, then what the tag says. A class is described before its first object, with the names of its parts;
later values of the same encoder refer to the description. docs/adr/0078-journals-without-pickle.md has the reasons.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

_I32, _I64, _FLOAT, _U16, _U32 = (struct.Struct(f"<{kind}") for kind in "iqdHI")
_BYTE, _WORD, _INT, _LONG, _BIG, _NONE, _TRUE, _FALSE, _REAL = b"bwihINTFf"
_STR, _TEXT, _BYTES, _DATA, _REF, _FAR = b"sSyYrR"
_LIST, _TUPLE, _SET, _FROZEN, _DICT, _ORDERED, _DEQUE, _ARRAY, _BYTEARRAY = b"ltezdoqaA"
_CLASS, _OBJECT = b"Cc"
_MANY, _NUMBERS_OF, _KEYS = 253, 254, 255
"""First byte of a sequence: how its items lie. A smaller byte is the number of items, each with a tag."""
_PACKED_FROM = 8
"""Sequences of so many items may lie packed, without tags."""
_WIDTHS = ("B", 0, 0xFF), ("H", 0, 0xFFFF), ("i", -0x80000000, 0x7FFFFFFF), ("q", -(1 << 63), (1 << 63) - 1)
"""How integers may lie packed, and what each kind holds."""
_PACKED_BYTES = {ord(kind): struct.calcsize(f"<{kind}") for kind in "BHiqd"}
_SHORT = 256
_HEAP_TYPE, _NOT_MADE = 1 << 9, 1 << 7
"""Flags of classes: made by a class statement, not by the interpreter; without a way to make objects."""
_NUMBERS = frozenset("bBhHiIlLqQfd")
"""Type codes of arrays."""

Classes = Mapping[str, type]
"""Classes by name, as `class_name` gives it."""


class CodecError(ValueError):
    """Bytes are no value, or name what the reader does not know."""


def class_name(cls: type) -> str:
    """Return the name under which bytes refer to a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_record(cls: type) -> bool:
    """Whether objects of the class are made of their parts alone: enums, named tuples, and what `object` makes."""
    if issubclass(cls, Enum):
        return True
    if issubclass(cls, tuple):
        return hasattr(cls, "_fields")
    made = cls.__flags__ & _HEAP_TYPE and not cls.__flags__ & _NOT_MADE
    return bool(made) and cls.__new__ is object.__new__ and not issubclass(cls, type)


def _slots(cls: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in reversed(cls.__mro__):
        named = base.__dict__.get("__slots__", ())
        found += (named,) if isinstance(named, str) else named
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _parts_of(names: Sequence[str]) -> Callable[[Any], Iterable[Any]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: [getattr(value, name) for name in names]


class CoreEncoder:
    """Encoder of values, for one `CoreDecoder` that gets all of them in order."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._seen: dict[object, int] = {}
        """Numbers of what this value has had: of objects by their id, of strings and bytes by themselves."""
        self._described = 0
        self._writers = _Writers(self._writer_of)
        self._writers.update(
            {
                type(None): lambda _: self._out.append(_NONE),
                bool: lambda value: self._out.append(_TRUE if value else _FALSE),
                int: self._int,
                float: self._float,
                str: self._str,
                bytes: self._bytes,
                list: self._container(_LIST),
                set: self._container(_SET),
                deque: self._deque,
                dict: self._mapping(_DICT),
                OrderedDict: self._mapping(_ORDERED),
                tuple: self._finished(bytes([_TUPLE]), counted=True),
                frozenset: self._finished(bytes([_FROZEN]), counted=True),
                array: self._array,
                bytearray: self._bytearray,
            }
        )

    def encode(self, value: object) -> bytes:
        """Return a value's bytes.

        Raises:
            TypeError: the value holds something of another kind, or a tuple that holds itself.
        """
        self._out.clear()
        self._seen.clear()
        try:
            self._writers[type(value)](value)
        finally:
            self._seen.clear()  # a number of an object that is gone may be another's
        return bytes(self._out)

    def _int(self, value: int) -> None:
        if 0 <= value < _SHORT:
            self._out += b"b%c" % value
        elif 0 <= value < 0x10000:
            self._out += b"w" + _U16.pack(value)
        elif -0x80000000 <= value < 0x80000000:
            self._out += b"i" + _I32.pack(value)
        elif -(1 << 63) <= value < 1 << 63:
            self._out += b"h" + _I64.pack(value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._out += b"I" + _U32.pack(len(data)) + data

    def _float(self, value: float) -> None:
        self._out += b"f" + _FLOAT.pack(value)

    def _str(self, value: str) -> None:
        if not self._refers(value):
            self._seen[value] = len(self._seen)
            self._sized(_STR, _TEXT, value.encode("utf-8", "surrogatepass"))

    def _bytes(self, value: bytes) -> None:
        if not self._refers(value):
            self._seen[value] = len(self._seen)
            self._sized(_BYTES, _DATA, value)

    def _sized(self, short: int, long: int, data: bytes) -> None:
        if len(data) < _SHORT:
            self._out += b"%c%c" % (short, len(data))
        else:
            self._out.append(long)
            self._out += _U32.pack(len(data))
        self._out += data

    def _refers(self, key: object) -> bool:
        """Write a reference, if this value has had the key."""
        number = self._seen.get(key)
        if number is None:
            return False
        self._out += b"r%c" % number if number < _SHORT else b"R" + _U32.pack(number)
        return True

    def _items(self, values: Sequence[Any] | set[Any]) -> None:
        """Write a sequence without its kind."""
        count, out, writers = len(values), self._out, self._writers
        if count >= _PACKED_FROM and self._packed(values):
            return
        if count < _MANY:
            out.append(count)
        else:
            out += b"%c" % _MANY + _U32.pack(count)
        for value in values:
            writers[type(value)](value)

    def _packed(self, values: Iterable[Any]) -> bool:
        kinds = set(map(type, values))
        if kinds == {int}:
            low, high = min(values), max(values)
            kind = next((kind for kind, least, most in _WIDTHS if least <= low and high <= most), "")
        elif kinds == {float}:
            kind = "d"
        else:
            return kinds == {bytes} and self._keys(list(values))
        if kind:
            listed = list(values)
            self._out += b"%c" % _NUMBERS_OF + kind.encode() + _U32.pack(len(listed))
            self._out += struct.pack(f"<{len(listed)}{kind}", *listed)
        return bool(kind)

    def _keys(self, values: list[bytes]) -> bool:
        size = len(values[0])
        if not 0 < size < _SHORT or len(set(map(len, values))) != 1:
            return False
        self._out += b"%c" % _KEYS + _U32.pack(len(values)) + b"%c" % size + b"".join(values)
        return True

    def _container(self, tag: int) -> Callable[[Any], None]:
        def write(value: Any) -> None:
            if not self._refers(id(value)):
                self._seen[id(value)] = len(self._seen)
                self._out.append(tag)
                self._items(value)

        return write

    def _deque(self, value: deque[Any]) -> None:
        if not self._refers(id(value)):
            self._seen[id(value)] = len(self._seen)
            self._out.append(_DEQUE)
            self._writers[type(value.maxlen)](value.maxlen)
            self._items(value)

    def _mapping(self, tag: int) -> Callable[[Any], None]:
        def write(value: Any) -> None:
            if not self._refers(id(value)):
                self._seen[id(value)] = len(self._seen)
                self._out.append(tag)
                self._items(list(value))
                self._items(list(value.values()))

        return write

    def _finished(self, head: bytes, *, counted: bool) -> Callable[[Any], None]:
        """Return the writer of what is made when its items are there: in the numbering the items come first."""

        def write(value: Any) -> None:
            key = id(value)
            if self._refers(key):
                return
            self._out += head
            if counted:
                self._items(value)
            else:
                for item in value:
                    self._writers[type(item)](item)
            if key in self._seen:
                raise TypeError(f"a {type(value).__name__} holds itself")
            self._seen[key] = len(self._seen)

        return write

    def _array(self, value: array[Any]) -> None:
        if not self._refers(id(value)):
            self._seen[id(value)] = len(self._seen)
            if value.typecode not in _NUMBERS:
                raise TypeError(f"an array of {value.typecode} has no place in a journal")
            self._out.append(_ARRAY)
            self._out += value.typecode.encode() + b"%c" % value.itemsize + _U32.pack(len(value)) + value.tobytes()

    def _bytearray(self, value: bytearray) -> None:
        if not self._refers(id(value)):
            self._seen[id(value)] = len(self._seen)
            self._out += b"A" + _U32.pack(len(value)) + value

    def _describe(self, cls: type, names: Sequence[str]) -> bytes:
        """Write a class's description; return what its objects begin with."""
        self._out.append(_CLASS)
        for text in (class_name(cls), *names):
            data = text.encode()
            self._out += _U16.pack(len(data)) + data
        self._out += b"\0\0"
        self._described += 1
        return b"c" + _U16.pack(self._described - 1)

    def _writer_of(self, cls: type) -> Callable[[Any], None]:
        """Return the writer of a class that this encoder has not had. Its description comes with the first object."""
        if not is_record(cls):
            raise TypeError(f"a {cls.__name__} has no place in a journal")
        if issubclass(cls, Enum):
            return self._enum(cls)
        if issubclass(cls, tuple):
            return self._finished(self._describe(cls, cls._fields), counted=False)  # type: ignore[attr-defined]
        slots = _slots(cls)
        return self._open_object(cls, slots) if cls.__dictoffset__ else self._object(cls, slots)

    def _enum(self, cls: type[Enum]) -> Callable[[Any], None]:
        members = list(cls)
        head = self._describe(cls, [member.name for member in members])
        codes = {member: head + _U16.pack(place) for place, member in enumerate(members)}

        def write(value: Any) -> None:
            self._out += codes[value]

        return write

    def _object(self, cls: type, slots: tuple[str, ...]) -> Callable[[Any], None]:
        head, writers, seen, parts = self._describe(cls, slots), self._writers, self._seen, _parts_of(slots)

        def write(value: Any) -> None:
            if not self._refers(id(value)):
                seen[id(value)] = len(seen)
                self._out += head
                for part in parts(value):
                    writers[type(part)](part)

        return write

    def _open_object(self, cls: type, slots: tuple[str, ...]) -> Callable[[Any], None]:
        """Return the writer of objects with a `__dict__`: a description for each set of names."""
        heads: dict[tuple[str, ...], bytes] = {}
        writers = self._writers

        def write(value: Any) -> None:
            if self._refers(id(value)):
                return
            state = vars(value)
            names = (*slots, *state)
            head = heads.get(names)
            if head is None:
                head = heads[names] = self._describe(cls, names)
            self._seen[id(value)] = len(self._seen)
            self._out += head
            for name in slots:
                part = getattr(value, name)
                writers[type(part)](part)
            for part in state.values():
                writers[type(part)](part)

        return write


class _Writers(dict[type, Callable[[Any], None]]):
    """The writer of each class; what is missing is made."""

    def __init__(self, make: Callable[[type], Callable[[Any], None]]) -> None:
        self._make = make

    def __missing__(self, cls: type) -> Callable[[Any], None]:
        writer = self[cls] = self._make(cls)
        return writer


class CoreDecoder:
    """Decoder of the bytes of one `CoreEncoder`, in the order in which they were encoded.

    Args:
        classes: all classes that bytes may name.
    """

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._described: list[Callable[[], Any]] = []
        self._data = b""
        self._at = 0
        self._seen: list[Any] = []
        self._readers: dict[int, Callable[[], Any]] = {
            _NONE: lambda: None,
            _TRUE: lambda: True,
            _FALSE: lambda: False,
            _BYTE: self._byte,
            _WORD: lambda: self._number(_U16),
            _INT: lambda: self._number(_I32),
            _LONG: lambda: self._number(_I64),
            _BIG: lambda: int.from_bytes(self._take(self._number(_U32)), "little", signed=True),
            _REAL: lambda: self._number(_FLOAT),
            _STR: lambda: self._keep(self._text(self._byte())),
            _TEXT: lambda: self._keep(self._text(self._number(_U32))),
            _BYTES: lambda: self._keep(self._take(self._byte())),
            _DATA: lambda: self._keep(self._take(self._number(_U32))),
            _REF: lambda: self._reference(self._byte()),
            _FAR: lambda: self._reference(self._number(_U32)),
            _LIST: self._list,
            _TUPLE: lambda: self._keep(tuple(self._items())),
            _SET: self._set,
            _FROZEN: lambda: self._keep(frozenset(self._items())),
            _DICT: lambda: self._mapping({}),
            _ORDERED: lambda: self._mapping(OrderedDict()),
            _DEQUE: self._deque,
            _ARRAY: self._array,
            _BYTEARRAY: lambda: self._keep(bytearray(self._take(self._number(_U32)))),
            _CLASS: self._description,
            _OBJECT: self._object,
        }

    def decode(self, data: bytes) -> Any:
        """Return the value of these bytes.

        Raises:
            CodecError: they are none, or name a class that is not among the classes.
        """
        self._data, self._at = data, 0
        self._seen.clear()
        try:
            value = self._value()
        except CodecError as error:
            raise CodecError(f"{error} (byte {self._at})") from error
        except RecursionError as error:
            raise CodecError("the value is nested too deeply") from error
        except Exception as error:  # a part that has no place there; hashing it may raise anything
            raise CodecError(f"a part does not fit at byte {self._at}: {error!r}") from error
        if self._at != len(data):
            raise CodecError(f"the value ends at byte {self._at} of {len(data)}")
        return value

    def _value(self) -> Any:
        reader = self._readers.get(self._byte())
        if reader is None:
            raise CodecError("an unknown tag")
        return reader()

    def _byte(self) -> int:
        if self._at >= len(self._data):
            raise CodecError("the value does not end")
        self._at += 1
        return self._data[self._at - 1]

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise CodecError(f"{size} bytes are wanted, {len(self._data) - self._at} are there")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, kind: struct.Struct) -> Any:
        return kind.unpack(self._take(kind.size))[0]

    def _text(self, size: int) -> str:
        return self._take(size).decode("utf-8", "surrogatepass")

    def _keep(self, value: Any) -> Any:
        self._seen.append(value)
        return value

    def _reference(self, number: int) -> Any:
        if number >= len(self._seen):
            raise CodecError("a reference to nothing")
        return self._seen[number]

    def _items(self) -> list[Any]:
        how = self._byte()
        if how < _MANY:
            return [self._value() for _ in range(how)]
        kind = self._byte() if how == _NUMBERS_OF else 0
        count = self._number(_U32)
        if how == _MANY:
            if count > len(self._data) - self._at:  # each item has a byte at least
                raise CodecError(f"{count} items in {len(self._data) - self._at} bytes")
            return [self._value() for _ in range(count)]
        if how == _KEYS:
            size = self._byte()
            if not size:
                raise CodecError("keys of no bytes")
            joined = self._take(count * size)
            return [joined[begin : begin + size] for begin in range(0, len(joined), size)]
        return list(struct.unpack(f"<{count}{chr(kind)}", self._take(count * _PACKED_BYTES[kind])))

    def _list(self) -> list[Any]:
        value: list[Any] = self._keep([])
        value += self._items()
        return value

    def _set(self) -> set[Any]:
        value: set[Any] = self._keep(set())
        value.update(self._items())
        return value

    def _deque(self) -> deque[Any]:
        number = len(self._seen)
        self._seen.append(None)
        value: deque[Any] = deque(maxlen=self._value())
        self._seen[number] = value
        value.extend(self._items())
        return value

    def _mapping(self, value: dict[Any, Any]) -> dict[Any, Any]:
        self._keep(value)
        keys = self._items()
        value.update(zip(keys, self._items(), strict=True))
        return value

    def _array(self) -> array[Any]:
        code = chr(self._byte())
        if code not in _NUMBERS:
            raise CodecError("an array of no numbers")
        value = array(code)
        if self._byte() != value.itemsize:
            raise CodecError("an array of another machine")
        value.frombytes(self._take(self._number(_U32) * value.itemsize))
        return self._keep(value)  # type: ignore[no-any-return]

    def _description(self) -> Any:
        name, *names = iter(self._name, "")
        cls = self._classes.get(name)
        if cls is None:
            raise CodecError(
                f"it names {name!r}, which is no class of a core of this version: if another version of Moonpool wrote "
                "the journal, rerun the journal with that version"
            )
        self._described.append(self._maker(cls, names))
        return self._value()

    def _name(self) -> str:
        return self._take(self._number(_U16)).decode()

    def _object(self) -> Any:
        number = self._number(_U16)
        if number >= len(self._described):
            raise CodecError("an object of no class")
        return self._described[number]()

    def _maker(self, cls: type, names: Sequence[str]) -> Callable[[], Any]:
        """Return what reads an object of the class.

        Raises:
            CodecError: the class has other parts in this version.
        """
        if issubclass(cls, Enum):
            if not set(names) <= cls.__members__.keys():
                raise _other_parts(cls)
            members = [cls.__members__[name] for name in names]
            return lambda: members[self._below(members)]
        if issubclass(cls, tuple):
            if tuple(names) != cls._fields:  # type: ignore[attr-defined]
                raise _other_parts(cls)
            return lambda: self._keep(tuple.__new__(cls, [self._value() for _ in names]))
        slots = set(_slots(cls))
        wanted = {field.name for field in fields(cls)} if is_dataclass(cls) else slots
        if not wanted <= set(names) or not (cls.__dictoffset__ or set(names) <= slots):
            raise _other_parts(cls)
        setters = [(name, name in slots) for name in names]

        def read() -> Any:
            value = self._keep(object.__new__(cls))
            for name, is_slot in setters:
                part = self._value()
                if is_slot:
                    object.__setattr__(value, name, part)
                else:
                    value.__dict__[name] = part
            return value

        return read

    def _below(self, there: Sized) -> int:
        number: int = self._number(_U16)
        if number >= len(there):
            raise CodecError("no such member")
        return number


def _other_parts(cls: type) -> CodecError:
    return CodecError(
        f"{class_name(cls)} has other parts in this version: if another version of Moonpool wrote the journal, rerun "
        "the journal with that version"
    )
