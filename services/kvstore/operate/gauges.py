"""The gauges of a kvstore.

Those with a value at rest have it again when no session is open. Figures per tenant exist for tenants that have a row
in the configuration, and one for all others together ("*"), so that a peer cannot add any.
"""

import functools
import json
from collections.abc import Callable, Sequence

from moonpool.streams.credits import ByteCredits
from moonpool.telemetry.gauges import Gauges, process_entries
from services.kvstore.core.store import BlockStore
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.streams.open_streams import OpenStreams
from services.kvstore.streams.rooms import RoomQueue
from services.kvstore.streams.watch import Journal
from services.kvstore.tenancy.tenants import DEFAULT_ROW

Add = Callable[..., None]


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
    add = gauges.add
    _add_sessions(add, store, streams)
    add("sessions_waiting_for_room", lambda: len(rooms), 0)
    add("read_ahead_bytes", lambda: ahead.out, 0)
    add("watchers", lambda: journal.watchers)
    add("retried_batches_total", lambda: 0 if writer is None else writer.retries)
    _add_dram(add, store)
    if store.tiers.ssd is not None:
        _add_ssd(add, store.tiers.ssd)
    _add_tenants(add, store, tenants)
    return gauges


def _add_sessions(add: Add, store: BlockStore, streams: OpenStreams) -> None:
    writes, reads, dram = store.writes, store.reads, store.tiers.dram
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


def _add_attributes(add: Add, source: object, name: str, *attributes: str) -> None:
    """One gauge per attribute of `source`; `name` is a format for the names."""
    for attribute in attributes:
        add(name.format(attribute), functools.partial(getattr, source, attribute))


def _add_dram(add: Add, store: BlockStore) -> None:
    writes, dram, pins = store.writes, store.tiers.dram, store.tiers.dram.pins
    add("dram_bytes", lambda: dram.block_bytes)
    add("dram_blocks", lambda: len(dram))
    _add_attributes(add, dram, "dram_{}", "capacity_bytes")
    _add_attributes(add, dram, "dram_{}_total", "evictions")
    _add_attributes(add, writes, "{}_total", "blocks_put")
    _add_attributes(add, writes.queue, "{}_total", "blocks_durable", "blocks_not_durable", "failed_batches")
    add("blocks_unsaved", lambda: len(writes.queue.unsaved))
    _add_attributes(
        add, store.reads, "{}_total", "dram_hits", "ssd_hits", "misses", "promotions", "bad_blocks", "damaged_blocks"
    )
    _add_attributes(add, dram.arena, "arena_{}", "free_bytes", "live_bytes", "resident_bytes", "mapped_bytes")
    _add_attributes(add, dram.arena, "arena_{}_total", "returned_bytes")
    add("pins", lambda: len(pins))
    add("pinned_blocks", lambda: pins.keys)
    add("pinned_bytes", lambda: pins.nbytes)
    add("pin_budget_bytes", lambda: pins.budget_bytes)
    add("dram_pinned_bytes", lambda: dram.pinned.total_bytes)


def _add_ssd(add: Add, ssd: SsdTier) -> None:
    add("ssd_reading_blocks", lambda: ssd.readers, 0)
    add("ssd_blocks", lambda: len(ssd.catalogue))
    add("ssd_segments", lambda: len(ssd.catalogue.segments))
    add("ssd_bytes", lambda: ssd.space.used_bytes)
    add("ssd_live_bytes", lambda: ssd.catalogue.live.total_bytes)
    add("ssd_capacity_bytes", lambda: ssd.space.capacity_bytes)
    add("ssd_write_amplification", lambda: ssd.write_amplification)
    add("ssd_indexed", lambda: float(ssd.indexed))
    add("ssd_housekeeping", lambda: float(ssd.has_housekeeping))
    counts = ("written_bytes", "user_bytes", "carried_bytes", "lost_blocks", "dropped_segments")
    _add_attributes(add, ssd, "ssd_{}_total", *counts)


def _add_tenants(add: Add, store: BlockStore, rows: Sequence[str]) -> None:
    """Of tenants with a row, and of all others together under "*"."""
    tables = {"dram_bytes": store.tiers.dram.account.used, "pinned_bytes": store.tiers.dram.pins.account.used}
    if store.tiers.ssd is not None:
        tables["ssd_bytes"] = store.tiers.ssd.account.used
    for tenant in dict.fromkeys([*rows, DEFAULT_ROW]) if rows else ():
        label = json.dumps(tenant, ensure_ascii=False)
        for what, used in tables.items():
            add(f"tenant_{what}{{tenant={label}}}", functools.partial(used.of_row, tenant, rows))
