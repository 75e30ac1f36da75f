"""Watching the store's keys: a snapshot, and every change, in order.

The journal numbers changes; changes of one turn of the event loop become one message. A watcher that knows this
incarnation and a number that the journal still reaches gets the changes since. Others get a snapshot, step by step
(`moonpool.cluster.events.snapshot`), each when the watcher has taken the one before, so that no turn of the loop is
long and no watcher costs more memory than a page and twice its queue. Changes that come meanwhile go in between the
pages. Each page carries the number of the last change that was told before it (0 at the start). With the last page the
watcher knows exactly what is here at that number.
"""

import asyncio
import collections
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence

from moonpool.cluster.events import KEYS_PER_MESSAGE, EventLog, HeldKeys, snapshot
from moonpool.errors import Overloaded, Unavailable
from moonpool.kv.keys import BlockKey
from moonpool.v1 import kv_pb2

RETRY_AFTER_S = 5.0


@dataclasses.dataclass(slots=True, eq=False)
class _Watcher:
    """One watcher's queue; `behind` once it was too slow."""

    queue: collections.deque[kv_pb2.KVEvents] = dataclasses.field(default_factory=collections.deque)
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    behind: bool = False


@dataclasses.dataclass(eq=False)
class Journal:
    """All changes since the start, the last ones kept.

    Attributes:
        held: every key, for snapshots.
        incarnation: of this store; numbers mean something within it only.
        journal_messages: how many messages are kept for replay at most.
        journal_bytes: how many bytes of keys are kept in them at most, beside the last message.
        watcher_messages: how far a watcher may be behind before it is cut off.
    """

    held: HeldKeys
    incarnation: int
    _: dataclasses.KW_ONLY
    journal_messages: int = 1024
    journal_bytes: int = 16 << 20
    watcher_messages: int = 256
    max_watchers: int = 256
    keys_per_page: int = KEYS_PER_MESSAGE

    def __post_init__(self) -> None:
        self._log = EventLog()
        self._kept: collections.deque[kv_pb2.KVEvents] = collections.deque()
        self._kept_bytes = 0
        self._watchers: set[_Watcher] = set()
        self._flushing = False
        self._closed = False

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    @property
    def sequence(self) -> int:
        """Number of the last change that was told."""
        return self._log.next_sequence - 1

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        """Takes note of changes; they are told in the event loop's next turn."""
        self._log.stored(stored)
        self._log.removed(removed)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while (message := self._log.next_message()) is not None:
            self._keep(message)
            for watcher in self._watchers:
                if len(watcher.queue) >= self.watcher_messages:
                    watcher.behind = True
                    watcher.queue.clear()
                elif not watcher.behind:
                    watcher.queue.append(message)
                watcher.ready.set()

    def _keep(self, message: kv_pb2.KVEvents) -> None:
        self._kept.append(message)
        self._kept_bytes += _size(message)
        kept = self._kept
        while len(kept) > self.journal_messages or (self._kept_bytes > self.journal_bytes and len(kept) > 1):
            self._kept_bytes -= _size(kept.popleft())

    async def watch(self, incarnation: int, after_sequence: int) -> AsyncGenerator[kv_pb2.KVEvents, None]:
        """The messages, without end, of a watcher that has seen `after_sequence` of an incarnation (0 for none).

        Raises:
            Unavailable: it was too slow and may come again, or the store is closing.
            Overloaded: too many watch.
        """
        if len(self._watchers) >= self.max_watchers:
            raise Overloaded("too many watchers", reason="kvstore_watchers", retry_after_s=RETRY_AFTER_S)
        self._flush()
        watcher = _Watcher()
        known = incarnation == self.incarnation and self._reaches(after_sequence)
        missed = [message for message in self._kept if message.sequence > after_sequence]
        pages = iter([missed]) if known else self._pages(watcher)
        self._watchers.add(watcher)
        try:
            for page in pages:
                for message in page:
                    self._check(watcher)
                    yield message
                await asyncio.sleep(0)  # a quick watcher waits for nothing, but others must have turns
            while True:
                while watcher.queue:
                    yield watcher.queue.popleft()
                self._check(watcher)
                watcher.ready.clear()
                await watcher.ready.wait()
        finally:
            self._watchers.discard(watcher)

    def _pages(self, watcher: _Watcher) -> Iterator[list[kv_pb2.KVEvents]]:
        """A snapshot: what was told since the last page, and one further page."""
        for page in snapshot(self.held, self.keys_per_page):
            self._flush()
            changes = list(watcher.queue)
            watcher.queue.clear()
            for message in page:
                message.sequence = self.sequence
            yield [*changes, *page]

    def _check(self, watcher: _Watcher) -> None:
        if self._closed:
            raise Unavailable("the store is shutting down")
        if watcher.behind:
            raise Unavailable("the watcher is too slow; watch again")

    def close(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.ready.set()

    def _reaches(self, sequence: int) -> bool:
        oldest = self._kept[0].sequence if self._kept else self.sequence + 1
        return oldest - 1 <= sequence <= self.sequence


def _size(message: kv_pb2.KVEvents) -> int:
    return len(message.stored_keys) + len(message.removed_keys)


class Unreported:
    """Changes that the conductor has not been told yet: the net effect per key; `max_keys` while it does not follow."""

    def __init__(self, max_keys: int = 1 << 18) -> None:
        self._max_keys = max_keys
        self._changes: dict[BlockKey, bool] = {}

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], *, follows: bool) -> None:
        """Takes note of changes. While the conductor does not follow, they may be dropped: it gets a snapshot first."""
        self._changes.update(dict.fromkeys(stored, True))
        self._changes.update(dict.fromkeys(removed, False))
        if len(self._changes) > self._max_keys and not follows:
            self._changes.clear()

    def take(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Stored and removed keys since the last call."""
        changes, self._changes = self._changes, {}
        return [key for key, here in changes.items() if here], [key for key, here in changes.items() if not here]
