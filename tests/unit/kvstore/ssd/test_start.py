"""Starts: on a full device, with an index that is lost or older than the segments, after a life without syncs."""

import errno
import logging
import os
import shutil
from pathlib import Path

import lmdb
import pytest

from moonpool.base.errors import ConfigError
from moonpool.kvstore.repair import verify
from moonpool.kvstore.ssd.files import FileLayer, open_lmdb
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from tests.unit.kvstore.faulty_files import FaultyFiles, counting
from tests.unit.kvstore.helpers import RECORD, Driven, data_of, held, keys_of, open_ssd, owner_of, store
from tests.unit.kvstore.invariants import check

KEYS = keys_of(12)
FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_INDEX = lmdb.DiskError("mdb_txn_commit: No space left on device")


def ssd_of(driven: Driven) -> SsdTier:
    backend = driven.store.tiers.ssd
    assert backend is not None
    return backend


def test_only_this_user_reads_what_users_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    before = os.umask(0)
    try:
        with store(folder, 2 * RECORD) as driven:
            driven.flush(KEYS[:2], "t")
        (folder / "index" / "data.mdb").chmod(0o644)  # as older versions made the file
        with store(folder, 2 * RECORD) as driven:
            assert driven.read(KEYS[:2]) == [data_of(key) for key in KEYS[:2]]
    finally:
        os.umask(before)
    open_to_others = [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]
    assert not open_to_others


@pytest.mark.parametrize(
    ("operation", "after"), [("open_index", 0), ("transaction", 0), ("transaction", 1), ("transaction", 2)]
)
def test_a_lost_index_waits_for_room_and_its_blocks_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, operation: str, after: int
) -> None:
    """Whether it cannot be looked for, made or filled."""
    with store(tmp_path, 2 * RECORD) as driven:
        driven.flush(KEYS[:5], "t")
    segments = [(file.name, file.read_bytes()) for file in sorted((tmp_path / "segments").iterdir())]
    shutil.rmtree(tmp_path / "index")
    for number in range(2):
        files = FaultyFiles()
        files.fail(operation, FULL_INDEX, after=after)
        caplog.clear()
        with store(tmp_path, 2 * RECORD, files=files) as driven:
            here = KEYS[: 5 + number]
            assert [line for line in caplog.messages if "too full for an index" in line] == [
                line for line in caplog.messages if str(tmp_path / "index") in line and "error" in line
            ]
            assert "free some room and start again" in caplog.text
            assert f"'needed_bytes': {48 * len(here) + (1 << 20)}" in caplog.text
            ssd = ssd_of(driven)
            assert not ssd.indexed
            assert not (tmp_path / "index").exists()
            assert {key: owner_of(ssd, key) for key in ssd.catalogue} == dict.fromkeys(here, "t")
            assert driven.read(KEYS) == [data_of(key) for key in here]
            now = [(file.name, file.read_bytes()) for file in sorted((tmp_path / "segments").iterdir())]
            assert now[: len(segments)] == segments
            driven.flush([KEYS[len(here)]], "t")  # where the data find room, blocks become durable all the same
            check(ssd)
    for rebuilt in (True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO), store(tmp_path, 2 * RECORD) as driven:
            assert ("rebuilding the index" in caplog.text) == rebuilt
            assert ssd_of(driven).indexed
            assert driven.read(KEYS) == [data_of(key) for key in KEYS[:7]]


def test_without_an_index_old_segments_make_room_as_ever(tmp_path: Path) -> None:
    ssd = open_ssd(tmp_path, 6 * RECORD, 2 * RECORD)
    Driven(ssd).flush(KEYS[:6])
    ssd.close()
    shutil.rmtree(tmp_path / "index")
    files = FaultyFiles()
    files.fail("open_index", FULL_INDEX)
    ssd = open_ssd(tmp_path, 6 * RECORD, 2 * RECORD, files=files)
    driven = Driven(ssd)
    for key in KEYS[6:10]:
        driven.flush([key])
    assert (set(ssd.catalogue), ssd.used_bytes) == (set(KEYS[4:10]), 6 * RECORD)
    ssd.close()
    ssd = open_ssd(tmp_path, 6 * RECORD, 2 * RECORD)
    assert (set(ssd.catalogue), ssd.indexed) == (set(KEYS[4:10]), True)
    ssd.close()


