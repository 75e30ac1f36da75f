"""Durability: batches, what transfers hear, and blocks that failed."""

from pathlib import Path

from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    LAYOUT,
    RECORD,
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


def test_blocks_on_their_way_to_the_device_are_not_evicted(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, dram_bytes=2 * BLOCK)
    transfer = driven.put([A, B])
    assert driven.visible == [(A,), (B,)]
    assert len(driven.store.writes.queue.queued) == 2
    assert driven.open(spec_of([C])) is None
    driven.flush()
    assert driven.durable == [(A, B)]
    driven.store.writes.close(transfer)
    driven.flush([C])
    assert driven.removed == []  # demoted, not gone
    assert held(driven.store) == {A, B, C}
    assert driven.read([A, B]) == [data_of(A), data_of(B)]
    ssd.close()


def test_a_transfer_hears_of_present_blocks_that_become_durable(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    driven.flush([A])
    first = driven.put([B])
    second = driven.open(spec_of([A, B]))
    assert second is not None
    assert list(second.present) == [0, 1]
    assert driven.store.writes.durable_of(second, second.present) == [0]
    driven.store.writes.close(first)
    driven.flush()
    assert driven.durable == [(A,), (B,)]
    ssd.close()


def test_commits_come_one_at_a_time_in_batches(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, batch_bytes=2 * 8192)
    driven.put(KEYS[:5])
    sizes = []
    while (plan := driven.store.writes.queue.next_plan()) is not None:
        assert driven.store.writes.queue.next_plan() is None
        sizes.append([block.info.key for block in plan.blocks])
        ssd.commit(plan)
        driven.store.writes.queue.plan_done(None)
    assert sizes == [KEYS[:2], KEYS[2:4], KEYS[4:5]]
    ssd.close()


def test_a_block_that_was_lost_while_it_was_read_is_brought_by_its_writer(tmp_path: Path) -> None:
    first = Driven(open_ssd(tmp_path))
    first.flush([A])
    assert first.store.tiers.ssd is not None
    first.store.tiers.ssd.close()
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    reads, writes = driven.store.reads, driven.store.writes
    good = reads.open([A], FORMAT, promote=True)
    bad = reads.open([A], FORMAT, promote=False)
    reads.lost(bad.sources[0])
    reads.close(bad)
    transfer = driven.open(spec_of([A]))
    assert transfer is not None
    source = good.sources[0]
    assert source.reader is not None
    for layer in range(LAYOUT.layers):
        source.reader.read_layers(layer, view_of(source, layer))
        source.filled |= 1 << layer
        writes.write(transfer, [run_of(A, 0, layer)] if layer < 2 else [])
    reads.close(good)  # whole, but what has left the store comes back with a writer only
    assert (driven.visible, A in driven.store.tiers, reads.promotions) == ([], False, 0)
    writes.write(transfer, [run_of(A, 0, 2)])
    assert driven.visible == [(A,)]
    assert (driven.removed, driven.stored) == ([A], [A])
    assert driven.durable == []
    driven.flush()
    assert driven.durable == [(A,)]  # it is stored anew
    writes.close(transfer)
    assert driven.read([A]) == [data_of(A)]
    ssd.close()


def fail(driven: Driven) -> None:
    """The batch under way meets a device that fails."""
    assert driven.store.writes.queue.next_plan() is not None
    driven.store.writes.queue.plan_done(OSError(5, "Input/output error"))


def test_a_block_that_failed_to_become_durable_is_queued_again_when_it_is_put_again(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    first = driven.put([A])
    fail(driven)
    assert (len(driven.store.writes.queue.queued), len(driven.store.writes.queue.unsaved), driven.durable) == (0, 1, [])
    check(driven.store)
    again = driven.open(spec_of([A]))
    assert again is not None
    assert list(again.present) == [0]
    assert len(driven.store.writes.queue.queued) == 1
    driven.flush()
    assert driven.durable == [(A,), (A,)]  # both transfers hear of it
    assert (len(driven.store.writes.queue.unsaved), driven.store.writes.queue.blocks_not_durable) == (0, 1)
    driven.store.writes.close(first)
    driven.store.writes.close(again)
    ssd.close()
    ssd = open_ssd(tmp_path)
    assert set(ssd.catalogue) == {A}
    ssd.close()


def test_blocks_that_failed_are_tried_again_batch_by_batch_while_they_stay_in_dram(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, dram_bytes=5 * BLOCK, batch_bytes=8192)
    transfer = driven.put(KEYS[:5])
    for _ in range(5):
        fail(driven)
    writes = driven.store.writes
    assert len(writes.queue.unsaved) == 5
    writes.queue.retry()
    assert len(writes.queue.queued) == 1  # the others are not held meanwhile
    fail(driven)
    assert (len(writes.queue.unsaved), writes.queue.blocks_not_durable) == (5, 5)
    writes.close(transfer)
    writes.close(driven.put([KEYS[5]]))  # evicts one of them
    writes.queue.retry()
    driven.flush()
    assert set(ssd.catalogue) == set(driven.store.tiers.dram)
    assert (len(ssd.catalogue), len(writes.queue.unsaved)) == (5, 0)
    ssd.close()


def test_a_transfer_awaits_what_is_not_durable(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    transfer = driven.put([A])
    assert driven.store.writes.awaits(transfer)
    driven.flush()
    assert not driven.store.writes.awaits(transfer)
    ssd.close()
    assert not Driven().store.writes.awaits(transfer)


def test_all_of_a_sustained_put_becomes_durable_however_small_the_tier(tmp_path: Path) -> None:
    """A batch is larger than the tier, and takes many of its segments."""
    ssd = open_ssd(tmp_path, 40 * RECORD, RECORD)
    driven = Driven(ssd, dram_bytes=128 * BLOCK, batch_bytes=1 << 30)
    for chain in range(3):
        driven.flush(keys_of(100, f"sustained-{chain}"))
    assert (driven.store.writes.queue.blocks_durable, driven.store.writes.queue.blocks_not_durable) == (300, 0)
    assert len(ssd.catalogue) >= 39
    ssd.close()


def test_a_block_that_is_read_into_dram_does_not_evict_the_rest_of_its_chain(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, dram_bytes=2 * BLOCK)
    driven.flush([A])
    driven.flush([B])
    driven.flush([C])  # in the place of A
    ssd.forget([B])  # as for its room
    assert driven.store.tiers.match([A, B]) == 2
    assert driven.read([A, B], promote=True) == [data_of(A), data_of(B)]
    ssd.close()
