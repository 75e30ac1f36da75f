"""One kvstore process: recover, serve, join the conductor, drain; and the contract's servicer.

The process ends in this order: no new work, running transfers finish, streams end, visible blocks become durable, files
close.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from moonpool.base import world
from moonpool.base.cluster import ClusterMembership, HeldKeys, InstanceReport
from moonpool.base.cluster.kv_events import KVEventJournal
from moonpool.base.cluster.proto_conversion import DELETION_PORTION, session_hint_from_proto
from moonpool.base.kv import native_library
from moonpool.base.kv.blocks import PARTS, KeyChanges
from moonpool.base.kv.keys import BlockKey, unpack_keys
from moonpool.base.kv.native_copy import copy_verified
from moonpool.base.kv.values import check_owned, tenant_tag
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.roles import own_tenant, tenant_of
from moonpool.base.rpc.server import Service, serving
from moonpool.base.rpc.stream_writes import bare_write
from moonpool.base.rpc.tls import Security
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import MetricSet
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.transport.async_utils import run_in_steps, wait_within
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.base.transport.listener import LISTENER_METRICS, TransportListener
from moonpool.base.transport.open_streams import OpenStreams
from moonpool.base.transport.registry import open_transports
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.core.put_transfer import MAX_TRANSFER_BLOCKS
from moonpool.kvstore.core.store import BlockStore
from moonpool.kvstore.core.tiered_store import StoreListener, find_blocks
from moonpool.kvstore.deletion import DeletionWorker, KeyWatch
from moonpool.kvstore.dram.arena import Arena
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.eviction.policies import POLICIES
from moonpool.kvstore.eviction.retention import Pins
from moonpool.kvstore.eviction.tenants import TenantAccount
from moonpool.kvstore.get_stream import GetResources, GetStream
from moonpool.kvstore.memory_wait_queue import MemoryWaitQueue
from moonpool.kvstore.metrics import MeasuredStore, StoreObserver, store_metrics
from moonpool.kvstore.operations import StoreOperations
from moonpool.kvstore.prefetch import Prefetcher
from moonpool.kvstore.put_stream import PutResources, PutStream
from moonpool.kvstore.record_store import RecordStore
from moonpool.kvstore.scrubber import Scrubber
from moonpool.kvstore.ssd.admission import SsdAdmission
from moonpool.kvstore.ssd.encryption import Keyring
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from moonpool.kvstore.write_behind import WriteBehind
from moonpool.v1 import conductor_pb2, kv_pb2
from moonpool.v1 import kvstore_pb2 as pb

MAX_MATCH_KEYS = 1 << 15
MAX_WAITING_FOR_ROOM = 512
LEASE_TIMEOUT_S = 600.0
"""Longest time for which a reader keeps blocks from eviction, whatever the reader does."""
END_STREAMS_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class KVStoreServicer:
    """Answers the contract's methods. `closing` is set when the service ends its streams."""

    put: PutResources
    get: GetResources
    deletions: DeletionWorker
    operations: StoreOperations
    journal: KVEventJournal
    gauges: MetricSet
    closing: asyncio.Event
    streams: OpenStreams
    listener: TransportListener | None = None

    async def Put(self, requests: AsyncIterator[PayloadMessage[pb.PutRequest]], context: object) -> None:  # noqa: N802
        stream = PutStream(self.put, self.closing, self.listener)
        with self.streams.running(stream):
            await stream.run(requests, bare_write(context))

    async def Get(self, requests: AsyncIterator[pb.GetRequest], context: object) -> None:  # noqa: N802
        stream = GetStream(self.get, self.closing, self.listener)
        with self.streams.running(stream):
            await stream.run(requests, bare_write(context))

    async def MatchPrefix(self, request: pb.MatchPrefixRequest, context: object) -> pb.MatchPrefixResponse:  # noqa: N802
        keys = unpack_keys(request.keys, max_keys=MAX_MATCH_KEYS)
        return pb.MatchPrefixResponse(blocks=self.operations.store.tiers.match(keys))

    async def Find(self, request: pb.FindRequest, context: object) -> pb.FindResponse:  # noqa: N802
        keys, tenant, store = _checked_keys(request.keys), tenant_of(request.tenant), self.operations.store
        deletions, namespace = store.writes.deletions, request.namespace
        concerning = deletions.matching((), tenant, namespace)
        if not keys:  # whoever puts asks for none, at first and after a refusal
            named = await run_in_steps(deletions.with_ending(tenant_tag(tenant), DELETION_PORTION))
            concerning = sorted({*concerning, *named})
        found, known = find_blocks(store.tiers, keys, namespace)
        layouts = [layout.to_proto() for layout in known]
        return pb.FindResponse(layouts=layouts, found=found, deletions=concerning, tenant=tenant)

    async def Remove(self, request: pb.RemoveRequest, context: object) -> pb.RemoveResponse:  # noqa: N802
        dropped = await self.deletions.drop(_checked_keys(request.keys))
        return pb.RemoveResponse(blocks=dropped.blocks, bytes=dropped.nbytes)

    async def Pin(self, request: pb.PinRequest, context: object) -> pb.PinResponse:  # noqa: N802
        keys = unpack_keys(request.keys, max_keys=MAX_TRANSFER_BLOCKS)
        outcome = self.operations.pin(request.tenant, request.name, keys, request.ttl_s)
        limit, ttl_s = pb.PinLimit.Value(f"PIN_LIMIT_{outcome.limit.name}"), request.ttl_s if outcome.blocks else 0.0
        return pb.PinResponse(blocks=outcome.blocks, bytes=outcome.nbytes, ttl_s=ttl_s, limit=limit)

    async def Unpin(self, request: pb.UnpinRequest, context: object) -> pb.UnpinResponse:  # noqa: N802
        return pb.UnpinResponse(found=self.operations.unpin(request.tenant, request.name))

    async def Watch(self, request: pb.WatchRequest, context: object) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        with self.streams.running(context):
            async with aclosing(self.journal.watch(request.epoch, request.after_sequence)) as messages:
                async for events in messages:
                    yield pb.WatchResponse(epoch=self.put.instance.epoch, events=events)

    async def KVStoreStats(self, request: pb.KVStoreStatsRequest, context: object) -> pb.KVStoreStatsResponse:  # noqa: N802
        return pb.KVStoreStatsResponse(instance=self.put.instance, gauges=self.gauges.read())

    async def Forget(self, request: kv_pb2.ForgetRequest, context: object) -> kv_pb2.ForgetResponse:  # noqa: N802
        done = await self.deletions.forget(request.deletions, request.ttl_s)
        return kv_pb2.ForgetResponse(blocks=done.blocks, bytes=done.nbytes)

    async def SyncRecords(self, request: pb.SyncRecordsRequest, context: object) -> pb.SyncRecordsResponse:  # noqa: N802
        await self.deletions.records.take(request.records)
        records, sequence, more = self.deletions.records.replicated.after(request.after)
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


