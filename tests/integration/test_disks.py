"""A kvstore process on a disk that really is full or read-only: a small file system of its own, mounted for the test.

Skipped where mounting is not permitted.
"""

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.kvstore.ssd.tier import SsdTier
from tests.integration.disks import DISK_BYTES, DRAM_BLOCKS, Disk, Store, refused, run, running
from tests.unit.kvstore.helpers import BLOCK, RECORD, Driven, data_of, keys_of, open_ssd
from tests.unit.kvstore.test_process import durable, put, read

CHUNK = 4
KEYS = keys_of(96, "disk")
OLD, NEW = KEYS[: 2 * CHUNK], KEYS[-CHUNK:]
UNSAVED = KEYS[-CHUNK - DRAM_BLOCKS : -CHUNK]
"""What DRAM has at the end of `goes_on`, and what becomes durable by itself once the disk can be written again."""
MEANWHILE = [KEYS[at : at + CHUNK] for at in range(2 * CHUNK, len(KEYS) - CHUNK, CHUNK)]

NOT_DURABLE = "blocks could not be made durable"
AGAIN = "blocks become durable again"
TRIED_AGAIN = "batches are tried again"


def ssd_of(driven: Driven) -> SsdTier:
    backend = driven.store.tiers.ssd
    assert isinstance(backend, SsdTier)
    return backend


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """An empty tmpfs."""
    disk = Disk(tmp_path / "disk")
    try:
        disk.mount(disk.path, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs")
        yield disk
    finally:
        disk.close()


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Disk]:
    """An empty ext4 on a loop device."""
    disk, image = Disk(tmp_path / "disk"), tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    try:
        run("mkfs.ext4", "-q", "-F", image)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4 can be made here: {error}")
    try:
        disk.mount(disk.path, "-o", "loop,errors=remount-ro", image)
        yield disk
    finally:
        disk.close()


async def goes_on(store: Store, after: Callable[[], None] = lambda: None) -> None:
    """Writers and readers are answered as ever, though nothing becomes durable; `after` each put."""
    for keys in MEANWHILE:
        await put(store.address, keys)
        after()
        assert await read(store.address, keys) == [data_of(key) for key in keys]
    await store.until("pending_writes", lambda value: value == 0)
    await store.check_up()


async def test_a_disk_that_others_fill(disk: Disk, tmp_path: Path) -> None:
    async with running(disk.path, tmp_path / "log") as store:
        disk.fill()
        await goes_on(store)
        assert (await store.gauges())["ssd_blocks"] == 0
        assert await store.present(KEYS) == UNSAVED
        assert len(store.said(NOT_DURABLE)) == 1
        assert "No space left on device" in store.said(NOT_DURABLE)[0]
        assert len(store.said(TRIED_AGAIN)) <= 2
        disk.remount(f"size={2 * DISK_BYTES}")
        await put(store.address, NEW)
        await durable(store.address, len(NEW))
        await store.until("pending_writes", lambda value: value == 0)
        assert len(store.said(AGAIN)) == 1
        disk.fill()
        await store.end(signal.SIGKILL)
    async with running(disk.path, tmp_path / "log2") as store:
        assert len(store.said("the device is full")) == 1
        await store.check_up()
        assert set(NEW) <= set(await store.present(KEYS)) <= {*UNSAVED, *NEW}
        await put(store.address, OLD)
        assert await store.present(OLD) == OLD
        await store.stop()


@pytest.mark.slow  # `tests/unit/kvstore/ssd` has full and read-only disks in one process
async def test_a_full_disk_gives_what_the_store_holds_away_and_nothing_else(disk: Disk, tmp_path: Path) -> None:
    async with running(disk.path, tmp_path / "log") as store:
        await put(store.address, OLD)
        await durable(store.address, len(OLD))
        disk.fill()
        await goes_on(store, disk.fill)
        assert len(store.said(NOT_DURABLE)) <= 2  # data and index may find no room, each once
        (disk.path / "another").unlink()
        await put(store.address, NEW)
        here = await store.present(KEYS)
        assert set(NEW) <= set(here)
        await store.until("pending_writes", lambda value: value == 0)
        stored = (await store.gauges())["ssd_blocks"]
        await store.end(signal.SIGKILL)
    async with running(disk.path, tmp_path / "log2") as store:
        assert (await store.gauges())["ssd_blocks"] == stored
        assert set(NEW) <= set(await store.present(KEYS))


