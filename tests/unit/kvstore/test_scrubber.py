"""Scrubbing: damage on disk is found without a reader."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest

from moonpool.kvstore.scrubber import Scrubber
from moonpool.kvstore.ssd.files import FileLayer
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import RECORD, Driven, data_of, held, keys_of, open_ssd, store

KEYS = keys_of(8)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def scrub(driven: Driven, pool: ThreadPoolExecutor, bytes_per_s: int = RECORD) -> list[float]:
    """One pass; the pauses that it made."""
    assert driven.store.tiers.ssd is not None
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    await Scrubber(driven.store, driven.store.tiers.ssd, pool, bytes_per_s, sleep).scrub()
    return pauses


async def test_damaged_blocks_are_dropped_and_those_in_dram_written_again(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with store(tmp_path, 4 * RECORD, files=FileLayer()) as driven:
        driven.flush(KEYS)
        ssd = driven.store.tiers.ssd
        assert ssd is not None
        for key in (KEYS[2], KEYS[5]):
            segment, row = ssd.catalogue.find(key) or pytest.fail("not on disk")
            with segment.path.open("r+b") as file:
                file.seek(segment.offset(row) + 4096)
                file.write(b"damaged")
        driven.store.tiers.dram.drop(driven.store.tiers.dram[KEYS[5]])
        assert await scrub(driven, pool) == [1.0] * len(KEYS)
        assert (held(driven.store), driven.removed) == ({*KEYS} - {KEYS[5]}, [KEYS[5]])
        driven.flush()
        assert set(ssd.catalogue) == {*KEYS} - {KEYS[5]}
        assert driven.store.reads.bad_blocks == 2
        for block in list(driven.store.tiers.dram.values()):
            driven.store.tiers.dram.drop(block)
        assert driven.read([KEYS[2]]) == [data_of(KEYS[2])]
        assert await scrub(driven, pool, 2 * RECORD) == [0.5] * (len(KEYS) - 1)
        assert (ssd.scrub_passes, ssd.scrubbed_bytes) == (2, 15 * RECORD)


async def test_a_damaged_index_is_written_anew_while_the_store_serves(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(KEYS[:6], "t")
        driven.store.delete_keys(KEYS[:1])
        driven.flush()
        ssd = driven.store.tiers.ssd
        assert ssd is not None
        (tmp_path / "index" / "data.mdb").write_bytes(b"\xa5" * 65536)
        await scrub(driven, pool)
        driven.flush(KEYS[6:], "t")
        assert (ssd.indexes_rebuilt, ssd.indexed) == (1, True)
        assert driven.read(KEYS[1:]) == [data_of(key) for key in KEYS[1:]]
    with store(tmp_path, 4 * RECORD) as driven:
        assert held(driven.store) == set(KEYS[1:])


@pytest.mark.parametrize("error", [lmdb.CorruptedError("MDB_CORRUPTED"), lmdb.PanicError("MDB_PANIC")])
async def test_new_blocks_are_durable_after_lmdb_refuses_its_file(tmp_path: Path, error: lmdb.Error) -> None:
    files = FaultyFiles()
    ssd = open_ssd(tmp_path, 8 * RECORD, 2 * RECORD, files=files)
    driven = Driven(ssd)
    driven.flush(KEYS[:5], "t")
    files.fail("transaction", error, 1)
    driven.flush(KEYS[5:7], "t")
    assert (ssd.indexes_rebuilt, driven.durable[-1]) == (1, tuple(KEYS[5:7]))
    here = set(ssd.catalogue)
    ssd.close()
    ssd = open_ssd(tmp_path, 8 * RECORD, 2 * RECORD, files=FaultyFiles())
    assert (set(ssd.catalogue), ssd.indexes_rebuilt) == (here, 0)
    ssd.close()
