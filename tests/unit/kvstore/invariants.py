"""What must hold between any two events in the parts of a store."""

import collections
import functools
from typing import Any

from moonpool.base.kv.blocks import PARTS
from moonpool.base.kv.reuse_stats import KeySample, ReturnRates, ReuseSample
from moonpool.kvstore.core.put_transfers import PutTransfers
from moonpool.kvstore.core.read_leases import ReadLeases
from moonpool.kvstore.core.store import BlockStore
from moonpool.kvstore.core.write_queue import SaveState
from moonpool.kvstore.dram.arena import Arena
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.kv_aware import KVAware, is_current
from moonpool.kvstore.eviction.policies import LFU, MOST_USES, S3FIFO
from moonpool.kvstore.eviction.retention import Pins
from moonpool.kvstore.eviction.tenants import TenantBytes, sum_by_tenant
from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.segment import Segment
from moonpool.kvstore.ssd.tier import SsdTier


@functools.singledispatch
def check(part: object) -> None:
    """Asserts what must hold of a part; of one with an SSD tier only while no plan is being committed."""
    raise TypeError(part)


@check.register
def _(store: BlockStore) -> None:
    dram, ssd = store.tiers.dram, store.tiers.ssd
    check(dram)
    if ssd is not None:
        check(ssd)
    _check_writes(store.writes, store)
    _check_queue(store)
    _check_reads(store.reads)
    check(dram.pins)
    keys = [key for number in range(PARTS) for key in store.tiers.part(number)]
    assert len(set(keys)) == len(keys)
    if not store.reads.leases and not store.writes.transfers:
        assert not dram.reserved
        assert store.writes.queue.queued or dram.held_bytes == 0


@check.register
def _(dram: DramTier) -> None:
    blocks = [*dram.values(), *dram.leaving]
    assert all(block.holds and not block.pinned for block in dram.leaving)
    assert dram.held_bytes == sum(block.info.nbytes for block in blocks if block.holds)
    assert dram.free_bytes >= 0
    for of_pictures, order in ((False, dram.policy), (True, dram.pictures)):
        kind = {key for key, block in dram.items() if block.info.format.of_pictures == of_pictures}
        assert set(order.candidates()) == {key for key in kind if not dram[key].pinned}
    assert all(block.info.key == key and block.holds >= 0 for key, block in dram.items())
    assert all(block.pinned == (key in dram.pins) for key, block in dram.items())
    sized = [(block, (block.info.account, block.info.nbytes)) for block in blocks]
    assert dram.account.used == sum_by_tenant(size for _, size in sized)
    assert dram.fixed == sum_by_tenant(size for block, size in sized if block.holds or block.pinned)
    assert dram.pinned == sum_by_tenant(size for block, size in sized if block.pinned)
    for count in (dram.account.used, dram.reserved, dram.fixed, dram.pinned):
        assert count.total_bytes == count.total()
        assert all(nbytes > 0 for nbytes in count.values())
    for tenant, used in dram.account.used.items():
        quota = dram.account.quota(tenant)
        assert quota is None or used + dram.reserved[tenant] <= quota
    check(dram.arena)


@check.register
def _(ssd: SsdTier) -> None:
    _check_catalogue(ssd.catalogue)
    assert not any(disk.space.segments for disk in ssd.disks if disk.out)
    assert ssd.used_bytes == sum(max(segment.size, segment.room) for segment in ssd.catalogue.segments.values())


def _check_catalogue(catalogue: Catalogue) -> None:
    live = TenantBytes()
    for name, segment in catalogue.segments.items():
        assert segment.id == name
        _check_segment(catalogue, segment)
        for tenant, nbytes in segment.live.items():
            live.add(tenant, nbytes)
    for key in catalogue:
        found = catalogue.find(key)
        assert found is not None
        assert found[0].keys[found[1]] == key
    assert catalogue.live == live
    assert catalogue.live.total_bytes == live.total_bytes


def _check_segment(catalogue: Catalogue, segment: Segment) -> None:
    assert segment.size
    assert not segment.going
    assert segment.readers >= 0
    rows = list(catalogue.live_rows(segment))
    assert all(segment.offset(row) + segment.nbytes(row) <= segment.size for row in rows)
    assert segment.live == sum_by_tenant((segment.kind(row).account, segment.nbytes(row)) for row in rows)
    assert segment.numbers == {kind: number for number, kind in enumerate(segment.named)}
    columns = (segment.starts, segment.lengths, segment.kinds, segment.written, segment.used)
    assert {len(segment.keys)} == set(map(len, columns))


def _check_queue(store: BlockStore) -> None:
    """Waiting blocks are held and not durable."""
    queue, there = store.writes.queue, store.tiers.dram
    waiting = [*queue.waiting, *(block for plan in queue.committing.values() for block in plan.blocks)]
    assert queue.states.keys() == set(waiting)
    assert {block for block in queue.waiting if queue.states[block] is SaveState.WAITING} == set(queue.waiting)
    waiting = [block for block in waiting if queue.states[block] is not SaveState.RECALLED]
    assert len(queue.queued) == len(waiting)
    assert not any(map(store.tiers.durable, (*queue.queued, *queue.unsaved)))
    assert all(block.holds > 0 for block in waiting)
    assert all(there.get(block.info.key) is block or block in there.leaving for block in waiting)


