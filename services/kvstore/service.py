"""One kvstore process: recover, serve, join the conductor, drain.

It ends in this order: no new work, running sessions finish, streams end, visible blocks become durable, files close.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.cluster import HeldKeys, Joining
from moonpool.cluster.journal import Journal
from moonpool.kv.changes import KeyChanges
from moonpool.kv.keys import BlockKey
from moonpool.kv.landing import land
from moonpool.kv.parts import PARTS
from moonpool.rpc.channels import Channels
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.security import Security
from moonpool.rpc.server import Service, serving
from moonpool.rpc.tuning import raise_open_files_limit
from moonpool.streams.credits import ByteCredits
from moonpool.streams.deadlines import within
from moonpool.streams.lanes.listening import LaneServer
from moonpool.streams.lanes.settings import LaneSettings
from moonpool.streams.open_streams import OpenStreams
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import Metrics
from moonpool.v1 import conductor_pb2, kv_pb2, kvstore_pb2
from services.kvstore.config import KVStoreConfig
from services.kvstore.core.store import BlockStore
from services.kvstore.core.tiered_store import StoreListener
from services.kvstore.dram.arena import Arena
from services.kvstore.dram.tier import DramTier
from services.kvstore.operate.deletions import Deletions
from services.kvstore.operate.gauges import gauges_of
from services.kvstore.operate.ledger import Ledger
from services.kvstore.operate.observe import Observer
from services.kvstore.operate.operations import Operations
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.policies import POLICIES
from services.kvstore.servicer import KVStoreServicer
from services.kvstore.ssd.admission import Admission
from services.kvstore.ssd.tier import SsdTier, open_tier
from services.kvstore.streams.get_stream import GetResources
from services.kvstore.streams.put_stream import PutResources
from services.kvstore.streams.rooms import RoomQueue
from services.kvstore.tenancy.pins import Pins
from services.kvstore.tenancy.tenants import Account

log = get_logger(__name__)

MAX_WAITING_FOR_ROOM = 512
END_STREAMS_S = 2.0


def open_tiers(config: KVStoreConfig) -> tuple[DramTier, SsdTier | None]:
    """Blocking. Both tiers of a store: an empty one in DRAM, and that on SSD, if any, with what it held before."""
    pins = Pins(config.pin_budget_bytes, Account.of(config.tenants, "pins"), max_pins=config.max_pins)
    account, arena = Account.of(config.tenants, "dram"), Arena(config.dram_bytes, ahead=True)
    dram = DramTier(config.dram_bytes, POLICIES[config.eviction](), pins=pins, account=account, arena=arena)
    if not (config.data_dir and config.ssd_bytes):
        return dram, None
    account, admission = Account.of(config.tenants, "ssd"), Admission(config.ssd_admission, pins)
    sizes, how = (config.ssd_bytes, config.segment_size), config.durability
    return dram, open_tier(config.data_dir, *sizes, durability=how, account=account, admission=admission)


class KVStoreService(StoreListener):
    """The store with its threads and its servicer; use `running`.

    Without `channels` to the conductor, it runs alone; else `on_drain` is called when the conductor orders it to drain,
    and the address of `instance` is set before it joins.
    """

    def __init__(
        self,
        config: KVStoreConfig,
        tiers: tuple[DramTier, SsdTier | None],
        instance: kv_pb2.Instance,
        channels: Channels | None = None,
        on_drain: Callable[[], None] = lambda: None,
        ledger: Ledger | None = None,
    ) -> None:
        self.config = config
        self.rooms = RoomQueue(MAX_WAITING_FOR_ROOM)
        self.idle = asyncio.Event()  # no session is open
        self.idle.set()
        self.streams = OpenStreams()
        self.lanes = LaneServer(LaneSettings.of(config), instance.incarnation)
        self.metrics = Metrics(config.service())
        self._closing = asyncio.Event()
        self._draining = False
        threads = config.read_threads * max(1, len(config.data_dir))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-read")
        self._observer = Observer(self.metrics)
        self._ledger = ledger = ledger or Ledger()
        sessions, leases = config.max_sessions, config.lease_budget_bytes
        self.store = BlockStore(*tiers, self, max_sessions=sessions, lease_bytes=leases, deletions=ledger.deletions)
        ssd = self.store.tiers.ssd
        rate, queue, observe = config.ssd_write_bytes_per_s, self.store.writes.queue, self._observer.committed
        self.writer = None if ssd is None else WriteBehind(queue, ssd, observe, self._ledger.leave_out, rate)
        held = HeldKeys(PARTS, self.store.tiers.part, self.store.tiers.cold)
        self._journal = Journal(held, instance.incarnation)
        ahead = ByteCredits(config.read_ahead_bytes)
        rows = list(config.tenants)
        self.gauges = gauges_of(self.store, self.streams, self.rooms, ahead, self._journal, self.writer, rows)
        for name, read, at_rest in self.lanes.gauges():
            self.gauges.add(name, read, at_rest)
        self.metrics.watch(self.gauges)
        clock, reuse = asyncio.get_running_loop().time, self._observer.reuse
        self._operations = Operations(self.store, self._pool, ahead, reuse, config.capacity_bytes, clock)
        self.servicer = self._make_servicer(instance, ahead)
        size = config.capacity_bytes
        self.hello = conductor_pb2.JoinHello(instance=instance, capacity_bytes=size, tells_cold=ssd is not None)
        self.agent: Joining | None = None
        if channels is not None and config.conductor:
            self.agent = Joining(channels, config.conductor, self.hello, self._load, None, held, on_drain)

    def _make_servicer(self, instance: kv_pb2.Instance, ahead: ByteCredits) -> KVStoreServicer:
        config, store, pool, timeout_s = self.config, self.store, self._pool, self.config.session_timeout_s
        put = PutResources(store.writes, self.rooms, instance, config.window_bytes, timeout_s, config.room_timeout_s)
        lease_timeout_s, on_read = config.lease_timeout_s, self._observer.read
        operations, journal, closing, streams = self._operations, self._journal, self._closing, self.streams
        deletions = Deletions(operations, self._ledger, self.writer, config.session_timeout_s)
        get = GetResources(store.reads, pool, ahead, instance, timeout_s, lease_timeout_s, on_read, deletions)
        return KVStoreServicer(put, get, deletions, operations, journal, self.gauges, closing, streams, self.lanes)

    @property
    def contract(self) -> Service:
        return kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"], self.servicer

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        self._journal.changed(stored, removed, cooled)
        self._observer.changed(stored, removed)
        if self.agent is not None:
            self.agent.changed(KeyChanges(stored, removed, cooled))

    def asked(self, keys: Sequence[BlockKey]) -> None:
        self._observer.asked(keys)

    def room(self) -> None:
        self.rooms.notify()

    def work(self) -> None:
        if self.writer is not None:
            self.writer.wake()

    def sessions_changed(self) -> None:
        if self.store.writes.sessions or self.store.reads.leases:
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
            running=self.store.reads.leases + len(self.store.writes.sessions),
            waiting=len(self.rooms),
            cached_blocks=len(dram),
            draining=self._draining,
            tiers=told,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Deletes what was missed, runs the writer, ends pins; at the end saves what is visible, and closes all."""
        loop, arena = asyncio.get_running_loop(), self.store.tiers.dram.arena
        arena.on_excess = lambda: loop.call_soon_threadsafe(arena.collect)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each.run()) for each in (self._operations, self.writer) if each is not None]
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
            await asyncio.to_thread(self._ledger.close)
            if self.store.tiers.ssd is not None:
                await asyncio.to_thread(self.store.tiers.ssd.close)
            arena.on_excess = lambda: None  # the loop may end before the last view

    async def _make_durable(self, writer: WriteBehind) -> None:
        self.store.writes.queue.retry()
        if not await writer.drain(self.config.drain_s / 2) or self.store.writes.queue.unsaved:
            blocks = {*self.store.writes.queue.queued, *self.store.writes.queue.unsaved}
            log.warning("some blocks are not durable", blocks=len(blocks))

    async def finish(self) -> None:
        """Reports that this store drains, waits for running sessions for a time, then ends all streams."""
        self._draining = True
        if self.agent is not None:
            self.agent.notify()  # the store stays joined while it drains
        await within(self.config.drain_s / 2, self.idle)
        self._closing.set()
        self._journal.close()
        await within(END_STREAMS_S, self.streams.quiet)


async def serve(ctx: ProcessContext, config: KVStoreConfig) -> None:
    """A kvstore process, until it is told to stop; raises ConfigError, or Mismatch when a conductor refuses it."""
    raise_open_files_limit()
    tiers = await asyncio.to_thread(open_tiers, config)
    await asyncio.to_thread(land.prepare)
    folders = config.data_dir if tiers[1] is None else [disk.folder.path for disk in tiers[1].disks]
    ledger = await asyncio.to_thread(Ledger, [folder / "records" for folder in folders])
    instance = ctx.instance(kv_pb2.INSTANCE_KIND_KVSTORE, config.id, "")
    security = Security.of(config, config.client_listen, config.api_keys)
    async with Channels(Security.tls_of(security)) as channels:
        service = KVStoreService(config, tiers, instance, channels, ctx.stopping.set, ledger)
        async with (
            service.running(),
            service.metrics.served(config.metrics_listen),
            service.lanes.running(config),
            serving(config.listen, [service.contract], security=security) as server,
        ):
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
