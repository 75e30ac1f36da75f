"""What an instance tells of its KV keys: the log of changes, merged into numbered messages, and snapshots in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from moonpool.v1 import kv_pb2

KEYS_PER_MESSAGE = 4096
"""Keys in one message at most: 128 KiB, so that a snapshot never holds up a stream."""


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """The keys that an instance holds, in parts that can each be listed in a moment.

    Attributes:
        parts: how many; at least one.
        part: the keys of one part now. A key is of one part, always the same.
    """

    parts: int
    part: Callable[[int], Iterable[bytes]]


def snapshot(held: HeldKeys, max_keys: int = KEYS_PER_MESSAGE) -> Iterator[list[kv_pb2.KVEvents]]:
    """Messages, not numbered yet, that say what is held, in steps; each step lists when it is taken.

    So no step is long, and between the steps changes may be told. The rule that keeps the listener right: what a step
    gives is told before any change that comes after the step, and changes are told in their order. Then a key is in
    its step's messages if it is held at that moment, and what becomes of it later is told later.

    A step lists no more keys than a message has and the largest part; they may make several messages.
    """
    number = 0
    while number < held.parts:
        begin, keys = number == 0, list[bytes]()
        while number < held.parts and len(keys) < max_keys:
            keys += held.part(number)
            number += 1
        messages = [
            kv_pb2.KVEvents(stored_keys=b"".join(keys[at : at + max_keys]))
            for at in range(0, max(len(keys), 1), max_keys)
        ]
        messages[0].snapshot_begin = begin
        messages[-1].snapshot_end = number == held.parts
        yield messages


class EventLog:
    """Changes not yet sent, as the net effect per key, and the number of the next message.

    Only the last change of a key matters to the reader, so that memory is bounded by the number of distinct keys, and
    the two lists of one message are disjoint: their order is of no consequence.
    """

    def __init__(self) -> None:
        """Start with nothing pending; the first message has sequence 1."""
        self._pending: dict[bytes, bool] = {}
        self._next_sequence = 1

    @property
    def pending(self) -> int:
        """Keys whose change was not sent yet."""
        return len(self._pending)

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next message."""
        return self._next_sequence

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note that the instance now holds `keys`."""
        for key in keys:
            self._pending.pop(key, None)  # re-inserted at the end: messages keep the order of last changes
            self._pending[key] = True

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note that the instance holds `keys` no longer."""
        for key in keys:
            self._pending.pop(key, None)
            self._pending[key] = False

    def next_message(self, max_keys: int = KEYS_PER_MESSAGE) -> kv_pb2.KVEvents | None:
        """Take the oldest pending changes as one message, or None when there are none."""
        if not self._pending:
            return None
        taken = [key for key, _ in zip(self._pending, range(max_keys), strict=False)]
        stored = [key for key in taken if self._pending[key]]
        removed = [key for key in taken if not self._pending[key]]
        for key in taken:
            del self._pending[key]
        return kv_pb2.KVEvents(
            sequence=self._take_sequence(), stored_keys=b"".join(stored), removed_keys=b"".join(removed)
        )

    def numbered(self, messages: Iterable[kv_pb2.KVEvents]) -> Iterator[kv_pb2.KVEvents]:
        """The messages of a snapshot's step, each with the number it has when it is taken."""
        for message in messages:
            message.sequence = self._take_sequence()
            yield message

    def forget(self) -> None:
        """Drop what is pending: a snapshot that is about to begin includes it."""
        self._pending.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError when the log contradicts itself."""
        assert self._next_sequence >= 1
        assert all(isinstance(key, bytes) for key in self._pending)

    def _take_sequence(self) -> int:
        sequence = self._next_sequence
        self._next_sequence += 1
        return sequence
