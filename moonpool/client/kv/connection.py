"""A client's connection to one kvstore: calls, and a pair of streams for each size of values that is in use."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc.aio

from moonpool.errors import DeadlineExceeded, StreamBroken, TransferFailed, Unavailable
from moonpool.kv.layout import KVLayout
from moonpool.rpc.channels import Channels, Metadata, payload_stream
from moonpool.rpc.errors import from_rpc_error
from moonpool.rpc.tls import Tls
from moonpool.streams.block_reader import BlockReader
from moonpool.streams.direct.opening import DirectStream
from moonpool.streams.lanes.dialing import LaneDialer
from moonpool.streams.prefix_read import Into, OnSlice
from moonpool.streams.store_writer import PutBlocks, PutOutcome, StoreWriter
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

if TYPE_CHECKING:
    from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceAsyncStub

PORTION = 4096
"""Values that travel in one session, or are asked for in one call."""
PORTION_BYTES = 64 << 20
"""Of values that are put in one session, unless one alone is larger: the store needs room for all of them at once."""
MAX_SIZES = 16
"""Pairs of streams that stay open when they are idle."""
WINDOW_BYTES = 8 << 20
"""How far the store may be ahead on one stream."""


@dataclass(slots=True)
class Streams:
    """The streams for values of one size class.

    Attributes:
        users: calls that are under way on them, or that wait for their connection.
    """

    writer: StoreWriter
    reader: BlockReader
    users: int = 0

    async def aclose(self) -> None:
        """Ends both."""
        await self.writer.aclose()
        await self.reader.aclose()


class Named:
    """A context manager that gives errors of connections the names that callers know.

    Raises:
        Unavailable: the store cannot be reached, or the connection was lost.
        TransferFailed: it took too long.
        MoonpoolError: what the store answers.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            named = from_rpc_error(error)
            raise TransferFailed(str(named)) if isinstance(named, DeadlineExceeded) else named from None
        if isinstance(error, StreamBroken):
            raise Unavailable(str(error)) from error


named = Named()


def _nothing(layer: int) -> None:
    """Values are of use when all their layers have come."""


class Connection:
    """Connects on first use, on the event loop that runs then."""

    def __init__(self, address: str, namespace: bytes, tls: Tls | None, api_key: str, lanes: LaneDialer) -> None:
        """Takes "host:port", the namespace of the values, certificates, a key that is sent only over TLS, and lanes."""
        self._address = address
        self._namespace = namespace
        self._lanes = lanes
        self._channels = Channels(tls)
        self._metadata: Metadata = (("authorization", f"Bearer {api_key}"),) if api_key and tls is not None else ()
        self._sender = kv_pb2.Instance(id="kv-client", incarnation=secrets.randbits(63) or 1)
        self._streams: OrderedDict[KVLayout, Streams] = OrderedDict()

    def portion(self, layout: KVLayout) -> int:
        """Values of a layout that are put at once, at most."""
        return min(PORTION, max(1, PORTION_BYTES // layout.block_bytes))

    async def put(self, layout: KVLayout, blocks: PutBlocks, timeout_s: float) -> PutOutcome:
        """Puts values of one layout as `StoreWriter.put`; raises as `named`, and InvalidRequest, Overloaded."""
        async with self._using(layout) as streams:
            with named:
                return await streams.writer.put(*blocks, timeout_s=timeout_s)

    async def read(
        self, layout: KVLayout, keys: Sequence[bytes], *, on_slice: OnSlice, into: Into, timeout_s: float
    ) -> int:
        """Reads values of one layout up to the first that is not there, as `BlockReader.read`; raises as `named`.

        Raises:
            PrefixLost, DamagedSliceError: some were lost, or came damaged.
        """
        layers = range(layout.layers)
        async with self._using(layout) as streams:
            with named:
                return await streams.reader.read(
                    keys, layers=layers, on_slice=on_slice, on_layer=_nothing, timeout_s=timeout_s, into=into
                )

    async def find(self, keys: Sequence[bytes], tenant: str, timeout_s: float) -> kvstore_pb2.FindResponse:
        """Which values are there, and who the caller is; raises as `named`."""
        request = kvstore_pb2.FindRequest(keys=b"".join(keys), tenant=tenant, namespace=self._namespace)
        with named:
            return await self._stub.Find(request, timeout=timeout_s, metadata=self._metadata)

    async def remove(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """Drops values; how many there were. Raises as `named`."""
        request = kvstore_pb2.RemoveRequest(keys=b"".join(keys))
        with named:
            answer = await self._stub.Remove(request, timeout=timeout_s, metadata=self._metadata)
        return int(answer.blocks)

    @asynccontextmanager
    async def _using(self, layout: KVLayout) -> AsyncIterator[Streams]:
        """The streams for values of this layout; they stay open as long as somebody uses them."""
        while (found := self._streams.get(layout)) is None:
            idle = [size for size, streams in self._streams.items() if not streams.users]
            surplus = [self._streams.pop(size) for size in idle[: max(0, len(self._streams) + 1 - MAX_SIZES)]]
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

    def _hello(self, layout: KVLayout) -> kv_pb2.StreamHello:
        return kv_pb2.StreamHello(sender=self._sender, namespace=self._namespace, layout=layout.to_proto())

    def _open(self, layout: KVLayout) -> Streams:
        where = self._channels, self._address, self._hello(layout), layout
        options: dict[str, Any] = {"lanes": self._lanes, "metadata": self._metadata}
        return Streams(StoreWriter(*where, **options), BlockReader(*where, window_bytes=WINDOW_BYTES, **options))

    def direct_stream(
        self, layout: KVLayout, method: str, asked: type[Any], answers: type[Any], **options: Any
    ) -> DirectStream[Any, Any]:
        """A stream of one more lane for values of a layout, to be opened on the loop; `options` of `DirectStream`."""
        hello, channels, address, metadata = self._hello(layout), self._channels, self._address, self._metadata
        self._lanes.fill(hello)

        def connect() -> grpc.aio.StreamStreamCall[Any, Any]:  # it must not keep this object, and so the client, alive
            opener = payload_stream(channels.get(address), "moonpool.v1.KVStoreService", method, asked, answers)
            return opener(metadata=metadata)

        return DirectStream(f"direct {method} to {address}", connect, asked(hello=hello), self._lanes, **options)

    def lane_of(self, layout: KVLayout) -> str:
        """How values of a layout travelled last in the usual way; as `lane`."""
        streams = self._streams.get(layout)
        return "" if streams is None else streams.writer.lane or streams.reader.lane

    @property
    def lane(self) -> str:
        """How the streams used last carry values: "local", "tcp" or "grpc"; "" without one."""
        if not self._streams:
            return ""
        return self.lane_of(next(reversed(self._streams)))

    @property
    def _stub(self) -> KVStoreServiceAsyncStub:
        return KVStoreServiceStub(self._channels.get(self._address))

    async def aclose(self) -> None:
        """Ends everything. Idempotent."""
        while self._streams:
            await self._streams.popitem()[1].aclose()
        await self._channels.aclose()