def _checked_keys(packed: bytes) -> list[BlockKey]:
    """Keys of a request; raises PermissionDenied unless the caller may name them."""
    keys = unpack_keys(packed, max_keys=MAX_MATCH_KEYS)
    check_owned(keys, own_tenant())
    return keys


log = get_logger(__name__)


def open_tiers(
    config: KVStoreConfig, files: Callable[[Path], FileLayer] | None = None
) -> tuple[DramTier, SsdTier | None]:
    """Blocking. A store's two tiers: an empty DRAM tier, and the SSD tier, if any, with its earlier content.

    `files` gives the file layer of a data folder; None: the file system.
    """
    pins = Pins(config.pin_budget_bytes, TenantAccount.of(config.tenants, "pins"))
    account = TenantAccount.of(config.tenants, "dram", config.picture_dram_bytes)
    arena = Arena(config.dram_bytes, ahead=True)
    dram = DramTier(config.dram_bytes, POLICIES[config.eviction](), pins=pins, account=account, arena=arena)
    if not (config.data_dir and config.ssd_bytes):
        return dram, None
    account = TenantAccount.of(config.tenants, "ssd", config.picture_ssd_bytes)
    admission = SsdAdmission(config.ssd_admission, pins)
    layers = [files(path) for path in config.data_dir] if files is not None else ()
    return dram, open_tier(
        config.data_dir,
        config.ssd_bytes,
        config.segment_size,
        durability=config.durability,
        account=account,
        admission=admission,
        keyring=None if config.encryption_keys is None else Keyring(config.encryption_keys),
        files=layers,
    )


