"""KVStoreService: protobuf on one side, the store's own terms on the other.

Owns the translation only.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.rpc.wire import PayloadMessage
from moonpool.streams.credits import Traffic
from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS
from services.kvstore.operate.operations import Operations
from services.kvstore.operate.pin_keeper import PinKeeper
from services.kvstore.streams.get_stream import GetParts, GetStream
from services.kvstore.streams.put_stream import PutParts, PutStream
from services.kvstore.streams.sessions import KVStream
from services.kvstore.streams.watch import Journal
from services.kvstore.tenancy.pins import PinLimit

MAX_MATCH_KEYS = 1 << 15
_LIMITS = {
    PinLimit.NONE: kvstore_pb2.PIN_LIMIT_UNSPECIFIED,
    PinLimit.ABSENT: kvstore_pb2.PIN_LIMIT_ABSENT,
    PinLimit.TENANT_BUDGET: kvstore_pb2.PIN_LIMIT_TENANT_BUDGET,
    PinLimit.STORE_BUDGET: kvstore_pb2.PIN_LIMIT_STORE_BUDGET,
}


@dataclasses.dataclass(slots=True)
class KVStoreServicer:
    """What the contract's methods are answered with.

    Attributes:
        put: shared parts of Put streams.
        get: shared parts of Get streams.
        match: how many leading keys are here.
        pins: the pins with their clock.
        operations: what operators ask for.
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
    pins: PinKeeper
    operations: Operations
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
        self, requests: AsyncIterator[PayloadMessage[kvstore_pb2.PutRequest]], context: object
    ) -> None:
        """Blocks from one writer process."""
        stream = PutStream(self.put, self.closing)
        with self._stream(stream):
            await stream.run(requests, context)

    async def Get(self, requests: AsyncIterator[kvstore_pb2.GetRequest], context: object) -> None:  # noqa: N802
        """Blocks to one reader process."""
        stream = GetStream(self.get, self.closing)
        with self._stream(stream):
            await stream.run(requests, context)

    async def MatchPrefix(  # noqa: N802
        self, request: kvstore_pb2.MatchPrefixRequest, context: object
    ) -> kvstore_pb2.MatchPrefixResponse:
        """How many leading blocks of a chain are here."""
        keys = unpack_keys(request.keys, max_keys=MAX_MATCH_KEYS)
        return kvstore_pb2.MatchPrefixResponse(blocks=self.match(keys))

    async def Pin(self, request: kvstore_pb2.PinRequest, context: object) -> kvstore_pb2.PinResponse:  # noqa: N802
        """Keeps the leading blocks that are here."""
        keys = unpack_keys(request.keys, max_keys=MAX_SESSION_BLOCKS)
        outcome = self.pins.pin(request.tenant, request.name, keys, request.ttl_s)
        return kvstore_pb2.PinResponse(
            blocks=outcome.blocks,
            bytes=outcome.nbytes,
            ttl_s=request.ttl_s if outcome.blocks else 0.0,
            limit=_LIMITS[outcome.limit],
        )

    async def Unpin(self, request: kvstore_pb2.UnpinRequest, context: object) -> kvstore_pb2.UnpinResponse:  # noqa: N802
        """Ends a pin."""
        return kvstore_pb2.UnpinResponse(found=self.pins.unpin(request.tenant, request.name))

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

    async def Compact(  # noqa: N802
        self, request: kvstore_pb2.CompactRequest, context: object
    ) -> kvstore_pb2.CompactResponse:
        """Begins to rewrite segments in which little is alive."""
        return kvstore_pb2.CompactResponse(segments=self.operations.compact(request.min_live_share))

    async def Warm(self, request: kvstore_pb2.WarmRequest, context: object) -> kvstore_pb2.WarmResponse:  # noqa: N802
        """Fills free DRAM from SSD."""
        warmed = await self.operations.warm(request.max_bytes)
        return kvstore_pb2.WarmResponse(blocks=warmed.blocks, bytes=warmed.nbytes)

    async def ReuseCurve(  # noqa: N802
        self, request: kvstore_pb2.ReuseCurveRequest, context: object
    ) -> kvstore_pb2.ReuseCurveResponse:
        """Hit shares that other sizes would have had."""
        reuse = self.operations.reuse
        return kvstore_pb2.ReuseCurveResponse(
            points=[kvstore_pb2.ReusePoint(bytes=nbytes, hit_share=share) for nbytes, share in self.operations.sizes()],
            references=reuse.uses,
            sampled=reuse.rate,
            capacity_bytes=self.operations.capacity_bytes,
        )