def test_a_first_start_needs_room_for_an_index(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fail("open_index", FULL_INDEX)
    with pytest.raises(ConfigError, match=r"data_dir: .* cannot be used: .*No space left"):
        open_ssd(tmp_path, files=files)


def test_a_folder_that_takes_no_files_is_refused_at_the_start(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fail("probe", OSError(errno.EROFS, "Read-only file system"))
    with pytest.raises(ConfigError, match=r"data_dir: .* cannot be used: Read-only file system"):
        open_ssd(tmp_path, files=files)


@pytest.mark.parametrize("after", range(3))
def test_a_disk_that_cannot_start_leaves_nothing_behind(tmp_path: Path, after: int) -> None:
    """Whenever its index fails: the other disk serves, and the disk can be opened again."""
    paths = [tmp_path / name for name in "ab"]
    for path, keys in zip(paths, (KEYS[:3], KEYS[3:6]), strict=True):
        with store(path, 2 * RECORD) as driven:
            driven.flush(keys)
    shutil.rmtree(paths[1] / "index")
    broken = FaultyFiles()
    broken.fail("transaction", lmdb.Error("mdb_txn_commit: Input/output error"), after=after)
    ssd = open_tier(paths, 1 << 20, 2 * RECORD, files=[FaultyFiles(), broken])
    check(ssd)
    assert (len(ssd.disks), set(ssd.catalogue)) == (1, set(KEYS[:3]))
    assert Driven(ssd).read(KEYS[:6]) == [data_of(key) for key in KEYS[:3]]
    ssd.close()
    with store(paths[1], 2 * RECORD) as driven:
        assert driven.read(KEYS[3:6]) == [data_of(key) for key in KEYS[3:6]]


@pytest.mark.parametrize(
    ("said", "probed", "heard"),
    [
        (lmdb.Error("mdb_txn_commit: Input/output error"), FULL, lmdb.DiskError),
        (lmdb.Error("mdb_txn_commit: Disk quota exceeded"), OSError(errno.EDQUOT, "quota"), lmdb.DiskError),
        (lmdb.Error("mdb_txn_commit: Input/output error"), OSError(errno.EIO, "broken"), lmdb.Error),
        (lmdb.Error("mdb_txn_commit: Input/output error"), None, lmdb.Error),
        (lmdb.MapFullError("mdb_put: MDB_MAP_FULL"), FULL, lmdb.MapFullError),
    ],
)
def test_an_unclear_error_of_lmdb_is_looked_into(
    tmp_path: Path, said: lmdb.Error, probed: OSError | None, heard: type[lmdb.Error]
) -> None:
    files = FaultyFiles()
    if probed is not None:
        files.fail("probe", probed)
    with pytest.raises(lmdb.Error) as caught, files.lmdb_errors(tmp_path):
        raise said
    assert type(caught.value) is heard
    assert list(tmp_path.iterdir()) == []


def test_a_store_whose_segments_hold_nothing_starts_on_a_full_device_too(tmp_path: Path) -> None:
    open_ssd(tmp_path).close()
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "segments" / "0000000000000001.seg").write_bytes(bytes(4096))
    files = FaultyFiles()
    files.fail("open_index", FULL_INDEX)
    ssd = open_ssd(tmp_path, files=files)
    assert (len(ssd.catalogue), ssd.indexed) == (0, False)
    ssd.close()


def test_what_segments_have_lost_need_not_be_noted_at_once(tmp_path: Path) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:3])
    (tmp_path / "segments" / "0000000000000002.seg").unlink()
    files = FaultyFiles()
    files.fail("transaction", FULL_INDEX, after=1)
    with store(tmp_path, files=files) as driven:
        assert held(driven.store) == {KEYS[0], KEYS[2]}
    with store(tmp_path) as driven:
        driven.flush([KEYS[3]])
    with store(tmp_path) as driven:
        assert held(driven.store) == {KEYS[0], KEYS[2], KEYS[3]}


