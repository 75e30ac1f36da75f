"""The log of KV changes an instance tells the conductor about.

Owns sequence numbers and the coalescing of changes into messages. Knows neither streams nor clocks; whoever sends
decides when.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.v1 import kv_pb2

KEYS_PER_MESSAGE = 4096
"""Keys in one message at most: 128 KiB, so that a snapshot never holds up a stream."""


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

    def snapshot(self, keys: Iterable[bytes], max_keys: int = KEYS_PER_MESSAGE) -> list[kv_pb2.KVEvents]:
        """Return messages that say "exactly `keys`"; pending changes are dropped, because `keys` includes them."""
        self._pending.clear()
        every = list(keys)
        pages = [every[i : i + max_keys] for i in range(0, len(every), max_keys)] or [[]]
        messages = [kv_pb2.KVEvents(sequence=self._take_sequence(), stored_keys=b"".join(page)) for page in pages]
        messages[0].snapshot_begin = True
        messages[-1].snapshot_end = True
        return messages

    def check_invariants(self) -> None:
        """Raise AssertionError when the log contradicts itself."""
        assert self._next_sequence >= 1
        assert all(isinstance(key, bytes) for key in self._pending)

    def _take_sequence(self) -> int:
        sequence = self._next_sequence
        self._next_sequence += 1
        return sequence
