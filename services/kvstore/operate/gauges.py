"""The gauges of a kvstore.

Those with a value at rest have it again when no session is open. Figures per tenant exist for tenants that have a row
in the configuration, and one for all others together ("*"), so that a peer cannot add any.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence

from moonpool.streams.credits import ByteCredits
from moonpool.telemetry.gauges import Gauges, process_entries
from services.kvstore.core.store import BlockStore
from services.kvstore.operate.writer import WriteBehind
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
    for add_some in (_add_sessions, _add_dram, _add_ssd, _add_pins, _add_tenants):
        add_some(gauges.add, of)
    return gauges


def _add_sessions(add: Add, of: Gauged) -> None:
    writes, reads, dram, calls = of.store.writes, of.store.reads, of.store.tiers.dram, of.calls
    add("put_sessions", lambda: len(writes.sessions), 0)
    add("get_sessions", lambda: reads.leases, 0)
    add("sessions_waiting_for_room", lambda: len(of.rooms), 0)
    add("unfinished_blocks", lambda: len(writes.unfinished), 0)
    add("pending_writes", lambda: len(writes.queued), 0)
    add("dram_reserved_bytes", lambda: dram.reserved.total_bytes, 0)
    add("dram_held_bytes", lambda: dram.held_bytes, 0)
    add("dram_leased_bytes", lambda: reads.leased_bytes, 0)
    add("durability_awaited_blocks", lambda: len(writes.awaiting), 0)
    add("read_ahead_bytes", lambda: of.ahead.out, 0)
    add("stream_tasks", lambda: sum(stream.tasks for stream in calls.kv_streams), 0)
    add("messages_unsent", lambda: calls.traffic.unsent, 0)
    add("put_credits_kept_bytes", lambda: calls.traffic.credits_kept, 0)
    add("get_credits_out_bytes", lambda: calls.traffic.credits_out, 0)
    add("streams", lambda: calls.streams)
    add("watchers", lambda: of.journal.watchers)


def _add_attributes(add: Add, source: object, attributes: Sequence[str], name: str) -> None:
    """One gauge per attribute of `source`; `name` is a format for the names."""
    for attribute in attributes:
        add(name.format(attribute), functools.partial(getattr, source, attribute))


def _add_dram(add: Add, of: Gauged) -> None:
    writes, dram, writer = of.store.writes, of.store.tiers.dram, of.writer
    add("dram_bytes", lambda: dram.block_bytes)
    add("dram_capacity_bytes", lambda: dram.capacity_bytes)
    add("dram_blocks", lambda: len(dram))
    add("dram_evictions_total", lambda: dram.evictions)
    add("damaged_blocks_total", lambda: of.store.tiers.damaged_blocks)
    counts = ("blocks_put", "blocks_durable", "blocks_not_durable", "failed_batches")
    _add_attributes(add, writes, counts, "{}_total")
    add("blocks_unsaved", lambda: len(writes.unsaved))
    add("retried_batches_total", lambda: 0 if writer is None else writer.retries)
    hits = ("dram_hits", "ssd_hits", "misses", "promotions", "bad_blocks")
    _add_attributes(add, of.store.reads, hits, "{}_total")
    _add_attributes(add, dram.arena, ("live_bytes", "free_bytes", "resident_bytes", "mapped_bytes"), "arena_{}")
    add("arena_returned_bytes_total", lambda: dram.arena.returned_bytes)


def _add_ssd(add: Add, of: Gauged) -> None:
    ssd = of.store.tiers.ssd
    if ssd is None:
        return
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
    _add_attributes(add, ssd, counts, "ssd_{}_total")


def _add_pins(add: Add, of: Gauged) -> None:
    pins, dram = of.store.pins, of.store.tiers.dram
    add("pins", lambda: len(pins))
    add("pinned_blocks", lambda: pins.keys)
    add("pinned_bytes", lambda: pins.nbytes)
    add("pin_budget_bytes", lambda: pins.budget_bytes)
    add("dram_pinned_bytes", lambda: dram.pinned.total_bytes)


def _add_tenants(add: Add, of: Gauged) -> None:
    """Of tenants with a row, and of all others together under "*"."""
    tables = {"dram_bytes": of.store.tiers.dram.account.used, "pinned_bytes": of.store.pins.used}
    if of.store.tiers.ssd is not None:
        tables["ssd_bytes"] = of.ssd_account.used
    for tenant in dict.fromkeys([*of.rows, DEFAULT_ROW]) if of.rows else ():
        label = json.dumps(tenant, ensure_ascii=False)
        for what, used in tables.items():
            add(f"tenant_{what}{{tenant={label}}}", functools.partial(used.of_row, tenant, of.rows))