def _check_writes(writes: PutTransfers, store: BlockStore) -> None:
    """Transfers and their blocks know each other."""
    assert writes.open_keys == sum(len(transfer.spec.keys) for transfer in writes.transfers)
    for key, block in writes.unfinished.items():
        assert block.key == key
        assert block.writers
        assert block.reserved or not block.data
        assert not block.data or len(block.hashes) < block.spec.format.layout.layers
        assert writes.transfers.keys() >= block.writers.keys()
        assert all(transfer.unfinished[index] is block for transfer, index in block.writers.items())
    for transfer in writes.transfers:
        assert not transfer.closed
        assert all(writes.unfinished[transfer.spec.keys[at]] is block for at, block in transfer.unfinished.items())
    reserved = sum(block.nbytes for block in writes.unfinished.values() if block.reserved)
    assert store.tiers.dram.reserved.total_bytes >= reserved
    for key, entries in writes.awaiting.items():
        assert entries
        assert all(not transfer.closed and transfer.spec.keys[index] == key for transfer, index in entries)


def _check_reads(reads: ReadLeases) -> None:
    assert 0 <= reads.leased_bytes <= reads.lease_bytes
    assert all(count > 0 for count in reads.leased.values())
    if not reads.leases:
        assert (reads.leased_bytes, reads.leased, reads.open_keys) == (0, {}, 0)


@check.register
def _(pins: Pins) -> None:
    """The pinned blocks and bytes are those of the pins, within the limits."""
    counts = collections.Counter((key, tenant) for (tenant, _), pin in pins.by_name.items() for key in pin.blocks)
    assert {(key, tenant): n for key, kept in pins.pinned.items() for tenant, n in kept.pins.items()} == counts
    assert all(pinned.pins for pinned in pins.pinned.values())
    assert pins.account.used == sum_by_tenant((tenant, pins.pinned[key].nbytes) for key, tenant in counts)
    assert pins.nbytes == sum(pinned.nbytes for pinned in pins.pinned.values()) <= pins.budget_bytes
    assert len(pins) <= pins.max_pins
    assert counts.total() <= pins.max_entries


@check.register
def _(arena: Arena) -> None:
    """Every slot is in one state, and the bytes add up. The thread that brings memory may hand slots back meanwhile."""
    before = handed_out(arena)
    arena.collect()
    live = resident = free = 0
    for size, each in arena.classes.items():
        assert size == each.size
        for slab in each.slabs:
            slots = {*slab.free, *slab.bare}
            assert len(slots) == len(slab.free) + len(slab.bare) <= slab.slots
            assert all(slot < slab.slots for slot in slots)
            assert (slab in each.warm) == bool(slab.free)
            live += slab.live * size
            resident += slab.resident * size
            free += 0 if each.small else len(slab.free)
    assert (arena.live_bytes, arena.resident_bytes) == (live, resident)
    assert handed_out(arena) <= live <= before
    assert not free or resident <= arena.limit


def handed_out(arena: Arena) -> int:
    """Bytes of the slots that somebody holds; `list` takes them at one moment, whatever other threads do."""
    return sum(place[0].size for _, place in list(arena.live.values()))


@check.register
def _(policy: EvictionPolicy) -> None:
    """Those without a check of their own have one part, which cannot contradict itself."""


@check.register
def _(policy: LFU) -> None:
    assert policy.order == sorted(policy.queues)
    assert all(policy.queues.values())
    assert policy.ranks == {key: rank for rank, queue in policy.queues.items() for key in queue}


@check.register
def _(policy: S3FIFO) -> None:
    assert not policy.small.keys() & policy.main.keys()
    assert policy.uses.keys() == policy.small.keys() | policy.main.keys()
    assert not policy.ghosts.keys() & policy.uses.keys()
    assert all(0 <= uses <= MOST_USES for uses in policy.uses.values())


@check.register
def _(policy: KVAware) -> None:
    children = collections.Counter(node.parent for node in policy.nodes.values())
    for key, node in policy.nodes.items():
        assert node.key == key
        assert node.children == children[node]
        assert node.held or node.children
        assert node.parent is None or policy.nodes[node.parent.key] is node.parent
    nodes = [node for node in policy.nodes.values() if node.held]
    assert len(nodes) == policy.held
    queued = {entry[2]: kind for kind, heap in enumerate(policy.leaves) for entry in heap if is_current(entry)}
    assert queued == {node: node.kind for node in nodes if not node.children}
    assert all(node.queued == 0 for node in policy.nodes.values() if node not in queued)
    check(policy.rates)


@check.register
def _(rates: ReturnRates) -> None:
    check_sample(rates.sample)
    since = [since for since, _ in rates.sample.values()]
    assert since == sorted(since)
    for tally in rates.tallies:
        assert min(*tally.ends, *tally.inside, *tally.returns) >= 0
        assert all(count <= ends for count, ends in zip(tally.returns, tally.ends, strict=True))
    assert rates.curve == sorted(rates.curve, reverse=True)


@check.register
def _(reuse: ReuseSample) -> None:
    check_sample(reuse.last_uses)
    assert reuse.times == sorted(reuse.times) == list(reuse.last_uses.values())
    assert all(weight >= 0 for weight in reuse.weights.values())


def check_sample(sample: KeySample[Any]) -> None:
    """A sample has no more keys than it may, and such alone as belong to it."""
    assert len(sample) <= sample.size
    assert all(map(sample.accepts, sample))
