"""A connection for the threads of those who call: what is small goes over direct lanes, without an event loop.

Its coroutines never suspend. What direct lanes do not take is done by the asyncio connection, on the loop in the
background. A direct lane, one for puts and one for reads of each size of values, is opened when a call of its kind went
over a lane in the usual way: before that, and where there are none, nothing is lost.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from moonpool.client.background import BackgroundLoop
from moonpool.client.kv.connection import MAX_SIZES, WINDOW_BYTES, Connection, named
from moonpool.kv.layout import KVLayout
from moonpool.streams.direct.lane import DirectLane
from moonpool.streams.direct.opening import DirectStream
from moonpool.streams.direct.reader import DirectReader
from moonpool.streams.direct.writer import DirectWriter
from moonpool.streams.lanes.brief import BRIEF_BYTES
from moonpool.streams.lanes.regions import SharedMemory
from moonpool.streams.prefix_read import Into, OnSlice
from moonpool.streams.store_writer import PutBlocks, PutOutcome
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kvstore_pb2

log = get_logger(__name__)

DIRECT = ("local", "tcp")
"""Lanes that can be direct ones."""
OPEN_AGAIN_S = 10.0
"""A direct lane of one kind and size is opened no sooner than this after the one before: it may break each time."""

User = TypeVar("User", DirectReader, DirectWriter)


@dataclass(slots=True, eq=False)
class _Open(Generic[User]):
    """A direct lane that is in use, and its stream.

    Attributes:
        again_at: from when on another one may be opened.
        used: when it was used last; higher is later.
    """

    user: User
    stream: DirectStream[Any, Any]
    again_at: float
    used: int


_Made = tuple[DirectStream[Any, Any], Callable[[DirectLane], User]]
"""A stream, and what makes of its lane what is used."""


class _Table(Generic[User]):
    """Direct lanes of one kind, by the layout of their values; they are used by several threads."""

    def __init__(self, loop: BackgroundLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock
        self._open: dict[KVLayout, _Open[User]] = {}
        self._again_at: dict[KVLayout, float] = {}
        self._changing = threading.Lock()  # `_open`
        self._opening = threading.Lock()
        self._uses = itertools.count(1)

    def get(self, layout: KVLayout) -> User | None:
        """The one for a layout; None when none is open."""
        found = self._open.get(layout)
        if found is None:
            return None
        if found.user.lane.error is not None:
            self._close(layout, found)
            return None
        found.used = next(self._uses)
        return found.user

    def wants(self, layout: KVLayout) -> bool:
        """There is none, and none was opened or failed a short time ago."""
        return layout not in self._open and self._clock() >= self._again_at.get(layout, 0.0)

    def open(self, layout: KVLayout, make: Callable[[], _Made[User]]) -> None:
        """Opens one, unless another thread is about to open some. The call before has ended well: this never fails."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            if self.wants(layout) and not self._opened(layout, *make()):
                self._again_at[layout] = self._clock() + OPEN_AGAIN_S
        except Exception as error:  # no memory or descriptor, or the client is being closed
            self._again_at[layout] = self._clock() + OPEN_AGAIN_S
            log.warning("no direct lane", error=str(error))
        finally:
            self._opening.release()

    def _opened(self, layout: KVLayout, stream: DirectStream[Any, Any], user: Callable[[DirectLane], User]) -> bool:
        lane = self._loop.run(stream.open())
        if lane is None:
            return False
        if len(self._open) >= MAX_SIZES:
            self._retire_one()
        with self._changing:
            self._open[layout] = _Open(user(lane), stream, self._clock() + OPEN_AGAIN_S, next(self._uses))
        return True

    def _retire_one(self) -> None:
        """Closes the one that was used longest ago, of those that are not in use."""
        with self._changing:
            every = sorted(self._open.items(), key=lambda item: item[1].used)
        for layout, found in every:
            if found.user.lane.retire():
                self._close(layout, found)
                return

    def _close(self, layout: KVLayout, found: _Open[User]) -> None:
        """For whoever comes first: several threads may find that it has ended."""
        with self._changing:
            if self._open.get(layout) is not found:
                return
            self._again_at[layout] = found.again_at
            del self._open[layout]
        self._loop.run(found.stream.aclose())

    async def aclose(self) -> None:
        """Ends all; on the loop."""
        with self._changing:
            every = [self._open.popitem()[1] for _ in list(self._open)]
        for found in every:
            await found.stream.aclose()


