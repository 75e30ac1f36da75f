"""A kvstore connection without an event loop: direct connections for small values.

The blocking connection sends small values over direct connections from the caller's thread, without an event loop. The
blocking connection's coroutines never suspend. What direct connections cannot do, the asyncio connection does on the
background loop. Each size class has a direct connection for puts and another for reads. Each opens after the first such
call on a stream.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from moonpool.base import world
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.blocking import BlockingReader, BlockingWriter
from moonpool.base.kv_transfer.prefix_reader import FROM_STORE, Into, OnSlice
from moonpool.base.kv_transfer.store_writer import PUT, BlocksToPut, PutOutcome
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.blocking import BlockingConnection, BlockingStream
from moonpool.base.transport.framing import ONE_SHOT_BYTES
from moonpool.base.transport.regions import SharedMemory
from moonpool.client.background import BackgroundLoop
from moonpool.client.kv.connection import MAX_SIZE_CLASSES, WINDOW_BYTES, KVConnection, StoreAddress, translated_errors
from moonpool.v1 import kvstore_pb2

log = get_logger(__name__)
DIRECT_TRANSPORTS = ("local", "tcp", "tls")
"""Transports that can carry direct connections."""
REOPEN_AFTER_S = 10.0
"""Seconds between two attempts to open a direct connection for one kind and size, which may break each time."""
DirectT = TypeVar("DirectT", BlockingReader, BlockingWriter)
_DirectFactory = tuple[BlockingStream[Any, Any], Callable[[BlockingConnection], DirectT]]
"""A stream, and the function that makes a reader or writer from the stream's connection."""


class BlockingKVConnection(KVConnection):
    """A connection with calls that run on the caller's thread and never suspend. Only `aclose` runs on the loop."""

    def __init__(self, loop: BackgroundLoop, store: StoreAddress) -> None:
        super().__init__(store)
        self._loop = loop
        self._writers = _DirectTable[BlockingWriter](loop, world.monotonic)
        self._readers = _DirectTable[BlockingReader](loop, world.monotonic)

    def portion(self, layout: KVLayout) -> int:
        writer = self._writers.get(layout)
        return writer.most if writer is not None and writer.most else super().portion(layout)

    async def find(self, keys: Sequence[bytes], tenant: str, timeout_s: float) -> kvstore_pb2.FindResponse:
        return self._loop.run(super().find(keys, tenant, timeout_s))

    async def remove(self, keys: Sequence[bytes], timeout_s: float) -> int:
        return self._loop.run(super().remove(keys, timeout_s))

    async def put(self, layout: KVLayout, blocks: BlocksToPut, timeout_s: float) -> PutOutcome:
        deadline, writer = world.monotonic() + timeout_s, self._writers.get(layout)
        if writer is not None and len(blocks.keys) <= writer.most:
            with translated_errors:
                outcome = writer.put(blocks, timeout_s)
            if outcome is not None:
                return outcome
        outcome = self._loop.run(super().put(layout, blocks, deadline - world.monotonic()))
        if (
            self._writers.wants(layout)
            and layout.block_bytes <= ONE_SHOT_BYTES
            and self.transport_of(layout) in DIRECT_TRANSPORTS
        ):
            self._writers.open(layout, lambda: self._new_writer(layout))
        return outcome

    async def read(
        self, layout: KVLayout, keys: Sequence[bytes], *, on_slice: OnSlice, into: Into, timeout_s: float
    ) -> int:
        deadline, reader = world.monotonic() + timeout_s, self._readers.get(layout)
        if reader is not None and reader.most:
            with translated_errors:
                if len(keys) <= reader.most:
                    count = reader.read(keys, into=into, on_slice=on_slice, timeout_s=timeout_s)
                else:
                    count = _read_direct(reader, keys, on_slice, into, timeout_s)
            if count is not None:
                return count
        left_s = deadline - world.monotonic()
        count = self._loop.run(super().read(layout, keys, on_slice=on_slice, into=into, timeout_s=left_s))
        if (
            self._readers.wants(layout)
            and layout.block_bytes <= ONE_SHOT_BYTES
            and self.transport_of(layout) in DIRECT_TRANSPORTS
        ):
            self._readers.open(layout, lambda: self._new_reader(layout))
        return count

    def _new_writer(self, layout: KVLayout) -> _DirectFactory[BlockingWriter]:
        staging = SharedMemory(ONE_SHOT_BYTES) if self.transport_of(layout) == "local" else None
        share = () if staging is None else (staging.shared,)
        stream = self.direct_stream(layout, PUT, share=share)
        return stream, lambda connection: BlockingWriter(
            connection, layout, staging if connection.name == "local" else None
        )

    def _new_reader(self, layout: KVLayout) -> _DirectFactory[BlockingReader]:
        stream = self.direct_stream(layout, FROM_STORE, mailbox_bytes=WINDOW_BYTES)
        return stream, lambda connection: BlockingReader(connection, layout)

    async def aclose(self) -> None:
        await self._writers.aclose()
        await self._readers.aclose()
        await super().aclose()


