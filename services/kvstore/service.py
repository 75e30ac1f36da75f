"""One kvstore process: recover, serve, join the conductor, drain.

Owns how the parts are put together and in which order they end: no new work, running sessions finish, streams end,
visible blocks become durable, files close.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.cluster import HeldKeys, JoinAgent
from moonpool.kv.keys import BlockKey
from moonpool.kv.parts import PARTS
from moonpool.rpc.channels import Channels
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import Service, serving
from moonpool.telemetry.gauges import Gauges
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import Metrics
from moonpool.v1 import conductor_pb2, kv_pb2, kvstore_pb2
from services.kvstore.config import KVStoreConfig
from services.kvstore.core.store import BlockStore
from services.kvstore.dram.tier import DramTier
from services.kvstore.operate.gauges import add_gauges
from services.kvstore.operate.observe import Observer
from services.kvstore.operate.operations import Operations
from services.kvstore.operate.pin_keeper import PinKeeper
from services.kvstore.operate.reuse import ReuseSample
from services.kvstore.operate.warming import Warmer
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.policies.policy import POLICIES
from services.kvstore.servicer import KVStoreServicer
from services.kvstore.ssd.files import raise_open_files_limit
from services.kvstore.ssd.tier import SsdTier, open_tier
from services.kvstore.streams.get_stream import GetParts
from services.kvstore.streams.layers import ReadAhead
from services.kvstore.streams.put_stream import PutParts
from services.kvstore.streams.rooms import RoomQueue
from services.kvstore.streams.watch import Journal, Unreported
from services.kvstore.tenancy.pins import Pins
from services.kvstore.tenancy.protection import Protection
from services.kvstore.tenancy.tenants import DEFAULT_ROW, Account, Grants, TenantRow

_log = get_logger(__name__)

MAX_WAITING_FOR_ROOM = 1024
END_STREAMS_S = 2.0


def make_dram(config: KVStoreConfig) -> DramTier:
    """The empty DRAM tier with the pins' budgets and the tenants' grants."""
    rows = config.tenants
    pins = Pins(
        config.pin_budget_bytes,
        {name: row.pin_bytes for name, row in rows.items() if name != DEFAULT_ROW},
        rows.get(DEFAULT_ROW, TenantRow()).pin_bytes,
        max_pins=config.max_pins,
    )
    account = Account(Grants.of(rows, "dram"))
    return DramTier(config.dram_bytes, POLICIES[config.eviction](), pins=pins, account=account)


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one store.

    Attributes:
        dram: the empty DRAM tier.
        ssd: the SSD tier with everything it held before; None when the configuration wants none.
        ssd_account: what tenants are granted and have on SSD.
    """

    dram: DramTier
    ssd: SsdTier | None
    ssd_account: Account


def open_tiers(config: KVStoreConfig) -> Tiers:
    """Blocking. Makes the DRAM tier, and opens the SSD tier, which keeps what the pins and guarantees say.

    Raises:
        ConfigError: naming `data_dir`.
    """
    dram, account = make_dram(config), Account(Grants.of(config.tenants, "ssd"))
    if config.data_dir is None or not config.has_ssd:
        return Tiers(dram, None, account)
    ssd = open_tier(
        config.data_dir,
        config.ssd_bytes,
        config.segment_size,
        durability=config.durability,
        keeps=Protection(dram.pins.__contains__, account).keeps,
        account=account,
    )
    return Tiers(dram, ssd, account)


