"""What was deleted is found by nobody: not by readers, writers or watchers, and not on disk after any restart."""

import shutil
from pathlib import Path

import pytest

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.core.store import DeletedCount, DeletionSteps
from moonpool.kvstore.ssd.tier import SsdTier
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    RECORD,
    Driven,
    data_of,
    keys_of,
    open_ssd,
    run_of,
    spec_of,
    store,
    view_of,
)
from tests.unit.kvstore.invariants import check

OURS, THEIRS = keys_of(4, "ours"), keys_of(2, "theirs")
EVERYTHING = [
    KVSelection(tenants=frozenset({"ours"})),
    KVSelection(keys=frozenset(OURS)),
]


def all_of(steps: DeletionSteps) -> DeletedCount:
    """Does all steps of a deletion."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: DeletedCount = end.value
            return found


class Asked(frozenset[str]):
    """Tenants, and how often it was asked for one."""

    times = 0

    def __contains__(self, tenant: object) -> bool:
        self.times += 1
        return super().__contains__(tenant)


def test_a_deletion_judges_each_kind_of_a_segment_once(tmp_path: Path) -> None:
    tenants = Asked(["ours"])
    with store(tmp_path, 16 * RECORD) as driven:
        driven.flush(OURS, "ours")
        driven.flush(THEIRS, "theirs")
        for key in (*OURS, *THEIRS):
            driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
        steps = driven.store.delete_selected(KVSelection(tenants=tenants), step_blocks=1)
        next(steps)
        driven.flush(keys_of(2, "late"), "late")  # a kind more
        assert all_of(steps).blocks == 4
        assert tenants.times <= 3 + 2  # three kinds, and two blocks in DRAM
        assert driven.read(OURS) == []


def tier_of(driven: Driven) -> SsdTier:
    ssd = driven.store.tiers.ssd
    assert ssd is not None
    return ssd


def on_disk(path: Path, keys: list[BlockKey]) -> list[BlockKey]:
    """Keys of which a header, or any of the data, is in some segment file."""
    raw = b"".join(file.read_bytes() for file in sorted((path / "segments").iterdir()))
    return [key for key in keys if bytes(key) in raw or data_of(key)[:64] in raw]


def crash(path: Path, to: Path) -> Path:
    """The files as they are at this moment, as another process would find them after `kill -9`."""
    shutil.copytree(path, to)
    return to


@pytest.mark.parametrize("selection", [*EVERYTHING, KVSelection(namespaces=frozenset({FORMAT.namespace}))])
def test_nobody_finds_it_any_more_and_it_is_counted_once(tmp_path: Path, selection: KVSelection) -> None:
    with store(tmp_path, 2 * RECORD) as driven:
        driven.flush(OURS, "ours")
        forgotten = all_of(driven.store.delete_selected(selection))
        assert forgotten == DeletedCount(4, 4 * BLOCK + 4 * RECORD)
        assert sorted(driven.removed) == sorted(OURS)
        assert driven.read(OURS) == []
        assert driven.store.tiers.match(OURS) == 0
        driven.flush()
        assert not driven.store.writes.queue.erasing
        assert on_disk(tmp_path, OURS) == []
        assert all_of(driven.store.delete_selected(selection)) == DeletedCount()


@pytest.mark.parametrize("selection", EVERYTHING)
@pytest.mark.parametrize("without", ["nothing", "index"])
def test_after_a_restart_others_blocks_are_there_and_deleted_ones_are_not(
    tmp_path: Path, selection: KVSelection, without: str
) -> None:
    """Also when the index is lost, so that all segments are read anew."""
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(OURS, "ours")
        driven.flush(THEIRS, "theirs")
        all_of(driven.store.delete_selected(selection))
        driven.flush()
    if without == "index":
        shutil.rmtree(tmp_path / "index")
    with store(tmp_path, 4 * RECORD) as driven:
        assert driven.read(OURS) == []
        assert driven.read(THEIRS) == [data_of(key) for key in THEIRS]
        driven.flush(OURS, "ours")  # what is written later is kept
        assert driven.read(OURS) == [data_of(key) for key in OURS]


def test_copies_that_were_superseded_do_not_come_back_with_a_lost_index(tmp_path: Path) -> None:
    with store(tmp_path, 8 * RECORD) as driven:
        driven.flush(OURS[:1], "ours")
        tier_of(driven).forget(OURS[:1])  # as for a quota: its record stays, dead
        driven.store.tiers.dram.drop(driven.store.tiers.dram[OURS[0]])
        driven.flush(OURS[:1], "ours")
        all_of(driven.store.delete_selected(EVERYTHING[1]))
        driven.flush()
        assert on_disk(tmp_path, OURS[:1]) == []
    shutil.rmtree(tmp_path / "index")
    with store(tmp_path, 8 * RECORD) as driven:
        assert driven.read(OURS[:1]) == []


def test_a_crash_after_the_answer_brings_nothing_back_and_one_before_it_no_wrong_byte(tmp_path: Path) -> None:
    live = tmp_path / "live"
    with store(live, 4 * RECORD) as driven:
        driven.flush(OURS, "ours")
        all_of(driven.store.delete_selected(EVERYTHING[0]))
        before = crash(live, tmp_path / "before")
        driven.flush()
        after = crash(live, tmp_path / "after")
    with store(before, 4 * RECORD) as driven:
        assert driven.read(OURS) == [data_of(key) for key in OURS]
    with store(after, 4 * RECORD) as driven:
        assert driven.read(OURS) == []


def test_a_crash_between_overwriting_and_the_index_leaves_a_miss(tmp_path: Path) -> None:
    live, files = tmp_path / "live", FaultyFiles()
    with store(live, 4 * RECORD, files=files) as driven:
        driven.flush(OURS, "ours")
        all_of(driven.store.delete_selected(EVERYTHING[0]))
        files.fail("transaction", OSError(5, "an error"), 1)
        driven.flush()
        assert driven.store.writes.queue.erasing  # it is not said to be done
        between = crash(live, tmp_path / "between")
        driven.flush()
        assert not driven.store.writes.queue.erasing
    with store(between, 4 * RECORD) as driven:
        assert driven.read(OURS) == []
        assert driven.removed == OURS[:1]


@pytest.mark.parametrize("moment", ["queued", "committing"])
def test_a_block_on_its_way_to_the_disk_does_not_get_there(tmp_path: Path, moment: str) -> None:
    with store(tmp_path, 4 * RECORD) as driven:
        transfer, writes = driven.put(OURS, "ours"), driven.store.writes
        plan = writes.queue.next_plan() if moment == "committing" else None
        all_of(driven.store.delete_selected(EVERYTHING[0]))
        assert transfer.closed
        if plan is not None:
            assert writes.queue.erasing
            tier_of(driven).commit(plan)
            writes.queue.plan_done(None)
        driven.flush()
        assert on_disk(tmp_path, OURS) == []
        assert driven.read(OURS) == []
        assert driven.store.tiers.dram.block_bytes == 0
        driven.flush(OURS, "ours")
        assert tier_of(driven).catalogue.live.total_bytes == 4 * RECORD


def test_a_block_that_comes_anew_while_the_deleted_one_is_written_becomes_durable(tmp_path: Path) -> None:
    with store(tmp_path, 4 * RECORD) as driven:
        driven.put(OURS[:1], "ours")
        plan = driven.store.writes.queue.next_plan()
        assert plan is not None
        all_of(driven.store.delete_selected(EVERYTHING[0]))
        again = driven.put(OURS[:1], "ours")
        tier_of(driven).commit(plan)
        driven.store.writes.queue.plan_done(None)
        assert driven.durable == []
        driven.flush()
        assert driven.durable == [tuple(OURS[:1])]
        driven.store.writes.close(again)
    with store(tmp_path, 4 * RECORD) as driven:
        assert driven.read(OURS[:1]) == [data_of(OURS[0])]


def test_a_block_that_is_carried_over_meanwhile_is_overwritten_at_its_new_place(tmp_path: Path) -> None:
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush([*OURS[:2], *THEIRS], "ours")
        driven.flush(keys_of(1, "more"))
        tier_of(driven).forget(THEIRS[:1])
        assert tier_of(driven).compact(0.9) == 1
        plan = driven.store.writes.queue.next_plan()
        assert plan is not None
        assert {append.key for append in plan.carry} >= set(OURS[:2])
        all_of(driven.store.delete_selected(EVERYTHING[1]))
        tier_of(driven).commit(plan)
        driven.store.writes.queue.plan_done(None)
        assert driven.store.writes.queue.erasing
        driven.flush()
        assert on_disk(tmp_path, OURS) == []


def test_an_unfinished_block_is_given_up_and_its_writer_told(tmp_path: Path) -> None:
    with store(tmp_path) as driven:
        transfer = driven.open(spec_of(OURS[:1], tenant="ours"))
        other = driven.open(spec_of(THEIRS[:1], tenant="theirs"))
        assert transfer is not None
        assert other is not None
        driven.store.writes.write(transfer, [run_of(OURS[0], 0, 0)])
        all_of(driven.store.delete_selected(EVERYTHING[0]))
        assert driven.forgotten == [tuple(OURS[:1])]
        assert (transfer.closed, other.closed) == (True, False)
        driven.store.writes.close(other)
        check(driven.store)


def test_a_reader_ends_with_what_it_has_in_memory_and_misses_the_rest(tmp_path: Path) -> None:
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(OURS, "ours")
    driven = Driven(open_ssd(tmp_path, 1 << 20, 4 * RECORD), dram_bytes=8 * BLOCK)
    assert driven.read(OURS[:1], promote=True) == [data_of(OURS[0])]
    lease = driven.store.reads.open(OURS[:2], FORMAT, promote=True)
    all_of(driven.store.delete_selected(EVERYTHING[0]))
    in_memory, cold = lease.sources
    assert b"".join(view_of(in_memory, layer) for layer in range(3)) == data_of(OURS[0])
    assert cold.reader is not None
    with pytest.raises(Exception, match="was deleted"):
        cold.reader.read_layers(0, cold.memory(range(3), FORMAT.layout))
    cold.filled = 0b111
    driven.store.reads.close(lease)
    driven.flush()
    assert driven.store.tiers.dram.block_bytes == 0
    assert driven.read(OURS[:2]) == []
    tier_of(driven).close()


def test_blocks_leave_a_tier_when_their_tenants_time_is_over(tmp_path: Path) -> None:
    """The time that a block came at outlives restarts, and index and records say the same of it."""
    with store(tmp_path, 8 * RECORD) as driven:
        for key, tenant, at in ((OURS[0], "ours", 1000), (OURS[1], "ours", 2000), (THEIRS[0], "theirs", 1000)):
            transfer = driven.open(spec_of([key], tenant=tenant, written_at=at))
            assert transfer is not None
            for layer in range(3):
                driven.store.writes.write(transfer, [run_of(key, 0, layer)])
            driven.store.writes.close(transfer)
        driven.flush()
        assert all_of(driven.store.delete_expired({"ours": 600.0}, 1500.0)) == DeletedCount()
    for lost in (False, True):
        if lost:
            shutil.rmtree(tmp_path / "index")
        with store(tmp_path, 8 * RECORD) as driven:
            assert driven.read(OURS[:1], promote=True) == [data_of(OURS[0])]
            assert all_of(driven.store.delete_expired({"ours": 600.0}, 1600.0)) == DeletedCount()
    with store(tmp_path, 8 * RECORD) as driven:
        driven.read(OURS[:1], promote=True)
        assert all_of(driven.store.delete_expired({"ours": 600.0}, 1601.0)) == DeletedCount(1, BLOCK + RECORD)
        driven.flush()
        assert [driven.read([key]) != [] for key in (OURS[0], OURS[1], THEIRS[0])] == [False, True, True]
        assert all_of(driven.store.delete_expired({"*": 600.0, "theirs": 1e9}, 3000.0)) == DeletedCount(1, RECORD)
        assert driven.read(THEIRS[:1]) == [data_of(THEIRS[0])]