def _read_direct(
    reader: BlockingReader, keys: Sequence[bytes], on_slice: OnSlice, into: Into, timeout_s: float
) -> int | None:
    """Read values in portions that fit into one message each. Returns None if a transfer is needed."""
    done, deadline = 0, world.monotonic() + timeout_s
    while done < len(keys):
        some = keys[done : done + reader.most]
        left_s = deadline - world.monotonic()
        count = reader.read(
            some, into=_offset_index(into, done), on_slice=_offset_index(on_slice, done), timeout_s=left_s
        )
        if count is None:
            return None
        done += count
        if count < len(some):
            break
    return done


def _offset_index(function: Callable[..., Any], first: int) -> Callable[..., Any]:
    """The function with `first` added to the index."""
    return function if not first else lambda layer, index, *rest: function(layer, first + index, *rest)


@dataclass(slots=True, eq=False)
class _OpenDirect(Generic[DirectT]):
    """An open direct connection, and the connection's stream.

    Attributes:
        user: reader or writer on the connection.
        stream: stream that opened the connection.
        again_at: time from which on another connection may be opened.
        used: the last use's number; higher is later.
    """

    user: DirectT
    stream: BlockingStream[Any, Any]
    again_at: float
    used: int


class _DirectTable(Generic[DirectT]):
    """Direct connections for one kind, by value layout, shared by all threads."""

    def __init__(self, loop: BackgroundLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock
        self._open: dict[KVLayout, _OpenDirect[DirectT]] = {}
        self._again_at: dict[KVLayout, float] = {}
        self._changing = threading.Lock()  # `_open`
        self._opening = threading.Lock()
        self._uses = itertools.count(1)

    def get(self, layout: KVLayout) -> DirectT | None:
        """The open connection for a layout, or None."""
        found = self._open.get(layout)
        if found is None:
            return None
        if found.user.connection.error is not None:
            self._close(layout, found)
            return None
        found.used = next(self._uses)
        return found.user

    def wants(self, layout: KVLayout) -> bool:
        """Whether no connection is open, and the last attempt to open one was long ago."""
        return layout not in self._open and self._clock() >= self._again_at.get(layout, 0.0)

    def open(self, layout: KVLayout, make: Callable[[], _DirectFactory[DirectT]]) -> None:
        """Open a connection, unless another thread opens one now. Never raises: the call before has succeeded."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            if self.wants(layout) and not self._opened(layout, *make()):
                self._again_at[layout] = self._clock() + REOPEN_AFTER_S
        except Exception as error:  # no memory or descriptor, or the client is being closed
            self._again_at[layout] = self._clock() + REOPEN_AFTER_S
            log.warning("no direct connection", error=str(error))
        finally:
            self._opening.release()

    def _opened(
        self, layout: KVLayout, stream: BlockingStream[Any, Any], user: Callable[[BlockingConnection], DirectT]
    ) -> bool:
        connection = self._loop.run(stream.open())
        if connection is None:
            return False
        if len(self._open) >= MAX_SIZE_CLASSES:
            self._retire_one()
        with self._changing:
            self._open[layout] = _OpenDirect(user(connection), stream, self._clock() + REOPEN_AFTER_S, next(self._uses))
        return True

    def _retire_one(self) -> None:
        """Close the idle connection that was used longest ago."""
        with self._changing:
            every = sorted(self._open.items(), key=lambda item: item[1].used)
        for layout, found in every:
            if found.user.connection.retire():
                self._close(layout, found)
                return

    def _close(self, layout: KVLayout, found: _OpenDirect[DirectT]) -> None:
        """Close a connection once, even if several threads find that the connection has ended."""
        with self._changing:
            if self._open.get(layout) is not found:
                return
            self._again_at[layout] = found.again_at
            del self._open[layout]
        self._loop.run(found.stream.aclose())

    async def aclose(self) -> None:
        """Close all connections; runs on the loop."""
        with self._changing:
            every = [self._open.popitem()[1] for _ in list(self._open)]
        for found in every:
            await found.stream.aclose()
