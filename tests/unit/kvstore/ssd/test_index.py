import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.disk_index import DiskIndex
from moonpool.kvstore.ssd.files import FileLayer, open_lmdb
from moonpool.kvstore.ssd.index import Index, IndexChange, IndexLostError
from moonpool.kvstore.ssd.segment import ENTRY, MAX_SEGMENT_BYTES, RecordKind
from tests.unit.kvstore.faulty_files import FaultyFiles
from tests.unit.kvstore.helpers import FORMAT, OTHER_FORMAT, keys_of, store

KEYS = keys_of(200)
KINDS = [RecordKind(FORMAT, "ü"), RecordKind(OTHER_FORMAT, "")]


def made(path: Path) -> Index:
    index = Index(FileLayer(), path, 1 << 16)
    index.commit(IndexChange())
    return index


def entries(*numbers: int) -> bytes:
    return b"".join(ENTRY.pack(KEYS[n], 2 * n, 2, 0, 0) for n in numbers)


def segment_of(number: int, records: int) -> IndexChange:
    """A segment with so many records."""
    packed = b"".join(ENTRY.pack(KEYS[n % len(KEYS)], 2 * n, 2, 0, 0) for n in range(records))
    return IndexChange(entries={(number, 0): packed}, segments={number: 8192 * records}, kinds={number: KINDS})


def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.commit(
        IndexChange(
            entries={(1, 0): entries(0, 1), (300, 0): entries(5)},
            segments={1: 16384, 300: 8192},
            kinds={1: [RecordKind(FORMAT, "ü")], 300: [RecordKind(FORMAT, ""), RecordKind(FORMAT, "b")]},
        )
    )
    index.commit(IndexChange(dropped=[(1, 0), (300, 0)]))
    index.commit(
        IndexChange(removed_segments=[300, 4], entries={(1, 2): entries(2)}, segments={1: 24576}, kinds={1: KINDS})
    )
    index.close()
    index = Index(FileLayer(), tmp_path / "i")
    image = index.load()
    assert image.entries == {1: entries(0, 1, 2)}
    assert image.segments == {1: 24576}
    assert image.kinds == {1: KINDS}
    assert image.dropped == {1: {0}}
    index.close()


class Kinds(Sequence[RecordKind]):
    """So many kinds, and how many of them were looked at."""

    def __init__(self, count: int) -> None:
        self.kinds = [*KINDS, *(RecordKind(FORMAT, str(number)) for number in range(2, count))]
        self.looks = 0

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, number: Any) -> Any:
        self.looks += 1
        return self.kinds[number]


def test_kinds_that_are_there_are_not_brought_again(tmp_path: Path) -> None:
    index, before, after = made(tmp_path / "i"), Kinds(50), Kinds(52)
    index.commit(segment_of(1, 1))
    for kinds in (before, after):
        index.commit(IndexChange(segments={1: 8192}, kinds={1: kinds}))
    assert after.looks <= 3  # the new ones, and one that is there
    assert index.load().kinds == {1: after.kinds}
    index.close()


def test_no_file_is_mapped_for_writing(tmp_path: Path) -> None:
    """On a full device a page that is written for the first time kills the process."""
    made(tmp_path / "i").close()
    assert [file.name for file in (tmp_path / "i").iterdir()] == ["data.mdb"]


