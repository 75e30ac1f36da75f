"""What an instance tells of its KV keys: the log of changes, merged into numbered messages, and snapshots in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.kv.changes import NetChanges
from moonpool.v1 import kv_pb2

KEYS_PER_MESSAGE = 4096
"""Keys in one message at most: 128 KiB, so that a snapshot never holds up a stream."""


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """The keys that an instance holds, in parts that can each be listed in a moment.

    Attributes:
        parts: how many; at least one.
        part: the keys of one part now. A key is of one part, always the same.
        cold: which of some held keys are on SSD only; None = there is no SSD.
    """

    parts: int
    part: Callable[[int], Iterable[bytes]]
    cold: Callable[[Iterable[Any]], Iterable[bytes]] | None = None

    def message(self, keys: Sequence[bytes]) -> kv_pb2.KVEvents:
        """Says that these are held."""
        cold = self.cold(keys) if self.cold is not None else ()
        return kv_pb2.KVEvents(stored_keys=b"".join(keys), cooled_keys=b"".join(cold))


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
        messages = [held.message(keys[at : at + max_keys]) for at in range(0, max(len(keys), 1), max_keys)]
        messages[0].snapshot_begin = begin
        messages[-1].snapshot_end = number == held.parts
        yield messages


class EventLog:
    """Changes not yet sent, and the number of the next message."""

    def __init__(self) -> None:
        """Start with nothing pending; the first message has sequence 1."""
        self._pending = NetChanges()
        self._next_sequence = 1

    @property
    def pending(self) -> int:
        """Keys whose change was not sent yet."""
        return len(self._pending)

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next message."""
        return self._next_sequence

    def note(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), cooled: Iterable[bytes] = ()) -> None:
        """Takes changes; see `KeyChanges`."""
        self._pending.note(stored, removed, cooled)

    def next_message(self, max_keys: int = KEYS_PER_MESSAGE) -> kv_pb2.KVEvents | None:
        """Take the oldest pending changes as one message, or None when there are none."""
        if not self._pending:
            return None
        stored, removed, cooled = map(b"".join, self._pending.take(max_keys))
        sequence = self._take_sequence()
        return kv_pb2.KVEvents(sequence=sequence, stored_keys=stored, removed_keys=removed, cooled_keys=cooled)

    def numbered(self, messages: Iterable[kv_pb2.KVEvents]) -> Iterator[kv_pb2.KVEvents]:
        """The messages of a snapshot's step, each with the number it has when it is taken."""
        for message in messages:
            message.sequence = self._take_sequence()
            yield message

    def forget(self) -> None:
        """Drop what is pending: a snapshot that is about to begin includes it."""
        self._pending.clear()

    def _take_sequence(self) -> int:
        sequence = self._next_sequence
        self._next_sequence += 1
        return sequence
