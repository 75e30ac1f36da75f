"""Sessions, visibility, room and durability, driven by hand."""

from pathlib import Path

import pytest

from moonpool.errors import FrameError, InvalidRequest, Overloaded
from moonpool.kv.frames import OpenRun, Run
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS, PutSpec
from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    LAYOUT,
    OTHER_FORMAT,
    Driven,
    data_of,
    keys_of,
    open_ssd,
    run_of,
    spec_of,
)

KEYS = keys_of(8)
A, B, C, D = KEYS[:4]


def test_nothing_incomplete_is_visible() -> None:
    driven = Driven()
    session = driven.open(spec_of([A, B]))
    assert session is not None
    writes = driven.store.writes
    for index, layer in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        assert driven.visible == []
        writes.write(session, [run_of(KEYS[index], index, layer)])
        driven.store.check_invariants()
    assert driven.visible == [(B,)]
    assert driven.stored == [B]
    assert driven.store.tiers.match([A]) == 0
    assert driven.read([A, B]) == []
    writes.write(session, [run_of(A, 0, 2)])
    assert driven.visible == [(B,), (A,)]
    assert session.complete
    assert driven.read([A, B]) == [data_of(A), data_of(B)]


def test_an_abandoned_session_leaves_nothing() -> None:
    driven = Driven()
    session = driven.open(spec_of([A, B]))
    assert session is not None
    for layer in range(LAYOUT.layers):
        driven.store.writes.write(session, [run_of(A, 0, layer)])
    driven.store.writes.write(session, [run_of(B, 1, 0)])
    assert driven.store.tiers.dram.reserved_bytes == BLOCK
    driven.store.writes.close(session)
    driven.store.writes.close(session)
    assert driven.store.tiers.dram.reserved_bytes == 0
    assert (driven.store.writes.sessions, driven.store.writes.unfinished_blocks) == (0, 0)
    assert list(driven.store.tiers) == [A]
    driven.store.check_invariants()


def test_existing_blocks_are_told_and_need_not_come() -> None:
    driven = Driven()
    driven.store.writes.close(driven.put([B]))
    session = driven.open(spec_of([A, B, C]))
    assert session is not None
    assert list(session.present) == [1]
    driven.store.writes.write(session, [run_of(B, 1, 0)])  # it may come all the same
    for index in (0, 2):
        for layer in range(LAYOUT.layers):
            driven.store.writes.write(session, [run_of(KEYS[index], index, layer)])
    assert session.complete
    assert driven.stored == [B, A, C]


def test_several_writers_share_a_block() -> None:
    driven = Driven()
    writes = driven.store.writes
    left = driven.open(spec_of([A], heads=range(1)))
    right = driven.open(spec_of([B, A], layers=range(3), heads=range(1, 2)))
    assert left is not None
    assert right is not None
    for layer in range(LAYOUT.layers):
        writes.write(left, [run_of(A, 0, layer, range(1))])
        driven.store.check_invariants()
        assert driven.visible == []
        assert driven.store.tiers.dram.reserved_bytes == BLOCK
        writes.write(right, [run_of(A, 1, layer, range(1, 2))])
    assert driven.visible == [(A,), (A,)]
    assert left.complete
    assert not right.complete
    assert driven.read([A]) == [data_of(A)]
    writes.close(left)
    writes.close(right)
    driven.store.check_invariants()


def test_two_whole_writers_of_one_block_and_one_leaves() -> None:
    driven = Driven()
    writes = driven.store.writes
    first, second = driven.open(spec_of([A])), driven.open(spec_of([A]))
    assert first is not None
    assert second is not None
    writes.write(first, [run_of(A, 0, 0)])
    writes.close(first)
    driven.store.check_invariants()
    for layer in range(LAYOUT.layers):
        writes.write(second, [run_of(A, 0, layer)])
    assert driven.visible == [(A,)]
    assert driven.read([A]) == [data_of(A)]


def test_a_session_is_told_when_another_finishes_its_block() -> None:
    driven = Driven()
    writes = driven.store.writes
    told: list[int] = []
    slow = writes.open(spec_of([A, B]), told.extend, lambda _: None)
    assert slow is not None
    writes.write(slow, [run_of(A, 0, 0)])
    writes.close(driven.put([A]))
    assert told == [0]
    assert set(slow.unfinished) == {1}
    writes.write(slow, [run_of(A, 0, 1)])  # it had sent this before it was told
    assert driven.store.tiers.dram.reserved_bytes == 0
    for layer in range(LAYOUT.layers):
        writes.write(slow, [run_of(B, 1, layer)])
    assert told == [0, 1]
    assert slow.complete
    assert driven.read([A, B]) == [data_of(A), data_of(B)]
    writes.close(slow)