@pytest.mark.slow  # `tests/unit/kvstore/ssd` has full and read-only disks in one process
async def test_a_disk_smaller_than_the_budget(disk: Disk, tmp_path: Path) -> None:
    disk.remount(f"size={32 * RECORD}")
    async with running(disk.path, tmp_path / "log") as store:
        await goes_on(store)
        assert 0 < (await store.gauges())["ssd_blocks"] < 32
        assert (await store.gauges())["blocks_not_durable_total"] == 0
        assert store.said(NOT_DURABLE) == []
        assert len(store.said(TRIED_AGAIN)) <= 2
        await store.stop()
    async with running(disk.path, tmp_path / "log2") as store:
        await store.check_up()
        assert set(MEANWHILE[-1]) <= set(await store.present(KEYS))


@pytest.mark.slow  # `test_starts_with_little_room` loses indexes, too
@pytest.mark.parametrize("lost", ["deleted", "garbage"])
async def test_a_lost_index_on_a_full_disk(disk: Disk, tmp_path: Path, lost: str) -> None:
    async with running(disk.path, tmp_path / "log") as store:
        await put(store.address, OLD)
        await durable(store.address, len(OLD))
        await store.end(signal.SIGKILL)
    index = disk.path / "index"
    (index / "data.mdb").write_bytes(b"\xa5" * 8192)
    if lost == "deleted":
        shutil.rmtree(index)
    disk.fill()
    async with running(disk.path, tmp_path / "log2") as store:
        told = store.said("the device is too full for an index")
        assert len(told) == 1
        assert "No space left on device" in told[0] or "No more disk space" in told[0]
        await store.check_up()
        gauges = await store.gauges()
        assert (gauges["ssd_indexed"], gauges["ssd_blocks"]) == (0, len(OLD))
        assert await store.present(OLD) == OLD
        await put(store.address, NEW)
        await store.until("pending_writes", lambda value: value == 0)
        assert set(NEW) <= set(await store.present(KEYS))
        await store.check_up()
        stored = (await store.gauges())["ssd_blocks"]
        await store.end(signal.SIGKILL)
    (disk.path / "another").unlink()
    async with running(disk.path, tmp_path / "log3") as store:
        assert store.said("rebuilding the index from the segments")
        gauges = await store.gauges()
        assert (gauges["ssd_indexed"], gauges["ssd_blocks"]) == (1, stored)
        await store.check_up()
        await put(store.address, MEANWHILE[0])
        await store.until("ssd_blocks", lambda value: value == stored + CHUNK)
        await store.stop()
    async with running(disk.path, tmp_path / "log4") as store:
        assert store.said("rebuilding") == []
        assert set(MEANWHILE[0] + NEW) <= set(await store.present(KEYS))


