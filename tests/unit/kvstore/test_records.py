from pathlib import Path

import pytest

from services.kvstore.blocks import BlockFormat, BlockInfo
from services.kvstore.records import (
    BadRecordError,
    header_size,
    pack_header,
    record_size,
    slice_checksum,
    unpack_header,
)
from services.kvstore.segments import SegmentFile, list_segments, segment_path
from tests.unit.kvstore.helpers import BLOCK, FORMAT, LAYOUT, RECORD, block_of, info_of, keys_of, slice_of

KEYS = keys_of(4)


def header_of(key: bytes) -> bytes:
    block = block_of(key)  # type: ignore[arg-type]
    return pack_header(block.info, [block.slice(layer) for layer in range(LAYOUT.layers)])


def write_segment(path: Path, count: int = 3) -> SegmentFile:
    file = SegmentFile(path)
    for index in range(count):
        data = bytes(block_of(KEYS[index]).data)
        parts: list[bytes | bytearray | memoryview] = [header_of(KEYS[index]), data, bytes(RECORD - 4096 - BLOCK)]
        file.append(parts, index * RECORD)
    file.sync()
    return file


def test_a_header_says_everything_of_its_block() -> None:
    info = BlockInfo(KEYS[0], KEYS[1], "tenant ü", BlockFormat(b"x" * 32, LAYOUT))
    slices = [memoryview(slice_of(KEYS[0], layer)) for layer in range(LAYOUT.layers)]
    packed = pack_header(info, slices)
    header = unpack_header(packed + b"more")
    assert header.info == info
    assert header.header_bytes == len(packed) == header_size(info) == 4096
    assert header.record_bytes == record_size(info) == RECORD
    assert header.checksums == tuple(slice_checksum(KEYS[0], layer, data) for layer, data in enumerate(slices))
    for layer, data in enumerate(slices):
        header.check_slice(layer, data)


def test_a_slice_of_another_layer_or_block_is_not_taken() -> None:
    header = unpack_header(header_of(KEYS[0]))
    with pytest.raises(BadRecordError):
        header.check_slice(1, memoryview(slice_of(KEYS[0], 0)))
    zeros = memoryview(bytes(LAYOUT.slice_bytes))
    assert slice_checksum(KEYS[0], 0, zeros) != slice_checksum(KEYS[1], 0, zeros)


@pytest.mark.parametrize("position", [0, 9, 17, 20, 30, 125, 141, 157, 161, 4000, 4095])
def test_no_bit_of_a_header_may_change(position: int) -> None:
    packed = bytearray(header_of(KEYS[0]))
    packed[position] ^= 1
    with pytest.raises(BadRecordError):
        unpack_header(bytes(packed))


@pytest.mark.parametrize("length", [0, 8, 23, 24, 4095])
def test_a_cut_header_is_refused(length: int) -> None:
    with pytest.raises(BadRecordError):
        unpack_header(header_of(KEYS[0])[:length])


def test_a_long_tenant_makes_a_longer_header() -> None:
    info = info_of(KEYS[0], tenant="t" * 1000)
    many = BlockFormat(FORMAT.namespace, type(LAYOUT)(500, 1, 1, 16, "float16"))
    long = BlockInfo(KEYS[0], KEYS[1], info.tenant, many)
    packed = pack_header(long, [memoryview(b"")] * 500)
    assert len(packed) == 8192
    assert unpack_header(packed).info == long


def test_a_scan_finds_all_records(tmp_path: Path) -> None:
    file = write_segment(tmp_path / "s")
    assert [(offset, header.info.key) for offset, header in file.scan()] == [
        (0, KEYS[0]),
        (RECORD, KEYS[1]),
        (2 * RECORD, KEYS[2]),
    ]
    file.close()
    file.close()


def test_a_scan_tolerates_a_cut_tail_and_goes_on_behind_a_broken_header(tmp_path: Path) -> None:
    file = write_segment(tmp_path / "s")
    file.truncate(3 * RECORD - 1)
    assert [header.info.key for _, header in file.scan()] == KEYS[:2]
    file.append([b"\xff"], 50)
    assert [(offset, header.info.key) for offset, header in file.scan()] == [(RECORD, KEYS[1])]
    file.append([bytes(4096)], RECORD)
    assert list(file.scan()) == []
    file.delete()
    assert not (tmp_path / "s").exists()


def test_reading_behind_the_end_is_a_bad_record(tmp_path: Path) -> None:
    file = write_segment(tmp_path / "s", 1)
    with pytest.raises(BadRecordError):
        file.read([memoryview(bytearray(10))], RECORD - 5)
    with pytest.raises(BadRecordError):
        file.read_header(RECORD)
    file.close()


def test_segments_are_listed_by_age_and_other_files_left_alone(tmp_path: Path) -> None:
    for number in (12, 3):
        segment_path(tmp_path, number).write_bytes(b"x" * number)
    (tmp_path / "notes.txt").write_bytes(b"")
    assert list(list_segments(tmp_path).items()) == [(3, 3), (12, 12)]
