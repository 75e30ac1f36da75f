"""Watching the keys that an instance holds: a snapshot, and every change, in order.

A watcher that knows this incarnation and a number that the journal still reaches gets the changes since. Others get a
snapshot, page by page, each when the watcher has taken the one before; changes that come meanwhile go in between. Each
page carries the number of the last change that was told before it (0 at the start).
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence

from moonpool.cluster.events import KEYS_PER_MESSAGE, EventLog, HeldKeys, snapshot
from moonpool.errors import Overloaded, Unavailable
from moonpool.kv.keys import BlockKey
from moonpool.v1 import kv_pb2

RETRY_AFTER_S = 5.0


@dataclasses.dataclass(eq=False)
class Journal:
    """All changes since the start; the last messages are kept, so many of them and so many bytes of keys at most.

    `held` has every key, for snapshots; numbers mean something within one `incarnation` only.
    """

    held: HeldKeys
    incarnation: int
    _: dataclasses.KW_ONLY
    journal_messages: int = 1024
    journal_bytes: int = 16 << 20
    max_watchers: int = 256
    keys_per_page: int = KEYS_PER_MESSAGE
    watchers: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self._log = EventLog()
        self._kept: dict[int, kv_pb2.KVEvents] = {}  # by number, ascending and without a gap
        self._kept_bytes = 0
        self._news = asyncio.Event()  # another one after each flush
        self._flushing = False
        self._closed = False

    @property
    def sequence(self) -> int:
        return self._log.next_sequence - 1

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        """Takes note of changes (`KeyChanges`); they are told in the event loop's next turn."""
        self._log.note(stored, removed, cooled)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        kept = self._kept
        while (message := self._log.next_message()) is not None:
            kept[message.sequence] = message
            self._kept_bytes += _size(message)
            while len(kept) > self.journal_messages or (self._kept_bytes > self.journal_bytes and len(kept) > 1):
                self._kept_bytes -= _size(kept.pop(next(iter(kept))))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def watch(self, incarnation: int, after_sequence: int) -> AsyncGenerator[kv_pb2.KVEvents, None]:
        """The messages, without end, of a watcher that has seen `after_sequence` of an incarnation (0 for none).

        Raises Unavailable when it was too slow, or the store is closing; Overloaded if too many watch.
        """
        if self.watchers >= self.max_watchers:
            raise Overloaded("too many watchers", reason="kvstore_watchers", retry_after_s=RETRY_AFTER_S)
        self._flush()
        self.watchers += 1
        seen = after_sequence
        try:
            if incarnation != self.incarnation or not (seen == self.sequence or seen + 1 in self._kept):
                seen = self.sequence
                for page in snapshot(self.held, self.keys_per_page):
                    self._flush()
                    listed = self.sequence
                    self._check_open()
                    while seen < listed:
                        yield self._message(seen := seen + 1)
                    for message in page:
                        message.sequence = listed
                        yield message
                    await asyncio.sleep(0)  # a quick watcher waits for nothing, but others must have turns
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


def _size(message: kv_pb2.KVEvents) -> int:
    return len(message.stored_keys) + len(message.removed_keys) + len(message.cooled_keys)
