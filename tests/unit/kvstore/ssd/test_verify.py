"""Checking a folder (`moonpool kvstore verify`)."""

from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.kvstore.repair import repair, verify
from moonpool.kvstore.ssd.folder_check import FolderFault
from tests.unit.kvstore.helpers import LAYOUT, RECORD, data_of, keys_of, store

KEYS = keys_of(12)


def test_a_check_finds_what_is_wrong_and_changes_nothing(tmp_path: Path) -> None:
    with store(tmp_path, segment=4 * RECORD) as driven:
        driven.flush(KEYS[:8])
        with pytest.raises(ConfigError, match="another process"):
            verify(tmp_path)
    seen: list[tuple[int, int]] = []
    report = verify(tmp_path, lambda done, of: seen.append((done, of)))
    assert report.ok
    assert (report.segments, report.records, report.blocks, report.dead) == (2, 8, 8, 0)
    assert (report.bytes_read, seen) == (8 * RECORD, [(1, 2), (2, 2)])
    first, second = sorted((tmp_path / "segments").iterdir())
    data = bytearray(first.read_bytes())
    data[RECORD + 4096 + LAYOUT.slice_bytes(0)] ^= 1  # layer 1 of the second block
    data[2 * RECORD + 40] ^= 1  # the third block's header
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[: 3 * RECORD])
    report = verify(tmp_path)
    assert not report.ok
    assert (report.records, report.blocks, report.fault_count) == (6, 5, 4)
    assert report.faults == [
        FolderFault(1, RECORD, KEYS[1], "hash of layer 1 is wrong"),
        FolderFault(1, 2 * RECORD, KEYS[2], "the index names a record that is not there"),
        FolderFault(2, None, None, f"the segment has {3 * RECORD} bytes instead of {4 * RECORD}"),
        FolderFault(2, 3 * RECORD, KEYS[7], "the index names a record that is not there"),
    ]
    assert first.read_bytes() == data
    second.unlink()
    assert verify(tmp_path).faults[0] == FolderFault(2, None, None, "the index names a segment that is not there")


def test_a_check_does_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data_dir: .* holds no store"):
        verify(tmp_path)
    with store(tmp_path) as driven:
        driven.flush(KEYS[:2])
    (tmp_path / "index" / "data.mdb").unlink()
    report = verify(tmp_path)
    assert (report.ok, report.fault_count, report.blocks) == (False, 0, 2)
    assert report.index_error is not None


def test_a_repair_drops_what_is_damaged_and_keeps_the_rest(tmp_path: Path) -> None:
    with store(tmp_path, segment=4 * RECORD) as driven:
        driven.flush(KEYS[:8])
    first = sorted((tmp_path / "segments").iterdir())[0]
    data = bytearray(first.read_bytes())
    data[RECORD + 4096] ^= 1  # the second block's data
    first.write_bytes(data)
    index = tmp_path / "index" / "data.mdb"
    index.write_bytes(index.read_bytes()[:9000])
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "data.mdb").write_bytes(b"\xa5" * 20_000)
    report = verify(tmp_path)
    assert (report.ok, report.damaged, bool(report.index_error), bool(report.records_error)) == (
        False,
        [(1, RECORD)],
        True,
        True,
    )
    repair(tmp_path, report)
    report = verify(tmp_path)
    assert (report.ok, report.blocks) == (True, 7)
    with store(tmp_path, segment=4 * RECORD) as driven:
        assert driven.read(KEYS[:1]) == [data_of(KEYS[0])]
        assert driven.read(KEYS[2:8]) == [data_of(key) for key in KEYS[2:8]]
