"""What a kvstore tells about itself, as numbers.

Those with a value at rest come back to it when no session is open. Figures per tenant exist for tenants that have a row
in the configuration, and one for all others together ("*"), so that a peer cannot add any.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping

from moonpool.streams.credits import ByteCredits
from moonpool.telemetry.gauges import Gauges, process_entries
from services.kvstore.core.store import BlockStore
from services.kvstore.operate.writer import WriteBehind
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.streams.open_calls import OpenCalls
from services.kvstore.streams.rooms import RoomQueue
from services.kvstore.streams.watch import Journal
from services.kvstore.tenancy.tenants import DEFAULT_ROW, Account, TenantRow

Add = Callable[..., None]


@dataclasses.dataclass(frozen=True, slots=True)
class Gauged:
    """What the gauges of a store read; `writer` is None without an SSD tier."""

    store: BlockStore
    calls: OpenCalls
    rooms: RoomQueue
    ahead: ByteCredits
    journal: Journal
    writer: WriteBehind | None
    ssd_account: Account
    rows: Mapping[str, TenantRow]


def gauges_of(of: Gauged) -> Gauges:
    """All gauges of a store."""
    gauges = Gauges(process_entries())
    _add_sessions(gauges.add, of)
    _add_dram(gauges.add, of)
    if of.store.tiers.ssd is not None:
        _add_ssd(gauges.add, of.store.tiers.ssd)
    _add_pins(gauges.add, of)
    _add_tenants(gauges.add, of)
    return gauges


def _add_sessions(add: Add, of: Gauged) -> None:
    writes, reads, dram, calls = of.store.writes, of.store.reads, of.store.tiers.dram, of.calls
    add("put_sessions", lambda: writes.sessions, 0)
    add("get_sessions", lambda: reads.leases, 0)
    add("sessions_waiting_for_room", lambda: len(of.rooms), 0)
    add("unfinished_blocks", lambda: writes.unfinished_blocks, 0)
    add("pending_writes", lambda: writes.pending, 0)
    add("dram_reserved_bytes", lambda: dram.reserved_bytes, 0)
    add("dram_held_bytes", lambda: dram.held_bytes, 0)
    add("dram_leased_bytes", lambda: reads.leased_bytes, 0)
    add("durability_awaited_blocks", lambda: writes.awaited, 0)
    add("read_ahead_bytes", lambda: of.ahead.out, 0)
    add("stream_tasks", lambda: sum(stream.tasks for stream in calls.kv_streams), 0)
    add("messages_unsent", lambda: calls.traffic.unsent, 0)
    add("put_credits_kept_bytes", lambda: calls.traffic.credits_kept, 0)
    add("get_credits_out_bytes", lambda: calls.traffic.credits_out, 0)
    add("streams", lambda: calls.streams)
    add("watchers", lambda: of.journal.watchers)


def _add_dram(add: Add, of: Gauged) -> None:
    writes, reads, dram, writer = of.store.writes, of.store.reads, of.store.tiers.dram, of.writer
    add("dram_bytes", lambda: dram.block_bytes)
    add("dram_capacity_bytes", lambda: dram.capacity_bytes)
    add("dram_blocks", lambda: len(dram))
    add("dram_evictions_total", lambda: dram.evictions)
    add("damaged_blocks_total", lambda: of.store.tiers.damaged_blocks)
    add("blocks_put_total", lambda: writes.blocks_put)
    add("blocks_durable_total", lambda: writes.blocks_durable)
    add("blocks_not_durable_total", lambda: writes.blocks_not_durable)
    add("blocks_unsaved", lambda: writes.unsaved)
    add("failed_batches_total", lambda: writes.failed_batches)
    add("retried_batches_total", lambda: 0 if writer is None else writer.retries)
    add("dram_hits_total", lambda: reads.dram_hits)
    add("ssd_hits_total", lambda: reads.ssd_hits)
    add("misses_total", lambda: reads.misses)
    add("promotions_total", lambda: reads.promotions)
    add("bad_blocks_total", lambda: reads.bad_blocks)
    add("arena_live_bytes", lambda: dram.arena.live_bytes)
    add("arena_free_bytes", lambda: dram.arena.free_bytes)
    add("arena_resident_bytes", lambda: dram.arena.resident_bytes)
    add("arena_mapped_bytes", lambda: dram.arena.mapped_bytes)
    add("arena_returned_bytes_total", lambda: dram.arena.returned_bytes)


def _add_ssd(add: Add, ssd: SsdTier) -> None:
    add("ssd_reading_blocks", lambda: ssd.readers, 0)
    add("ssd_blocks", lambda: len(ssd))
    add("ssd_bytes", lambda: ssd.used_bytes)
    add("ssd_capacity_bytes", lambda: ssd.capacity_bytes)
    add("ssd_segments", lambda: ssd.segments)
    add("ssd_indexed", lambda: float(ssd.indexed))
    add("ssd_live_bytes", lambda: ssd.live_bytes)
    add("ssd_housekeeping", lambda: float(ssd.has_housekeeping))
    add("ssd_written_bytes_total", lambda: ssd.written_bytes)
    add("ssd_user_bytes_total", lambda: ssd.user_bytes)
    add("ssd_carried_bytes_total", lambda: ssd.carried_bytes)
    add("ssd_write_amplification", lambda: ssd.write_amplification)
    add("ssd_lost_blocks_total", lambda: ssd.lost_blocks)
    add("ssd_dropped_segments_total", lambda: ssd.dropped_segments)


def _add_pins(add: Add, of: Gauged) -> None:
    pins, dram = of.store.pins, of.store.tiers.dram
    add("pins", lambda: len(pins))
    add("pinned_blocks", lambda: pins.keys)
    add("pinned_bytes", lambda: pins.nbytes)
    add("pin_budget_bytes", lambda: pins.budget_bytes)
    add("dram_pinned_bytes", lambda: dram.pinned_bytes)


def _add_tenants(add: Add, of: Gauged) -> None:
    """Of tenants with a row, and of all others together under "*"."""

    def add_one(what: str, tenant: str, used: Callable[[str], int]) -> None:
        add(f"tenant_{what}{{tenant={json.dumps(tenant, ensure_ascii=False)}}}", lambda: used(tenant))

    for tenant in dict.fromkeys([*of.rows, DEFAULT_ROW]) if of.rows else ():
        add_one("dram_bytes", tenant, of.store.tiers.dram.account.of_row)
        add_one("pinned_bytes", tenant, of.store.pins.of_row)
        if of.store.tiers.ssd is not None:
            add_one("ssd_bytes", tenant, of.ssd_account.of_row)