def test_one_of_many_writers_vanishes_and_its_part_is_brought_by_another() -> None:
    driven = Driven()
    writes = driven.store.writes
    low, high = driven.open(spec_of([A], layers=range(2))), driven.open(spec_of([A], layers=range(2, 3)))
    assert low is not None
    assert high is not None
    writes.write(low, [run_of(A, 0, 0)])
    writes.close(low)  # vanishes; layer 0 stays as long as somebody writes the block
    writes.write(high, [run_of(A, 0, 2)])
    again = driven.open(spec_of([A], layers=range(1, 2)))
    assert again is not None
    driven.store.check_invariants()
    writes.write(again, [run_of(A, 0, 1)])
    assert driven.read([A]) == [data_of(A)]
    writes.close(high)
    writes.close(again)
    driven.store.check_invariants()


def test_when_the_last_writer_vanishes_its_memory_comes_back() -> None:
    driven = Driven()
    writes, dram = driven.store.writes, driven.store.tiers.dram
    sessions = [driven.open(spec_of([A], heads=range(head, head + 1))) for head in range(2)]
    for head, session in enumerate(sessions):
        assert session is not None
        writes.write(session, [run_of(A, 0, 0, range(head, head + 1))])
    assert dram.arena.live_bytes == BLOCK
    for session in sessions:
        assert session is not None
        writes.close(session)
    dram.arena.collect()
    assert (dram.arena.live_bytes, dram.reserved_bytes, writes.unfinished_blocks) == (0, 0, 0)
    writes.close(driven.put([A]))
    assert driven.read([A]) == [data_of(A)]


@pytest.mark.parametrize(
    "run",
    [
        Run(0, 0, 1, 0, 2, 16),  # twice
        Run(2, 0, 1, 0, 2, 16),  # a layer it did not declare
        Run(1, 0, 1, 1, 2, 15),  # not full
        Run(1, 1, 1, 0, 2, 16),  # no such block
        Run(1, 0, 2, 0, 2, 16),  # more blocks than there are
    ],
)
def test_frames_outside_the_declaration_are_refused(run: Run) -> None:
    driven = Driven()
    session = driven.open(spec_of([A], layers=range(2)))
    assert session is not None
    driven.store.writes.write(session, [run_of(A, 0, 0)])
    with pytest.raises(FrameError):
        driven.store.writes.write(
            session, [OpenRun(run, memoryview(bytes(run.block_count * LAYOUT.slice_bytes)), [0] * run.block_count)]
        )
    driven.store.writes.close(session)
    driven.store.check_invariants()


def test_heads_outside_the_declaration_are_refused() -> None:
    driven = Driven()
    session = driven.open(spec_of([A], heads=range(1)))
    assert session is not None
    with pytest.raises(FrameError):
        driven.store.writes.write(session, [run_of(A, 0, 0)])


def test_wrong_declarations_name_their_field() -> None:
    def field(**changes: object) -> str:
        fields: dict[str, object] = {
            "format": FORMAT, "keys": [A], "parents": [B], "tenant": "", "layers": range(3), "heads": range(2),
        } | changes  # fmt: skip
        with pytest.raises(InvalidRequest) as refusal:
            PutSpec(**fields)  # type: ignore[arg-type]
        return refusal.value.field

    assert field(keys=[], parents=[]) == "keys"
    assert field(keys=[A, A], parents=[B, B]) == "keys"
    assert field(keys=keys_of(MAX_SESSION_BLOCKS + 1)) == "keys"
    assert field(parents=[]) == "parent_keys"
    assert field(layers=range(2, 4)) == "layer_end"
    assert field(layers=range(2, 2)) == "layer_end"
    assert field(heads=range(3)) == "head_end"
    assert field(tenant="ü" * 600) == "tenant"


def test_a_key_has_one_format() -> None:
    driven = Driven()
    unfinished = driven.open(spec_of([A]))
    with pytest.raises(InvalidRequest, match="another format"):
        driven.open(spec_of([A], block_format=OTHER_FORMAT))
    assert unfinished is not None
    driven.store.writes.close(unfinished)
    driven.put([B])
    with pytest.raises(InvalidRequest, match="another format"):
        driven.open(spec_of([B], block_format=OTHER_FORMAT))
    lease = driven.store.reads.open([B], OTHER_FORMAT, promote=False)
    assert lease.blocks == 0


