"""Several disks: where blocks go, disks that fail while the store runs, and folders that are missing or swapped."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.eviction.tenants import TenantAccount, TenantRow
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from moonpool.kvstore.write_behind import WriteBehind
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import RECORD, Driven, block_of, data_of, keys_of, spec_of, writing
from tests.unit.kvstore.invariants import check

KEYS = keys_of(12)
BROKEN = OSError(errno.EIO, "Input/output error")
FULL = OSError(errno.ENOSPC, "No space left on device")


def folders(path: Path, count: int = 2) -> list[Path]:
    return [path / name for name in "abc"[:count]]


@contextmanager
def tier(
    paths: Sequence[Path], records: int = 8, *, files: Sequence[FaultyFiles] = (), account: TenantAccount | None = None
) -> Iterator[SsdTier]:
    ssd = open_tier(paths, records * RECORD, RECORD, files=files, account=account, map_bytes=1 << 16)
    try:
        yield ssd
        check(ssd)
    finally:
        ssd.close()


def over(ssd: SsdTier, batch_records: int = 2) -> Driven:
    """A store whose batches go to the disks in turn."""
    return Driven(ssd, batch_bytes=batch_records * RECORD)


def keys_on(ssd: SsdTier, disk: int) -> set[BlockKey]:
    return {key for key in ssd.catalogue if (found := ssd.catalogue.find(key)) and found[0].disk == disk}


def open_below(folder: Path) -> list[str]:
    """Files below a folder that this process has open, named ones and others."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of the listing
            found.append(str(descriptor.readlink()))
    return [name for name in found if name.startswith(f"{folder}/")]


def put(ssd: SsdTier, keys: Sequence[BlockKey], disk: int) -> None:
    put_blocks(ssd, [block_of(key) for key in keys], disk)


def put_blocks(ssd: SsdTier, blocks: Sequence[DramBlock], disk: int) -> None:
    plan = ssd.plan(blocks, disk)
    ssd.commit(plan)
    ssd.committed(plan)


def test_each_disk_takes_batches_and_has_a_budget_of_its_own(tmp_path: Path) -> None:
    with tier(folders(tmp_path), 4) as ssd:
        driven = over(ssd)
        driven.flush(KEYS[:8])
        assert (keys_on(ssd, 0), keys_on(ssd, 1)) == ({*KEYS[:2], *KEYS[4:6]}, {*KEYS[2:4], *KEYS[6:8]})
        assert (ssd.used_bytes, ssd.capacity_bytes) == (8 * RECORD, 8 * RECORD)
        put(ssd, KEYS[8:10], 1)  # its oldest blocks make room, not those of the other
        assert keys_on(ssd, 0) == {*KEYS[:2], *KEYS[4:6]}
        assert keys_on(ssd, 1) == set(KEYS[6:10])
    assert [len(list((path / "segments").iterdir())) for path in folders(tmp_path)] == [4, 4]


def test_an_index_that_is_written_anew_has_the_blocks_of_its_disk(tmp_path: Path) -> None:
    with tier(folders(tmp_path)) as ssd:
        over(ssd).flush(KEYS[:8])
        before = keys_on(ssd, 0), keys_on(ssd, 1)
        index = ssd.disks[0].committer.index
        index.write_anew()
        assert index.rebuilt == 1
    with tier(folders(tmp_path)) as ssd:
        assert (keys_on(ssd, 0), keys_on(ssd, 1)) == before
        assert over(ssd).read(KEYS[:8]) == [data_of(key) for key in KEYS[:8]]


def test_blocks_are_found_whatever_the_order_of_the_folders(tmp_path: Path) -> None:
    with tier(folders(tmp_path)) as ssd:
        over(ssd).flush(KEYS[:8])
    with tier(folders(tmp_path)[::-1]) as ssd:
        assert keys_on(ssd, 1) == {*KEYS[:2], *KEYS[4:6]}
        driven = over(ssd)
        assert driven.read(KEYS[:8]) == [data_of(key) for key in KEYS[:8]]
        driven.flush(KEYS[8:12])
    with tier(folders(tmp_path)) as ssd:
        assert set(ssd.catalogue) == set(KEYS)


