"""New segments in the files of reclaimed ones: what is left behind their ends is nobody's, and goes when it must."""

import errno
import random
import shutil
from pathlib import Path

import pytest

from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.repair import verify
from moonpool.kvstore.ssd.catalogue import RecordFilter, RecordLocation
from moonpool.kvstore.ssd.files import ALIGN
from moonpool.kvstore.ssd.records import pack_header
from moonpool.kvstore.ssd.segment import Segment
from moonpool.kvstore.ssd.segment_files import list_segments
from moonpool.kvstore.ssd.tier import SsdTier
from moonpool.kvstore.ssd.write_plan import WritePlan
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import RECORD, Driven, block_of, data_of, keys_of, open_ssd
from tests.unit.kvstore.invariants import check

KEYS = keys_of(60)
SEGMENT = 2 * RECORD
CAPACITY = 4 * SEGMENT


def put(ssd: SsdTier, keys: list[BlockKey], block_format: BlockFormat | None = None) -> WritePlan:
    formats = () if block_format is None else (block_format,)
    plan = ssd.plan([block_of(key, "", *formats) for key in keys])
    ssd.commit(plan)
    ssd.committed(plan)
    check(ssd)
    return plan


def full(path: Path, files: FaultyFiles) -> SsdTier:
    """A tier whose fifth segment has one record, in the file of the first."""
    ssd = open_ssd(path, CAPACITY, SEGMENT, files=files)
    for at in range(0, 8, 2):
        put(ssd, KEYS[at : at + 2])
    assert not files.named("rename")
    put(ssd, KEYS[8:9])
    assert files.named("rename") == [f"{1:016d}.seg"]
    assert files.named("unlink") == ["unsynced"]  # of an earlier life
    assert set(ssd.catalogue) == set(KEYS[2:9])
    return ssd


def sizes(path: Path) -> dict[int, int]:
    return list_segments(path / "segments")


def test_a_full_tier_goes_on_in_the_files_that_it_has(tmp_path: Path) -> None:
    files = FaultyFiles()
    ssd = full(tmp_path, files)
    inodes = {file.stat().st_ino for file in (tmp_path / "segments").iterdir()}
    for key in KEYS[9:16]:
        put(ssd, [key])
        assert {file.stat().st_ino for file in (tmp_path / "segments").iterdir()} == inodes
        assert sum(sizes(tmp_path).values()) == ssd.used_bytes == CAPACITY
    assert len(files.named("unlink")) == 1
    ssd.close()


@pytest.mark.parametrize("indexed", [True, False])
def test_a_start_finds_nothing_of_the_older_segment(tmp_path: Path, *, indexed: bool) -> None:
    ssd = full(tmp_path, FaultyFiles())
    ssd.abandon()
    assert sizes(tmp_path)[5] == SEGMENT
    if not indexed:
        shutil.rmtree(tmp_path / "index")
    ssd = open_ssd(tmp_path, CAPACITY, SEGMENT)
    assert set(ssd.catalogue) == set(KEYS[2:9])
    assert sizes(tmp_path)[5] == RECORD
    ssd.close()


def test_an_orderly_end_leaves_nothing_of_it_either(tmp_path: Path) -> None:
    full(tmp_path, FaultyFiles()).close()
    assert sizes(tmp_path) == {2: SEGMENT, 3: SEGMENT, 4: SEGMENT, 5: RECORD}


def test_a_deletion_waits_until_it_has_gone(tmp_path: Path) -> None:
    """A device that does not take it keeps nothing else from being done."""
    files = FaultyFiles()
    ssd = full(tmp_path, files)
    assert not ssd.has_housekeeping
    ssd.erase_tails()
    files.fail("truncate", error := OSError(errno.EIO, "broken"))
    plan = put(ssd, [])
    assert plan.erase_error is error, "it is logged"
    assert ssd.disks[0].erasing
    files.mend()
    plan = ssd.plan([])
    assert ssd.disks[0].erasing
    ssd.commit(plan)
    ssd.committed(plan)
    assert not ssd.has_housekeeping
    assert sizes(tmp_path)[5] == RECORD
    put(ssd, KEYS[9:10])
    assert set(sizes(tmp_path)) == {2, 3, 4, 5, 6}
    ssd.close()