def test_a_record_that_is_cut_off_does_not_hide_an_older_copy(tmp_path: Path) -> None:
    """A transaction failed after it was committed: what it had carried was cut off, and stayed where it was."""
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(KEYS[:2])
    first, second = (tmp_path / "segments" / f"000000000000000{number}.seg" for number in (1, 2))
    older = first.read_bytes()
    with store(tmp_path, 4 * RECORD) as driven:
        assert ssd_of(driven).compact(1.0) == 1
        driven.flush()
        assert second.stat().st_size == 2 * RECORD
    first.write_bytes(older)
    with second.open("r+b") as file:
        file.truncate(RECORD)
    for _ in range(2):
        with store(tmp_path, 4 * RECORD) as driven:
            assert driven.read(KEYS[:2]) == [data_of(key) for key in KEYS[:2]]


# Segments that are newer than the index


def test_records_that_the_index_does_not_name_are_adopted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An index from a backup is older than the segments beside it."""
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(KEYS[:1], "a")
        shutil.copytree(tmp_path / "index", tmp_path / "backup")
        driven.flush(KEYS[1:9], "b")  # the rest of the first segment, the second, and one record of the third
    for _ in range(2):
        shutil.rmtree(tmp_path / "index")
        shutil.copytree(tmp_path / "backup", tmp_path / "index")
        caplog.clear()
        with store(tmp_path, 4 * RECORD) as driven:
            assert "segments hold more than the index names" in caplog.text
            assert "'segments': 3, 'adopted_blocks': 8, 'deleted_bytes': 0" in caplog.text
            ssd = ssd_of(driven)
            assert [owner_of(ssd, key) for key in KEYS[:9]] == ["a"] + ["b"] * 8
            assert driven.read(KEYS) == [data_of(key) for key in KEYS[:9]]
            check(ssd)
    caplog.clear()
    with store(tmp_path, 4 * RECORD) as driven:  # the index names them now
        assert "more than the index names" not in caplog.text
        assert driven.read(KEYS) == [data_of(key) for key in KEYS[:9]]


def test_only_whole_records_are_adopted_and_the_rest_is_deleted_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with store(tmp_path, 2 * RECORD) as driven:
        driven.flush(KEYS[:1])
        shutil.copytree(tmp_path / "index", tmp_path / "backup")
        driven.flush(KEYS[1:6])
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "backup").rename(tmp_path / "index")
    damage = {1: (RECORD + 4096, RECORD + 4097), 2: (0, RECORD)}  # data of the first's second; the header of another
    for number, (begin, end) in damage.items():
        file = tmp_path / "segments" / f"{number:016d}.seg"
        data = bytearray(file.read_bytes())
        data[begin:end] = bytes(0xFF ^ byte for byte in data[begin:end])
        file.write_bytes(data)
    (tmp_path / "segments" / f"{9:016d}.seg").write_bytes(bytes(3 * RECORD))
    with store(tmp_path, 2 * RECORD) as driven:
        assert "'adopted_blocks': 3, 'deleted_bytes': 32768" in caplog.text
        assert set(ssd_of(driven).catalogue) == {KEYS[0], *KEYS[3:6]}
        assert driven.read(KEYS[3:6]) == [data_of(key) for key in KEYS[3:6]]


def test_a_segment_that_cannot_be_read_at_a_start_is_left_for_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with store(tmp_path) as driven:
        driven.flush(KEYS[:2])
    shutil.rmtree(tmp_path / "index")

    class Unreadable(FileLayer):
        def peek(self, path: Path, nbytes: int, offset: int) -> bytes:
            if path.name == "0000000000000001.seg":
                raise OSError(errno.EIO, "Input/output error")
            return super().peek(path, nbytes, offset)

    with store(tmp_path, files=Unreadable()) as driven:
        assert "a segment cannot be read; it is left as it is" in caplog.text
        assert set(ssd_of(driven).catalogue) == {KEYS[1]}
    with store(tmp_path) as driven:
        assert driven.read(KEYS[:2]) == [data_of(key) for key in KEYS[:2]]


# Syncs


def test_names_of_new_folders_and_files_are_synced_at_the_first_start(tmp_path: Path) -> None:
    files = FaultyFiles()
    open_ssd(tmp_path / "a" / "b", files=files).close()
    synced = files.named("sync_folder")
    assert synced[:5] == [tmp_path.name, "a", "b", "b", "index"]
    assert synced[-2:] == ["b", "index"]  # an index without contents is made anew


def test_where_lost_syncs_cannot_be_noted_there_are_syncs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    (tmp_path / "segments").mkdir()
    files.fail("sync_folder", FULL, 1)
    ssd = open_tier([tmp_path], 1 << 20, RECORD, durability="process", files=[files])
    assert ssd.durability == "power"
    assert "durability is power" in caplog.text
    assert not (tmp_path / "unsynced").exists()
    ssd.close()


def test_an_index_without_syncs_is_trusted_in_the_same_boot_only(tmp_path: Path) -> None:
    for boot, is_first in (("one", True), ("one", False), ("two", False)):
        files = FaultyFiles(boot=boot)
        ssd = open_tier([tmp_path], 1 << 20, 4 * RECORD, durability="process", files=[files])
        driven = Driven(ssd)
        if is_first:
            driven.flush(KEYS[:3])
        assert set(ssd.catalogue) == held(driven.store) == set(KEYS[:3])
        assert files.named("sync") == []
        assert (tmp_path / "unsynced").read_text() == boot
        ssd.abandon()  # and then the process ends
    files = FaultyFiles(boot="two")
    ssd = open_tier([tmp_path], 1 << 20, 4 * RECORD, durability="process", files=[files])
    Driven(ssd).flush(KEYS[3:4])
    ssd.close()
    assert files.named("sync") == ["0000000000000001.seg", "0000000000000002.seg"]  # the killed life's too
    assert not (tmp_path / "unsynced").exists()
    ssd = open_tier([tmp_path], 1 << 20, 4 * RECORD)
    assert set(ssd.catalogue) == set(KEYS[:4])
    ssd.close()


def test_a_boot_that_is_noted_already_is_not_noted_again(tmp_path: Path) -> None:
    """Written anew the note could be lost: the device may be full."""
    for boot, notes in (("one", 1), ("one", 0), ("two", 1)):
        files = FaultyFiles(boot=boot)
        done = counting(files.steps)
        open_tier([tmp_path], 1 << 20, RECORD, durability="process", files=[files]).abandon()
        assert [name for name, _ in done()].count("note") == notes
        assert (tmp_path / "unsynced").read_text() == boot


def test_an_index_of_another_boot_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ssd = open_tier([tmp_path], 1 << 20, 4 * RECORD, durability="process", files=[FaultyFiles(boot="one")])
    Driven(ssd).flush(KEYS[:3], "t")
    ssd.abandon()
    with caplog.at_level(logging.INFO):
        ssd = open_tier([tmp_path], 1 << 20, 4 * RECORD, files=[FaultyFiles(boot="two")])
    assert "restarted before everything was synced; rebuilding the index" in caplog.text
    assert "segments read" in caplog.text
    assert "more than the index names" not in caplog.text
    assert {key: owner_of(ssd, key) for key in ssd.catalogue} == dict.fromkeys(KEYS[:3], "t")
    ssd.close()


def test_an_index_without_checksums_gets_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As version 4 wrote it."""
    with store(tmp_path, 4 * RECORD) as driven:
        driven.flush(KEYS[:7], "t")
        driven.store.delete_keys(KEYS[:1])
        driven.flush()
    with open_lmdb(tmp_path / "index") as env, env.begin(write=True) as txn:
        for name in (b"segments", b"entries", b"dropped", b"kinds"):
            table = env.open_db(name, txn)
            for key, value in list(txn.cursor(table)):
                txn.put(key, value[8:16] if name == b"segments" else value[8:], db=table)
        txn.put(b"version", b"4", db=env.open_db(b"meta", txn))
    assert verify(tmp_path).ok
    for rebuilt in (1, 0):
        with store(tmp_path, 4 * RECORD) as driven:
            assert {key: owner_of(ssd_of(driven), key) for key in held(driven.store)} == dict.fromkeys(KEYS[1:7], "t")
            assert driven.read(KEYS[1:7]) == [data_of(key) for key in KEYS[1:7]]
            assert ssd_of(driven).indexes_rebuilt == rebuilt
    assert "segments read" not in caplog.text
