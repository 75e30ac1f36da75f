"""Building blocks of the deterministic state machines ("cores"): the protocol, timers, digests and random draws.

A core decides. A driver (asyncio in a service, an event heap in the simulator) carries the decisions out and reports
the results as events. Events and actions are frozen (`moonpool.base.frozen`). A core has no clock, no I/O and no hidden
randomness: the same events at the same times give the same actions.
"""

from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from moonpool.base.frozen import frozen

DIGEST_BYTES = 16


def digest_of(*values: object) -> bytes:
    """A 16-byte hash of plain values.

    Takes None, bool, int, float, str, bytes, enums, arrays, dataclasses, tuples, lists, deques, sets (in any order),
    mappings (in their order, which is part of the state), and objects with a method `digest() -> bytes`.

    Raises:
        TypeError: a value has another kind.
    """
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        _feed(hasher.update, value)
    return hasher.digest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    match value:
        case Enum():
            _feed_bytes(update, b"e", f"{type(value).__name__}.{value.name}".encode())
        case None | bool() | int() | float():
            _feed_bytes(update, b"p", repr(value).encode())
        case str():
            _feed_bytes(update, b"s", value.encode())
        case bytes() | bytearray() | memoryview():
            _feed_bytes(update, b"b", bytes(value))
        case array():
            _feed_bytes(update, b"a" + value.typecode.encode(), value.tobytes())
        case tuple() | list() | deque():
            _feed_each(update, b"l", value)
        case Mapping():
            _feed_each(update, b"m", [part for item in value.items() for part in item])
        case Set():
            _feed_each(update, b"t", sorted(map(digest_of, value)))
        case _ if hasattr(value, "digest"):
            _feed_bytes(update, b"d", value.digest())
        case _ if is_dataclass(value):
            _feed_bytes(update, b"c", type(value).__name__.encode())
            _feed_each(update, b"f", [getattr(value, field.name) for field in fields(value)])
        case _:
            raise TypeError(f"{type(value).__name__} has no digest")


def _feed_bytes(update: Callable[[bytes], None], kind: bytes, data: bytes) -> None:
    update(kind + len(data).to_bytes(8, "little"))
    update(data)


def _feed_each(update: Callable[[bytes], None], kind: bytes, values: Any) -> None:
    update(kind + len(values).to_bytes(8, "little"))
    for value in values:
        _feed(update, value)


_MASK_64 = (1 << 64) - 1


def draw_bits(seed: int, *counters: int) -> int:
    """64 random bits for these counters. The mixing is SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    state = seed & _MASK_64
    for counter in (*counters, len(counters)):
        state = (state + 0x9E3779B97F4A7C15 + counter * 0xD1342543DE82EF95) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


def draw_unit(seed: int, *counters: int) -> float:
    """A number in [0, 1), uniform, for these counters."""
    return (draw_bits(seed, *counters) >> 11) * 2.0**-53


def draw_below(limit: int, seed: int, *counters: int) -> int:
    """An integer in [0, limit) for these counters; the bias is below limit / 2^64."""
    return (draw_bits(seed, *counters) * limit) >> 64


def thin_out(times: Collection[float], most: int) -> list[float]:
    """At most `most` times out of `times`, ascending and evenly spread; the last time is included."""
    ordered = sorted(set(times))
    if len(ordered) <= most:
        return ordered
    return [ordered[(turn + 1) * len(ordered) // most - 1] for turn in range(most)]


K = TypeVar("K", bound=Hashable)
_MIN_TIMERS_TO_SWEEP = 64


def earliest(first: float | None, other: float | None) -> float | None:
    """The earlier of two deadlines; None = no deadline."""
    if first is None or other is None:
        return other if first is None else first
    return min(first, other)


A = TypeVar("A")
T = TypeVar("T")


class Timers(Generic[K]):
    """One deadline per key. Each call costs O(log n); equal deadlines come in the order of setting."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._valid: dict[K, tuple[float, int, K]] = {}  # the valid entries of the heap
        self._count = 0

    def __len__(self) -> int:
        return len(self._valid)

    def set(self, key: K, at: float) -> None:
        """Set or move the deadline of `key`."""
        self._count += 1
        entry = self._valid[key] = at, self._count, key
        heappush(self._heap, entry)
        if len(self._heap) > _MIN_TIMERS_TO_SWEEP and len(self._heap) > 2 * len(self._valid):
            self._sweep()

    def clear(self, key: K) -> None:
        """Remove the deadline of `key`, if any."""
        self._valid.pop(key, None)

    def at(self, key: K) -> float | None:
        """The deadline of `key`; None = no deadline."""
        entry = self._valid.get(key)
        return None if entry is None else entry[0]

    def next(self) -> float | None:
        """The earliest deadline; None = no deadline."""
        heap, valid = self._heap, self._valid
        while heap:
            entry = heap[0]
            if valid.get(entry[2]) is entry:
                return entry[0]
            heappop(heap)
        return None

    def pop_due(self, now: float) -> K | None:
        """Take the key of the earliest deadline if that is not after `now`; else None."""
        if not self._heap or self._heap[0][0] > now:
            return None
        at = self.next()
        if at is None or at > now:
            return None
        key = heappop(self._heap)[2]
        del self._valid[key]
        return key

    def digest(self) -> bytes:
        return digest_of({key: (at, count) for key, (at, count, _) in self._valid.items()})

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) is entry]
        heapify(self._heap)


E_contra = TypeVar("E_contra", contravariant=True)


@frozen
class Tick:
    """Time has passed. Sent when `Core.due` is reached; may be sent at any time."""


@frozen
class IoEnded(Generic[T]):
    """The I/O that an action started has ended: by success, failure or cancellation.

    Each action that starts I/O carries an `io` number and is answered by exactly one `IoEnded`, also after `CancelIo`.
    The blocks and limits that the I/O uses stay taken until then.
    """

    io: int
    result: T


@frozen
class CancelIo:
    """An action: cancels I/O, which is still answered by `IoEnded`."""

    io: int


class Core(Protocol[E_contra, A]):
    """A state machine without I/O. The state consists of what journals take (`moonpool.base.runtime.core_codec`)."""

    def handle(self, now: float, event: E_contra | Tick, out: list[A]) -> None:
        """Take an event and append actions.

        Args:
            now: seconds of any clock that never goes back.
            event: a frozen value.
            out: gets the actions, in order.
        """

    def due(self) -> float | None:
        """When the core needs a `Tick` if no event comes; None = never."""

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""

    def digest(self) -> bytes:
        """Hash of the whole state; equal for equal states in any process."""


class PendingIo(Generic[T]):
    """I/O in flight, each with a value: the resources pinned by the I/O. Numbers are never used twice."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, io: int) -> bool:
        return io in self._open

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return iter(list(self._open.items()))

    def begin(self, pinned: T) -> int:
        """Add I/O; return the I/O's number."""
        io, self._next = self._next, self._next + 1
        self._open[io] = pinned
        return io

    def get(self, io: int) -> T | None:
        """The value for I/O in flight; None if the I/O has ended."""
        return self._open.get(io)

    def digest(self) -> bytes:
        """Hash over the I/O in flight and the next number."""
        return digest_of(self._next, self._open)

    def end(self, io: int) -> T:
        """Remove I/O that has ended; return the value.

        Raises:
            KeyError: the I/O has ended before, or never began: a defect of the driver.
        """
        return self._open.pop(io)
