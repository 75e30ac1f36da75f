"""Commits on devices that are full, broken or read-only, and reads that fail."""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lmdb
import pytest

from moonpool.base.kv.file_io import FileSpan
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.ssd.admission import SsdAdmission
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from moonpool.kvstore.write_behind import WriteBehind
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import RECORD, Driven, block_of, data_of, held, keys_of, open_ssd, store, writing
from tests.unit.kvstore.invariants import check

KEYS = keys_of(12)


def ssd_of(driven: Driven) -> SsdTier:
    backend = driven.store.tiers.ssd
    assert backend is not None
    return backend


async def written(driven: Driven, *, retry_after_s: tuple[float, ...] = (0.0, 0.0)) -> WriteBehind:
    """Lets the writer thread do all there is to do."""
    async with writing(driven, retry_after_s=retry_after_s) as writer:
        assert await writer.drain(20)
    check(driven.store)
    return writer


FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")
FULL_INDEX = lmdb.DiskError("mdb_txn_commit: No space left on device")


@pytest.mark.parametrize(("operation", "error"), [("write", FULL), ("transaction", FULL_INDEX)])
async def test_a_full_device_is_tried_again_with_less_on_it(tmp_path: Path, operation: str, error: Exception) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        driven.flush(KEYS[:4])
        for key in KEYS[:4]:
            driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
        transfer = driven.put([KEYS[4]])
        files.fail(operation, error, 2)
        writer = await written(driven)
        assert (writer.retries, driven.store.writes.queue.failed_batches) == (2, 2)
        assert driven.durable[1:] == [(KEYS[4],)]
        assert driven.store.writes.queue.blocks_not_durable == 0
        assert driven.removed[0] == KEYS[0]
        assert KEYS[3] in driven.store.tiers
        driven.store.writes.close(transfer)
    with store(tmp_path) as driven:
        assert {KEYS[3], KEYS[4]} <= held(driven.store)
        assert not set(driven.removed) & held(driven.store)


async def test_a_device_that_stays_full_is_given_up(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        driven.put([KEYS[0]])
        files.fail("write", FULL)
        writer = await written(driven)
        files.mend()
        assert (writer.retries, driven.store.writes.queue.failed_batches) == (2, 3)
        assert driven.store.writes.queue.blocks_not_durable == 1
        assert driven.read([KEYS[0]]) == [data_of(KEYS[0])]
        driven.put([KEYS[1]])
        await written(driven)
        assert (KEYS[1],) in driven.durable


async def test_a_full_device_gives_up_as_much_as_a_batch_needs(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        driven.flush(KEYS[:6])
        driven.store.writes.close(driven.put(KEYS[6:9]))
        files.fail("write", FULL, 1)
        writer = await written(driven)
        assert writer.retries == 1
        assert set(ssd_of(driven).catalogue) == set(KEYS[3:9])


async def test_on_a_device_that_stays_full_only_the_first_batch_is_tried_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        backend = ssd_of(driven)
        async with writing(driven, retry_after_s=(0.0, 0.0), unsaved_after_s=(3600.0,)) as writer:
            files.fail("write", FULL)
            for key in KEYS[:4]:
                driven.store.writes.close(driven.put([key]))
                assert await writer.drain(20)
            files.mend()
            assert (writer.retries, driven.store.writes.queue.failed_batches) == (2, 2 + 4)
            assert not backend.has_housekeeping


async def test_trouble_is_told_once_a_while_and_its_end_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    caplog.set_level(logging.INFO)
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        settings: dict[str, Any] = {"retry_after_s": (0.0,), "unsaved_after_s": (3600.0,), "clock": lambda: now}
        async with writing(driven, **settings) as writer:

            async def put(key: BlockKey, error: Exception | None) -> list[str]:
                """What is said while a block is put."""
                caplog.clear()
                if error is not None:
                    files.fail("write", error)
                driven.store.writes.close(driven.put([key]))
                assert await writer.drain(20)
                files.mend()
                return [
                    record.getMessage() for record in caplog.records if record.name == "moonpool.kvstore.write_behind"
                ]

            def broken(name: str) -> OSError:
                return OSError(errno.EROFS, "Read-only file system", name)

            assert [len(await put(KEYS[n], broken(f"{n}.seg"))) for n in range(3)] == [1, 0, 0]
            now = 60.0
            assert "Read-only file system: '3.seg'" in (await put(KEYS[3], broken("3.seg")))[0]
            assert "durable again" in (await put(KEYS[4], None))[0]
            assert len(await put(KEYS[5], broken("5.seg"))) == 1
            assert len(await put(KEYS[6], FULL)) == 2  # tried again, and given up
            assert len(await put(KEYS[7], None)) == 1
            assert await put(KEYS[8], None) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
async def test_a_broken_or_read_only_device_is_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        driven.flush(KEYS[:1])
        files.fail("write", OSError(number, "no"))
        driven.put([KEYS[1]])
        with caplog.at_level(logging.ERROR):
            writer = await written(driven)
        assert (writer.retries, driven.store.writes.queue.failed_batches) == (0, 1)
        assert "could not be made durable" in caplog.text
        assert driven.read(KEYS[:2]) == [data_of(key) for key in KEYS[:2]]
        assert driven.durable == [(KEYS[0],)]


async def test_a_plan_that_gets_nowhere_is_not_made_again_and_again(tmp_path: Path) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:3])
    ssd = open_tier([tmp_path], 2 * RECORD, RECORD, admission=SsdAdmission(pins=KEYS))
    driven = Driven(ssd)
    await written(driven)
    assert ssd.has_housekeeping
    assert len(ssd.catalogue) == 3
    ssd.close()


