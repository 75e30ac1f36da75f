"""What was deleted, or found damaged, does not come back, and who waits for it hears so."""

import dataclasses
import errno
import shutil
from pathlib import Path

import pytest

from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.core.put_transfer import PutSpec
from moonpool.kvstore.core.put_transfers import DeletedBlocksError
from moonpool.kvstore.core.store import DeletedCount
from tests.layouts import uniform_like
from tests.unit.kvstore.core.test_deletion import all_of, on_disk, tier_of
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    LAYOUT,
    RECORD,
    Driven,
    block_of,
    data_of,
    keys_of,
    run_of,
    spec_of,
    store,
)

OURS, THEIRS = keys_of(4, "ours"), keys_of(2, "theirs")
MINE = KVSelection(tenants=frozenset({"ours"}))
BROKEN = OSError(errno.EIO, "Input/output error")


def damage(driven: Driven, key: BlockKey) -> None:
    driven.store.tiers.dram[key].data[5] ^= 1


@pytest.mark.parametrize("moment", ["queued", "committing"])
def test_a_damaged_block_on_its_way_to_the_disk_makes_way_for_a_good_copy(tmp_path: Path, moment: str) -> None:
    with store(tmp_path, 4 * RECORD) as driven:
        driven.put(OURS[:2])
        plan = driven.store.writes.queue.next_plan() if moment == "committing" else None
        damage(driven, OURS[0])
        driven.store.reads.suspect(OURS[0])
        assert (driven.forgotten, driven.removed) == ([tuple(OURS[:2])], OURS[:1])
        again = driven.put(OURS[:1])
        assert driven.store.writes.queue.queued >= {OURS[0]}  # it does not wait for the other's end
        if plan is not None:
            tier_of(driven).commit(plan)
            driven.store.writes.queue.plan_done(None)
        driven.flush()
        driven.store.writes.close(again)
        driven.store.tiers.dram.drop(driven.store.tiers.dram[OURS[0]])
        assert driven.read(OURS[:1]) == [data_of(OURS[0])]
    with store(tmp_path, 4 * RECORD) as driven:
        assert driven.read(OURS[:2]) == [data_of(key) for key in OURS[:2]]


def test_a_transfer_that_waits_for_durable_hears_at_once_that_its_block_was_too_old(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, 4 * RECORD, files=files) as driven:
        files.fail("write", BROKEN)
        driven.flush(OURS[:1])  # in DRAM only
        unsaved, queued = driven.put(OURS[:1]), driven.put(OURS[1:2])
        all_of(driven.store.delete_expired({"*": 60.0}, 1000.0))
        assert sorted(driven.forgotten) == sorted([tuple(OURS[:1]), tuple(OURS[1:2])])
        assert (unsaved.closed, queued.closed) == (True, True)
        assert driven.store.writes.awaiting == {}
        files.mend()
        driven.flush()
        assert on_disk(tmp_path, OURS) == []


def test_a_record_that_cannot_be_overwritten_keeps_no_plan_from_its_end(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, 4 * RECORD, files=files) as driven:
        driven.flush([*OURS[:1], *THEIRS], "ours")
        all_of(driven.store.delete_selected(KVSelection(keys=frozenset(OURS))))
        files.fail("write", BROKEN, 1)
        transfer = driven.put(keys_of(1, "more"))
        plan = driven.store.writes.queue.next_plan()
        assert plan is not None
        tier_of(driven).commit(plan)
        driven.store.writes.queue.plan_done(None)
        assert driven.durable == [tuple(OURS[:1]) + tuple(THEIRS), tuple(keys_of(1, "more"))]
        assert driven.store.writes.queue.erasing  # it is not said to be done
        driven.flush()
        assert not driven.store.writes.queue.erasing
        assert on_disk(tmp_path, OURS) == []
        driven.store.writes.close(transfer)


def test_a_segment_of_which_a_record_cannot_be_overwritten_is_written_anew(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, 8 * RECORD, files=files) as driven:
        driven.flush([*OURS[:1], *THEIRS], "ours")
        (number,) = tier_of(driven).catalogue.segments
        all_of(driven.store.delete_selected(KVSelection(keys=frozenset(OURS))))
        for _ in range(2):  # the second plan tries it again, and then the file goes
            files.fail("write", BROKEN, 1)
            plan = driven.store.writes.queue.next_plan()
            assert plan is not None
            tier_of(driven).commit(plan)
            driven.store.writes.queue.plan_done(None)
        assert number not in tier_of(driven).catalogue.segments
        driven.flush()
        assert not driven.store.writes.queue.erasing
        assert on_disk(tmp_path, OURS) == []
        assert driven.read(THEIRS) == [data_of(key) for key in THEIRS]


def test_a_key_that_is_named_twice_is_dropped_once(tmp_path: Path) -> None:
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(OURS[:2])
        assert driven.store.delete_keys([OURS[0], OURS[1], OURS[0]]) == DeletedCount(2, 2 * (BLOCK + RECORD))
        driven.flush()
        assert driven.read(OURS[:1]) == []


