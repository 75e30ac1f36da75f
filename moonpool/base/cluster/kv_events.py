"""KV events: the log of an instance's key changes, snapshots in steps, and the journal that watchers follow.

A watcher that knows this epoch and a number that the journal still reaches gets the changes since. Others get a
snapshot, page by page; changes that come meanwhile go in between.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import Overloaded, Unavailable
from moonpool.base.kv.blocks import NetChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.v1 import kv_pb2

KEYS_PER_MESSAGE = 4096
"""Keys in one message at most: 128 KiB, so that a snapshot never holds up a stream."""
RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """The keys that an instance holds, in parts that can each be listed in a moment.

    Attributes:
        parts: how many; at least one.
        part: one part's keys now. A key always belongs to the same part.
        cold: which of some held keys are on SSD only; None = there is no SSD.
    """

    parts: int
    part: Callable[[int], Iterable[bytes]]
    cold: Callable[[Iterable[Any]], Iterable[bytes]] | None = None

    def message(self, keys: Sequence[bytes]) -> kv_pb2.KVEvents:
        """Say that these are held."""
        cold = self.cold(keys) if self.cold is not None else ()
        return kv_pb2.KVEvents(stored_keys=b"".join(keys), cooled_keys=b"".join(cold))


def snapshot_messages(held: HeldKeys, max_keys: int = KEYS_PER_MESSAGE) -> Iterator[list[kv_pb2.KVEvents]]:
    """Messages, not numbered yet, that say what is held, in steps; each step lists keys at the time of the step.

    So no step is long, and between the steps changes may be told. The rule that keeps the listener right: a step's
    messages are sent before any change that comes after the step, and changes are sent in order. Then a key is in a
    step's messages if held at that moment, and later changes are sent later.

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


class KVEventLog:
    """Changes not yet sent, and the number of the next message."""

    def __init__(self) -> None:
        """Start without pending changes; the first message has sequence 1."""
        self._pending = NetChanges()
        self._next_sequence = 1

    @property
    def pending(self) -> int:
        """Keys with unsent changes."""
        return len(self._pending)

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next message."""
        return self._next_sequence

    def note(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), cooled: Iterable[bytes] = ()) -> None:
        """Take changes; see `KeyChanges`."""
        self._pending.note(stored, removed, cooled)

    def next_message(self, max_keys: int = KEYS_PER_MESSAGE) -> kv_pb2.KVEvents | None:
        """Take the oldest pending changes as one message, or None when there are none."""
        if not self._pending:
            return None
        stored, removed, cooled = map(b"".join, self._pending.take(max_keys))
        sequence = self._take_sequence()
        return kv_pb2.KVEvents(sequence=sequence, stored_keys=stored, removed_keys=removed, cooled_keys=cooled)

    def numbered(self, messages: Iterable[kv_pb2.KVEvents]) -> Iterator[kv_pb2.KVEvents]:
        """The messages of a snapshot's step; each gets a number when the caller takes the message."""
        for message in messages:
            message.sequence = self._take_sequence()
            yield message

    def forget(self) -> None:
        """Drop pending changes: a snapshot that is about to begin includes them."""
        self._pending.clear()

    def _take_sequence(self) -> int:
        sequence = self._next_sequence
        self._next_sequence += 1
        return sequence


@dataclasses.dataclass(eq=False)
class KVEventJournal:
    """All changes since the start; the last messages are kept, bounded in number and key bytes.

    `held` has every key, for snapshots; numbers mean something within one `epoch` only.
    """

    held: HeldKeys
    epoch: int
    _: dataclasses.KW_ONLY
    journal_messages: int = 1024
    journal_bytes: int = 16 << 20
    max_watchers: int = 256
    keys_per_page: int = KEYS_PER_MESSAGE
    watchers: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self._log = KVEventLog()
        self._kept: dict[int, kv_pb2.KVEvents] = {}  # by number, ascending and without a gap
        self._kept_bytes = 0
        self._news = asyncio.Event()  # another event after each flush
        self._flushing = False
        self._closed = False

    @property
    def sequence(self) -> int:
        return self._log.next_sequence - 1

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        """Take note of changes (`KeyChanges`); they are told in the event loop's next turn."""
        self._log.note(stored, removed, cooled)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        kept = self._kept
        while (message := self._log.next_message()) is not None:
            kept[message.sequence] = message
            self._kept_bytes += _message_bytes(message)
            while len(kept) > self.journal_messages or (self._kept_bytes > self.journal_bytes and len(kept) > 1):
                self._kept_bytes -= _message_bytes(kept.pop(next(iter(kept))))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def watch(self, epoch: int, after_sequence: int) -> AsyncGenerator[kv_pb2.KVEvents, None]:
        """The messages, without end, for a watcher that has seen `after_sequence` of an epoch (0 for none).

        Raises Unavailable if the watcher was too slow, or the store is closing; Overloaded if too many watch.
        """
        if self.watchers >= self.max_watchers:
            raise Overloaded("too many watchers", reason="kvstore_watchers", retry_after_s=RETRY_AFTER_S)
        self._flush()
        self.watchers += 1
        seen = after_sequence
        try:
            if epoch != self.epoch or not (seen == self.sequence or seen + 1 in self._kept):
                seen = self.sequence
                for page in snapshot_messages(self.held, self.keys_per_page):
                    self._flush()
                    listed = self.sequence
                    self._check_open()
                    while seen < listed:
                        yield self._message(seen := seen + 1)
                    for message in page:
                        message.sequence = listed
                        yield message
                    await asyncio.sleep(0)  # a quick watcher never waits, but others must have turns
            while True:
                while seen < self.sequence:
                    yield self._message(seen := seen + 1)
                self._check_open()
                await self._news.wait()
        finally:
            self.watchers -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the instance is shutting down")

    def _message(self, sequence: int) -> kv_pb2.KVEvents:
        if sequence not in self._kept:
            raise Unavailable("the watcher is too slow; watch again")
        return self._kept[sequence]

    def close(self) -> None:
        self._closed = True
        self._wake()


def _message_bytes(message: kv_pb2.KVEvents) -> int:
    return len(message.stored_keys) + len(message.removed_keys) + len(message.cooled_keys)