class KVStoreService(StoreListener):
    """The store with threads and servicer; use `running`.

    Without `channels` to the conductor, the store runs alone. With channels, `on_drain` is called when the conductor
    orders the store to drain, and `instance` must have an address before the store joins.
    """

    def __init__(
        self,
        config: KVStoreConfig,
        tiers: tuple[DramTier, SsdTier | None],
        instance: kv_pb2.Instance,
        channels: Channels | None = None,
        on_drain: Callable[[], None] = lambda: None,
        records: RecordStore | None = None,
    ) -> None:
        self.config = config
        self.rooms = MemoryWaitQueue(MAX_WAITING_FOR_ROOM)
        self.idle = asyncio.Event()  # no transfer is open
        self.idle.set()
        self.streams = OpenStreams()
        self.listener = TransportListener(open_transports(config), instance.epoch)
        self.metrics = PrometheusMetrics.of(config)
        self._closing = asyncio.Event()
        self._draining = False
        threads = config.read_threads * max(1, len(config.data_dir))
        self._pool = world.thread_pool(threads, "kvstore-read")
        self._observer = StoreObserver(self.metrics)
        self._records = records = records or RecordStore()
        transfers, leases = config.max_transfers, config.lease_budget_bytes
        self.store = BlockStore(*tiers, self, max_transfers=transfers, lease_bytes=leases, deletions=records.deletions)
        ssd = self.store.tiers.ssd
        rate, queue, observe = config.ssd_write_bytes_per_s, self.store.writes.queue, self._observer.committed
        self.writer = None if ssd is None else WriteBehind(queue, ssd, observe, self._records.leave_out, rate)
        held = HeldKeys(PARTS, self.store.tiers.part, self.store.tiers.cold)
        self._journal = KVEventJournal(held, instance.epoch)
        ahead = ByteCredits(config.read_ahead_bytes)
        clock, reuse = asyncio.get_running_loop().time, self._observer.reuse
        self._operations = StoreOperations(self.store, self._pool, ahead, reuse, config.capacity_bytes, clock)
        self.prefetcher = prefetcher = Prefetcher(self._operations)
        measured = MeasuredStore(self.store, self.streams, self.rooms, ahead, self._journal, self.writer, prefetcher)
        self.gauges = store_metrics(measured, list(config.tenants)).add(LISTENER_METRICS, self.listener)
        self.metrics.watch(self.gauges)
        self.scrubber = None if ssd is None else Scrubber(self.store, ssd, self._pool)
        self.servicer = self._make_servicer(instance, ahead)
        keyring = None if ssd is None else ssd.keyring
        self._key_watch = None if keyring is None else KeyWatch(keyring, self.servicer.deletions)
        size = config.capacity_bytes
        self.hello = conductor_pb2.JoinHello(
            instance=instance, capacity_bytes=size, tells_cold=ssd is not None, process=world.this_process()
        )
        self.agent: ClusterMembership | None = None
        if channels is not None and config.conductor:
            self.agent = ClusterMembership(
                channels,
                config.conductor,
                InstanceReport(self.hello, self._load, held, on_drain=on_drain, on_session=self._session_told),
            )

    def _make_servicer(self, instance: kv_pb2.Instance, ahead: ByteCredits) -> KVStoreServicer:
        config, store, pool, timeout_s = self.config, self.store, self._pool, self.config.transfer_timeout_s
        put = PutResources(store.writes, self.rooms, instance, config.window_bytes, timeout_s, config.room_timeout_s)
        on_read = self._observer.read
        operations, journal, closing, streams = self._operations, self._journal, self._closing, self.streams
        deletions = DeletionWorker(operations, self._records, self.writer, config.transfer_timeout_s)
        get = GetResources(store.reads, pool, ahead, instance, timeout_s, LEASE_TIMEOUT_S, on_read, deletions)
        return KVStoreServicer(put, get, deletions, operations, journal, self.gauges, closing, streams, self.listener)

    @property
    def contract(self) -> Service:
        return pb.DESCRIPTOR.services_by_name["KVStoreService"], self.servicer

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        self._journal.changed(stored, removed, cooled)
        self._observer.changed(stored, removed)
        if self.agent is not None:
            self.agent.changed(KeyChanges(stored, removed, cooled))

    def asked(self, keys: Sequence[BlockKey]) -> None:
        self._observer.asked(keys)

    def _session_told(self, told: conductor_pb2.SessionOrder) -> None:
        """The conductor says what is known of a session."""
        keys = unpack_keys(told.prefetch_keys, "session.prefetch_keys", max_keys=MAX_MATCH_KEYS)
        self.prefetcher.told(session_hint_from_proto(told), keys)

    def room(self) -> None:
        self.rooms.notify()

    def work(self) -> None:
        if self.writer is not None:
            self.writer.wake()

    def transfers_changed(self) -> None:
        if self.store.writes.transfers or self.store.reads.leases:
            self.idle.clear()
        else:
            self.idle.set()

    def _load(self) -> conductor_pb2.LoadReport:
        dram, ssd = self.store.tiers.dram, self.store.tiers.ssd
        tiers = [("dram", len(dram), dram.block_bytes, dram.capacity_bytes)]
        if ssd is not None:
            tiers.append(("ssd", len(ssd.catalogue), ssd.used_bytes, ssd.capacity_bytes))
        told = [conductor_pb2.TierLoad(name=n, blocks=b, used_bytes=u, capacity_bytes=c) for n, b, u, c in tiers]
        return conductor_pb2.LoadReport(
            running=self.store.reads.leases + len(self.store.writes.transfers),
            waiting=len(self.rooms),
            cached_blocks=len(dram),
            draining=self._draining,
            tiers=told,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Delete what was missed, write, scrub, end pins; at the end save what is visible, and close all."""
        loop, arena = asyncio.get_running_loop(), self.store.tiers.dram.arena
        arena.on_excess = lambda: loop.call_soon_threadsafe(arena.collect)
        try:
            async with asyncio.TaskGroup() as group:
                parts = (self._operations, self.prefetcher, self.writer, self.scrubber, self._key_watch)
                tasks = [group.create_task(part.run()) for part in parts if part is not None]
                try:
                    await self.servicer.deletions.catch_up()
                    yield
                finally:
                    if self.writer is not None:
                        await self._make_durable(self.writer)
                    for task in tasks:
                        task.cancel()
        finally:
            if self.writer is not None:
                await self.writer.aclose()
            await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
            await asyncio.to_thread(arena.close)
            await asyncio.to_thread(self._records.close)
            if self.store.tiers.ssd is not None:
                await asyncio.to_thread(self.store.tiers.ssd.close)
            arena.on_excess = lambda: None  # the loop may end before the last view

    async def _make_durable(self, writer: WriteBehind) -> None:
        self.store.writes.queue.retry()
        if not await writer.drain(self.config.drain_s / 2) or self.store.writes.queue.unsaved:
            blocks = {*self.store.writes.queue.queued, *self.store.writes.queue.unsaved}
            log.warning("some blocks are not durable", blocks=len(blocks))

    async def finish(self) -> None:
        """Report that this store drains, wait for running transfers for a time, then end all streams."""
        self._draining = True
        if self.agent is not None:
            self.agent.notify()  # the store stays joined while draining
        await wait_within(self.config.drain_s / 2, self.idle)
        self._closing.set()
        self._journal.close()
        await wait_within(END_STREAMS_S, self.streams.quiet)


async def serve(ctx: ProcessContext, config: KVStoreConfig, files: Callable[[Path], FileLayer] | None = None) -> None:
    """Run a kvstore process until told to stop; `files`: as of `open_tiers`.

    Raises:
        ConfigError: a setting is refused.
        Mismatch: a conductor refuses the store.
    """
    tiers = await asyncio.to_thread(open_tiers, config, files)
    await asyncio.to_thread(native_library.build_ahead, ctx.starting)
    await asyncio.to_thread(copy_verified.prepare)
    folders = config.data_dir if tiers[1] is None else [disk.folder.path for disk in tiers[1].disks]
    keyring = None if tiers[1] is None else tiers[1].keyring
    records = await asyncio.to_thread(RecordStore, [folder / "records" for folder in folders], keyring=keyring)
    instance = ctx.instance(kv_pb2.INSTANCE_KIND_KVSTORE, config.id, "")
    security = Security.of(config, config.client_listen, config.api_keys)
    async with Channels(Security.tls_of(security)) as channels:
        service = KVStoreService(config, tiers, instance, channels, ctx.stopping.set, records)
        async with (
            service.running(),
            service.metrics.served(config.metrics_listen),
            service.listener.running(config),
            serving(config.listen, [service.contract], security=security) as server,
        ):
            service.metrics.ready = server.lacking
            instance.address = config.advertised(server.port)
            service.hello.instance.CopyFrom(instance)
            left = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                if service.agent is not None:
                    group.create_task(service.agent.run(left))
                ctx.announce(instance.address)
                await ctx.stopping.wait()
                server.set_serving(False)
                await service.finish()
                left.set()
