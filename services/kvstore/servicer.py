"""KVStoreService: translates between protobuf and the store's own terms."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.rpc.wire import PayloadMessage
from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS
from services.kvstore.operate.operations import Operations
from services.kvstore.operate.pin_keeper import PinKeeper
from services.kvstore.streams.get_stream import GetResources, GetStream
from services.kvstore.streams.open_calls import OpenCalls, PeerContext
from services.kvstore.streams.put_stream import PutResources, PutStream
from services.kvstore.streams.watch import Journal

MAX_MATCH_KEYS = 1 << 15


@dataclasses.dataclass(frozen=True, slots=True)
class KVStoreServicer:
    """Answers the contract's methods.

    Attributes:
        match: how many leading keys are here.
        closing: set when the service ends its streams.
    """

    put: PutResources
    get: GetResources
    match: Callable[[Sequence[BlockKey]], int]
    pins: PinKeeper
    operations: Operations
    journal: Journal
    gauges: Gauges
    instance: kv_pb2.Instance
    closing: asyncio.Event
    calls: OpenCalls

    async def Put(  # noqa: N802
        self, requests: AsyncIterator[PayloadMessage[kvstore_pb2.PutRequest]], context: PeerContext
    ) -> None:
        stream = PutStream(self.put, self.closing)
        with self.calls.stream(context, stream):
            await stream.run(requests, context)

    async def Get(self, requests: AsyncIterator[kvstore_pb2.GetRequest], context: PeerContext) -> None:  # noqa: N802
        stream = GetStream(self.get, self.closing)
        with self.calls.stream(context, stream):
            await stream.run(requests, context)

    async def MatchPrefix(  # noqa: N802
        self, request: kvstore_pb2.MatchPrefixRequest, context: object
    ) -> kvstore_pb2.MatchPrefixResponse:
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
            limit=kvstore_pb2.PinLimit.Value(f"PIN_LIMIT_{outcome.limit.name}"),
        )

    async def Unpin(self, request: kvstore_pb2.UnpinRequest, context: object) -> kvstore_pb2.UnpinResponse:  # noqa: N802
        return kvstore_pb2.UnpinResponse(found=self.pins.unpin(request.tenant, request.name))

    async def Watch(  # noqa: N802
        self, request: kvstore_pb2.WatchRequest, context: PeerContext
    ) -> AsyncIterator[kvstore_pb2.WatchResponse]:
        """A snapshot (or what was missed), then changes."""
        with self.calls.stream(context):
            async with aclosing(self.journal.watch(request.incarnation, request.after_sequence)) as messages:
                async for events in messages:
                    yield kvstore_pb2.WatchResponse(incarnation=self.instance.incarnation, events=events)

    async def KVStoreStats(  # noqa: N802
        self, request: kvstore_pb2.KVStoreStatsRequest, context: object
    ) -> kvstore_pb2.KVStoreStatsResponse:
        return kvstore_pb2.KVStoreStatsResponse(instance=self.instance, gauges=self.gauges.read())

    async def Compact(  # noqa: N802
        self, request: kvstore_pb2.CompactRequest, context: object
    ) -> kvstore_pb2.CompactResponse:
        return kvstore_pb2.CompactResponse(segments=self.operations.compact(request.min_live_share))

    async def Warm(  # noqa: N802
        self, request: kvstore_pb2.WarmRequest, context: PeerContext
    ) -> kvstore_pb2.WarmResponse:
        with self.calls.call(context):
            blocks, nbytes = await self.operations.warm(request.max_bytes)
        return kvstore_pb2.WarmResponse(blocks=blocks, bytes=nbytes)

    async def ReuseCurve(  # noqa: N802
        self, request: kvstore_pb2.ReuseCurveRequest, context: object
    ) -> kvstore_pb2.ReuseCurveResponse:
        """Hit shares that other sizes would have had."""
        reuse = self.operations.reuse
        return kvstore_pb2.ReuseCurveResponse(
            points=[kvstore_pb2.ReusePoint(bytes=nbytes, hit_share=share) for nbytes, share in self.operations.sizes()],
            references=reuse.uses,
            sampled=reuse.last_uses.rate,
            capacity_bytes=self.operations.capacity_bytes,
        )