def test_sessions_are_bounded() -> None:
    driven = Driven()
    for key in KEYS[:4]:
        assert driven.open(spec_of([key])) is not None
        driven.store.reads.open([key], FORMAT, promote=False)
    with pytest.raises(Overloaded):
        driven.open(spec_of([KEYS[4]]))
    with pytest.raises(Overloaded):
        driven.store.reads.open([KEYS[4]], FORMAT, promote=False)


def test_a_session_larger_than_all_dram_is_refused_for_good() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    with pytest.raises(InvalidRequest, match="keys: the session needs"):
        driven.open(spec_of(KEYS[:3]))


def test_opening_a_session_evicts_and_reserves_nothing() -> None:
    driven = Driven(dram_bytes=4 * BLOCK)
    old = keys_of(4, "old")
    driven.store.writes.close(driven.put(old))
    session = driven.open(spec_of(KEYS[:4]))
    assert session is not None
    assert (driven.removed, driven.store.tiers.dram.reserved_bytes) == ([], 0)
    driven.store.writes.write(session, [run_of(A, 0, 0)])
    assert (driven.removed, driven.store.tiers.dram.reserved_bytes) == ([old[-1]], BLOCK)
    driven.store.writes.close(session)
    assert driven.store.tiers.dram.reserved_bytes == 0
    driven.store.check_invariants()


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
    driven.store.check_invariants()
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
    assert driven.store.tiers.dram.reserved_bytes == BLOCK
    driven.store.check_invariants()


def test_a_block_completed_by_a_frame_that_fails_later_is_kept_and_all_its_writers_are_told() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    writes = driven.store.writes
    told: list[int] = []
    other = writes.open(spec_of([B, A]), told.extend, lambda _: None)
    session = driven.open(spec_of([A, B]))
    assert other is not None
    assert session is not None
    for layer in range(2):
        writes.write(session, [run_of(A, 0, layer)])
    with pytest.raises(FrameError, match="come before"):
        writes.write(session, [run_of(A, 0, 2), run_of(A, 0, 2)])
    assert (driven.visible, told) == ([(A,)], [1])
    writes.close(session)
    writes.close(other)
    driven.store.check_invariants()
    assert driven.read([A]) == [data_of(A)]
    driven.put([B, C])  # all DRAM can be had again


def test_many_frames_that_fail_cost_no_room() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    for key in KEYS:
        session = driven.open(spec_of([key]))
        assert session is not None
        runs = [run_of(key, 0, layer) for layer in range(LAYOUT.layers)]
        with pytest.raises(FrameError):
            driven.store.writes.write(session, [*runs, runs[0]])
        driven.store.writes.close(session)
        driven.store.check_invariants()
    assert set(driven.store.tiers) == set(KEYS[-2:])


def test_a_session_that_waits_uses_its_present_blocks_once() -> None:
    """It is touched when the session opens: the block used last stays longest."""
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
    assert driven.store.writes.pending == 0
    driven.store.check_invariants()


def test_a_reader_keeps_its_blocks() -> None:
    driven = Driven(dram_bytes=2 * BLOCK)
    driven.store.writes.close(driven.put([A]))
    driven.store.writes.close(driven.put([B]))
    lease = driven.store.reads.open([A, B, C], FORMAT, promote=False)
    assert lease.blocks == 2
    assert driven.open(spec_of([C])) is None
    assert bytes(lease.sources[0].take(1, LAYOUT)) == data_of(A)[LAYOUT.slice_bytes : 2 * LAYOUT.slice_bytes]
    driven.store.reads.close(lease)
    driven.store.reads.close(lease)
    driven.put([C])
    assert driven.removed == [B]  # the chain's tail before its head


def test_blocks_on_their_way_to_the_device_are_not_evicted(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, dram_bytes=2 * BLOCK)
    session = driven.put([A, B])
    assert driven.visible == [(A,), (B,)]
    assert driven.store.writes.pending == 2
    assert driven.open(spec_of([C])) is None
    driven.flush()
    assert driven.durable == [(A, B)]
    driven.store.writes.close(session)
    driven.flush([C])
    assert driven.removed == []  # demoted, not gone
    assert set(driven.store.tiers) == {A, B, C}
    assert driven.read([A, B]) == [data_of(A), data_of(B)]
    ssd.close()


