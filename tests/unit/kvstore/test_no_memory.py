"""The system gives no memory: a store starts or serves without, says so by name, and loses nothing."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from moonpool.base.errors import Overloaded, Unavailable
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.dram.arena import Arena
from moonpool.kvstore.record_store import RecordStore
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from moonpool.v1 import kv_pb2
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import Driven, data_of, held, keys_of, store, writing
from tests.unit.kvstore.invariants import check

MIB = 1 << 20
OLD, NEW = keys_of(8, "old"), keys_of(4, "new")
NOW = 1000.0
REFUSED = lmdb.MemoryError("mdb_env_set_mapsize: Cannot allocate memory")


@contextmanager
def little_memory(room: int = 256 * MIB) -> Iterator[None]:
    """This process may map so many bytes more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def open_large(path: Path) -> SsdTier:
    """A tier whose index is mapped to more than there is."""
    return open_tier([path], MIB, 1 << 16, map_bytes=1 << 30)


def close(driven: Driven) -> None:
    assert driven.store.tiers.ssd is not None
    driven.store.tiers.ssd.close()


def read_all(driven: Driven, keys: list[BlockKey]) -> None:
    for key in keys:
        assert driven.read([key]) == [data_of(key)]


def test_a_store_starts_without_memory_for_its_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven(open_large(tmp_path))
    driven.flush(OLD)
    close(driven)
    with little_memory():
        driven = Driven(open_large(tmp_path))
        read_all(driven, OLD)
        driven.flush(NEW, "new")
        assert driven.durable == [tuple(NEW)]
        check(driven.store)
        close(driven)
    assert "no memory for the index" in caplog.text
    assert str(tmp_path / "index") in caplog.text
    driven = Driven(open_large(tmp_path))
    assert held(driven.store) == {*OLD, *NEW}
    read_all(driven, [*OLD, *NEW])
    assert driven.store.tiers.ssd is not None
    assert driven.store.tiers.ssd.indexed
    close(driven)


async def test_an_index_that_cannot_grow_keeps_no_block_from_becoming_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is not left out; deleted blocks do not come back with an index that has grown old."""
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        driven.flush(OLD)
        files.fail("transaction", REFUSED, 1)
        async with writing(driven, retry_after_s=(), unsaved_after_s=(3600.0,)) as writer:
            driven.store.writes.close(driven.put(NEW))
            driven.store.delete_keys(OLD[:2])
            assert await writer.drain(20)
        assert driven.store.writes.queue.blocks_not_durable == 0
        check(driven.store)
    assert "no memory for the index" in caplog.text
    with store(tmp_path) as driven:
        assert held(driven.store) == {*OLD[2:], *NEW}
        read_all(driven, [*OLD[2:], *NEW])


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError("no memory")])
async def test_a_batch_that_finds_no_memory_is_tried_again(tmp_path: Path, error: Exception) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as driven:
        files.fail("write", error, 2)
        async with writing(driven, retry_after_s=(0.0, 0.0)) as writer:
            transfer = driven.put(NEW)
            assert await writer.drain(20)
            assert writer.retries == 2
        assert driven.durable == [tuple(NEW)]
        driven.store.writes.close(transfer)
        check(driven.store)


async def test_records_are_read_without_memory_for_their_database(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def record(name: str) -> kv_pb2.Record:
        return kv_pb2.Record(kind="k", tenant="t", id=name, value=b"v" * 9000, version=1, expires_at=2 * NOW)

    kept = RecordStore([tmp_path], lambda: NOW)
    await kept.take([record("old")])
    kept.close()
    with little_memory():
        kept = RecordStore([tmp_path], lambda: NOW)
        assert kept.replicated.get("k", "t", "old") == record("old")
        with pytest.raises(Unavailable, match="Cannot allocate memory"):
            await kept.take([record("new")])
    assert "no memory for the records' database" in caplog.text
    assert str(tmp_path) in caplog.text
    await kept.take([record("newer")])
    kept.close()
    kept = RecordStore([tmp_path], lambda: NOW)
    assert {name for name in ("old", "new", "newer") if kept.replicated.get("k", "t", name)} == {"old", "new", "newer"}
    kept.close()


def test_memory_for_blocks_that_is_refused_is_told_and_asked_for_again() -> None:
    arena = Arena(1 << 30)
    kept = arena.allocate(MIB)
    kept[:] = b"k" * MIB
    with little_memory(), pytest.raises(Overloaded, match="no memory for blocks of 536870912 bytes"):
        arena.allocate(512 * MIB)
    assert bytes(kept[:4]) == b"kkkk"
    assert len(arena.allocate(512 * MIB)) == 512 * MIB
