"""KVStoreService: protobuf on one side, the store's own terms on the other.

Owns the translation only.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from moonpool.errors import Unsupported
from moonpool.kv.credits import Traffic
from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.kv.wire import PayloadMessage
from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.get_stream import GetParts, GetStream
from services.kvstore.put_stream import PutParts, PutStream
from services.kvstore.streams import KVStream, ServerContext
from services.kvstore.watch import Journal

MAX_MATCH_KEYS = 1 << 17
_NO_PAYLOAD = memoryview(b"")


@dataclasses.dataclass(slots=True)
class KVStoreServicer:
    """What the contract's methods are answered with.

    Attributes:
        put: shared parts of Put streams.
        get: shared parts of Get streams.
        match: how many leading keys are here.
        journal: what watchers get.
        gauges: everything the store holds.
        instance: who this store is.
        closing: set when the service ends its streams.
        streams: open Put, Get and Watch streams.
        kv_streams: those of them that carry KV.
        quiet: set while there are none.
    """

    put: PutParts
    get: GetParts
    match: Callable[[Sequence[BlockKey]], int]
    journal: Journal
    gauges: Gauges
    instance: kv_pb2.Instance
    closing: asyncio.Event
    streams: int = 0
    kv_streams: set[KVStream[Any]] = dataclasses.field(default_factory=set)
    quiet: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def traffic(self) -> Traffic:
        """What is under way on all Put and Get streams."""
        return sum((stream.traffic for stream in self.kv_streams), Traffic())

    @contextmanager
    def _stream(self, stream: KVStream[Any] | None = None) -> Iterator[None]:
        own = set() if stream is None else {stream}
        self.streams += 1
        self.kv_streams |= own
        self.quiet.clear()
        try:
            yield
        finally:
            self.streams -= 1
            self.kv_streams -= own
            if not self.streams:
                self.quiet.set()

    async def Put(  # noqa: N802
        self, requests: AsyncIterator[PayloadMessage[kvstore_pb2.PutRequest]], context: ServerContext
    ) -> None:
        """Blocks from one writer process."""

        async def pairs() -> AsyncIterator[tuple[kvstore_pb2.PutRequest, memoryview]]:
            async for item in requests:
                payload = item.payload
                yield item.message, payload if isinstance(payload, memoryview) else _NO_PAYLOAD

        stream = PutStream(self.put, self.closing)
        with self._stream(stream):
            await stream.run(pairs(), context)

    async def Get(self, requests: AsyncIterator[kvstore_pb2.GetRequest], context: ServerContext) -> None:  # noqa: N802
        """Blocks to one reader process."""

        async def pairs() -> AsyncIterator[tuple[kvstore_pb2.GetRequest, memoryview]]:
            async for message in requests:
                yield message, _NO_PAYLOAD

        stream = GetStream(self.get, self.closing)
        with self._stream(stream):
            await stream.run(pairs(), context)

    async def MatchPrefix(  # noqa: N802
        self, request: kvstore_pb2.MatchPrefixRequest, context: object
    ) -> kvstore_pb2.MatchPrefixResponse:
        """How many leading blocks of a chain are here."""
        keys = unpack_keys(request.keys, max_keys=MAX_MATCH_KEYS)
        return kvstore_pb2.MatchPrefixResponse(blocks=self.match(keys))

    async def Pin(self, request: kvstore_pb2.PinRequest, context: object) -> kvstore_pb2.PinResponse:  # noqa: N802
        """Not built yet."""
        raise Unsupported("pins are not built yet")

    async def Unpin(self, request: kvstore_pb2.UnpinRequest, context: object) -> kvstore_pb2.UnpinResponse:  # noqa: N802
        """Not built yet."""
        raise Unsupported("pins are not built yet")

    async def Watch(  # noqa: N802
        self, request: kvstore_pb2.WatchRequest, context: object
    ) -> AsyncIterator[kvstore_pb2.WatchResponse]:
        """A snapshot (or what was missed), then changes."""
        with self._stream():
            async with aclosing(self.journal.watch(request.incarnation, request.after_sequence)) as messages:
                async for events in messages:
                    yield kvstore_pb2.WatchResponse(incarnation=self.instance.incarnation, events=events)

    async def KVStoreStats(  # noqa: N802
        self, request: kvstore_pb2.KVStoreStatsRequest, context: object
    ) -> kvstore_pb2.KVStoreStatsResponse:
        """Everything the store holds."""
        return kvstore_pb2.KVStoreStatsResponse(instance=self.instance, gauges=self.gauges.read())