def test_a_session_hears_of_present_blocks_that_become_durable(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    driven.flush([A])
    first = driven.put([B])
    second = driven.open(spec_of([A, B]))
    assert second is not None
    assert list(second.present) == [0, 1]
    assert driven.store.writes.durable_present(second) == [0]
    driven.store.writes.close(first)
    driven.flush()
    assert driven.durable == [(A,), (B,)]
    ssd.close()


def test_commits_come_one_at_a_time_in_batches(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, batch_bytes=2 * 8192)
    driven.put(KEYS[:5])
    sizes = []
    while (plan := driven.store.writes.next_plan()) is not None:
        assert driven.store.writes.next_plan() is None
        sizes.append([block.info.key for block in plan.blocks])
        ssd.commit(plan)
        driven.store.writes.plan_done(None)
    assert sizes == [KEYS[:2], KEYS[2:4], KEYS[4:5]]
    ssd.close()


def test_a_block_that_came_back_another_way_is_not_taken_twice(tmp_path: Path) -> None:
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
    session = driven.open(spec_of([A]))
    assert session is not None
    source = good.sources[0]
    assert source.reader is not None
    for layer in range(LAYOUT.layers):
        source.reader.read(layer, source.take(layer, LAYOUT))
        source.filled |= 1 << layer
        writes.write(session, [run_of(A, 0, layer)] if layer < 2 else [])
    reads.close(good)  # promotes what was thought to be lost, and the writer hears of it
    assert driven.visible == [(A,)]
    assert session.complete
    writes.write(session, [run_of(A, 0, 2)])
    assert driven.visible == [(A,)]
    assert (driven.removed, driven.stored) == ([A], [A])
    assert driven.durable == []
    driven.flush()
    assert driven.durable == [(A,)]  # it is stored anew
    writes.close(session)
    assert driven.read([A]) == [data_of(A)]
    ssd.close()


def fail(driven: Driven) -> None:
    """The batch under way meets a device that fails."""
    assert driven.store.writes.next_plan() is not None
    driven.store.writes.plan_done(OSError(5, "Input/output error"))


def test_a_block_that_failed_to_become_durable_is_queued_again_when_it_is_put_again(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    first = driven.put([A])
    fail(driven)
    assert (driven.store.writes.pending, driven.store.writes.unsaved, driven.durable) == (0, 1, [])
    driven.store.check_invariants()
    again = driven.open(spec_of([A]))
    assert again is not None
    assert list(again.present) == [0]
    assert driven.store.writes.pending == 1
    driven.flush()
    assert driven.durable == [(A,), (A,)]  # both sessions hear of it
    assert (driven.store.writes.unsaved, driven.store.writes.blocks_not_durable) == (0, 1)
    driven.store.writes.close(first)
    driven.store.writes.close(again)
    ssd.close()
    ssd = open_ssd(tmp_path)
    assert set(ssd) == {A}
    ssd.close()


def test_blocks_that_failed_are_tried_again_batch_by_batch_while_they_stay_in_dram(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd, dram_bytes=5 * BLOCK, batch_bytes=8192)
    session = driven.put(KEYS[:5])
    for _ in range(5):
        fail(driven)
    writes = driven.store.writes
    assert writes.unsaved == 5
    writes.retry()
    assert writes.pending == 1  # the others are not held meanwhile
    fail(driven)
    assert (writes.unsaved, writes.blocks_not_durable) == (5, 5)
    writes.close(session)
    writes.close(driven.put([KEYS[5]]))  # evicts one of them
    writes.retry()
    driven.flush()
    assert set(ssd) == set(driven.store.tiers.dram)
    assert (len(ssd), writes.unsaved) == (5, 0)
    ssd.close()


def test_a_session_awaits_what_is_not_durable(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    driven = Driven(ssd)
    session = driven.put([A])
    assert driven.store.writes.awaits(session)
    driven.flush()
    assert not driven.store.writes.awaits(session)
    ssd.close()
    assert not Driven().store.writes.awaits(session)


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
    driven.store.check_invariants()
    for lease in (more, same, first):
        reads.close(lease)
        driven.store.check_invariants()
    assert reads.leased_bytes == 0


def test_leases_promote_no_more_than_they_may(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path)
    Driven(ssd).flush(KEYS[:4])
    driven = Driven(ssd, lease_bytes=2 * BLOCK)
    assert driven.read(KEYS[:4], promote=True) == [data_of(key) for key in KEYS[:4]]
    assert set(driven.store.tiers.dram) == set(KEYS[:2])
    assert driven.store.reads.leased_bytes == 0
    ssd.close()
