"""A client's connection to one kvstore: calls, and a pair of streams for each value size class.

The blocking connection sends small values over direct connections from the caller's thread, without an event loop. The
blocking connection's coroutines never suspend. What direct connections cannot do, the asyncio connection does on the
background loop. Each size class has a direct connection for puts and another for reads. Each opens after the first such
call on a stream.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from moonpool.base import world
from moonpool.base.errors import DeadlineExceeded, InvalidRequest, StreamBroken, TransferFailed, Unavailable
from moonpool.base.kv.frames import DamagedSliceError
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.values import ValueTarget
from moonpool.base.kv_transfer.blocking import BlockingReader, BlockingWriter
from moonpool.base.kv_transfer.endpoint import KVEndpoint, StreamMethod
from moonpool.base.kv_transfer.prefix_reader import FROM_STORE, BlockReader, Into, OnSlice, PrefixLost
from moonpool.base.kv_transfer.store_writer import PUT, BlocksToPut, PutOutcome, StoreWriter
from moonpool.base.rpc.channels import Channels, Metadata
from moonpool.base.rpc.tls import Tls
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.blocking import BlockingConnection, BlockingStream
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.framing import ONE_SHOT_BYTES
from moonpool.base.transport.regions import SharedMemory
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.client.background import BackgroundLoop
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

if TYPE_CHECKING:
    from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceAsyncStub


MAX_KEYS_PER_CALL = 4096
"""Most values in one session or call."""
MAX_BYTES_PER_CALL = 64 << 20
"""Most bytes in one put session; a larger value is a session alone.

The store needs memory for all values of a session at once."""
MAX_SIZE_CLASSES = 16
"""Pairs of streams that stay open while idle."""
WINDOW_BYTES = 8 << 20
"""Bytes that the store may send on one stream before the client has read them."""


@dataclass(slots=True)
class SizeClassStreams:
    """The streams for one size class.

    Attributes:
        writer: stream for puts.
        reader: stream for reads.
        users: calls that use the streams, or wait for their connection.
    """

    writer: StoreWriter
    reader: BlockReader
    users: int = 0

    async def aclose(self) -> None:
        """Close both streams."""
        await self.writer.aclose()
        await self.reader.aclose()


class ErrorTranslation:
    """A context manager that turns gRPC and stream errors into `moonpool.base.errors`.

    Raises:
        Unavailable: the store cannot be reached, or the connection was lost.
        TransferFailed: the call took too long.
        MoonpoolError: the store's error.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DeadlineExceeded):
            raise TransferFailed(str(error)) from error
        if isinstance(error, StreamBroken):
            raise Unavailable(str(error)) from error


translated_errors = ErrorTranslation()


