"""KVStoreService: translates between protobuf and the store's own terms."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing

from moonpool.cluster.journal import Journal
from moonpool.cluster.selections import PORTION
from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.kv.values import check_owned, tenant_tag
from moonpool.rpc.roles import own_tenant, tenant_of
from moonpool.rpc.wire import PayloadMessage
from moonpool.streams.lanes.listening import LaneServer
from moonpool.streams.open_streams import OpenStreams
from moonpool.streams.turns import in_turns
from moonpool.telemetry.gauges import Gauges
from moonpool.v1 import kv_pb2
from moonpool.v1 import kvstore_pb2 as pb
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS
from services.kvstore.core.tiered_store import find
from services.kvstore.operate.deletions import Deletions
from services.kvstore.operate.operations import Operations
from services.kvstore.streams.get_stream import GetResources, GetStream
from services.kvstore.streams.put_stream import PutResources, PutStream

MAX_MATCH_KEYS = 1 << 15


@dataclasses.dataclass(frozen=True, slots=True)
class KVStoreServicer:
    """Answers the contract's methods. `closing` is set when the service ends its streams."""

    put: PutResources
    get: GetResources
    deletions: Deletions
    operations: Operations
    journal: Journal
    gauges: Gauges
    closing: asyncio.Event
    streams: OpenStreams
    lanes: LaneServer | None = None

    async def Put(self, requests: AsyncIterator[PayloadMessage[pb.PutRequest]], context: object) -> None:  # noqa: N802
        stream = PutStream(self.put, self.closing, self.lanes)
        with self.streams.running(stream):
            await stream.run(requests, context)

    async def Get(self, requests: AsyncIterator[pb.GetRequest], context: object) -> None:  # noqa: N802
        stream = GetStream(self.get, self.closing, self.lanes)
        with self.streams.running(stream):
            await stream.run(requests, context)

    async def MatchPrefix(self, request: pb.MatchPrefixRequest, context: object) -> pb.MatchPrefixResponse:  # noqa: N802
        keys = unpack_keys(request.keys, max_keys=MAX_MATCH_KEYS)
        return pb.MatchPrefixResponse(blocks=self.operations.store.tiers.match(keys))

    async def Find(self, request: pb.FindRequest, context: object) -> pb.FindResponse:  # noqa: N802
        keys, tenant, store = _own(request.keys), tenant_of(request.tenant), self.operations.store
        deletions, namespace = store.writes.deletions, request.namespace
        concerning = deletions.concerning((), tenant, namespace)
        if not keys:  # whoever puts asks for none, at first and after a refusal
            named = await in_turns(deletions.with_ending(tenant_tag(tenant), PORTION))
            concerning = sorted({*concerning, *named})
        found, known = find(store.tiers, keys, namespace)
        layouts = [layout.to_proto() for layout in known]
        return pb.FindResponse(layouts=layouts, found=found, deletions=concerning, tenant=tenant)

    async def Remove(self, request: pb.RemoveRequest, context: object) -> pb.RemoveResponse:  # noqa: N802
        dropped = await self.deletions.drop(_own(request.keys))
        return pb.RemoveResponse(blocks=dropped.blocks, bytes=dropped.nbytes)

    async def Pin(self, request: pb.PinRequest, context: object) -> pb.PinResponse:  # noqa: N802
        keys = unpack_keys(request.keys, max_keys=MAX_SESSION_BLOCKS)
        outcome = self.operations.pin(request.tenant, request.name, keys, request.ttl_s)
        limit, ttl_s = pb.PinLimit.Value(f"PIN_LIMIT_{outcome.limit.name}"), request.ttl_s if outcome.blocks else 0.0
        return pb.PinResponse(blocks=outcome.blocks, bytes=outcome.nbytes, ttl_s=ttl_s, limit=limit)

    async def Unpin(self, request: pb.UnpinRequest, context: object) -> pb.UnpinResponse:  # noqa: N802
        return pb.UnpinResponse(found=self.operations.unpin(request.tenant, request.name))

    async def Watch(self, request: pb.WatchRequest, context: object) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        with self.streams.running(context):
            async with aclosing(self.journal.watch(request.incarnation, request.after_sequence)) as messages:
                async for events in messages:
                    yield pb.WatchResponse(incarnation=self.put.instance.incarnation, events=events)

    async def KVStoreStats(self, request: pb.KVStoreStatsRequest, context: object) -> pb.KVStoreStatsResponse:  # noqa: N802
        return pb.KVStoreStatsResponse(instance=self.put.instance, gauges=self.gauges.read())

    async def Forget(self, request: kv_pb2.ForgetRequest, context: object) -> kv_pb2.ForgetResponse:  # noqa: N802
        done = await self.deletions.forget(request.deletions, request.ttl_s)
        return kv_pb2.ForgetResponse(blocks=done.blocks, bytes=done.nbytes)

    async def SyncRecords(self, request: pb.SyncRecordsRequest, context: object) -> pb.SyncRecordsResponse:  # noqa: N802
        await self.deletions.ledger.take(request.records)
        records, sequence, more = self.deletions.ledger.book.after(request.after)
        return pb.SyncRecordsResponse(records=records, sequence=sequence, more=more)

    async def Compact(self, request: pb.CompactRequest, context: object) -> pb.CompactResponse:  # noqa: N802
        return pb.CompactResponse(segments=self.operations.compact(request.min_live_share))

    async def Warm(self, request: pb.WarmRequest, context: object) -> pb.WarmResponse:  # noqa: N802
        blocks, nbytes = await self.operations.warm(request.max_bytes)
        return pb.WarmResponse(blocks=blocks, bytes=nbytes)

    async def ReuseCurve(self, request: pb.ReuseCurveRequest, context: object) -> pb.ReuseCurveResponse:  # noqa: N802
        reuse, capacity = self.operations.reuse, self.operations.capacity_bytes
        points = [pb.ReusePoint(bytes=nbytes, hit_share=share) for nbytes, share in self.operations.sizes()]
        uses, rate = reuse.uses, reuse.last_uses.rate
        return pb.ReuseCurveResponse(points=points, references=uses, sampled=rate, capacity_bytes=capacity)


def _own(packed: bytes) -> list[BlockKey]:
    """Keys of a request; raises PermissionDenied unless its caller may name them."""
    keys = unpack_keys(packed, max_keys=MAX_MATCH_KEYS)
    check_owned(keys, own_tenant())
    return keys