# Reading

PASSING = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ENOENT]


@pytest.mark.parametrize("number", PASSING)
def test_a_passing_error_while_reading_is_a_miss_and_the_block_stays(tmp_path: Path, number: int) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        driven.flush(KEYS[:3])
        for key in KEYS[:3]:
            driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
        files.fail("read", OSError(number, "passing"))
        assert driven.read(KEYS[:3], promote=True) == []
        files.mend()
        assert (driven.removed, driven.store.reads.bad_blocks) == ([], 0)
        assert not ssd_of(driven).has_housekeeping
        assert driven.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]
    with store(tmp_path) as driven:
        assert driven.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]


@pytest.mark.parametrize("number", PASSING)
async def test_a_passing_error_while_carrying_takes_no_kept_block(tmp_path: Path, number: int) -> None:
    """The segment is passed over: another one makes room, and the batch becomes durable all the same."""
    files, pins = FaultyFiles(), {KEYS[0]}
    ssd = open_ssd(tmp_path, 8 * RECORD, 2 * RECORD, pins=pins, files=files)
    driven = Driven(ssd)
    for key in KEYS[:8]:
        driven.flush([key])
        driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
    files.fail("read", OSError(number, "passing"), 1)
    driven.put(KEYS[8:9])
    writer = await written(driven)
    assert (writer.retries, ssd.lost_blocks, ssd.carried_bytes) == (1, 0, 0)
    assert {KEYS[0], KEYS[8]} <= set(ssd.catalogue)
    assert not pins & set(driven.removed)
    assert driven.read([KEYS[0]]) == [data_of(KEYS[0])]
    check(ssd)
    ssd.close()
    ssd = open_ssd(tmp_path, 8 * RECORD, 2 * RECORD)
    assert Driven(ssd).read([KEYS[0]]) == [data_of(KEYS[0])]
    ssd.close()


def open_segments(folder: Path) -> int:
    links = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    return sum(link.startswith(str(folder)) and link.endswith(".seg") for link in links)


def test_a_tier_of_many_segments_keeps_few_of_them_open(tmp_path: Path) -> None:
    files = FaultyFiles(max_open=4)
    keys = keys_of(40)
    with store(tmp_path, files=files) as driven:
        for key in keys:
            driven.flush([key])
            driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
            assert open_segments(tmp_path) <= 4
        assert len(ssd_of(driven).catalogue.segments) == 40
        for key in keys:
            assert driven.read([key]) == [data_of(key)]
            assert open_segments(tmp_path) <= 4


