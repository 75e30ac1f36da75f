"""The SSD tier under a store: durable, bounded, and honest about what a device has lost."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.ssd.data_folder import DataFolder
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.reader import Band, read_bands
from moonpool.kvstore.ssd.records import BadRecordError
from moonpool.kvstore.ssd.segment import RecordKind
from moonpool.kvstore.ssd.tier import SsdTier
from tests.unit.kvstore.faulty_files import FaultyFiles, counting
from tests.unit.kvstore.helpers import (
    FORMAT,
    LAYOUT,
    OTHER_FORMAT,
    RECORD,
    Driven,
    block_of,
    data_of,
    held,
    keys_of,
    open_ssd,
)
from tests.unit.kvstore.invariants import check

KEYS = keys_of(12)


@contextmanager
def store(
    path: Path, capacity: int = 1 << 20, segment: int = 1 << 16, files: FileLayer | None = None
) -> Iterator[tuple[Driven, SsdTier]]:
    ssd = open_ssd(path, capacity, segment, files=files)
    try:
        yield Driven(ssd), ssd
    finally:
        ssd.close()


def segment_files(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "segments").iterdir())


def flip(path: Path, position: int, segment: int = 1) -> None:
    file = path / "segments" / f"{segment:016d}.seg"
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_durable_blocks_are_there_after_a_restart_byte_for_byte(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, ssd):
        driven.flush(KEYS[:3])
        assert driven.durable == [tuple(KEYS[:3])]
        assert ssd.used_bytes == 3 * RECORD
    with store(tmp_path) as (driven, ssd):
        assert held(driven.store) == set(KEYS[:3])
        assert driven.store.tiers.match(KEYS) == 3
        assert driven.read(KEYS) == [data_of(key) for key in KEYS[:3]]
        assert (driven.stored, driven.removed) == ([], [])
        assert (len(ssd.catalogue.segments), ssd.used_bytes) == (1, 3 * RECORD)
        driven.flush([KEYS[3]])
        assert segment_files(tmp_path) == ["0000000000000001.seg", "0000000000000002.seg"]


def test_an_intact_record_at_another_block_s_place_is_not_read(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, _):
        driven.flush(KEYS[:2])
    file = tmp_path / "segments" / f"{1:016d}.seg"
    data = bytearray(file.read_bytes())
    data[RECORD : 2 * RECORD] = data[:RECORD]
    file.write_bytes(data)
    with store(tmp_path) as (driven, _):
        assert driven.read(KEYS[:1]) == [data_of(KEYS[0])]
        assert driven.read(KEYS[1:2]) == []
        assert driven.store.reads.bad_blocks == 1


def test_what_was_not_committed_is_not_there_and_takes_no_room(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, ssd):
        driven.flush([KEYS[0]])
        driven.put([KEYS[1]])
        plan = driven.store.writes.queue.next_plan()
        assert plan is not None
        append = plan.store[0]
        with append.segment.path.open("r+b") as file:  # and then the process ends
            file.seek(append.offset)
            file.write(b"half a record")
    with store(tmp_path) as (driven, ssd):
        assert list(held(driven.store)) == [KEYS[0]]
        assert (tmp_path / "segments" / segment_files(tmp_path)[0]).stat().st_size == RECORD == ssd.used_bytes


def test_a_segment_that_holds_no_record_is_removed(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, _):
        driven.flush([KEYS[0]])
    (tmp_path / "segments" / "0000000000000007.seg").write_bytes(bytes(RECORD))
    with store(tmp_path) as (driven, _):
        assert segment_files(tmp_path) == ["0000000000000001.seg"]
        driven.flush([KEYS[1]])
        assert segment_files(tmp_path) == ["0000000000000001.seg", "0000000000000008.seg"]


@pytest.mark.parametrize("how", ["deleted", "garbage"])
def test_a_lost_index_is_rebuilt_from_the_segments(tmp_path: Path, how: str) -> None:
    with store(tmp_path, segment=2 * RECORD) as (driven, _):
        driven.flush(KEYS[:5])
    index = tmp_path / "index" / "data.mdb"
    index.unlink() if how == "deleted" else index.write_bytes(b"\xa5" * index.stat().st_size)
    for _ in range(2):  # the second start finds the rebuilt index
        with store(tmp_path, segment=2 * RECORD) as (driven, ssd):
            assert held(driven.store) == set(KEYS[:5])
            assert driven.read(KEYS) == [data_of(key) for key in KEYS[:5]]
            assert (len(ssd.catalogue.segments), ssd.used_bytes) == (3, 5 * RECORD)


def test_a_rebuild_drops_a_cut_tail(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, _):
        driven.flush(KEYS[:3])
    file = tmp_path / "segments" / "0000000000000001.seg"
    file.write_bytes(file.read_bytes()[: 3 * RECORD - 10])
    (tmp_path / "index" / "data.mdb").unlink()
    with store(tmp_path) as (driven, ssd):
        assert held(driven.store) == set(KEYS[:2])
        assert ssd.used_bytes == 2 * RECORD
        assert driven.read(KEYS) == [data_of(key) for key in KEYS[:2]]


def test_a_cut_or_missing_segment_costs_its_blocks_only(tmp_path: Path) -> None:
    with store(tmp_path, segment=2 * RECORD) as (driven, _):
        driven.flush(KEYS[:6])
    (tmp_path / "segments" / "0000000000000001.seg").unlink()
    second = tmp_path / "segments" / "0000000000000002.seg"
    second.write_bytes(second.read_bytes()[: RECORD + 1])
    for _ in range(2):
        with store(tmp_path, segment=2 * RECORD) as (driven, ssd):
            assert held(driven.store) == {KEYS[2], KEYS[4], KEYS[5]}
            assert driven.read([KEYS[2]]) == [data_of(KEYS[2])]
            check(ssd)


@pytest.mark.parametrize("position", [RECORD + 10, RECORD + 40, RECORD + 4096, RECORD + 4096 + LAYOUT.block_bytes - 1])
def test_a_changed_byte_makes_a_miss_and_is_announced(tmp_path: Path, position: int) -> None:
    with store(tmp_path) as (driven, _):
        driven.flush(KEYS[:3])
    flip(tmp_path, position)
    with store(tmp_path) as (driven, ssd):
        assert driven.read(KEYS[:3]) == [data_of(KEYS[0])]
        assert driven.removed == [KEYS[1]]
        assert driven.store.reads.bad_blocks == 1
        assert driven.store.tiers.match(KEYS[:3]) == 1
        assert ssd.has_housekeeping
        driven.flush()
        assert not ssd.has_housekeeping
        driven.flush([KEYS[1]])
        assert driven.stored == [KEYS[1]]
        driven.read(KEYS[:3])
    with store(tmp_path) as (driven, _):
        assert driven.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]


def test_a_bad_block_that_was_replaced_meanwhile_is_kept(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, ssd):
        driven.flush([KEYS[0]])
    with store(tmp_path) as (driven, ssd):
        first = driven.store.reads.open([KEYS[0]], FORMAT, promote=False)
        second = driven.store.reads.open([KEYS[0]], FORMAT, promote=False)
        driven.store.reads.lost(first.sources[0])
        driven.store.reads.close(first)
        driven.flush([KEYS[0]])
        driven.store.reads.lost(second.sources[0])
        driven.store.reads.close(second)
        assert driven.store.reads.bad_blocks == 1
        assert driven.store.tiers.durable(KEYS[0])
        check(ssd)


def test_the_budget_is_kept_by_dropping_the_oldest_segment(tmp_path: Path) -> None:
    with store(tmp_path, capacity=4 * RECORD, segment=2 * RECORD) as (driven, ssd):
        driven.flush(KEYS[:4])
        for key in KEYS[:4]:
            driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
        driven.flush([KEYS[4]])
        assert set(ssd.catalogue) == {KEYS[2], KEYS[3], KEYS[4]}
        assert driven.removed == KEYS[:2]
        assert ssd.used_bytes == 4 * RECORD  # the new segment has the file of the old one
        assert segment_files(tmp_path) == ["0000000000000002.seg", "0000000000000003.seg"]
    with store(tmp_path, capacity=4 * RECORD, segment=2 * RECORD) as (driven, ssd):
        assert held(driven.store) == {KEYS[2], KEYS[3], KEYS[4]}


def test_a_block_that_is_still_in_dram_is_not_announced_as_removed(tmp_path: Path) -> None:
    with store(tmp_path, capacity=2 * RECORD, segment=RECORD) as (driven, ssd):
        driven.flush(KEYS[:2])
        driven.flush([KEYS[2]])
        assert set(ssd.catalogue) == {KEYS[1], KEYS[2]}
        assert driven.removed == []
        assert driven.read([KEYS[0]]) == [data_of(KEYS[0])]


def test_a_smaller_budget_is_reached_after_a_restart(tmp_path: Path) -> None:
    with store(tmp_path, segment=RECORD) as (driven, _):
        driven.flush(KEYS[:5])
    with store(tmp_path, capacity=2 * RECORD, segment=RECORD) as (driven, ssd):
        assert ssd.has_housekeeping
        driven.flush()
        assert held(driven.store) == {KEYS[3], KEYS[4]}
        assert driven.removed == KEYS[:3]
    assert len(segment_files(tmp_path)) == 2


def test_nothing_is_reclaimed_under_a_reader(tmp_path: Path) -> None:
    with store(tmp_path, capacity=2 * RECORD, segment=RECORD) as (driven, ssd):
        driven.flush(KEYS[:2])
    with store(tmp_path, capacity=2 * RECORD, segment=RECORD) as (driven, ssd):
        lease = driven.store.reads.open([KEYS[0]], FORMAT, promote=False)
        driven.flush([KEYS[2]])
        assert set(ssd.catalogue) == {KEYS[0], KEYS[2]}
        both = driven.store.reads.open([KEYS[0]], FORMAT, promote=False), ssd.reader(KEYS[2])
        driven.flush([KEYS[3]])
        assert driven.store.writes.queue.blocks_not_durable == 1
        assert KEYS[3] in driven.store.tiers
        assert not driven.store.tiers.durable(KEYS[3])
        for open_lease in (lease, both[0]):
            driven.store.reads.close(open_lease)
        both[1].release()
        driven.flush([KEYS[4]])
        assert set(ssd.catalogue) == {KEYS[2], KEYS[4]}


def test_a_block_larger_than_the_budget_stays_in_dram(tmp_path: Path) -> None:
    with store(tmp_path, capacity=RECORD - 1, segment=RECORD) as (driven, ssd):
        driven.flush([KEYS[0]])
        assert (len(ssd.catalogue), driven.store.writes.queue.blocks_not_durable) == (0, 1)
        assert driven.durable == []
        assert driven.read([KEYS[0]]) == [data_of(KEYS[0])]


def test_a_full_device_gives_up_its_oldest_segment(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, segment=RECORD, files=files) as (driven, ssd):
        driven.flush(KEYS[:3])
        files.fail("write", OSError(errno.ENOSPC, "No space left on device"))
        driven.flush([KEYS[3]])
        files.mend()
        assert driven.store.writes.queue.failed_batches == 1
        assert not driven.store.tiers.durable(KEYS[3])
        assert KEYS[3] in driven.store.tiers
        assert ssd.used_bytes == 2 * RECORD
        driven.flush([KEYS[4]])
        assert set(ssd.catalogue) == {KEYS[1], KEYS[2], KEYS[4]}
        assert driven.durable[1:] == [(KEYS[4],)]
    with store(tmp_path, segment=RECORD) as (driven, ssd):
        assert held(driven.store) == {KEYS[1], KEYS[2], KEYS[4]}


def test_a_failed_index_transaction_names_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as (driven, ssd):
        driven.flush([KEYS[0]])
        files.fail("transaction", OSError(errno.EIO, "Input/output error"))
        driven.flush([KEYS[1]])
        files.mend()
        assert driven.durable == [(KEYS[0],)]
        assert set(ssd.catalogue) == {KEYS[0]}
        driven.flush([KEYS[2]])
        assert driven.read(KEYS[2:3]) == [data_of(KEYS[2])]
    with store(tmp_path) as (driven, ssd):
        assert held(driven.store) == {KEYS[0], KEYS[2]}
        assert driven.read([KEYS[2]]) == [data_of(KEYS[2])]


def test_the_index_names_a_record_only_after_its_sync(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, files=files) as (driven, _ssd):
        done = counting(files.steps)
        driven.flush(KEYS[:2])
        assert [name for name, _ in done()] == ["write", "sync", "sync_folder", "transaction"]


def test_blocks_of_another_format_are_a_miss(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, _):
        driven.flush([KEYS[0]])
    with store(tmp_path) as (driven, _ssd):
        lease = driven.store.reads.open([KEYS[0]], OTHER_FORMAT, promote=True)
        assert lease.blocks == 0
        driven.store.reads.close(lease)


def test_one_process_per_folder(tmp_path: Path) -> None:
    with store(tmp_path), pytest.raises(ConfigError, match=r"data_dir: .* another process"):
        open_ssd(tmp_path)
    open_ssd(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError) as refusal:
        DataFolder(tmp_path / "file" / "data", FileLayer())
    assert refusal.value.field == "data_dir"


def test_promotion_brings_blocks_back_into_dram(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, _):
        driven.flush(KEYS[:3])
    with store(tmp_path) as (driven, _ssd):
        dram = driven.store.tiers.dram
        assert driven.read(KEYS[:3], promote=True) == [data_of(key) for key in KEYS[:3]]
        assert set(dram) == set(KEYS[:3])
        assert driven.store.reads.promotions == 3
        assert (driven.stored, driven.removed) == (KEYS[:3], []), "they are in DRAM from now on"
        assert driven.read(KEYS[:3]) == [data_of(key) for key in KEYS[:3]]
        assert (driven.store.reads.dram_hits, driven.store.reads.ssd_hits) == (3, 3)


def test_a_bad_block_is_not_promoted(tmp_path: Path) -> None:
    with store(tmp_path) as (driven, _):
        driven.flush(KEYS[:2])
    flip(tmp_path, RECORD + 4096 + LAYOUT.slice_bytes(0) * 2)
    with store(tmp_path) as (driven, _ssd):
        assert driven.read(KEYS[:2], promote=True) == [data_of(KEYS[0])]
        assert set(driven.store.tiers.dram) == {KEYS[0]}
        assert driven.store.tiers.dram.reserved.total_bytes == 0


def test_a_block_held_in_no_format_twice(tmp_path: Path) -> None:
    block: BlockKey = KEYS[0]
    with store(tmp_path) as (driven, ssd):
        driven.flush([block])
        plan = ssd.plan([block_of(KEYS[1], block_format=OTHER_FORMAT)])
        ssd.commit(plan)
        ssd.committed(plan)
    with store(tmp_path) as (driven, ssd):
        kinds = [ssd.catalogue.kind_of(key) for key in (block, *KEYS[1:3])]
        assert kinds == [RecordKind(FORMAT, ""), RecordKind(OTHER_FORMAT, ""), None]


def bands_of(ssd: SsdTier, keys: Sequence[BlockKey]) -> list[Band]:
    return [(ssd.reader(key), memoryview(bytearray(LAYOUT.block_bytes))) for key in keys]


def read_of(bands: Sequence[Band]) -> list[bytes]:
    for reader, _ in bands:
        reader.release()
    return [bytes(out) for _, out in bands]


def test_blocks_of_one_segment_are_read_in_one_call(tmp_path: Path) -> None:
    files = FaultyFiles()
    with store(tmp_path, segment=2 * RECORD, files=files) as (driven, ssd):
        driven.flush(KEYS[:4])
        bands, new = bands_of(ssd, KEYS[:4]), counting(files.steps)
        assert read_bands(0, bands) is None
        assert [name for name, _ in new()] == ["read", "read"]
        assert read_of(bands) == [data_of(key) for key in KEYS[:4]]


@pytest.mark.parametrize("bad", range(4))
def test_those_before_a_bad_block_are_read(tmp_path: Path, bad: int) -> None:
    with store(tmp_path, segment=2 * RECORD) as (driven, ssd):
        driven.flush(KEYS[:4])
        flip(tmp_path, bad % 2 * RECORD + 4096 + LAYOUT.slice_bytes(0), 1 + bad // 2)
        bands = bands_of(ssd, KEYS[:4])
        failure = read_bands(0, bands)
        assert failure is not None
        assert (failure[0], type(failure[1])) == (bad, BadRecordError)
        assert [reader.hashes[2] for reader, _ in bands[:bad]] == [block_of(key).hashes[2] for key in KEYS[:bad]]
        assert read_of(bands)[:bad] == [data_of(key) for key in KEYS[:bad]]