def test_what_a_plan_overwrites_now_counts_too(tmp_path: Path) -> None:
    ssd = full(tmp_path, FaultyFiles())
    plan = ssd.plan([block_of(key) for key in KEYS[9:12]])
    ssd.erase_tails()
    ssd.commit(plan)
    assert ssd.disks[0].erasing
    ssd.committed(plan)
    assert not ssd.disks[0].erasing  # both segments are as long as the files were
    ssd.close()


def test_a_failed_plan_gives_its_files_up(tmp_path: Path) -> None:
    files = FaultyFiles()
    ssd = full(tmp_path, files)
    plan = ssd.plan([block_of(key) for key in KEYS[9:11]])
    files.fail("write", error := OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="broken"):
        ssd.commit(plan)
    files.mend()
    ssd.failed(plan, error)
    put(ssd, [])
    assert set(ssd.catalogue) == set(KEYS[4:9])
    assert sizes(tmp_path) == {3: SEGMENT, 4: SEGMENT, 5: RECORD}
    ssd.close()


def on_disk(path: Path, key: BlockKey) -> bool:
    """Whether the data of a block are in a file."""
    return any(data_of(key) in file.read_bytes() for file in (path / "segments").iterdir())


def test_a_file_that_a_failed_plan_did_not_take_goes(tmp_path: Path) -> None:
    """Also if the device refuses at first: the index has forgotten the segment, so a start would adopt it."""
    files = FaultyFiles()
    ssd = open_ssd(tmp_path, CAPACITY, SEGMENT, files=files, pins={KEYS[0]})
    for at in range(0, 8, 2):
        put(ssd, KEYS[at : at + 2])
    plan = ssd.plan([block_of(key) for key in KEYS[8:11]])
    assert [append.key for append in plan.carry] == KEYS[:1]
    assert [segment.number for segment in plan.reuse.values()] == [2]
    files.fail("rename", error := OSError(errno.EIO, "broken"))
    files.fail("unlink", error, 1, after=1)  # the first file goes
    with pytest.raises(OSError, match="broken"):
        ssd.commit(plan)
    ssd.failed(plan, error)
    assert 2 in sizes(tmp_path)
    assert ssd.disks[0].erasing
    while ssd.disks[0].erasing:
        put(ssd, [])
    assert set(sizes(tmp_path)) == {3, 4, 5}
    assert set(ssd.catalogue) == {KEYS[0], *KEYS[4:8]}
    ssd.close()


def test_a_deleted_record_that_is_not_overwritten_goes_with_its_file(tmp_path: Path) -> None:
    files = FaultyFiles()
    ssd = open_ssd(tmp_path, CAPACITY, SEGMENT, files=files)
    for at in range(0, 8, 2):
        put(ssd, KEYS[at : at + 2])
    assert ssd.erase([place for place in [ssd.catalogue.find(KEYS[1])] if place is not None]) == [KEYS[1]]
    files.fail("write", OSError(errno.EIO, "broken"), 1)
    put(ssd, KEYS[8:9])
    while ssd.disks[0].erasing:
        put(ssd, [])
    assert set(ssd.catalogue) == set(KEYS[2:9])
    assert not on_disk(tmp_path, KEYS[1])
    ssd.close()