class SlowClosing(FileLayer):
    """Closing a file takes until it is permitted."""

    def __init__(self) -> None:
        super().__init__()
        self.permitted = threading.Event()
        self.closed: list[str] = []

    def close(self, path: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.permitted.wait(60)
        self.closed.append(f"{path.name} in {threading.current_thread().name}")
        super().close(path)


def test_a_removed_segment_is_closed_off_the_event_loop(tmp_path: Path) -> None:
    """It is 1 GiB, as a rule, and its last close frees all of it."""
    files = SlowClosing()
    ssd = open_ssd(tmp_path, 8 * RECORD, 2 * RECORD, pins={KEYS[0]}, files=files)
    driven = Driven(ssd)
    for key in KEYS[:8]:
        driven.flush([key])
    transfer = driven.put(KEYS[8:9])
    plan = driven.store.writes.queue.next_plan()
    assert plan is not None
    reader = ssd.reader(KEYS[0])
    ssd.commit(plan)
    driven.store.writes.queue.plan_done(None)  # neither this nor the release waits for the closing
    out = memoryview(bytearray(len(data_of(KEYS[0])) // 3))
    reader.read_layers(0, out)
    assert out == data_of(KEYS[0])[: len(out)]
    reader.release()
    before = list(files.closed)
    files.permitted.set()
    driven.store.writes.close(transfer)
    ssd.close()
    late = files.closed[len(before) :]
    assert "0000000000000001.seg in kvstore-close_0" in late


class HeldFiles(FileLayer):
    """Files are deleted when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Future[None], Callable[[Path], None], Path]] = []

    def later(self, change: Callable[[Path], None], path: Path) -> "Future[None]":
        self.held.append((Future(), change, path))
        return self.held[-1][0]

    def delete(self, error: OSError | None = None) -> list[str]:
        """Does what was to be done, or lets it fail; names of the files."""
        held, self.held = self.held, []
        for done, change, path in held:
            if error is None:
                change(path)
                done.set_result(None)
            else:
                done.set_exception(error)
        return [path.name for _, _, path in held]


def full_of(files: FileLayer, path: Path) -> SsdTier:
    """A tier of two segments, the first of which, of an earlier life, has made room for a third."""
    for keys in KEYS[:4], KEYS[4:5]:
        ssd = open_ssd(path, 4 * RECORD, 2 * RECORD, files=files)
        for key in keys:
            plan = ssd.plan([block_of(key)])
            ssd.commit(plan)
            ssd.committed(plan)
        if keys[0] == KEYS[0]:
            ssd.close()
    assert set(ssd.catalogue) == set(KEYS[2:5])
    return ssd


@pytest.mark.parametrize("fails", [False, True])
def test_files_that_are_being_deleted_are_work_until_they_are_gone(tmp_path: Path, fails: bool) -> None:
    files = HeldFiles()
    ssd = full_of(files, tmp_path)
    disk, first = ssd.disks[0], tmp_path / "segments" / f"{1:016d}.seg"
    assert first.exists()
    assert disk.erasing
    assert ssd.has_housekeeping
    if fails:
        assert first.name in files.delete(BROKEN)
        assert disk.erasing
        plan = ssd.plan([])
        ssd.commit(plan)
        assert disk.erasing  # also while a plan tries again
        ssd.committed(plan)
        assert disk.erasing
    assert first.name in files.delete()
    assert not first.exists()
    assert not disk.erasing  # without another plan, which might begin to delete the next file
    assert not ssd.has_housekeeping
    ssd.close()


def test_a_plan_that_deletes_nothing_waits_for_no_deletion(tmp_path: Path) -> None:
    files = HeldFiles()
    ssd = full_of(files, tmp_path)
    plan = ssd.plan([block_of(KEYS[5])])
    ssd.commit(plan)
    ssd.committed(plan)
    assert set(ssd.catalogue) == set(KEYS[2:6])
    files.delete()
    ssd.close()


def test_nobody_waits_for_what_a_disk_deletes_that_is_left_out(tmp_path: Path) -> None:
    ssd = full_of(HeldFiles(), tmp_path)
    assert list(ssd.leave_out(0)) == [[KEYS[2], KEYS[3]], [KEYS[4]]]
    assert not ssd.disks[0].erasing
    ssd.close()


def test_after_a_disk_was_away_names_are_looked_up_again_and_readers_of_removed_files_go_on(tmp_path: Path) -> None:
    files, named, removed = FileLayer(), tmp_path / "named", tmp_path / "removed"
    for path in (named, removed):
        files.write(path, [b"before"], 0)
        assert files.peek(path, 6, 0) == b"before"
    files.unlink(removed, readable=True)
    (tmp_path / "of the disk that came back").write_bytes(b"behind")
    (tmp_path / "of the disk that came back").rename(named)
    files.forget_open()
    assert files.peek(named, 6, 0) == b"behind"
    assert files.peek(removed, 6, 0) == b"before"
    files.close_all()


def test_where_direct_writes_are_refused_the_page_cache_takes_them(tmp_path: Path) -> None:
    """A write that is not aligned is refused as by a file system that has no direct ones."""
    files, path, out = FileLayer(direct=True), tmp_path / "file", memoryview(mmap.mmap(-1, 8192))
    for parts, offset in (([b"a" * 4096, b"b" * 4096], 0), ([b"o", b"ff"], 4095), ([b"end"], 8192)):
        files.write(path, parts, offset)
        assert files.read(path, [FileSpan(0, out)])[::2] == (1, None)
    files.sync(path)
    files.close_all()
    assert path.read_bytes() == b"a" * 4095 + b"off" + b"b" * 4094 + b"end"
    assert out == path.read_bytes()[:8192]