def test_leases_of_two_blocks_that_had_one_key_count_what_each_has() -> None:
    """The first one is leaving; the second, of another size, was put after it had been dropped."""
    larger = BlockFormat(b"n" * 32, uniform_like(LAYOUT, layers=5))
    driven = Driven()
    driven.put(OURS[:1])
    reads, tiers = driven.store.reads, driven.store.tiers
    first = reads.open(OURS[:1], FORMAT, promote=False)
    driven.store.delete_keys(OURS[:1])
    assert tiers.reserve({"": larger.layout.block_bytes})
    tiers.insert([block_of(OURS[0], block_format=larger)])
    second = reads.open(OURS[:1], larger, promote=False)
    assert reads.leased_bytes == BLOCK + larger.layout.block_bytes
    reads.close(first)
    assert reads.leased_bytes == larger.layout.block_bytes
    reads.close(second)
    assert (reads.leased_bytes, reads.leased) == (0, {})


@pytest.mark.parametrize("then", ["stays", "deleted", "put again"])
def test_a_block_that_is_read_while_its_segment_is_rewritten_does_not_come_back(tmp_path: Path, then: str) -> None:
    """A deletion finds the new copy; what is read is the old one, in a file without a name, and maybe another value."""
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush([*OURS[:1], *THEIRS], "ours")
        driven.flush(keys_of(2, "more"))
        tiers, queue = driven.store.tiers, driven.store.writes.queue
        tiers.dram.drop(tiers.dram[OURS[0]])
        tier_of(driven).forget(THEIRS)
        assert tier_of(driven).compact(0.9) == 1
        plan = queue.next_plan()
        assert plan is not None
        assert OURS[0] in [append.key for append in plan.carry]
        lease = driven.store.reads.open(OURS[:1], FORMAT, promote=True)
        tier_of(driven).commit(plan)
        queue.plan_done(None)
        if then != "stays":
            all_of(driven.store.delete_selected(KVSelection(keys=frozenset(OURS))))
            driven.flush()
        if then == "put again":
            driven.flush(OURS[:1])
            tiers.dram.drop(tiers.dram[OURS[0]])
        (source,) = lease.sources
        assert source.reader is not None
        source.reader.read_layers(0, source.memory(range(LAYOUT.layers), LAYOUT))
        source.filled = (1 << LAYOUT.layers) - 1
        driven.store.reads.close(lease)
        driven.flush()
        assert (OURS[0] in tiers.dram, OURS[0] in tiers) == (False, then != "deleted")
        assert driven.store.reads.promotions == 0
        assert on_disk(tmp_path, OURS) == ([] if then == "deleted" else OURS[:1])


def knowing(keys: list[BlockKey], *forgotten: str, tenant: str = "ours") -> PutSpec:
    """What a writer opens that has carried out some deletions."""
    return dataclasses.replace(spec_of(keys, tenant=tenant), forgotten=frozenset(forgotten))


def test_what_may_be_older_than_a_deletion_is_refused_and_what_is_younger_is_not() -> None:
    driven = Driven()
    driven.store.writes.deletions.add("one", MINE)
    driven.store.writes.deletions.add("two", KVSelection(keys=frozenset(THEIRS[:1])))
    runs = [run_of(OURS[0], 0, layer) for layer in range(LAYOUT.layers)]
    data = memoryview(b"".join(bytes(run.data) for run in runs))
    hashes = [value for run in runs for value in run.hashes]
    for spec in (knowing(OURS[:1]), knowing(OURS[:1], "two", "three")):
        with pytest.raises(DeletedBlocksError, match="keys: they may be older than a deletion"):
            driven.open(spec)
        with pytest.raises(DeletedBlocksError, match="keys: they may be older than a deletion"):
            driven.store.writes.put_whole(spec, data, hashes, 0.0)
    assert driven.store.writes.put_whole(knowing(OURS[:1], "zero", "one"), data, hashes, 0.0) == []
    assert driven.open(knowing(OURS[1:2], "one")) is not None
    with pytest.raises(DeletedBlocksError):
        driven.open(knowing(THEIRS, "one", tenant="theirs"))
    assert driven.open(knowing(THEIRS, "two", tenant="theirs")) is not None
    assert driven.open(knowing(keys_of(1, "other"), tenant="others")) is not None
    assert driven.read(OURS[:1]) == [data_of(OURS[0])]


def test_a_deletion_goes_in_steps_and_misses_nothing_that_moves_meanwhile(tmp_path: Path) -> None:
    """Between any two steps every block changes its tier, and segments are rewritten."""
    many = keys_of(12, "ours many")
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(many, "ours")
        driven.flush(THEIRS, "theirs")
        dram, steps = driven.store.tiers.dram, driven.store.delete_selected(MINE, step_blocks=1)
        left = [len(many)]
        for _ in steps:
            for key in many:
                if key in dram:
                    dram.drop(dram[key])
                else:
                    driven.read([key], promote=True)
            tier_of(driven).compact(1.0)
            driven.flush()
            left.append(sum(key in driven.store.tiers for key in many))
        assert left[0] > left[1] > left[len(left) // 3] > left[-1] == 0  # a few at a time
        driven.flush()
        assert driven.read(many) == []
        assert on_disk(tmp_path, many) == []
        assert driven.read(THEIRS) == [data_of(key) for key in THEIRS]
    shutil.rmtree(tmp_path / "index")
    with store(tmp_path, 4 * RECORD) as driven:
        assert driven.store.tiers.match(many) == 0