def test_a_dead_copy_that_is_reclaimed_while_its_key_is_deleted_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(ssd := open_ssd(tmp_path, CAPACITY, SEGMENT))
    for at in range(0, 8, 2):
        driven.flush(KEYS[at : at + 2])
    ssd.forget(KEYS[:2])  # as for a quota: their records stay, dead
    for key in KEYS[:2]:
        driven.store.tiers.dram.drop(driven.store.tiers.dram[key])
    dead, looked_at = ssd.catalogue.dead, list[BlockKey]()

    def watched(segment: Segment, rows: range, wanted: RecordFilter) -> list[RecordLocation]:
        looked_at.extend(segment.keys[row] for row in rows)
        return dead(segment, rows, wanted)

    monkeypatch.setattr(ssd.catalogue, "dead", watched)
    deletion = driven.store.delete_selected(KVSelection(keys=frozenset({KEYS[1]})), step_blocks=1)
    while KEYS[0] not in looked_at:
        next(deletion)
    assert KEYS[1] not in looked_at
    driven.flush(KEYS[8:9])  # into the file of the segment of which one record was looked at
    assert on_disk(tmp_path, KEYS[1])
    assert not any(deletion)
    while driven.store.writes.queue.erasing:
        driven.flush()
    assert not on_disk(tmp_path, KEYS[1])
    ssd.close()


def test_a_block_that_has_records_in_it_brings_none_of_them_in(tmp_path: Path) -> None:
    """Somebody makes up records, of others' keys, and a crash leaves them behind the end of the newest segment."""
    large = BlockFormat(b"n" * 32, KVLayout.uniform(4, 2, 8, 64, "float32"))
    made_up, size = block_of(KEYS[59], "another"), large.layout.block_bytes
    record = (pack_header(made_up.info, made_up.hashes) + bytes(made_up.data)).ljust(RECORD, b"\0")
    files = FaultyFiles()
    ssd = open_ssd(tmp_path, 4 * 2 * (size + ALIGN), 2 * (size + ALIGN), files=files)
    for key in KEYS[:8]:
        block = block_of(key, "", large)
        block.data[:] = (bytes(ALIGN) + record * (size // RECORD))[:size]
        plan = ssd.plan([block])
        ssd.commit(plan)
        ssd.committed(plan)
    put(ssd, KEYS[8:9])
    ssd.abandon()
    ssd = open_ssd(tmp_path)
    assert KEYS[59] not in ssd.catalogue
    assert KEYS[8] in ssd.catalogue
    ssd.close()


class Copying(FaultyFiles):
    """Copies the data folder before a transaction, once it is told where to: what a process leaves that is killed."""

    copy: Path | None = None

    def step(self, name: str, path: Path | None = None) -> None:
        super().step(name, path)
        if name == "transaction" and self.copy is not None:
            shutil.copytree(self.copy.parent / "data", self.copy)
            self.copy = None


def test_a_store_may_be_killed_before_the_index_knows_who_has_the_file(tmp_path: Path) -> None:
    files = Copying()
    ssd = full(tmp_path / "data", files)
    files.copy = tmp_path / "copy"
    put(ssd, KEYS[9:11])
    ssd.close()
    report = verify(tmp_path / "copy")
    assert report.ok, report.faults
    ssd = open_ssd(tmp_path / "copy", CAPACITY, SEGMENT)
    assert set(ssd.catalogue) == set(KEYS[4:11])
    check(ssd)
    ssd.close()


def test_files_are_as_long_as_the_budget_says(tmp_path: Path) -> None:
    """Records of several sizes, which leave something of the older segment at the end of a file."""
    chance = random.Random(1)
    formats = [BlockFormat(b"n" * 32, KVLayout.uniform(pages, 2, 8, 64, "float32")) for pages in (1, 2, 4)]
    assert [block_format.layout.block_bytes for block_format in formats] == [8192, 16384, 32768]
    files = FaultyFiles()
    ssd = open_ssd(tmp_path, 1 << 19, 1 << 16, files=files)
    written: dict[BlockKey, BlockFormat] = {}
    for number in range(30):
        kind, keys = chance.choice(formats), keys_of(chance.randint(1, 4), str(number))
        put(ssd, keys, kind)
        written |= dict.fromkeys(keys, kind)
        assert ssd.used_bytes <= ssd.capacity_bytes
        assert sum(sizes(tmp_path).values()) <= ssd.used_bytes
    assert files.named("rename")
    for key in list(ssd.catalogue):
        reader, layout = ssd.reader(key), written[key].layout
        reader.read_layers(0, out := memoryview(bytearray(layout.block_bytes)))
        assert out == data_of(key, layout)
        reader.release()
    ssd.close()
