"""What a kvstore tells about itself, as numbers.

Owns their names. Must not know how they are shown. Those with a value at rest come back to it when no session is open.
Figures per tenant exist for tenants that have a row in the configuration, and one for all others together ("*"), so
that their number does not depend on who comes.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.telemetry.gauges import process_entries
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.tenants import DEFAULT_ROW

if TYPE_CHECKING:
    from services.kvstore.service import KVStoreService


def add_gauges(service: "KVStoreService") -> None:
    """Adds all gauges of a store."""
    _add_sessions(service)
    _add_dram(service)
    for entry in process_entries():
        service.gauges.add(*entry)
    if service.ssd is not None:
        _add_ssd(service, service.ssd)
    _add_arena(service)
    _add_pins(service)
    _add_tenants(service)


def _add_sessions(service: "KVStoreService") -> None:
    writes, reads, dram = service.store.writes, service.store.reads, service.store.holdings.dram
    servicer, add = service.servicer, service.gauges.add
    add("put_sessions", lambda: writes.sessions, 0)
    add("get_sessions", lambda: reads.leases, 0)
    add("sessions_waiting_for_room", lambda: len(service.rooms), 0)
    add("unfinished_blocks", lambda: writes.unfinished_blocks, 0)
    add("pending_writes", lambda: writes.pending, 0)
    add("dram_reserved_bytes", lambda: dram.reserved_bytes, 0)
    add("dram_held_bytes", lambda: dram.held_bytes, 0)
    add("durability_awaited_blocks", lambda: writes.awaited, 0)
    add("read_ahead_bytes", lambda: service.ahead.out, 0)
    add("stream_tasks", lambda: sum(stream.tasks for stream in servicer.kv_streams), 0)
    add("messages_unsent", lambda: servicer.traffic.unsent, 0)
    add("put_credits_kept_bytes", lambda: servicer.traffic.credits_kept, 0)
    add("get_credits_out_bytes", lambda: servicer.traffic.credits_out, 0)
    add("streams", lambda: servicer.streams)
    add("watchers", lambda: service.journal.watchers)


def _add_dram(service: "KVStoreService") -> None:
    writes, reads, dram = service.store.writes, service.store.reads, service.store.holdings.dram
    add = service.gauges.add
    add("dram_bytes", lambda: dram.block_bytes)
    add("dram_capacity_bytes", lambda: dram.capacity_bytes)
    add("dram_blocks", lambda: len(dram))
    add("dram_evictions_total", lambda: dram.evictions)
    add("damaged_blocks_total", lambda: service.store.holdings.damaged_blocks)
    add("blocks_put_total", lambda: writes.blocks_put)
    add("blocks_durable_total", lambda: writes.blocks_durable)
    add("blocks_not_durable_total", lambda: writes.blocks_not_durable)
    add("failed_batches_total", lambda: writes.failed_batches)
    add("retried_batches_total", lambda: service.writer.retries if service.writer is not None else 0)
    add("dram_hits_total", lambda: reads.dram_hits)
    add("ssd_hits_total", lambda: reads.ssd_hits)
    add("misses_total", lambda: reads.misses)
    add("promotions_total", lambda: reads.promotions)
    add("bad_blocks_total", lambda: reads.bad_blocks)


def _add_ssd(service: "KVStoreService", ssd: SsdTier) -> None:
    add = service.gauges.add
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


def _add_arena(service: "KVStoreService") -> None:
    arena, add = service.store.holdings.dram.arena, service.gauges.add
    add("arena_live_bytes", lambda: arena.live_bytes)
    add("arena_free_bytes", lambda: arena.free_bytes)
    add("arena_resident_bytes", lambda: arena.resident_bytes)
    add("arena_mapped_bytes", lambda: arena.mapped_bytes)
    add("arena_returned_bytes_total", lambda: arena.returned_bytes)


def _add_pins(service: "KVStoreService") -> None:
    pins, dram, add = service.store.pins, service.store.holdings.dram, service.gauges.add
    add("pins", lambda: len(pins))
    add("pinned_blocks", lambda: pins.keys)
    add("pinned_bytes", lambda: pins.nbytes)
    add("pin_budget_bytes", lambda: pins.budget_bytes)
    add("dram_pinned_bytes", lambda: dram.pinned_bytes)


def _add_tenants(service: "KVStoreService") -> None:
    """Of tenants with a row, and of all others together under "*"."""
    pins, account = service.store.pins, service.store.holdings.dram.account
    rows = service.config.tenants
    if not rows:
        return

    def add(what: str, tenant: str, used: Callable[[str], int]) -> None:
        label = json.dumps(tenant, ensure_ascii=False)
        service.gauges.add(f"tenant_{what}{{tenant={label}}}", lambda: used(tenant))

    for tenant in dict.fromkeys([*rows, DEFAULT_ROW]):
        add("dram_bytes", tenant, account.of_row)
        add("pinned_bytes", tenant, pins.of_row)
        if service.ssd is not None:
            add("ssd_bytes", tenant, service.ssd_account.of_row)
