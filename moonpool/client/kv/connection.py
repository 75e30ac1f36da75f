"""A client's connection to a kvstore: calls, and a pair of streams for each value size class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moonpool.base import world
from moonpool.base.errors import DeadlineExceeded, StreamBroken, TransferFailed, Unavailable
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint, StreamMethod
from moonpool.base.kv_transfer.prefix_reader import BlockReader, Into, OnSlice
from moonpool.base.kv_transfer.store_writer import BlocksToPut, PutOutcome, StoreWriter
from moonpool.base.rpc.channels import Channels, Metadata
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.blocking import BlockingStream
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

if TYPE_CHECKING:
    from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceAsyncStub

MAX_KEYS_PER_CALL = 4096
"""Most values in one transfer or call."""
MAX_BYTES_PER_CALL = 64 << 20
"""Most bytes in one transfer to the store; a larger value is a transfer alone.

The store needs memory for all values of a transfer at once."""
MAX_SIZE_CLASSES = 16
"""Pairs of streams that stay open while idle."""
WINDOW_BYTES = 8 << 20
"""Bytes that the store may send on one stream before the client has read them."""


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
        await self.writer.aclose()
        await self.reader.aclose()


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
    """Ignore single layers: a value is useful only with all layers."""