def test_the_map_grows(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    for n in range(40):
        index.commit(segment_of(n, 100))
    assert sum(len(packed) for packed in index.load().entries.values()) == 4000 * ENTRY.size
    index.close()


@pytest.mark.parametrize("count", range(1700, 2101, 50))
def test_the_map_grows_for_what_is_written_last(tmp_path: Path, count: int) -> None:
    """Some of these leave so few pages of the map that the commit itself needs a larger one."""
    index = Index(FileLayer(), tmp_path / "i", 1 << 16)
    index.commit(segment_of(1, count))
    assert len(index.load().entries[1]) == count * ENTRY.size
    index.close()


@pytest.mark.parametrize(
    "wrong",
    [
        IndexChange(entries={(1, 4): entries(4)}),  # a gap
        IndexChange(entries={(1, 3): entries(3)}),  # more records than the segment says
        IndexChange(entries={(1, 3): entries(3)}, segments={1: 3 * 8192}),  # beyond the committed bytes
        IndexChange(entries={(1, 3): entries(2)}, segments={1: 4 * 8192}),  # one over another
        IndexChange(entries={(1, 3): ENTRY.pack(KEYS[3], 6, 2, 2, 0)}, segments={1: 4 * 8192}),  # of no kind
        IndexChange(entries={(1, 3): ENTRY.pack(KEYS[3], 6, 1, 0, 0)}, segments={1: 4 * 8192}),  # too short
        IndexChange(dropped=[(1, 3)]),
        IndexChange(removed_segments=[1], kinds={1: KINDS}),
    ],
)
def test_a_segment_whose_values_do_not_agree_is_left_out(tmp_path: Path, wrong: IndexChange) -> None:
    with contextlib.closing(made(tmp_path / "i")) as index:
        index.commit(segment_of(1, 3))
        index.commit(segment_of(2, 3))
        assert index.load().damage == ""
        index.commit(wrong)
        image = index.load()
        assert "segment 1: " in image.damage
        assert (image.segments, list(image.entries), list(image.kinds), image.dropped) == ({2: 24576}, [2], [2], {})


@pytest.mark.parametrize(("nbytes", "fits"), [(MAX_SEGMENT_BYTES, True), (MAX_SEGMENT_BYTES + 4096, False)])
def test_a_segment_may_be_as_long_as_a_place_can_say(tmp_path: Path, nbytes: int, *, fits: bool) -> None:
    with contextlib.closing(made(tmp_path / "i")) as index:
        index.commit(IndexChange(entries={(1, 0): entries(0)}, segments={1: nbytes}, kinds={1: KINDS}))
        image = index.load()
        assert (image.segments, bool(image.damage)) == ({1: nbytes} if fits else {}, not fits)


def test_an_index_whose_first_commit_failed_is_lost(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fail("transaction", lmdb.DiskError("No space left on device"), 1, after=1)
    index = Index(files, tmp_path / "i")
    with pytest.raises(lmdb.DiskError):
        index.commit(segment_of(1, 1))
    with pytest.raises(IndexLostError, match="new"):
        index.load()
    index.commit(segment_of(1, 2))
    assert index.load().segments == {1: 2 * 8192}
    index.close()


def test_an_index_of_another_version_is_lost(tmp_path: Path) -> None:
    made(tmp_path / "i").close()
    with open_lmdb(tmp_path / "i") as env, env.begin(write=True) as txn:
        txn.put(b"version", b"1", db=env.open_db(b"meta", txn))
    with contextlib.closing(Index(FileLayer(), tmp_path / "i")) as index, pytest.raises(IndexLostError, match="b'1'"):
        index.load()


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    made(tmp_path / "i").close()
    index = Index(None, tmp_path / "i")
    assert index.load().entries == {}
    index.close()


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty"])
def test_a_damaged_file_is_lost_and_never_touched_further(tmp_path: Path, damage: str) -> None:
    index = made(tmp_path / "i")
    for n in range(40):
        index.commit(segment_of(n, 100))
    index.close()
    data = tmp_path / "i" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes({"garbage": b"\xa5" * len(whole), "cut": whole[: len(whole) // 2], "empty": b"x"}[damage])
    with pytest.raises(IndexLostError):
        Index(FileLayer(), tmp_path / "i").load()


def as_of_version_4(path: Path) -> None:
    """Makes an index one of the version before: without checksums and counts."""
    with open_lmdb(path, map_size=1 << 20) as env:
        tables = {name: env.open_db(name) for name in (b"meta", b"segments", b"entries", b"dropped", b"kinds")}
        with env.begin(write=True) as txn:
            txn.put(b"version", b"4", db=tables[b"meta"])
            for name in (b"segments", b"entries", b"dropped", b"kinds"):
                for key, value in [(bytes(key), bytes(value)) for key, value in txn.cursor(tables[name])]:
                    txn.put(key, value[8:16] if name == b"segments" else value[8:], db=tables[name])


@pytest.mark.parametrize("damaged", [False, True])
def test_an_index_of_the_version_before_is_read(tmp_path: Path, damaged: bool) -> None:
    """It is to be written anew; a damaged size costs one segment."""
    with contextlib.closing(made(tmp_path / "i")) as index:
        for number in (1, 2):
            index.commit(segment_of(number, 3))
        whole = index.load()
    as_of_version_4(tmp_path / "i")
    if damaged:
        with open_lmdb(tmp_path / "i", map_size=1 << 20) as env:
            table = env.open_db(b"segments")
            with env.begin(write=True) as txn:
                txn.put((1).to_bytes(8, "big"), b"short", db=table)
    with contextlib.closing(Index(FileLayer(), tmp_path / "i")) as index:
        image = index.load()
    assert image.stale
    assert list(image.segments) == ([2] if damaged else [1, 2])
    assert all(image.entries[number] == whole.entries[number] for number in image.segments)
    assert all(image.kinds[number] == whole.kinds[number] for number in image.segments)


def test_a_change_that_finds_the_index_damaged_is_in_the_new_one(tmp_path: Path) -> None:
    files = FaultyFiles()
    index = DiskIndex(files, tmp_path, Catalogue(), disk=0, sync=True, map_bytes=1 << 16)
    index.open()
    files.fail("transaction", lmdb.CorruptedError("a page is another one"), 1)
    index.commit(segment_of(2, 3), earlier=[segment_of(1, 3)])
    assert set(index.load().segments) == {1, 2}
    index.close()


def test_an_index_that_cannot_be_written_anew_is_left_out_until_it_can(tmp_path: Path) -> None:
    """What lies there of the new one would else take the next changes; a start would believe it without the rest."""
    files, now = FaultyFiles(), 100.0
    index = DiskIndex(files, tmp_path, Catalogue(), disk=0, sync=True, map_bytes=1 << 16, clock=lambda: now)
    index.open()
    index.commit(segment_of(1, 3))
    index.lose()
    files.fail("transaction", lmdb.DiskError("mdb_txn_commit: No space left on device"), 1, after=1)
    index.commit(segment_of(2, 3))
    index.commit(segment_of(3, 3))
    assert not index.usable
    assert not index.path.exists()
    now += 60.0
    index.commit(segment_of(4, 3), earlier=[segment_of(number, 3) for number in (1, 2, 3)])
    assert set(index.load().segments) == {1, 2, 3, 4}
    index.close()


def test_a_check_writes_a_damaged_index_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:4])
        assert driven.store.tiers.ssd is not None
        index = driven.store.tiers.ssd.disks[0].committer.index
        whole = index.load()
        index.check()
        assert index.rebuilt == 0
        index.close()
        with open_lmdb(index.path, map_size=1 << 20) as env:
            table = env.open_db(b"entries")
            with env.begin(write=True) as txn:
                key, value = next((bytes(key), bytes(value)) for key, value in txn.cursor(table))
                txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=table)
        index.open()
        index.check()
        assert index.rebuilt == 1
        assert "the index is damaged" in caplog.text
        assert (index.load().entries, index.load().damage) == (whole.entries, "")