class KVStoreService:
    """The store with its threads and its servicer; use `running`.

    Attributes:
        store: what it holds.
        servicer: how others reach it.
        pins: its pins.
        rooms: who waits for room in DRAM.
        ahead: what is read ahead.
        idle: set while no session is open.
    """

    def __init__(self, config: KVStoreConfig, tiers: Tiers, instance: kv_pb2.Instance) -> None:
        self.config = config
        self.instance = instance
        self.ssd_account = tiers.ssd_account
        ssd = tiers.ssd
        self.store = BlockStore(tiers.dram, ssd, max_sessions=config.max_sessions, durable_account=tiers.ssd_account)
        self.pins = PinKeeper(self.store)
        self.ssd = ssd
        self.closing = asyncio.Event()
        self.idle = asyncio.Event()
        self._pool = ThreadPoolExecutor(config.read_threads, thread_name_prefix="kvstore-read")
        holdings, writes, reads = self.store.holdings, self.store.writes, self.store.reads
        self.rooms = RoomQueue(MAX_WAITING_FOR_ROOM)
        self.writer = WriteBehind(writes, ssd) if ssd is not None else None
        self.ahead = ReadAhead(config.read_ahead_bytes)
        self.held = HeldKeys(PARTS, holdings.part)
        self.journal = Journal(self.held, instance.incarnation)
        put = PutParts(
            writes,
            self.rooms,
            instance,
            config.window_bytes,
            config.session_timeout_s,
            config.room_timeout_s,
            self._session_changed,
        )
        get = GetParts(
            reads,
            self._pool,
            self.ahead,
            instance,
            config.session_timeout_s,
            config.lease_timeout_s,
            self._session_changed,
            lambda cold, seconds: self.observer.read(cold=cold, seconds=seconds),
        )
        self.gauges = Gauges()
        self.metrics = Metrics(config.service())
        self.observer = Observer(self.metrics)
        self.reuse = ReuseSample()
        warmer = Warmer(self.store, self._pool, self.ahead, self._session_changed)
        capacity_bytes = config.dram_bytes + config.durable_bytes
        operations = Operations(self.store, ssd, self.writer, warmer, self.reuse, capacity_bytes)
        self.servicer = KVStoreServicer(
            put, get, holdings.match, self.pins, operations, self.journal, self.gauges, instance, self.closing
        )
        self.servicer.quiet.set()
        add_gauges(self)
        self.metrics.watch(self.gauges)
        self._session_changed()
        holdings.on_change.append(self.journal.changed)
        holdings.on_change.append(self.observer.changed)
        reads.on_asked = self._asked
        holdings.on_room.append(self.rooms.poke)
        if self.writer is not None:
            self.writer.on_committed = self.observer.committed
            writes.on_work = self.writer.wake
            reads.on_lost = self.writer.wake

    @property
    def contract(self) -> Service:
        """What `serving` serves."""
        return kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"], self.servicer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the writer; at the end everything visible is made durable, threads and files are closed."""
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self.writer.run()) if self.writer is not None else None
                try:
                    yield
                finally:
                    if self.writer is not None and writer is not None:
                        if not await self.writer.drain(self.config.drain_s / 2):
                            _log.warning("not everything could be made durable", blocks=self.store.writes.pending)
                        writer.cancel()
        finally:
            self.pins.close()
            if self.writer is not None:
                await self.writer.aclose()
            await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
            if self.ssd is not None:
                await asyncio.to_thread(self.ssd.close)

    async def finish(self) -> None:
        """Waits for running sessions, for a time; then ends all streams."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s / 2):
                await self.idle.wait()
        self.closing.set()
        self.journal.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_STREAMS_S):
                await self.servicer.quiet.wait()

    def _asked(self, keys: Sequence[BlockKey]) -> None:
        self.observer.asked(keys)
        self.reuse.observe(keys)

    def _session_changed(self) -> None:
        if self.store.writes.sessions or self.store.reads.leases:
            self.idle.clear()
        else:
            self.idle.set()


async def serve(ctx: ProcessContext, config: KVStoreConfig) -> None:
    """A kvstore process, until it is told to stop.

    Raises:
        ConfigError: a setting cannot be used.
        Mismatch: the conductor refuses this store.
    """
    raise_open_files_limit()
    tiers = await asyncio.to_thread(open_tiers, config)
    instance = ctx.instance(kv_pb2.INSTANCE_KIND_KVSTORE, config.id, "")
    service = KVStoreService(config, tiers, instance)
    async with (
        service.running(),
        service.metrics.served(config.metrics_listen),
        Channels() as channels,
        serving(config.listen, [service.contract]) as server,
    ):
        instance.address = config.advertised(server.port)
        left = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            agent = _join(service, channels, ctx.stopping) if config.conductor else None
            if agent is not None:
                group.create_task(agent.run(left))
            ctx.announce(instance.address)
            await ctx.stopping.wait()
            server.set_serving(False)
            if agent is not None:
                agent.notify()  # tells that this store drains; it stays joined while it does
            await service.finish()
            left.set()


def _join(service: KVStoreService, channels: Channels, stopping: asyncio.Event) -> JoinAgent:
    """The agent that keeps this store joined; while the store drains it says so."""
    holdings, dram = service.store.holdings, service.store.holdings.dram
    unreported = Unreported(lambda: agent.follows)

    def load() -> conductor_pb2.LoadReport:
        reads, writes = service.store.reads, service.store.writes
        return conductor_pb2.LoadReport(
            running=reads.leases + writes.sessions,
            waiting=len(service.rooms),
            cached_blocks=len(dram),
            draining=stopping.is_set(),
        )

    agent = JoinAgent(
        channels,
        service.config.conductor,
        conductor_pb2.JoinHello(
            instance=service.instance, capacity_bytes=service.config.dram_bytes + service.config.durable_bytes
        ),
        load,
        unreported.take,
        service.held,
        stopping.set,
    )
    holdings.on_change.append(unreported.changed)
    holdings.on_change.append(lambda stored, removed: agent.notify())
    return agent
