"""A store's reports: metrics, histograms of reads and of block lifetimes, and a sample of reuse.

Tenant metrics exist for tenants with a row in the configuration, and once for all other tenants together ("*"). So a
peer cannot add metrics.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base import world
from moonpool.base.cluster.kv_events import KVEventJournal
from moonpool.base.kv.blocks import PICTURES
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.reuse_stats import KeySample, ReuseSample
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet, counter
from moonpool.base.telemetry.prometheus import AGES, SECONDS, PrometheusMetrics
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.base.transport.open_streams import OpenStreams
from moonpool.kvstore.core.store import BlockStore
from moonpool.kvstore.eviction.tenants import DEFAULT_ROW, TenantBytes
from moonpool.kvstore.memory_wait_queue import MemoryWaitQueue
from moonpool.kvstore.prefetch import Prefetcher
from moonpool.kvstore.ssd.tier import SsdTier
from moonpool.kvstore.write_behind import WriteBehind

SSD_METRICS: tuple[Metric[SsdTier], ...] = (
    Metric("ssd_reading_blocks", "Blocks that are being read from SSD.", lambda ssd: ssd.readers, 0),
    Metric("ssd_blocks", "Blocks on SSD.", lambda ssd: len(ssd.catalogue)),
    Metric("ssd_segments", "Segment files on SSD.", lambda ssd: len(ssd.catalogue.segments)),
    Metric("ssd_bytes", "Bytes of segment files on SSD.", lambda ssd: ssd.used_bytes),
    Metric("ssd_live_bytes", "Bytes on SSD of records that are in use.", lambda ssd: ssd.catalogue.live.total_bytes),
    Metric("picture_ssd_bytes", "Bytes on SSD of encoded pictures.", lambda ssd: ssd.account.used[PICTURES]),
    Metric("ssd_capacity_bytes", "Size of the SSD tier in bytes.", lambda ssd: ssd.capacity_bytes),
    Metric(
        "ssd_locked_blocks",
        "Blocks on SSD that counted as absent at the start, because `encryption_keys` lacks their key.",
        lambda ssd: ssd.locked_blocks,
    ),
    Metric("ssd_disks_out", "Data folders left out since the start.", lambda ssd: ssd.disks_out),
    Metric("ssd_indexed", "1 if the SSD tier keeps an index on disk, else 0.", lambda ssd: ssd.indexed),
    Metric(
        "ssd_write_amplification",
        "Bytes written to SSD over bytes of new blocks.",
        lambda ssd: ssd.written_bytes / ssd.user_bytes if ssd.user_bytes else 1.0,
    ),
    Metric(
        "ssd_housekeeping", "1 if segments wait to be rewritten or deleted, else 0.", lambda ssd: ssd.has_housekeeping
    ),
    counter("ssd_written_bytes_total", "Bytes written to SSD.", lambda ssd: ssd.written_bytes),
    counter("ssd_user_bytes_total", "Bytes written to SSD for new blocks.", lambda ssd: ssd.user_bytes),
    counter(
        "ssd_carried_bytes_total",
        "Bytes of records copied out of segments that were removed.",
        lambda ssd: ssd.carried_bytes,
    ),
    counter(
        "ssd_lost_blocks_total",
        "Blocks found damaged when they were to be copied to another segment.",
        lambda ssd: ssd.lost_blocks,
    ),
    counter("ssd_scrubbed_bytes_total", "Bytes that scrubbing has read and checked.", lambda ssd: ssd.scrubbed_bytes),
    counter("ssd_scrub_passes_total", "Times that scrubbing has read all blocks.", lambda ssd: ssd.scrub_passes),
    counter(
        "ssd_indexes_rebuilt_total",
        "Times that an index on disk was written anew: damaged, lost, or of an older version.",
        lambda ssd: ssd.indexes_rebuilt,
    ),
    counter("ssd_dropped_segments_total", "Segments removed: evicted, or rewritten.", lambda ssd: ssd.dropped_segments),
    counter(
        "ssd_refused_blocks_total", "Blocks that the SSD tier did not admit.", lambda ssd: ssd.admission.refused_blocks
    ),
    counter(
        "ssd_refused_bytes_total", "Bytes that the SSD tier did not admit.", lambda ssd: ssd.admission.refused_bytes
    ),
)
"""Reported by a store with an SSD tier."""
FOLLOWED_KEYS = 4096


@dataclass(frozen=True, slots=True)
class MeasuredStore:
    """The parts of a running store that the metrics read.

    Attributes:
        store: both tiers, and the open transfers.
        streams: open streams of clients.
        rooms: transfers that wait for DRAM.
        ahead: bounds the bytes that were read from SSD and not sent yet.
        journal: the watchers of KV events.
        writer: writes to the SSD tier; None = no SSD tier.
        prefetcher: reads from the SSD tier for sessions.
    """

    store: BlockStore
    streams: OpenStreams
    rooms: MemoryWaitQueue
    ahead: ByteCredits
    journal: KVEventJournal
    writer: WriteBehind | None
    prefetcher: Prefetcher


STORE_METRICS: tuple[Metric[MeasuredStore], ...] = (
    Metric("put_transfers", "Open writing transfers.", lambda measured: len(measured.store.writes.transfers), 0),
    Metric("get_transfers", "Open reading transfers.", lambda measured: measured.store.reads.leases, 0),
    Metric(
        "unfinished_blocks",
        "Blocks that have not fully arrived.",
        lambda measured: len(measured.store.writes.unfinished),
        0,
    ),
    Metric(
        "pending_writes",
        "Blocks on the way to the SSD tier.",
        lambda measured: len(measured.store.writes.queue.states),
        0,
    ),
    Metric(
        "dram_reserved_bytes",
        "Bytes of DRAM reserved for blocks that are being written or read in.",
        lambda measured: measured.store.tiers.dram.reserved.total_bytes,
        0,
    ),
    Metric(
        "dram_held_bytes",
        "Bytes in DRAM that leases keep from eviction.",
        lambda measured: measured.store.tiers.dram.held_bytes,
        0,
    ),
    Metric(
        "dram_leased_bytes",
        "Bytes of DRAM counted against the budget of reading transfers.",
        lambda measured: measured.store.reads.leased_bytes,
        0,
    ),
    Metric(
        "durability_awaited_blocks",
        "Blocks with writers that wait until the blocks are durable.",
        lambda measured: len(measured.store.writes.awaiting),
        0,
    ),
    Metric(
        "stream_tasks",
        "Tasks of open streams.",
        lambda measured: sum(stream.tasks for stream in measured.streams.kv),
        0,
    ),
    Metric(
        "messages_unsent",
        "Messages that wait to be written to clients.",
        lambda measured: measured.streams.traffic.unsent,
        0,
    ),
    Metric(
        "put_credits_kept_bytes",
        "Bytes from writers with credits not yet handed back.",
        lambda measured: measured.streams.traffic.credits_kept,
        0,
    ),
    Metric(
        "get_credits_out_bytes",
        "Bytes sent to readers with credits not yet returned.",
        lambda measured: measured.streams.traffic.credits_out,
        0,
    ),
    Metric("streams", "Open streams of clients.", lambda measured: len(measured.streams)),
    Metric("transfers_waiting_for_room", "Transfers that wait for free DRAM.", lambda measured: len(measured.rooms), 0),
    Metric(
        "read_ahead_bytes", "Bytes that were read from SSD and not sent yet.", lambda measured: measured.ahead.out, 0
    ),
    Metric("watchers", "Clients that follow KV events.", lambda measured: measured.journal.watchers),
    counter(
        "retried_batches_total",
        "Batches for the SSD tier that were tried again.",
        lambda measured: 0 if measured.writer is None else measured.writer.retries,
    ),
    Metric("dram_bytes", "Bytes of blocks in DRAM.", lambda measured: measured.store.tiers.dram.block_bytes),
    Metric("dram_blocks", "Blocks in DRAM.", lambda measured: len(measured.store.tiers.dram)),
    Metric(
        "dram_pinned_bytes",
        "Bytes of pinned blocks in DRAM.",
        lambda measured: measured.store.tiers.dram.pinned.total_bytes,
    ),
    Metric(
        "blocks_unsaved",
        "Blocks in DRAM that could not be written to SSD and will be tried again.",
        lambda measured: len(measured.store.writes.queue.unsaved),
    ),
    Metric("sessions", "Sessions with blocks in DRAM.", lambda measured: len(measured.store.tiers.dram.policy)),
    Metric(
        "unwanted_blocks",
        "Blocks in DRAM that no session will ask for again: they leave first.",
        lambda measured: measured.store.tiers.dram.policy.unwanted,
    ),
    Metric(
        "prefetching", "Sessions whose blocks are read from SSD, or wait.", lambda measured: len(measured.prefetcher), 0
    ),
    counter(
        "prefetched_blocks_total",
        "Blocks read from SSD for sessions before their turn.",
        lambda measured: measured.prefetcher.blocks,
    ),
    counter(
        "prefetches_cancelled_total",
        "Sessions that were told of anew before all of their blocks were read.",
        lambda measured: measured.prefetcher.cancelled,
    ),
    Metric("pins", "Named pins.", lambda measured: len(measured.store.tiers.dram.pins)),
    Metric(
        "pinned_blocks", "Blocks that pins keep, in either tier.", lambda measured: measured.store.tiers.dram.pins.keys
    ),
    Metric(
        "pinned_bytes", "Bytes that pins keep, in either tier.", lambda measured: measured.store.tiers.dram.pins.nbytes
    ),
    Metric(
        "pin_budget_bytes",
        "Most bytes that all pins may keep.",
        lambda measured: measured.store.tiers.dram.pins.budget_bytes,
    ),
    Metric(
        "dram_capacity_bytes",
        "Size of the DRAM tier in bytes.",
        lambda measured: measured.store.tiers.dram.capacity_bytes,
    ),
    counter("dram_evictions_total", "Blocks evicted from DRAM.", lambda measured: measured.store.tiers.dram.evictions),
    counter("blocks_put_total", "Blocks stored.", lambda measured: measured.store.writes.blocks_put),
    counter(
        "blocks_durable_total", "Blocks written to SSD.", lambda measured: measured.store.writes.queue.blocks_durable
    ),
    counter(
        "blocks_not_durable_total",
        "Blocks that could not be written to SSD.",
        lambda measured: measured.store.writes.queue.blocks_not_durable,
    ),
    counter(
        "failed_batches_total",
        "Batches that failed at the disk.",
        lambda measured: measured.store.writes.queue.failed_batches,
    ),
    counter("dram_hits_total", "Blocks found in DRAM by readers.", lambda measured: measured.store.reads.dram_hits),
    counter("ssd_hits_total", "Blocks found on SSD by readers.", lambda measured: measured.store.reads.ssd_hits),
    counter(
        "misses_total", "Blocks that readers asked for and did not find.", lambda measured: measured.store.reads.misses
    ),
    Metric(
        "picture_dram_bytes",
        "Bytes of encoded pictures in DRAM.",
        lambda measured: measured.store.tiers.dram.account.used[PICTURES],
    ),
    counter(
        "picture_evictions_total",
        "Blocks of encoded pictures evicted from DRAM.",
        lambda measured: measured.store.tiers.dram.picture_evictions,
    ),
    counter(
        "picture_hits_total",
        "Blocks of encoded pictures that readers found, in either tier.",
        lambda measured: measured.store.reads.picture_hits,
    ),
    counter(
        "picture_misses_total",
        "Blocks of encoded pictures that readers asked for and did not find.",
        lambda measured: measured.store.reads.picture_misses,
    ),
    counter("promotions_total", "Blocks read from SSD into DRAM.", lambda measured: measured.store.reads.promotions),
    counter(
        "bad_blocks_total", "Blocks on SSD dropped for wrong bytes.", lambda measured: measured.store.reads.bad_blocks
    ),
    counter(
        "damaged_blocks_total",
        "Blocks in DRAM dropped for wrong bytes.",
        lambda measured: measured.store.reads.damaged_blocks,
    ),
    Metric(
        "arena_free_bytes",
        "Resident bytes of free slots in DRAM.",
        lambda measured: measured.store.tiers.dram.arena.free_bytes,
    ),
    Metric(
        "arena_live_bytes", "Bytes of used slots in DRAM.", lambda measured: measured.store.tiers.dram.arena.live_bytes
    ),
    Metric(
        "arena_resident_bytes",
        "Resident bytes of all slots.",
        lambda measured: measured.store.tiers.dram.arena.resident_bytes,
    ),
    Metric(
        "arena_mapped_bytes",
        "Address space of all slots in bytes.",
        lambda measured: measured.store.tiers.dram.arena.mapped_bytes,
    ),
    counter(
        "arena_returned_bytes_total",
        "Bytes of slots returned to the operating system.",
        lambda measured: measured.store.tiers.dram.arena.returned_bytes,
    ),
)


class TenantFigures(NamedTuple):
    """One tenant, or all tenants without a row, in a byte table."""

    used: TenantBytes
    tenant: str
    rows: Sequence[str]

    @property
    def nbytes(self) -> float:
        return self.used.of_row(self.tenant, self.rows)


def _tenant_metric(name: str, text: str) -> tuple[Metric[TenantFigures]]:
    return (Metric(name, text, lambda measured: measured.nbytes),)


TENANT_DRAM = _tenant_metric("tenant_dram_bytes", "Bytes of a tenant's blocks in DRAM.")
TENANT_PINNED = _tenant_metric("tenant_pinned_bytes", "Bytes that a tenant's pins keep.")
TENANT_SSD = _tenant_metric("tenant_ssd_bytes", "Bytes of a tenant's blocks on SSD.")


def store_metrics(measured: MeasuredStore, tenants: Sequence[str]) -> MetricSet:
    """All metrics of a store; `tenants` are those with a row."""
    metrics = MetricSet().add(PROCESS_METRICS, None).add(STORE_METRICS, measured)
    dram, ssd = measured.store.tiers.dram, measured.store.tiers.ssd
    tables = [(TENANT_DRAM, dram.account.used), (TENANT_PINNED, dram.pins.account.used)]
    if ssd is not None:
        metrics.add(SSD_METRICS, ssd)
        tables.append((TENANT_SSD, ssd.account.used))
    for tenant in dict.fromkeys([*tenants, DEFAULT_ROW]) if tenants else ():
        for table, used in tables:
            metrics.add(table, TenantFigures(used, tenant, tenants), tenant=tenant)
    return metrics


class StoreObserver:
    """Fills the histograms and the reuse sample of a store. Lives of blocks are followed for `sample_keys` at most."""

    def __init__(
        self, metrics: PrometheusMetrics, clock: Callable[[], float] = world.monotonic, sample_keys: int = FOLLOWED_KEYS
    ) -> None:
        self._clock = clock
        reads = metrics.histogram(
            "read_seconds", "Seconds of a reading transfer, by the coldest tier.", SECONDS, ["tier"]
        )
        self._warm_reads, self._cold_reads = reads.labels(tier="dram"), reads.labels(tier="ssd")
        self.committed = metrics.histogram("commit_seconds", "Seconds until a batch was on SSD.", SECONDS).observe
        self._lifetimes = metrics.histogram(
            "block_lifetime_seconds", "Seconds from storing a block to losing the block, in a sample of blocks.", AGES
        )
        self._gaps = metrics.histogram(
            "block_reuse_gap_seconds", "Seconds between two uses of a block, of a sample of blocks.", AGES
        )
        self.reuse = ReuseSample()
        self.followed: KeySample[tuple[float, float]] = KeySample(sample_keys)  # times: stored, used last

    def read(self, cold: bool, seconds: float) -> None:
        (self._cold_reads if cold else self._warm_reads).observe(seconds)

    def asked(self, keys: Sequence[BlockKey]) -> None:
        self.reuse.observe(keys)
        now = self._clock()
        for key in keys:
            if key in self.followed:
                stored, used = self.followed[key]
                self._gaps.observe(now - used)
                self.followed[key] = (stored, now)

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        now = self._clock()
        for key in removed:
            if key in self.followed:
                self._lifetimes.observe(now - self.followed.pop(key)[0])
        for key in stored:
            if key not in self.followed and self.followed.accepts(key):
                self.followed.put(key, (now, now))