def test_starts_with_little_room(disk: Disk, tmp_path: Path) -> None:
    """Where some of an index fits, LMDB speaks of an input/output error; what is served must not depend on that."""
    disk.remount("size=24m")
    keys = keys_of(1500, "little room")
    driven = Driven(open_ssd(disk.path / "store", 1 << 30, 512 * RECORD), 64 * BLOCK)
    for at in range(0, len(keys), 50):
        driven.flush(keys[at : at + 50])
    ssd_of(driven).close()
    indexed = {}
    for free_kib in (0, 4, 16, 32, 64, 96, 1024):
        shutil.rmtree(disk.path / "store" / "index")
        disk.leave(free_kib << 10)
        driven = Driven(open_ssd(disk.path / "store", 1 << 30, 512 * RECORD))
        assert set(ssd_of(driven).catalogue) == set(keys)
        assert driven.read(keys[-2:]) == [data_of(key) for key in keys[-2:]]
        indexed[free_kib] = ssd_of(driven).indexed
        ssd_of(driven).close()
        (disk.path / "store" / "index").mkdir(exist_ok=True)
    assert (indexed[0], indexed[16], indexed[1024]) == (False, False, True)
    for free_kib, number in ((0, 1), (4, 2), (8, 3)):
        segment = sorted((disk.path / "store" / "segments").iterdir())[0]
        keys = keys[segment.stat().st_size // RECORD :]
        segment.unlink()
        disk.leave(free_kib << 10)
        driven = Driven(open_ssd(disk.path / "store", 1 << 30, 512 * RECORD))
        assert set(ssd_of(driven).catalogue) == set(keys), number
        ssd_of(driven).close()


@pytest.mark.slow  # `tests/unit/kvstore/ssd` has full and read-only disks in one process
async def test_a_folder_that_becomes_read_only(disk: Disk, tmp_path: Path) -> None:
    """A file system with files open for writing cannot be made read-only; what hides the folder from new files can."""
    async with running(disk.path, tmp_path / "log") as store:
        await put(store.address, OLD)
        await durable(store.address, len(OLD))
        segments = disk.path / "segments"
        disk.mount(segments, "--bind", segments)
        disk.remount("bind,ro", segments)
        await goes_on(store)
        assert len(store.said(NOT_DURABLE)) == 1
        assert "Read-only file system" in store.said(NOT_DURABLE)[0]
        assert store.said(TRIED_AGAIN) == []
        assert await store.present(OLD) == OLD
        disk.remount("bind,rw", segments)
        await put(store.address, NEW)
        await store.until("ssd_blocks", lambda value: value >= len(OLD) + len(NEW))
        await store.until("pending_writes", lambda value: value == 0)
        assert len(store.said(AGAIN)) == 1
        await store.stop()
    async with running(disk.path, tmp_path / "log2") as store:
        assert set(OLD + NEW) <= set(await store.present(KEYS))


async def test_a_disk_that_vanishes_and_comes_back(disk: Disk, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    async with running(disk.path, tmp_path / "log") as store:
        await put(store.address, OLD)
        await durable(store.address, len(OLD))
        shutil.copytree(disk.path, copy)
        disk.unmount()
        await goes_on(store)
        assert len(store.said(NOT_DURABLE)) == 1
        disk.mount(disk.path, "-t", "tmpfs", "-o", f"size={2 * DISK_BYTES}", "tmpfs")
        shutil.copytree(copy, disk.path, ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)
        shutil.copy(copy / "lock", disk.path)  # by which the store knows its folder
        await put(store.address, NEW)
        await store.until("ssd_blocks", lambda value: value >= len(OLD) + len(NEW))
        await store.until("pending_writes", lambda value: value == 0)
        assert len(store.said(AGAIN)) == 1
        await store.check_up()
        await store.end(signal.SIGKILL)
    async with running(disk.path, tmp_path / "log2") as store:
        assert set(OLD + NEW) <= set(await store.present(KEYS))


async def test_a_file_system_that_the_kernel_makes_read_only(ext4: Disk, tmp_path: Path) -> None:
    """What ext4 does when it finds the device broken: all writing ends, through open files too, until a repair."""
    async with running(ext4.path, tmp_path / "log") as store:
        await put(store.address, OLD)
        await durable(store.address, len(OLD))
        ext4.remount("abort")
        await goes_on(store)
        assert (await store.gauges())["ssd_blocks"] == len(OLD)
        assert len(store.said(NOT_DURABLE)) == 1
        assert "Read-only file system" in store.said(NOT_DURABLE)[0]
        assert await store.present(OLD) == OLD
        await store.stop()
    line = refused(ext4.path, tmp_path / "log2")
    assert line.startswith(f"kvstore: data_dir: {ext4.path} cannot be used: Read-only file system")
    ext4.unmount()
    # A copy: where a mount namespace of another test still has the first mount, the image itself stays read-only.
    ext4.mount(ext4.path, "-o", "loop", shutil.copy(tmp_path / "image", tmp_path / "repaired"))
    async with running(ext4.path, tmp_path / "log3") as store:
        assert await store.present(OLD) == OLD
        await put(store.address, NEW)
        await store.until("ssd_blocks", lambda value: value == len(OLD) + len(NEW))


async def test_a_start_on_a_read_only_disk_is_refused(disk: Disk, tmp_path: Path) -> None:
    async with running(disk.path, tmp_path / "log") as store:
        await put(store.address, OLD)
        await durable(store.address, len(OLD))
        await store.stop()
    disk.remount("ro")
    assert refused(disk.path, tmp_path / "log2") == (
        f"kvstore: data_dir: {disk.path} cannot be used: Read-only file system"
    )
    disk.remount("rw")
    async with running(disk.path, tmp_path / "log3") as store:
        assert await store.present(OLD) == OLD


async def test_a_first_start_on_a_full_disk(disk: Disk, tmp_path: Path) -> None:
    disk.fill()
    line = refused(disk.path, tmp_path / "log")
    assert line.startswith(f"kvstore: data_dir: {disk.path} cannot be used: ")
    assert "No space left on device" in line
