"""The writer thread: what is visible becomes durable, and what failed is tried again."""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.kvstore.write_behind import WriteBehind
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import RECORD, Driven, data_of, keys_of, open_ssd, spec_of, writing

KEYS = keys_of(6)
A, B, C = KEYS[:3]


@asynccontextmanager
async def failing(path: Path, **settings: Any) -> AsyncIterator[tuple[Driven, FaultyFiles, WriteBehind]]:
    files = FaultyFiles()
    ssd = open_ssd(path, files=files)
    driven = Driven(ssd)
    async with writing(driven, **settings) as writer:
        yield driven, files, writer
    ssd.close()


async def test_the_writer_makes_durable_what_is_visible(tmp_path: Path) -> None:
    async with failing(tmp_path) as (driven, _, writer):
        driven.put(KEYS[:4])
        assert await writer.drain(10)
        driven.put(KEYS[4:])
        assert await writer.drain(10)
        assert {key for keys in driven.durable for key in keys} == set(KEYS)
        assert len(driven.store.writes.queue.queued) == 0
    ssd = open_ssd(tmp_path)
    assert set(ssd.catalogue) == set(KEYS)
    ssd.close()


async def test_writes_keep_to_a_rate_but_at_the_end(tmp_path: Path) -> None:
    """A batch has used up the rate for hours: the next waits, until the store is told to end."""
    async with failing(tmp_path, bytes_per_s=1) as (driven, _, writer):
        heard = asyncio.Event()
        transfer = driven.store.writes.open(spec_of([A]), lambda _: None, lambda _: heard.set(), lambda: None)
        assert transfer is not None
        driven.put([A])
        async with asyncio.timeout(60):
            await heard.wait()
        driven.put([B])
        for _ in range(20):
            await asyncio.sleep(0)
        assert (driven.durable, driven.store.writes.queue.queued) == ([(A,)], {B})
        assert await writer.drain(10)
        assert driven.durable == [(A,), (B,)]


async def test_only_who_waits_for_something_ends_a_pause(tmp_path: Path) -> None:
    """A deletion with nothing on disk does not; one that has waits for one plan; who waits for all is not passed by."""
    async with failing(tmp_path, bytes_per_s=1) as (driven, _, writer):
        queue, heard = driven.store.writes.queue, asyncio.Event()
        assert driven.store.writes.open(spec_of([A]), lambda _: None, lambda _: heard.set(), lambda: None) is not None
        driven.put([A])
        async with asyncio.timeout(60):
            await heard.wait()
        driven.put([B])
        assert await writer.erased(10)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [block.info.key for block in queue.waiting] == [B]
        driven.store.delete_keys([A])
        assert await writer.erased(10)
        driven.put([C])
        for _ in range(20):
            await asyncio.sleep(0)
        assert [block.info.key for block in queue.waiting] == [C]
        draining = asyncio.ensure_future(writer.drain(10))
        await asyncio.sleep(0)
        driven.store.delete_keys([B])
        assert await writer.erased(10)
        assert await draining
        assert driven.durable == [(A,), (B,), (C,)]


def test_all_that_is_written_is_owed_to_the_rate_however_much_at_once(tmp_path: Path) -> None:
    """Of two disks one has carried over ten batches: the other waits for these too."""
    ssd = open_ssd(tmp_path)
    writer = WriteBehind(Driven(ssd, batch_bytes=1000).store.writes.queue, ssd, bytes_per_s=100)
    assert [writer.pause_after(nbytes, 0.0) for nbytes in (10_000, 1000)] == [100.0, 110.0]
    assert writer.pause_after(0, 5.0) == 105.0
    assert writer.pause_after(100, 160.0) == 1.0
    ssd.close()


async def test_a_failing_device_stops_nothing(tmp_path: Path) -> None:
    async with failing(tmp_path, unsaved_after_s=[3600]) as (driven, files, writer):
        files.fail("sync", OSError(5, "Input/output error"))
        driven.put([A])
        assert await writer.drain(10)
        files.mend()
        assert driven.durable == []
        driven.put([B])
        assert await writer.drain(10)
        assert driven.durable == [(B,)]
        assert driven.read([A, B]) == [data_of(A), data_of(B)]


async def test_a_transfer_hears_durable_after_an_error_has_passed(tmp_path: Path) -> None:
    """Nothing is put meanwhile: the writer tries again by itself."""
    async with failing(tmp_path, unsaved_after_s=[0.001]) as (driven, files, writer):
        heard = asyncio.Event()
        transfer = driven.store.writes.open(spec_of([A]), lambda _: None, lambda _: heard.set(), lambda: None)
        assert transfer is not None
        files.fail("sync", OSError(5, "Input/output error"))
        driven.put([A])
        assert await writer.drain(10)
        assert not heard.is_set()
        assert len(driven.store.writes.queue.unsaved) == 1
        files.mend()
        async with asyncio.timeout(60):
            await heard.wait()
        assert (driven.durable, len(driven.store.writes.queue.unsaved)) == ([(A,)], 0)


async def test_a_block_put_again_after_an_error_becomes_durable(tmp_path: Path) -> None:
    async with failing(tmp_path, unsaved_after_s=[3600]) as (driven, files, writer):
        files.fail("sync", OSError(5, "Input/output error"))
        driven.put([A])
        assert await writer.drain(10)
        files.mend()
        assert driven.put([A]).present == [0]
        assert await writer.drain(10)
        assert set(driven.durable) == {(A,)}
        assert driven.store.tiers.durable(A)


async def test_a_disk_that_was_away_is_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its file system comes back as another one, and has lost a segment meanwhile."""
    disk, back = tmp_path / "disk", tmp_path / "back"
    files = FaultyFiles()
    ssd = open_ssd(disk, 1 << 20, 2 * RECORD, files=files)
    driven = Driven(ssd)
    async with writing(driven, unsaved_after_s=[0.001], retry_after_s=[]) as writer:
        for key in KEYS[:4]:
            driven.store.writes.close(driven.put([key]))
            assert await writer.drain(10)
        for key in KEYS[:3]:
            driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
        shutil.copytree(disk, back)
        sorted((back / "segments").iterdir())[1].unlink()  # two blocks, of which DRAM has one
        files.fail("write", OSError(errno.EIO, "Input/output error"), 1)
        driven.put(KEYS[4:])
        assert await writer.drain(10)
        shutil.rmtree(disk)
        disk.mkdir()  # the mount point
        driven.store.writes.queue.retry()
        assert await writer.drain(10)
        assert set(ssd.catalogue) == set(KEYS[:4])
        assert driven.read(KEYS[4:]) == [data_of(key) for key in KEYS[4:]]
        disk.rmdir()
        back.rename(disk)
        driven.store.writes.queue.retry()
        assert await writer.drain(10)
        assert set(ssd.catalogue) == {*KEYS} - {KEYS[2]}
        assert (driven.removed, ssd.indexes_rebuilt) == ([KEYS[2]], 1)
        assert driven.read(KEYS[:2]) == [data_of(key) for key in KEYS[:2]]
    assert caplog.text.count("could not be made durable") <= 2  # an error of the device, and no folder
    ssd.close()
    ssd = open_ssd(disk, 1 << 20, 2 * RECORD)
    assert set(ssd.catalogue) == {*KEYS} - {KEYS[2]}
    ssd.close()
