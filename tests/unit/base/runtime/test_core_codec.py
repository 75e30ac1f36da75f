"""Values that go through bytes are the same values, with the same circles."""

import math
import os
import pickle
import random
from array import array
from collections import Counter as CountOf
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.frozen import frozen
from moonpool.base.runtime.core_classes import core_classes
from moonpool.base.runtime.core_codec import CodecError, CoreDecoder, CoreEncoder, class_name


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Pair(NamedTuple):
    left: Any
    right: Any


@frozen
class Point:
    x: Any
    y: Any = 0


@frozen
class Single:
    only: Any


@dataclass
class Open:
    name: str
    rest: list[Any] = field(default_factory=list)


class Parent:
    __slots__ = ("child", "up")
    child: Any
    up: Any


class Below(Parent):
    __slots__ = ("more",)
    more: Any


class Plain:
    """Its own ways to be made and restored are never called."""

    def __init__(self) -> None:
        raise AssertionError("called")

    def __setstate__(self, state: object) -> None:
        raise AssertionError("called")

    def __reduce__(self) -> Any:
        raise AssertionError("called")


CLASSES = {class_name(cls): cls for cls in (Colour, Pair, Point, Single, Open, Parent, Below, Plain)}


def through(*values: Any) -> list[Any]:
    encoder, decoder = CoreEncoder(), CoreDecoder(CLASSES)
    return [decoder.decode(encoder.encode(value)) for value in values]


WHOLE = st.one_of(
    st.integers(), st.integers(-300, 300), st.sampled_from([2**n + d for n in (8, 16, 31, 63) for d in (-1, 0)])
)
PLAIN = st.one_of(st.none(), st.booleans(), WHOLE, st.floats(), st.text(), st.binary(), st.sampled_from(Colour))
HASHED = st.recursive(
    PLAIN,
    lambda parts: st.one_of(
        st.tuples(parts, parts),
        st.builds(Pair, parts, parts),
        st.builds(Point, parts),
        st.frozensets(parts, max_size=3),
    ),
    max_leaves=5,
)
ANY = st.recursive(
    st.one_of(
        HASHED, st.lists(st.integers(0, 300)), st.lists(st.floats()), st.lists(st.binary(min_size=4, max_size=4))
    ),
    lambda parts: st.one_of(
        st.lists(parts),
        st.lists(parts).map(tuple),
        st.dictionaries(HASHED, parts),
        st.dictionaries(HASHED, parts).map(OrderedDict),
        st.sets(HASHED),
        st.lists(parts).map(lambda values: deque(values, maxlen=9)),
        st.lists(st.integers(-9, 9)).map(lambda values: array("q", values)),
        st.binary().map(bytearray),
        st.builds(Point, parts, parts),
        st.builds(Single, parts),
        st.builds(Open, st.text(), st.lists(parts)),
    ),
    max_leaves=12,
)


@given(st.lists(ANY, max_size=3))
def test_values_are_the_same(values: list[Any]) -> None:
    assert list(map(told, through(*values))) == list(map(told, values))


