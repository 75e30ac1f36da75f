"""A client's connection to one kvstore: calls, and a pair of streams for each size of values that is in use."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from moonpool.errors import DeadlineExceeded, StreamBroken, TransferFailed, Unavailable
from moonpool.kv.layout import KVLayout
from moonpool.rpc.channels import Channels, Metadata
from moonpool.rpc.errors import from_rpc_error
from moonpool.rpc.tls import Tls
from moonpool.streams.block_reader import BlockReader
from moonpool.streams.lanes.dialing import LaneDialer
from moonpool.streams.store_writer import StoreWriter
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

if TYPE_CHECKING:
    from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceAsyncStub

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


@contextmanager
def named() -> Iterator[None]:
    """Gives errors of connections the names that callers know.

    Raises:
        Unavailable: the store cannot be reached, or the connection was lost.
        TransferFailed: it took too long.
        MoonpoolError: what the store answers.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        named = from_rpc_error(error)
        raise TransferFailed(str(named)) if isinstance(named, DeadlineExceeded) else named from None
    except StreamBroken as error:
        raise Unavailable(str(error)) from error


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

    async def find(self, keys: Sequence[bytes], tenant: str, timeout_s: float) -> kvstore_pb2.FindResponse:
        """Which values are there, and who the caller is; raises as `named`."""
        request = kvstore_pb2.FindRequest(keys=b"".join(keys), tenant=tenant, namespace=self._namespace)
        with named():
            return await self._stub.Find(request, timeout=timeout_s, metadata=self._metadata)

    async def remove(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """Drops values; how many there were. Raises as `named`."""
        request = kvstore_pb2.RemoveRequest(keys=b"".join(keys))
        with named():
            answer = await self._stub.Remove(request, timeout=timeout_s, metadata=self._metadata)
        return int(answer.blocks)

    @asynccontextmanager
    async def streams(self, layout: KVLayout) -> AsyncIterator[Streams]:
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

    def _open(self, layout: KVLayout) -> Streams:
        hello = kv_pb2.StreamHello(sender=self._sender, namespace=self._namespace, layout=layout.to_proto())
        where = self._channels, self._address, hello, layout
        options: dict[str, Any] = {"lanes": self._lanes, "metadata": self._metadata}
        return Streams(StoreWriter(*where, **options), BlockReader(*where, window_bytes=WINDOW_BYTES, **options))

    @property
    def lane(self) -> str:
        """How the streams used last carry values: "local", "tcp" or "grpc"; "" without one."""
        if not self._streams:
            return ""
        last = next(reversed(self._streams.values()))
        return last.writer.lane or last.reader.lane

    @property
    def _stub(self) -> KVStoreServiceAsyncStub:
        return KVStoreServiceStub(self._channels.get(self._address))

    async def aclose(self) -> None:
        """Ends everything. Idempotent."""
        while self._streams:
            await self._streams.popitem()[1].aclose()
        await self._channels.aclose()
