"""The gauges of a kvstore.

Those with a value at rest have it again when no session is open. Figures per tenant exist for tenants that have a row
in the configuration, and one for all others together ("*"), so that a peer cannot add any.
"""

import functools
import json
from collections.abc import Sequence

from moonpool.cluster.journal import Journal
from moonpool.streams.credits import ByteCredits
from moonpool.streams.open_streams import OpenStreams
from moonpool.telemetry.gauges import Gauges, process_entries
from services.kvstore.core.store import BlockStore
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.streams.rooms import RoomQueue
from services.kvstore.tenancy.tenants import DEFAULT_ROW


def gauges_of(
    store: BlockStore,
    streams: OpenStreams,
    rooms: RoomQueue,
    ahead: ByteCredits,
    journal: Journal,
    writer: WriteBehind | None,
    tenants: Sequence[str],
) -> Gauges:
    """All gauges of a store; `writer` is None without an SSD tier, `tenants` are those with a row."""
    gauges = Gauges(process_entries())
    add, writes, reads, dram = gauges.add, store.writes, store.reads, store.tiers.dram
    add("put_sessions", lambda: len(writes.sessions), 0)
    add("get_sessions", lambda: reads.leases, 0)
    add("unfinished_blocks", lambda: len(writes.unfinished), 0)
    add("pending_writes", lambda: len(writes.queue.queued), 0)
    add("dram_reserved_bytes", lambda: dram.reserved.total_bytes, 0)
    add("dram_held_bytes", lambda: dram.held_bytes, 0)
    add("dram_leased_bytes", lambda: reads.leased_bytes, 0)
    add("durability_awaited_blocks", lambda: len(writes.awaiting), 0)
    add("stream_tasks", lambda: sum(stream.tasks for stream in streams.kv), 0)
    add("messages_unsent", lambda: streams.traffic.unsent, 0)
    add("put_credits_kept_bytes", lambda: streams.traffic.credits_kept, 0)
    add("get_credits_out_bytes", lambda: streams.traffic.credits_out, 0)
    add("streams", lambda: len(streams))
    add("sessions_waiting_for_room", lambda: len(rooms), 0)
    add("read_ahead_bytes", lambda: ahead.out, 0)
    add("watchers", lambda: journal.watchers)
    add("retried_batches_total", lambda: 0 if writer is None else writer.retries)
    add("dram_bytes", lambda: dram.block_bytes)
    add("dram_blocks", lambda: len(dram))
    add("dram_pinned_bytes", lambda: dram.pinned.total_bytes)
    add("blocks_unsaved", lambda: len(writes.queue.unsaved))
    add("pins", lambda: len(dram.pins))
    add("pinned_blocks", lambda: dram.pins.keys)
    add("pinned_bytes", lambda: dram.pins.nbytes)
    add("pin_budget_bytes", lambda: dram.pins.budget_bytes)
    _add_attributes(gauges, "dram_{}", dram, "capacity_bytes")
    _add_attributes(gauges, "dram_{}_total", dram, "evictions")
    _add_attributes(gauges, "{}_total", writes, "blocks_put")
    _add_attributes(gauges, "{}_total", writes.queue, "blocks_durable", "blocks_not_durable", "failed_batches")
    counts = "dram_hits", "ssd_hits", "misses", "promotions", "bad_blocks", "damaged_blocks"
    _add_attributes(gauges, "{}_total", reads, *counts)
    _add_attributes(gauges, "arena_{}", dram.arena, "free_bytes", "live_bytes", "resident_bytes", "mapped_bytes")
    _add_attributes(gauges, "arena_{}_total", dram.arena, "returned_bytes")
    tables = {"dram_bytes": dram.account.used, "pinned_bytes": dram.pins.account.used}
    if store.tiers.ssd is not None:
        _add_ssd(gauges, store.tiers.ssd)
        tables["ssd_bytes"] = store.tiers.ssd.account.used
    for tenant in dict.fromkeys([*tenants, DEFAULT_ROW]) if tenants else ():
        label = json.dumps(tenant, ensure_ascii=False)
        for what, used in tables.items():
            add(f"tenant_{what}{{tenant={label}}}", functools.partial(used.of_row, tenant, tenants))
    return gauges


def _add_attributes(gauges: Gauges, name: str, source: object, *attributes: str) -> None:
    for attribute in attributes:
        gauges.add(name.format(attribute), functools.partial(getattr, source, attribute))


def _add_ssd(gauges: Gauges, ssd: SsdTier) -> None:
    add = gauges.add
    add("ssd_reading_blocks", lambda: ssd.readers, 0)
    add("ssd_blocks", lambda: len(ssd.catalogue))
    add("ssd_segments", lambda: len(ssd.catalogue.segments))
    add("ssd_bytes", lambda: ssd.used_bytes)
    add("ssd_live_bytes", lambda: ssd.catalogue.live.total_bytes)
    _add_attributes(gauges, "ssd_{}", ssd, "capacity_bytes", "disks_out", "indexed")
    add("ssd_write_amplification", lambda: ssd.written_bytes / ssd.user_bytes if ssd.user_bytes else 1.0)
    add("ssd_housekeeping", lambda: ssd.has_housekeeping)
    counts = "written_bytes", "user_bytes", "carried_bytes", "lost_blocks", "dropped_segments"
    _add_attributes(gauges, "ssd_{}_total", ssd, *counts)
    _add_attributes(gauges, "ssd_{}_total", ssd.admission, "refused_blocks", "refused_bytes")