def _ignore_layer(layer: int) -> None:
    """Ignores single layers: a value is useful only with all layers."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A kvstore, and how a client connects.

    Attributes:
        address: "host:port".
        namespace: namespace for the client's values.
        tls: certificates; None for plaintext.
        api_key: sent over TLS only; "" for none.
        dialer: opens transports beside gRPC.
    """

    address: str
    namespace: bytes
    tls: Tls | None
    api_key: str
    dialer: TransportDialer

    @property
    def metadata(self) -> Metadata:
        """Each call's metadata."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key and self.tls is not None else ()


class KVConnection:
    """A connection for asyncio. The connection opens on first use, on the event loop that runs then."""

    def __init__(self, store: StoreAddress) -> None:
        self._store = store
        self._channels = Channels(store.tls)
        self._sender = kv_pb2.Instance(id="kv-client", epoch=world.random_bits(63) or 1)
        self._streams: OrderedDict[KVLayout, SizeClassStreams] = OrderedDict()

    def portion(self, layout: KVLayout) -> int:
        """Most values with a layout in one put."""
        return min(MAX_KEYS_PER_CALL, max(1, MAX_BYTES_PER_CALL // layout.block_bytes))

    async def put(self, layout: KVLayout, blocks: BlocksToPut, timeout_s: float) -> PutOutcome:
        """Put values with one layout, as `StoreWriter.put`.

        Raises:
            InvalidRequest, Overloaded: the store refuses the values.
            MoonpoolError: as `ErrorTranslation`.
        """
        async with self._using(layout) as streams:
            with translated_errors:
                return await streams.writer.put(*blocks, timeout_s=timeout_s)

    async def read(
        self, layout: KVLayout, keys: Sequence[bytes], *, on_slice: OnSlice, into: Into, timeout_s: float
    ) -> int:
        """Read values with one layout up to the first missing value, as `BlockReader.read`.

        Raises:
            PrefixLost, DamagedSliceError: values were lost, or arrived damaged.
            MoonpoolError: as `ErrorTranslation`.
        """
        layers = range(layout.layers)
        async with self._using(layout) as streams:
            with translated_errors:
                return await streams.reader.read(
                    keys, layers=layers, on_slice=on_slice, on_layer=_ignore_layer, timeout_s=timeout_s, into=into
                )

    async def find(self, keys: Sequence[bytes], tenant: str, timeout_s: float) -> kvstore_pb2.FindResponse:
        """Which values the store has, and the caller's tenant. Raises as `ErrorTranslation`."""
        request = kvstore_pb2.FindRequest(keys=b"".join(keys), tenant=tenant, namespace=self._store.namespace)
        with translated_errors:
            return await self._stub.Find(request, timeout=timeout_s, metadata=self._store.metadata)

    async def remove(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """Delete values. Returns how many the store had. Raises as `ErrorTranslation`."""
        request = kvstore_pb2.RemoveRequest(keys=b"".join(keys))
        with translated_errors:
            answer = await self._stub.Remove(request, timeout=timeout_s, metadata=self._store.metadata)
        return int(answer.blocks)

    @asynccontextmanager
    async def _using(self, layout: KVLayout) -> AsyncIterator[SizeClassStreams]:
        """The streams for values with a layout. The streams stay open while a call uses them."""
        while (found := self._streams.get(layout)) is None:
            idle = [size for size, streams in self._streams.items() if not streams.users]
            surplus = [self._streams.pop(size) for size in idle[: max(0, len(self._streams) + 1 - MAX_SIZE_CLASSES)]]
            for streams in surplus:
                await streams.aclose()
            if not surplus:
                self._streams[layout] = self._open(layout)
        self._streams.move_to_end(layout)
        found.users += 1
        try:
            yield found
        finally:
            found.users -= 1

    def _endpoint(self, layout: KVLayout) -> KVEndpoint:
        store = self._store
        hello = kv_pb2.StreamHello(sender=self._sender, namespace=store.namespace, layout=layout.to_proto())
        settings = StreamSettings(store.dialer, metadata=store.metadata)
        return KVEndpoint(self._channels, store.address, hello, layout, settings)

    def _open(self, layout: KVLayout) -> SizeClassStreams:
        endpoint = self._endpoint(layout)
        return SizeClassStreams(StoreWriter(endpoint), BlockReader(endpoint, window_bytes=WINDOW_BYTES))

    def direct_stream(
        self, layout: KVLayout, method: StreamMethod[Any, Any], **options: Any
    ) -> BlockingStream[Any, Any]:
        """A direct connection's stream for values with a layout, to be opened on the loop."""
        endpoint, dialer = self._endpoint(layout), self._store.dialer
        dialer.fill(endpoint.hello)
        # `connect` must not refer to this object, which keeps the client alive.
        connect = partial(endpoint.connect, method)
        name = f"direct {method.name} to {endpoint.address}"
        return BlockingStream(name, connect, method.request(hello=endpoint.hello), dialer, **options)

    def transport_of(self, layout: KVLayout) -> str:
        """Transport for the last value with a layout on ordinary streams; as `transport`."""
        streams = self._streams.get(layout)
        return "" if streams is None else streams.writer.transport or streams.reader.transport

    @property
    def transport(self) -> str:
        """Transport of the last used streams: "local", "tcp", "tls" or "grpc"; "" without streams."""
        if not self._streams:
            return ""
        return self.transport_of(next(reversed(self._streams)))

    @property
    def _stub(self) -> KVStoreServiceAsyncStub:
        return KVStoreServiceStub(self._channels.get(self._store.address))

    async def aclose(self) -> None:
        """Close all streams and channels. Idempotent."""
        while self._streams:
            await self._streams.popitem()[1].aclose()
        await self._channels.aclose()


@dataclass(slots=True, eq=False)
class ValueRead:
    """One value to read.

    Attributes:
        key: the block's key.
        memory: where to put the value; None for new memory.
        target: the bytes so far; complete once `found` is set.
        found: whether the value is complete.
    """

    key: BlockKey
    memory: memoryview | None = None
    target: ValueTarget | None = None
    found: bool = False

    def value(self) -> bytearray | None:
        """The value; None after a miss."""
        return self.target.value() if self.found and self.target is not None else None

    def length(self) -> int | None:
        """Size of the value in `memory`, in bytes; None after a miss.

        Raises:
            InvalidRequest: `memory` is too small for the value.
        """
        nbytes = self.target.length() if self.found and self.target is not None else None
        if nbytes is not None and self.memory is not None and nbytes > self.memory.nbytes:
            raise InvalidRequest("buffer", f"has {self.memory.nbytes} bytes, the value {nbytes}")
        return nbytes


def remaining_s(deadline: float) -> float:
    """Seconds deadline `deadline`, on the clock `world.monotonic`.

    Raises:
        TransferFailed: the deadline has passed.
    """
    seconds = deadline - world.monotonic()
    if seconds <= 0:
        raise TransferFailed("the call took too long")
    return seconds


async def read_values(connection: KVConnection, layout: KVLayout, wanted: Sequence[ValueRead], deadline: float) -> int:
    """Read values with one layout.

    Returns the index of the first missing value; the values before that index are `found`.

    A value that was lost or damaged counts as missing. `deadline`: as of `remaining_s`.

    Raises:
        MoonpoolError: as `KVConnection.read`.
    """
    for one in wanted:
        one.target = ValueTarget(layout, one.memory)

    def take(layer: int, index: int, data: memoryview, value: int) -> None:
        target = wanted[index].target
        assert target is not None, "set above"
        target.take(layer, data)

    def into(layer: int, index: int) -> memoryview | None:
        target = wanted[index].target
        assert target is not None, "set above"
        return target.place(layer)

    keys = [one.key for one in wanted]
    try:
        count = await connection.read(layout, keys, on_slice=take, into=into, timeout_s=remaining_s(deadline))
    except PrefixLost as lost:
        return await read_values(connection, layout, wanted[: lost.blocks], deadline) if lost.blocks else 0
    except DamagedSliceError as damaged:
        return await read_values(connection, layout, wanted[: damaged.block], deadline) if damaged.block else 0
    for one in wanted[:count]:
        one.found = True
    return count


log = get_logger(__name__)
DIRECT_TRANSPORTS = ("local", "tcp", "tls")
"""Transports that can carry direct connections."""
REOPEN_AFTER_S = 10.0
"""Seconds between two attempts to open a direct connection for one kind and size, which may break each time."""
DirectT = TypeVar("DirectT", BlockingReader, BlockingWriter)


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


_DirectFactory = tuple[BlockingStream[Any, Any], Callable[[BlockingConnection], DirectT]]
"""A stream, and the function that makes a reader or writer from the stream's connection."""


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
        return stream, lambda it: BlockingWriter(it, layout, staging if it.name == "local" else None)

    def _new_reader(self, layout: KVLayout) -> _DirectFactory[BlockingReader]:
        stream = self.direct_stream(layout, FROM_STORE, mailbox_bytes=WINDOW_BYTES)
        return stream, lambda it: BlockingReader(it, layout)

    async def aclose(self) -> None:
        await self._writers.aclose()
        await self._readers.aclose()
        await super().aclose()


def _read_direct(
    reader: BlockingReader, keys: Sequence[bytes], on_slice: OnSlice, into: Into, timeout_s: float
) -> int | None:
    """Read values in portions that fit into one message each. Returns None if a session is needed."""
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
