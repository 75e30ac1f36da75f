"""Room in DRAM: what transfers evict and reserve, frames that fail, and what leases keep."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from moonpool.base.errors import FrameError, InvalidRequest, Overloaded
from moonpool.base.kv.frames import OpenedRun, SliceRun
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.core.put_transfer import PORTION_BLOCKS, split_portions
from moonpool.kvstore.core.put_transfers import PUTS_AHEAD
from moonpool.kvstore.core.read_leases import PORTION_KEYS, ReadLease
from moonpool.kvstore.core.tiered_store import StoreListener
from moonpool.kvstore.eviction.policies import LFU
from moonpool.kvstore.eviction.tenants import TenantAccount
from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    LAYOUT,
    Driven,
    data_of,
    held,
    keys_of,
    open_ssd,
    run_of,
    spec_of,
    view_of,
)
from tests.unit.kvstore.invariants import check

KEYS = keys_of(8)
A, B, C, D = KEYS[:4]


def test_opening_a_transfer_evicts_and_reserves_nothing() -> None:
    driven = Driven(dram_bytes=4 * BLOCK)
    old = keys_of(4, "old")
    driven.store.writes.close(driven.put(old))
    transfer = driven.open(spec_of(KEYS[:4]))
    assert transfer is not None
    assert (driven.removed, driven.store.tiers.dram.reserved.total_bytes) == ([], 0)
    driven.store.writes.write(transfer, [run_of(A, 0, 0)])
    assert (driven.removed, driven.store.tiers.dram.reserved.total_bytes) == ([old[-1]], BLOCK)
    driven.store.writes.close(transfer)
    assert driven.store.tiers.dram.reserved.total_bytes == 0
    check(driven.store)


def test_room_is_made_ahead_once_and_if_it_is_little() -> None:
    driven = Driven(dram_bytes=64 * BLOCK)
    writes, old = driven.store.writes, keys_of(64, "old")
    writes.close(driven.put(old[:63]))
    writes.make_room(spec_of(old[:1]))
    assert driven.removed == []
    writes.close(driven.put(old[63:]))
    writes.make_room(spec_of(old[:2]))
    assert driven.removed == []
    for _ in range(2):
        writes.make_room(spec_of(old[63:]))
        assert len(driven.removed) == 1
    assert driven.store.tiers.dram.free_bytes == BLOCK
    check(driven.store)


def test_room_is_made_ahead_for_some_puts_at_once() -> None:
    driven = Driven(dram_bytes=64 * 20 * BLOCK)
    writes, dram, old = driven.store.writes, driven.store.tiers.dram, keys_of(64 * 20, "old")
    for at in range(0, len(old), 64):
        writes.close(driven.put(old[at : at + 64]))
    for blocks, room in ((1, PUTS_AHEAD), (PUTS_AHEAD, PUTS_AHEAD), (PUTS_AHEAD + 1, 20), (21, 20)):
        writes.make_room(spec_of(old[-blocks:]))
        assert dram.free_bytes == room * BLOCK
    assert len(driven.removed) == 20
    check(driven.store)


def test_room_that_is_made_ahead_leaves_a_tenant_what_its_quota_allows() -> None:
    driven = Driven(dram_bytes=64 * 20 * BLOCK, account=TenantAccount(quotas={"ann": 10 * BLOCK}))
    driven.store.writes.close(driven.put(KEYS, "ann"))
    driven.store.writes.close(driven.put(keys_of(2, "more"), "ann"))
    driven.store.writes.make_room(spec_of(KEYS[-1:], tenant="ann"))
    assert len(driven.removed) == 1
    check(driven.store)


@pytest.mark.parametrize("limit", ["a quota", "an order in which what is new leaves first"])
def test_room_made_ahead_is_not_that_of_what_was_just_put(limit: str) -> None:
    account = TenantAccount(quotas={"ann": BLOCK}) if limit == "a quota" else None
    driven = Driven(dram_bytes=64 * BLOCK, account=account, policy=LFU())
    writes, dram, old = driven.store.writes, driven.store.tiers.dram, keys_of(63, "old")
    writes.close(driven.put(old))
    dram.touch(old)
    writes.close(driven.put([A], "ann"))
    writes.make_room(spec_of([A], tenant="ann"))
    assert A in dram
    assert dram.free_bytes == (0 if account is not None else BLOCK)
    assert dram.held_bytes == 0
    check(driven.store)


@pytest.mark.parametrize("limit", ["all DRAM", "a quota"])
def test_nothing_is_evicted_for_whole_blocks_that_are_damaged(limit: str) -> None:
    account = TenantAccount(quotas={"ann": 2 * BLOCK}) if limit == "a quota" else None
    driven = Driven(dram_bytes=(8 if account else 2) * BLOCK, account=account)
    writes, dram = driven.store.writes, driven.store.tiers.dram
    writes.close(driven.put([A, B], "ann"))
    spec, runs = spec_of([B, C], tenant="ann"), [run_of(key, 0, layer) for layer in range(3) for key in (B, C)]
    data, hashes = bytearray(b"".join(bytes(run.data) for run in runs)), [run.hashes[0] for run in runs]
    data[-1] ^= 1
    with pytest.raises(FrameError):
        writes.put_whole(spec, memoryview(data), hashes, 0.0)
    assert (driven.removed, dram.reserved.total_bytes) == ([], 0)
    data[-1] ^= 1
    assert writes.put_whole(spec, memoryview(data), hashes, 0.0) == [0]
    assert driven.removed == [A]
    assert driven.read([B, C]) == [data_of(B), data_of(C)]
    check(driven.store)


def test_data_waits_while_unfinished_blocks_fill_dram() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    writes = driven.store.writes
    first, second = driven.open(spec_of([A, B])), driven.open(spec_of([C]))
    assert first is not None
    assert second is not None
    assert writes.write(first, [run_of(A, 0, 0), run_of(B, 1, 0)])
    assert not writes.write(second, [run_of(C, 0, 0)])
    assert driven.open(spec_of([D])) is None
    assert writes.write(first, [run_of(A, 0, 1)])  # what has its room need not wait
    check(driven.store)
    writes.close(first)
    assert driven.rooms == 1
    assert writes.write(second, [run_of(C, 0, 0)])


def test_a_frame_takes_room_for_all_of_its_blocks_or_for_none() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    writes = driven.store.writes
    first, second = driven.open(spec_of([A])), driven.open(spec_of([B, C]))
    assert first is not None
    assert second is not None
    assert writes.write(first, [run_of(A, 0, 0)])
    assert not writes.write(second, [run_of(B, 0, 0), run_of(C, 1, 0)])
    assert driven.store.tiers.dram.reserved.total_bytes == BLOCK
    check(driven.store)


def test_a_block_completed_by_a_frame_that_fails_later_is_kept_and_all_its_writers_are_told() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    writes = driven.store.writes
    told: list[int] = []
    other = writes.open(spec_of([B, A]), told.extend, lambda _: None, lambda: None)
    transfer = driven.open(spec_of([A, B]))
    assert other is not None
    assert transfer is not None
    for layer in range(2):
        writes.write(transfer, [run_of(A, 0, layer)])
    with pytest.raises(FrameError, match="come before"):
        writes.write(transfer, [run_of(A, 0, 2), run_of(A, 0, 2)])
    assert (driven.visible, told) == ([(A,)], [1])
    writes.close(transfer)
    writes.close(other)
    check(driven.store)
    assert driven.read([A]) == [data_of(A)]
    driven.put([B, C])  # all DRAM can be had again


def test_many_frames_that_fail_cost_no_room() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    for key in KEYS:
        transfer = driven.open(spec_of([key]))
        assert transfer is not None
        runs = [run_of(key, 0, layer) for layer in range(LAYOUT.layers)]
        with pytest.raises(FrameError):
            driven.store.writes.write(transfer, [*runs, runs[0]])
        driven.store.writes.close(transfer)
        check(driven.store)
    assert held(driven.store) == set(KEYS[-2:])


def test_a_transfer_that_waits_uses_its_present_blocks_once() -> None:
    """It is touched when the transfer opens: the block used last stays longest."""
    driven = Driven(dram_bytes=3 * BLOCK)
    driven.store.writes.close(driven.put([A]))
    driven.store.writes.close(driven.put([B]))
    lease = driven.store.reads.open([B], FORMAT, promote=False)
    first = driven.open(spec_of([C]))
    assert first is not None
    driven.store.writes.write(first, [run_of(C, 0, 0)])
    pinned = driven.store.reads.open([A], FORMAT, promote=False)
    waiting = spec_of([A, D])
    assert driven.open(waiting) is None
    driven.store.reads.close(pinned)
    driven.store.reads.close(lease)
    assert driven.open(waiting) is not None
    driven.put([KEYS[4]])
    assert driven.removed == [B]


def test_without_a_durable_tier_eviction_is_removal() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    for key in (A, B, C):
        driven.store.writes.close(driven.put([key]))
    assert driven.removed == [A]
    assert driven.stored == [A, B, C]
    assert driven.durable == []
    assert len(driven.store.writes.queue.queued) == 0
    check(driven.store)


def test_a_reader_keeps_its_blocks() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    driven.store.writes.close(driven.put([A]))
    driven.store.writes.close(driven.put([B]))
    lease = driven.store.reads.open([A, B, C], FORMAT, promote=False)
    assert lease.blocks == 2
    assert driven.open(spec_of([C])) is None
    assert bytes(view_of(lease.sources[0], 1)) == data_of(A)[LAYOUT.slice_bytes(0) : 2 * LAYOUT.slice_bytes(0)]
    driven.store.reads.close(lease)
    driven.store.reads.close(lease)
    driven.put([C])
    assert driven.removed == [B]  # the chain's tail before its head


def test_leases_keep_no_more_dram_than_they_may() -> None:
    driven = Driven(dram_bytes=8 * BLOCK, lease_bytes=3 * BLOCK)
    driven.store.writes.close(driven.put(KEYS[:6]))
    reads = driven.store.reads
    first = reads.open(KEYS[:2], FORMAT, promote=False)
    same = reads.open(KEYS[:2], FORMAT, promote=False)  # keeps nothing more
    more = reads.open(KEYS[:6], FORMAT, promote=False)
    assert (first.blocks, same.blocks, more.blocks, reads.leased_bytes) == (2, 2, 3, 3 * BLOCK)
    with pytest.raises(Overloaded) as refusal:
        reads.open(KEYS[3:6], FORMAT, promote=False)
    assert refusal.value.reason == "kvstore_leases"
    driven.put(keys_of(5, "others"))  # the rest of DRAM is there for writers
    check(driven.store)
    for lease in (more, same, first):
        reads.close(lease)
        check(driven.store)
    assert reads.leased_bytes == 0


def test_leases_promote_no_more_than_they_may(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    Driven(ssd).flush(KEYS[:4])
    driven = Driven(ssd, lease_bytes=2 * BLOCK)
    assert driven.read(KEYS[:4], promote=True) == [data_of(key) for key in KEYS[:4]]
    assert set(driven.store.tiers.dram) == set(KEYS[:2])
    assert driven.store.reads.leased_bytes == 0
    ssd.close()


def test_a_transfer_larger_than_all_dram_is_refused_for_good() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    with pytest.raises(InvalidRequest, match="keys: the transfer needs"):
        driven.open(spec_of(KEYS[:3]))


def test_when_the_last_writer_vanishes_its_memory_comes_back() -> None:
    driven = Driven()
    writes, dram = driven.store.writes, driven.store.tiers.dram
    transfers = [driven.open(spec_of([A], heads=range(head, head + 1))) for head in range(2)]
    for head, transfer in enumerate(transfers):
        assert transfer is not None
        writes.write(transfer, [run_of(A, 0, 0, range(head, head + 1))])
    assert dram.arena.live_bytes == BLOCK
    for transfer in transfers:
        assert transfer is not None
        writes.close(transfer)
    dram.arena.collect()
    assert (dram.arena.live_bytes, dram.reserved.total_bytes, len(writes.unfinished)) == (0, 0, 0)
    writes.close(driven.put([A]))
    assert driven.read([A]) == [data_of(A)]


def test_a_transfer_reserves_ahead_no_more_than_it_has_brought() -> None:
    driven = Driven()
    transfer = driven.open(spec_of(KEYS))
    assert transfer is not None
    reserved = []
    for index, key in enumerate(KEYS):
        assert driven.store.writes.write(transfer, [run_of(key, index, 0)])
        reserved.append(driven.store.tiers.dram.reserved.total_bytes // BLOCK)
    assert reserved == [1, 3, 3, 7, 7, 7, 7, 8]
    check(driven.store)
    driven.store.writes.close(transfer)
    assert driven.store.tiers.dram.reserved.total_bytes == 0


def test_without_room_ahead_a_transfer_has_what_its_frame_needs() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    transfer = driven.open(spec_of([A, B]))
    other = driven.open(spec_of([C]))
    assert transfer is not None
    assert other is not None
    for index, key in enumerate((A, B)):
        assert driven.store.writes.write(transfer, [run_of(key, index, 0)])
    assert not driven.store.writes.write(other, [run_of(C, 0, 0)])


TINY = KVLayout.uniform(layers=64, kv_heads=4, head_dim=1, block_size=16, dtype="bfloat16")
LARGE = KVLayout.uniform(layers=1, kv_heads=8, head_dim=2048, block_size=128, dtype="float32")


def parts_of(layout: KVLayout, layers: int, blocks: int) -> list[list[OpenedRun]]:
    """The parts of a frame of zeros, whose hashes count the slices."""
    size = blocks * layout.slice_bytes(0)
    runs = [
        OpenedRun(
            SliceRun(layer, 0, blocks, 0, layout.head_shares, layout.block_size),
            memoryview(bytes(size)),
            list(range(layer * blocks, (layer + 1) * blocks)),
        )
        for layer in range(layers)
    ]
    return split_portions(runs)


def test_a_frame_of_few_blocks_is_written_at_once() -> None:
    assert len(parts_of(TINY, 64, 16)) == 1
    assert split_portions([]) == [[]]


@pytest.mark.parametrize(("layers", "blocks"), [(1, 1024), (2, 512), (7, 129)])
def test_a_frame_of_many_blocks_is_written_in_parts(layers: int, blocks: int) -> None:
    parts = parts_of(TINY, layers, blocks)
    assert all(sum(run.block_count for run, _, _ in part) <= PORTION_BLOCKS for part in parts)
    assert [value for part in parts for _, _, hashes in part for value in hashes] == list(range(layers * blocks))
    slices = [
        (run.layer, run.first_block + at) for part in parts for run, _, _ in part for at in range(run.block_count)
    ]
    assert slices == [(layer, block) for layer in range(layers) for block in range(blocks)]
    assert all(len(data) == run.block_count * TINY.slice_bytes(0) for part in parts for run, data, _ in part)


def test_large_slices_are_written_one_by_one() -> None:
    parts = parts_of(LARGE, 1, 3)
    assert [(run.first_block, run.block_count, len(data), hashes) for [(run, data, hashes)] in parts] == [
        (block, 1, LARGE.slice_bytes(0), [block]) for block in range(3)
    ]


def test_a_lease_of_many_blocks_is_had_in_portions() -> None:
    many = keys_of(PORTION_KEYS + 3, "many")
    driven = Driven(dram_bytes=len(many) * BLOCK)
    driven.store.writes.close(driven.put(many))
    reads = driven.store.reads
    lease = reads.begin(ReadLease(FORMAT, many))
    assert (reads.extend(lease), lease.blocks) == (True, PORTION_KEYS)
    assert reads.dram_hits == 0
    assert (reads.extend(lease), lease.blocks, reads.dram_hits) == (False, len(many), len(many))
    reads.close(lease)
    half = reads.begin(ReadLease(FORMAT, many))
    reads.extend(half)
    reads.close(half)
    check(driven.store)


class Broken(StoreListener):
    """Fails when it is told of a removal."""

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        if removed:
            raise RuntimeError("broken")


def test_a_lease_that_fails_in_the_middle_holds_nothing_when_it_is_closed(tmp_path: Path) -> None:
    """Its first block is in DRAM; the second comes from SSD in the place of one that is nowhere else."""
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, dram_bytes=2 * BLOCK, listener=Broken())
    dram, reads = driven.store.tiers.dram, driven.store.reads
    driven.flush([A, B])
    dram.drop(dram[B])
    driven.flush([C])
    ssd.forget([C])
    lease = reads.begin(ReadLease(FORMAT, [A, B], promote=True))
    with pytest.raises(RuntimeError, match="broken"):
        reads.extend(lease)
    assert driven.removed == [C]
    reads.close(lease)
    assert (dram.held_bytes, reads.leased_bytes) == (0, 0)
    ssd.close()