def test_blocks_of_a_folder_that_is_missing_are_misses_until_it_is_back(tmp_path: Path) -> None:
    a, b = folders(tmp_path)
    with tier([a, b]) as ssd:
        over(ssd).flush(KEYS[:4])
    with tier([a]) as ssd:
        assert set(ssd.catalogue) == set(KEYS[:2])
        put(ssd, KEYS[2:3], 0)
    with tier([a, b]) as ssd:  # one block is on both
        assert set(ssd.catalogue) == set(KEYS[:4])
        assert over(ssd).read(KEYS[:4]) == [data_of(key) for key in KEYS[:4]]


@pytest.mark.parametrize("first", [0, 1])
def test_a_dead_copy_on_one_disk_does_not_hide_the_block_on_another(tmp_path: Path, first: int) -> None:
    with tier(folders(tmp_path)) as ssd:
        put(ssd, KEYS[:2], first)
        ssd.forget(KEYS[:1])
        put(ssd, [], first)  # its index learns it
        put(ssd, KEYS[:1], 1 - first)
    with tier(folders(tmp_path)) as ssd:
        assert (keys_on(ssd, first), keys_on(ssd, 1 - first)) == ({KEYS[1]}, {KEYS[0]})


def test_a_folder_that_cannot_be_used_is_left_out_of_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = folders(tmp_path)
    with tier([a, b]) as ssd:
        over(ssd).flush(KEYS[:4])
    (b / "lock").unlink()
    (b / "lock").mkdir()
    with tier([b, a]) as ssd:
        assert (set(ssd.catalogue), len(ssd.disks)) == (set(KEYS[:2]), 1)
        assert [message for message in caplog.messages if "left out" in message and str(b) in message]
        with pytest.raises(ConfigError, match="data_dir"):
            open_tier([b, a], RECORD, RECORD)


def test_a_disk_whose_index_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    with tier(folders(tmp_path)) as ssd:
        over(ssd).flush(KEYS[:4])
    files = FaultyFiles(), FaultyFiles()
    files[0].fail("open_index", BROKEN)
    with tier(folders(tmp_path), files=files) as ssd:
        assert set(ssd.catalogue) == set(KEYS[2:4])


@asynccontextmanager
async def running(ssd: SsdTier) -> AsyncIterator[tuple[Driven, WriteBehind]]:
    driven = over(ssd)
    async with writing(driven, retry_after_s=(0.0, 0.0)) as writer:
        yield driven, writer