class DirectConnection(Connection):
    """A `Connection` whose calls are driven by the threads that make them; `aclose` alone belongs to the loop."""

    def __init__(self, loop: BackgroundLoop, *arguments: Any) -> None:
        """Takes the loop in the background, and what a `Connection` takes."""
        super().__init__(*arguments)
        self._loop = loop
        self._writers = _Table[DirectWriter](loop, time.monotonic)
        self._readers = _Table[DirectReader](loop, time.monotonic)

    def portion(self, layout: KVLayout) -> int:
        writer = self._writers.get(layout)
        return writer.most if writer is not None and writer.most else super().portion(layout)

    async def find(self, keys: Sequence[bytes], tenant: str, timeout_s: float) -> kvstore_pb2.FindResponse:
        return self._loop.run(super().find(keys, tenant, timeout_s))

    async def remove(self, keys: Sequence[bytes], timeout_s: float) -> int:
        return self._loop.run(super().remove(keys, timeout_s))

    async def put(self, layout: KVLayout, blocks: PutBlocks, timeout_s: float) -> PutOutcome:
        until, writer = time.monotonic() + timeout_s, self._writers.get(layout)
        if writer is not None and len(blocks.keys) <= writer.most:
            with named:
                outcome = writer.put(blocks, timeout_s)
            if outcome is not None:
                return outcome
        outcome = self._loop.run(super().put(layout, blocks, until - time.monotonic()))
        if self._writers.wants(layout) and layout.block_bytes <= BRIEF_BYTES and self.lane_of(layout) in DIRECT:
            self._writers.open(layout, lambda: self._new_writer(layout))
        return outcome

    async def read(
        self, layout: KVLayout, keys: Sequence[bytes], *, on_slice: OnSlice, into: Into, timeout_s: float
    ) -> int:
        until, reader = time.monotonic() + timeout_s, self._readers.get(layout)
        if reader is not None and reader.most:
            with named:
                if len(keys) <= reader.most:
                    count = reader.read(keys, into=into, on_slice=on_slice, timeout_s=timeout_s)
                else:
                    count = _read(reader, keys, on_slice, into, timeout_s)
            if count is not None:
                return count
        left_s = until - time.monotonic()
        count = self._loop.run(super().read(layout, keys, on_slice=on_slice, into=into, timeout_s=left_s))
        if self._readers.wants(layout) and layout.block_bytes <= BRIEF_BYTES and self.lane_of(layout) in DIRECT:
            self._readers.open(layout, lambda: self._new_reader(layout))
        return count

    def _new_writer(self, layout: KVLayout) -> _Made[DirectWriter]:
        staging = SharedMemory(BRIEF_BYTES) if self.lane_of(layout) == "local" else None
        share = () if staging is None else (staging.shared,)
        stream = self.direct_stream(layout, "Put", kvstore_pb2.PutRequest, kvstore_pb2.PutResponse, share=share)
        return stream, lambda lane: DirectWriter(lane, layout, staging if lane.name == "local" else None)

    def _new_reader(self, layout: KVLayout) -> _Made[DirectReader]:
        kinds = kvstore_pb2.GetRequest, kvstore_pb2.GetResponse
        stream = self.direct_stream(layout, "Get", *kinds, lend_bytes=WINDOW_BYTES)
        return stream, lambda lane: DirectReader(lane, layout)

    async def aclose(self) -> None:
        await self._writers.aclose()
        await self._readers.aclose()
        await super().aclose()


def _read(reader: DirectReader, keys: Sequence[bytes], on_slice: OnSlice, into: Into, timeout_s: float) -> int | None:
    """Reads as many as there are, some at a time; None where that takes a session."""
    done, until = 0, time.monotonic() + timeout_s
    while done < len(keys):
        some = keys[done : done + reader.most]
        left_s = until - time.monotonic()
        count = reader.read(some, into=_from(into, done), on_slice=_from(on_slice, done), timeout_s=left_s)
        if count is None:
            return None
        done += count
        if count < len(some):
            break
    return done


def _from(function: Callable[..., Any], first: int) -> Callable[..., Any]:
    """The function for indices that count from `first` on."""
    return function if not first else lambda layer, index, *rest: function(layer, first + index, *rest)