@pytest.mark.parametrize("size", [0, 255, 256, 70_000])
def test_texts_and_bytes_of_any_length(size: int) -> None:
    values = ["x" * size, b"y" * size, "\u00e9" * (size // 2)]
    assert through(*values) == values


@pytest.mark.parametrize(
    ("least", "most", "width"),
    [(0, 0xFF, 1), (0, 0xFFFF, 2), (-0x80000000, 0x7FFFFFFF, 4), (-(1 << 63), (1 << 63) - 1, 8)],
)
def test_whole_numbers_lie_in_as_few_bytes_as_they_need(least: int, most: int, width: int) -> None:
    values = [least, most] * 500
    encoded = CoreEncoder().encode(values)
    assert width * 1000 < len(encoded) < width * 1000 + 16
    assert CoreDecoder(CLASSES).decode(encoded) == values


def test_a_number_of_one_byte_takes_no_more() -> None:
    assert len(CoreEncoder().encode(0)) == len(CoreEncoder().encode(255)) == 2 < len(CoreEncoder().encode(256))


def test_whole_numbers_alone_at_the_edges_of_their_widths() -> None:
    for bits in (7, 8, 15, 16, 31, 32, 63, 64, 70):
        for value in (edge + more for edge in (1 << bits, -(1 << bits)) for more in (-1, 0, 1)):
            assert through(value, "and more") == [value, "and more"]


@pytest.mark.parametrize("bits", [31, 63])
def test_the_least_number_of_a_width_takes_as_many_bytes_as_the_largest(bits: int) -> None:
    least, largest = (len(CoreEncoder().encode(value)) for value in (-(1 << bits), (1 << bits) - 1))
    assert least == largest == 1 + (bits + 1) // 8


@pytest.mark.parametrize("count", [252, 253, 254, 255, 256])
def test_counts_of_items_at_the_edge_of_a_byte(count: int) -> None:
    assert through([None] * count, "and more") == [[None] * count, "and more"]


def test_keys_of_one_length_lie_together_and_others_come_back_too() -> None:
    keys = [bytes([number % 256]) * 16 for number in range(1000)]
    assert len(CoreEncoder().encode(keys)) < 16_020
    mixed = [*keys, b"longer than the others"]
    assert through(keys, mixed, [b""] * 9) == [keys, mixed, [b""] * 9]


def told(value: Any) -> str:
    """Kind and content: 1, 1.0 and True are three things, and so are the zeros."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(told, value))}"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(told(key), told(part)) for key, part in value.items()]}"
    if isinstance(value, deque):
        return f"deque {value.maxlen} {list(map(told, value))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{list(map(told, value))}"
    if isinstance(value, Point):
        return f"Point {told(value.x)} {told(value.y)}"
    if isinstance(value, Single):
        return f"Single {told(value.only)}"
    if isinstance(value, Open):
        return f"Open {told(value.name)} {told(value.rest)}"
    return f"{type(value).__name__} {value!r}"


def test_what_is_one_object_stays_one_object() -> None:
    entry = (1.0, 2, "key")
    heap, valid = [entry], {"key": entry}
    [(found, by_key)] = through((heap, valid))
    assert found[0] is by_key["key"]


def test_circles() -> None:
    plain = object.__new__(Plain)
    below = Below()
    below.child, below.up, below.more = plain, below, [plain]
    plain.__dict__.update(above=below, itself=plain, among={1: plain})
    [found] = through(below)
    assert found.up is found
    assert found.child is found.more[0] is found.child.itself is found.child.among[1]
    assert found.child.above is found
    looped: list[Any] = []
    looped.append((looped,))
    with pytest.raises(TypeError, match="a tuple holds itself"):
        CoreEncoder().encode(looped[0])


def test_objects_that_have_got_other_parts_meanwhile() -> None:
    first, second = object.__new__(Plain), object.__new__(Plain)
    first.__dict__.update(a=1)
    second.__dict__.update(a=1, b=2)
    assert [vars(found) for found in through(first, second, first)] == [{"a": 1}, {"a": 1, "b": 2}, {"a": 1}]


def test_a_class_is_described_once() -> None:
    encoder = CoreEncoder()
    first, second = (len(encoder.encode(Point(1, 2))) for _ in range(2))
    assert second < 10 < first


def test_special_numbers() -> None:
    [found] = through([math.inf, -0.0, math.nan, 2**200, -(2**200), 2**63, -(2**63) - 1])
    assert found[:2] == [math.inf, 0.0]
    assert math.copysign(1, found[1]) == -1
    assert math.isnan(found[2])
    assert found[3:] == [2**200, -(2**200), 2**63, -(2**63) - 1]


@pytest.mark.parametrize(
    "value", [print, object(), CountOf("a"), Plain, 1j, ValueError("x"), array("u", "x"), lambda: 0]
)
def test_what_has_no_place_is_refused_when_it_is_written(value: object) -> None:
    with pytest.raises(TypeError, match="has no place in a journal"):
        CoreEncoder().encode([value])


@pytest.mark.parametrize("value", [Point(1), Single(1), Pair(1, 2), Colour.RED, Open("x")])
def test_another_versions_class_is_named(value: object) -> None:
    """With a part more, with one less, or gone."""
    name, data = class_name(type(value)), CoreEncoder().encode(value)
    with pytest.raises(CodecError, match="no class of a core of this version"):
        CoreDecoder({}).decode(data)

    class Renamed(Enum):
        GREEN = "g"

    @frozen
    class Grown:
        x: int = 0
        only: int = 0
        name: int = 0
        left: int = 0
        later: int = 0

    other = Renamed if isinstance(value, Enum) else Grown
    with pytest.raises(CodecError, match="has other parts in this version"):
        CoreDecoder({name: other}).decode(data)


# --- hostile bytes ----------------------------------------------------------------------------------------------------


def described(name: str, *parts: str) -> bytes:
    texts = [text.encode() for text in (name, *parts)]
    return b"C" + b"".join(len(text).to_bytes(2, "little") + text for text in texts) + b"\0\0"


NAMES = (
    "os.system",
    "builtins.eval",
    "builtins.object",
    "ctypes.CDLL",
    "logging.FileHandler",
    "moonpool.base.kv.file_io.ctypes.CDLL",
    "moonpool.base.kv.layout.KVLayout.__init__",
    "moonpool.base.scheduling.state_machine.Enum",
    "moonpool.conductor.core.events.frozen",
    "moonpool.base.runtime.journal.JournalWriter",
    "moonpool.base.fork_server.Program",
    "moonpool.base.kv.layout",
    "moonpool.base.kv.layout:KVLayout",
    "",
    "\udcff",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_things_are_refused(name: str) -> None:
    text = name.encode("utf-8", "surrogatepass")
    data = b"C" + len(text).to_bytes(2, "little") + text
    for objects in (b"c\0\0", b"t\0", b""):
        with pytest.raises(CodecError):
            CoreDecoder(core_classes()).decode(data + b"\0\0" + objects)


@pytest.mark.parametrize("part", ["__class__", "__dict__", "handle", "x.y"])
def test_parts_that_a_class_does_not_have_are_refused_or_plain_data(part: str) -> None:
    with pytest.raises(CodecError, match="has other parts"):
        CoreDecoder(CLASSES).decode(described(class_name(Point), "x", "y", part) + b"c\0\0NNN")
    found = CoreDecoder(CLASSES).decode(described(class_name(Plain), part) + b"c\0\0" + b"i\1\0\0\0")
    assert type(found) is Plain
    assert vars(found) == {part: 1}


HUGE = b"\xff\xff\xff\xff"
COUNTS = [
    *(tag + b"\xfd" + HUGE for tag in (b"l", b"t", b"e", b"z", b"d", b"o")),
    *(b"l\xfe" + kind + HUGE for kind in (b"B", b"H", b"i", b"q", b"d", b"P", b"x")),
    b"l\xff" + HUGE + b"\x20",
    b"l\xff" + HUGE + b"\0" + b"x",
    *(tag + HUGE for tag in (b"S", b"Y", b"I", b"A", b"R")),
    b"ad\x08" + HUGE,
    b"au\x04\1\0\0\0abcd",
    b"aq\x04\1\0\0\0abcd",
    b"q" + b"h" + b"\xff" * 8 + b"\0",
    b"d\xff" + HUGE + b"\0\0",
    b"s\xff",
    b"c\xff\xff",
    b"r\0",
    b"q\1r\0",
    b"e\1l\0",
    b"d\1l\0\1N",
    b"d\2NT\1N",
    b"x",
    b"",
    b"NN",
    b"l\1" * 100_000,
    described("", "") * 3,
]


@pytest.mark.parametrize("place", range(len(COUNTS)))
def test_counts_and_shapes_that_are_not_there(place: int) -> None:
    """Each is refused before memory is taken: the process may have 64 MiB more than it has."""
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            CoreDecoder(CLASSES).decode(COUNTS[place])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_what_is_nested_too_deeply_is_named() -> None:
    with pytest.raises(CodecError, match="nested too deeply"):
        CoreDecoder(CLASSES).decode(b"l\1" * 100_000)


def test_unknown_tags_and_values_without_an_end_are_named() -> None:
    with pytest.raises(CodecError, match="an unknown tag"):
        CoreDecoder(CLASSES).decode(b"\xff")
    with pytest.raises(CodecError, match="the value does not end"):
        CoreDecoder(CLASSES).decode(b"l\1")


def test_a_member_that_an_enum_does_not_have_is_named() -> None:
    with pytest.raises(CodecError, match="no such member"):
        CoreDecoder(CLASSES).decode(described(class_name(Colour), "RED", "BLUE") + b"c\0\0\2\0")


def test_a_pickle_is_no_value() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(CodecError):
            CoreDecoder(CLASSES).decode(pickle.dumps(Point(1, [2]), protocol=protocol))


def test_random_damage_gives_a_value_or_an_error() -> None:
    """`MOONPOOL_FUZZ_SEED=N` repeats a run."""
    seed = int(os.environ.get("MOONPOOL_FUZZ_SEED") or random.randrange(1 << 32))
    print(f"MOONPOOL_FUZZ_SEED={seed}")
    draw = random.Random(seed)
    below = Below()
    below.child, below.up, below.more = Open("a", [Colour.BLUE, Pair(1, 2.0)]), below, deque([{1: b"x" * 32}], maxlen=3)
    value = [below, Point({2, 3}, array("q", [1, 2])), list(range(20)), [b"abcd"] * 9, OrderedDict(a=None), "é" * 300]
    data = CoreEncoder().encode(value)
    for _ in range(4000):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            match draw.randrange(3):
                case 0:
                    damaged[draw.randrange(len(damaged))] = draw.randrange(256)
                case 1:
                    del damaged[(at := draw.randrange(len(damaged))) : at + draw.randrange(9)]
                case _:
                    damaged[(at := draw.randrange(len(damaged))) : at] = draw.randbytes(draw.randrange(9))
            damaged = damaged or bytearray(b"N")
        try:
            found = CoreDecoder(CLASSES).decode(bytes(damaged))
        except CodecError:
            continue
        assert_known(found, set())


def assert_known(value: Any, seen: set[int]) -> None:
    """Every object is plain, a container, or of a class that was given."""
    if id(value) in seen:
        return
    seen.add(id(value))
    kinds = (type(None), bool, int, float, str, bytes, bytearray, array)
    if isinstance(value, list | tuple | set | frozenset | deque | dict):
        assert type(value).__module__ in ("builtins", "collections", __name__)
        for part in [*value, *(value.values() if isinstance(value, dict) else ())]:
            assert_known(part, seen)
    elif not isinstance(value, Enum) and type(value) not in kinds:
        assert class_name(type(value)) in CLASSES
        names = {*vars(value)} if hasattr(value, "__dict__") else {"x", "y", "only", "child", "up", "more"}
        for name in names:
            if hasattr(value, name):
                assert_known(getattr(value, name), seen)


def test_every_truncation_is_an_error() -> None:
    data = CoreEncoder().encode([Point(1, {"a": (1, 2)}), deque([2.5]), list(range(10))])
    for end in range(len(data)):
        with pytest.raises(CodecError):
            CoreDecoder(CLASSES).decode(data[:end])