async def test_what_comes_now_and_then_fills_the_emptier_disk_and_then_both_in_turn(tmp_path: Path) -> None:
    with tier(folders(tmp_path), 16) as ssd:
        put(ssd, KEYS[:2], 0)
        async with running(ssd) as (driven, writer):
            assert await writer.drain(10)  # both wait now
            for key in KEYS[2:]:
                driven.store.writes.close(driven.put([key]))
                assert await writer.drain(10)
        assert [int(key in keys_on(ssd, 1)) for key in KEYS] == [0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("error", [BROKEN, FULL])
async def test_a_disk_that_fails_is_left_out_and_the_other_takes_its_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    files = FaultyFiles(), FaultyFiles()
    with tier(folders(tmp_path), 16, files=files) as ssd:
        put(ssd, KEYS[:2], 0)
        put(ssd, KEYS[2:4], 1)
        async with running(ssd) as (driven, writer):
            files[1].fail("write", error)
            driven.put(KEYS[4:12])
            assert await writer.drain(10)
            while not ssd.disks[1].out:  # it may have had no batch yet
                driven.put(keys_of(4, f"more-{len(driven.stored)}"))
                assert await writer.drain(10)
            assert not driven.store.writes.queue.unsaved
        assert set(driven.removed) == set(KEYS[2:4])
        assert {*KEYS[:2], *KEYS[4:12]} <= keys_on(ssd, 0)
        assert set(KEYS[2:4]).isdisjoint(ssd.catalogue)
        assert (ssd.disks_out, ssd.capacity_bytes) == (1, 16 * RECORD)
        assert open_below(folders(tmp_path)[0] / "segments")
        assert not open_below(folders(tmp_path)[1] / "segments"), "the disk could not be unmounted"
        told = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(told) == 1
        assert "a disk is left out" in told[0].getMessage()
        assert str(folders(tmp_path)[1]) in told[0].getMessage()


async def test_what_dram_still_has_of_a_failed_disk_is_written_to_another(tmp_path: Path) -> None:
    files = FaultyFiles(), FaultyFiles()
    with tier(folders(tmp_path), 16, files=files) as ssd:
        put(ssd, KEYS[:2], 0)
        driven = over(ssd)
        driven.put(KEYS[2:6])
        assert driven.commit(1)
        assert driven.commit(1)
        driven.store.tiers.dram.drop(driven.store.tiers.dram[KEYS[2]])
        async with writing(driven, retry_after_s=()) as writer:
            files[1].fail("write", BROKEN)
            while not ssd.disks[1].out:
                driven.put(keys_of(4, f"more-{len(driven.stored)}"))
                assert await writer.drain(10)
        assert driven.removed == [KEYS[2]]
        assert {*KEYS[:2], *KEYS[3:6]} <= keys_on(ssd, 0)
        check(driven.store)


def test_a_disk_found_full_below_its_budget_counts_as_full_until_it_takes_more(tmp_path: Path) -> None:
    files = FaultyFiles(), FaultyFiles()
    with tier(folders(tmp_path), 16, files=files) as ssd:
        put(ssd, KEYS[:4], 0)
        put(ssd, KEYS[4:5], 1)
        spaces = [disk.space for disk in ssd.disks]
        assert spaces[1].turn < spaces[0].turn
        files[1].fail("write", FULL, 1)
        plan = ssd.plan([block_of(KEYS[5])], 1)
        with pytest.raises(OSError, match="No space left"):
            ssd.commit(plan)
        ssd.failed(plan, FULL)
        assert spaces[1].turn > spaces[0].turn
        put(ssd, KEYS[5:6], 1)  # in place of its oldest block
        assert keys_on(ssd, 1) == {KEYS[5]}
        assert spaces[1].turn > spaces[0].turn
        put(ssd, KEYS[6:7], 1)  # there is room after all
        assert keys_on(ssd, 1) == {*KEYS[5:7]}
        assert spaces[1].turn < spaces[0].turn


async def test_others_take_what_a_disk_pauses_before_it_tries_again(tmp_path: Path) -> None:
    files = FaultyFiles(), FaultyFiles()
    with tier(folders(tmp_path), 16, files=files) as ssd:
        put(ssd, KEYS[:2], 0)  # so that the other is asked first
        driven, durable = over(ssd), asyncio.Event()
        async with writing(driven, retry_after_s=(3600.0,)) as writer:
            assert await writer.drain(10)
            files[1].fail("write", FULL)
            driven.store.writes.open(spec_of(KEYS[2:3]), lambda _: None, lambda _: durable.set(), lambda: None)
            driven.put(KEYS[2:3])
            async with asyncio.timeout(60):
                await durable.wait()
            assert (keys_on(ssd, 0), ssd.disks_out) == (set(KEYS[:3]), 0)


async def test_no_disk_is_left_out_for_want_of_descriptors(tmp_path: Path) -> None:
    files = FaultyFiles(), FaultyFiles()
    with tier(folders(tmp_path), 16, files=files) as ssd:
        async with running(ssd) as (driven, writer):
            for each in files:
                each.fail("write", OSError(errno.EMFILE, "Too many open files"))
            driven.put(KEYS[:4])
            assert await writer.drain(10)
            assert ssd.disks_out == 0
            assert set(driven.store.writes.queue.unsaved) == set(KEYS[:4])


async def test_the_last_disk_is_never_left_out(tmp_path: Path) -> None:
    files = FaultyFiles(), FaultyFiles()
    with tier(folders(tmp_path), 16, files=files) as ssd:
        async with running(ssd) as (driven, writer):
            for each in files:
                each.fail("write", BROKEN)
            driven.put(KEYS[:8])
            assert await writer.drain(10)
            assert ssd.disks_out <= 1
            assert set(driven.store.writes.queue.unsaved) == set(KEYS[:8])
            for each in files:
                each.mend()
            driven.store.writes.queue.retry()
            assert await writer.drain(10)
            assert set(ssd.catalogue) == set(KEYS[:8])


def test_a_block_that_is_deleted_while_it_is_carried_and_put_on_another_disk_stays_there(tmp_path: Path) -> None:
    with tier(folders(tmp_path), 4) as ssd:
        driven = over(ssd)
        put(ssd, KEYS[:2], 0)
        ssd.disks[0].space.segment_bytes = 2 * RECORD  # each segment is half a one now
        assert ssd.compact(1.0) == 1
        plan = ssd.plan([], 0)
        (append,) = plan.carry
        ssd.commit(plan)
        driven.store.delete_keys([append.key])
        put(ssd, [append.key], 1)
        ssd.committed(plan)
        check(ssd)
        assert append.key in keys_on(ssd, 1)
        put(ssd, [], 0)
        put(ssd, [], 0)
    with tier(folders(tmp_path)[:1]) as ssd:
        assert append.key not in ssd.catalogue


def test_a_quota_holds_over_plans_of_several_disks(tmp_path: Path) -> None:
    account = TenantAccount.of({"a": TenantRow(ssd_quota_bytes=3 * RECORD)}, "ssd")
    with tier(folders(tmp_path), account=account) as ssd:
        first = ssd.plan([block_of(key, "a") for key in KEYS[:2]], 0)
        second = ssd.plan([block_of(key, "a") for key in KEYS[2:4]], 1)
        assert (len(second.blocks), len(second.rejected)) == (1, 1)
        for plan in (second, first):
            ssd.commit(plan)
            ssd.committed(plan)
        assert account.used["a"] == 3 * RECORD
        third = ssd.plan([block_of(KEYS[5], "a")], 1)  # the oldest of the tenant goes, on whatever disk
        assert third.given_up == [KEYS[0]]
        ssd.commit(third)
        ssd.committed(third)
        put(ssd, [], 0)
    with tier(folders(tmp_path)) as ssd:
        assert set(ssd.catalogue) == {KEYS[1], KEYS[2], KEYS[5]}


def test_a_quota_and_warming_go_by_the_age_of_blocks_on_all_disks(tmp_path: Path) -> None:
    with tier(folders(tmp_path)) as ssd:
        for at, (key, disk) in enumerate(zip(KEYS[:4], (1, 0, 1, 0), strict=True)):
            block = block_of(key, "a")
            info = dataclasses.replace(block.info, written_at=100 + at)
            put_blocks(ssd, [DramBlock(info, block.data, block.hashes)], disk)
    account = TenantAccount.of({"a": TenantRow(ssd_quota_bytes=4 * RECORD)}, "ssd")
    with tier(folders(tmp_path), account=account) as ssd:  # all segments of one disk are found before the other's
        assert [key for step in ssd.catalogue.newest_first(8) for key in step] == KEYS[3::-1]
        plan = ssd.plan([block_of(KEYS[4], "a"), block_of(KEYS[5], "a")], 0)
        assert plan.given_up == KEYS[:2]
        ssd.commit(plan)
        ssd.committed(plan)


def test_a_block_is_not_written_anew_while_another_disk_writes_what_was_deleted(tmp_path: Path) -> None:
    with tier(folders(tmp_path)) as ssd:
        driven = over(ssd)
        queue = driven.store.writes.queue
        driven.put(KEYS[:1])
        plan = queue.next_plan(0)
        assert plan is not None
        driven.store.delete_keys(KEYS[:1])
        driven.put(KEYS[:1])
        assert queue.next_plan(1) is None
        ssd.commit(plan)
        queue.plan_done(None, 0)
        driven.flush()
        assert KEYS[0] in ssd.catalogue
        assert not queue.recalled


def test_what_is_being_written_counts_as_used(tmp_path: Path) -> None:
    """So that other batches go to the disks that have room."""
    with tier(folders(tmp_path)) as ssd:
        plan, used = ssd.plan([block_of(key) for key in KEYS[:2]], 0), ssd.used_bytes
        assert used == 2 * RECORD
        ssd.commit(plan)
        ssd.committed(plan)
        assert ssd.used_bytes == used


@pytest.mark.parametrize("readable", [False, True])
def test_a_file_without_a_name_takes_no_room_unless_it_is_read(tmp_path: Path, readable: bool) -> None:
    files, path = FileLayer(), tmp_path / "folder" / "file"
    files.make_folder(path.parent)
    files.write(path, [bytes(4096)], 0)
    files.unlink(path, readable=readable)
    assert bool(open_below(path.parent)) == readable
    files.close(path)
    assert not open_below(path.parent)


def test_a_disk_that_was_not_away_is_locked_once(tmp_path: Path) -> None:
    with tier(folders(tmp_path)) as ssd:
        locks = [name for name in open_below(tmp_path) if name.endswith("lock")]
        assert ssd.reopen(0) == []
        assert [name for name in open_below(tmp_path) if name.endswith("lock")] == locks
