import random
from pathlib import Path

import pytest
import xxhash

from moonpool.base.kv.blocks import BlockFormat, BlockInfo
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.reader import read_record, read_whole
from moonpool.kvstore.ssd.records import (
    BadRecordError,
    header_size,
    pack_header,
    record_size,
    rewrite_record,
    unpack_header,
)
from moonpool.kvstore.ssd.segment_files import ScannedRecord, list_segments, scan_segment, segment_path
from tests.layouts import GROUPED, uniform_like
from tests.unit.kvstore.helpers import BLOCK, FORMAT, LAYOUT, OTHER_FORMAT, RECORD, block_of, info_of, keys_of, slice_of

KEYS = keys_of(4)


def header_of(key: bytes) -> bytes:
    block = block_of(key)  # type: ignore[arg-type]
    return pack_header(block.info, block.hashes)


def found_in(path: Path, **pieces: int) -> list[ScannedRecord]:
    files = FileLayer()
    try:
        return list(scan_segment(files, path, path.stat().st_size, **pieces))
    finally:
        files.close_all()


def write_segment(path: Path, count: int = 3) -> FileLayer:
    files = FileLayer()
    for index in range(count):
        data = bytes(block_of(KEYS[index]).data)
        parts: list[bytes | bytearray | memoryview] = [header_of(KEYS[index]), data, bytes(RECORD - 4096 - BLOCK)]
        files.write(path, parts, index * RECORD)
    return files


def test_a_header_says_everything_of_its_block() -> None:
    info = BlockInfo(KEYS[0], KEYS[1], "tenant ü", BlockFormat(b"x" * 32, LAYOUT))
    slices = [memoryview(slice_of(KEYS[0], layer)) for layer in range(LAYOUT.layers)]
    hashes = tuple(bind(slice_hash(data), KEYS[0], layer) for layer, data in enumerate(slices))
    packed = pack_header(info, hashes)
    header = unpack_header(packed + b"more")
    assert header.info == info
    assert header.header_bytes == len(packed) == header_size(info) == 4096
    assert header.record_bytes == record_size(info) == RECORD
    assert header.hashes == hashes
    for layer, data in enumerate(slices):
        assert header.check_slices(layer, data) == [hashes[layer]]


def test_a_header_has_the_groups_of_its_layout() -> None:
    info = BlockInfo(KEYS[0], KEYS[1], "tenant", BlockFormat(b"x" * 32, GROUPED), 7)
    header = unpack_header(pack_header(info, [1, 2, 3, 4], 9))
    assert (header.info, header.hashes, header.segment) == (info, (1, 2, 3, 4), 9)
    record = bytearray(record_size(info))
    record[: header.header_bytes] = pack_header(info, [1, 2, 3, 4], 9)
    rewrite_record(record, 11)
    again = unpack_header(record)
    assert (again.info, again.segment) == (info, 11)


@pytest.mark.parametrize("length", [1, 1 << 20])
def test_groups_that_do_not_fit_their_header_are_refused(length: int) -> None:
    info = BlockInfo(KEYS[0], KEYS[1], "", BlockFormat(b"x" * 32, GROUPED))
    packed = bytearray(pack_header(info, [1, 2, 3, 4]))
    packed[124:128] = length.to_bytes(4, "little")
    packed[8:16] = xxhash.xxh3_64_intdigest(memoryview(packed)[16:]).to_bytes(8, "little")
    with pytest.raises(BadRecordError):
        unpack_header(bytes(packed))


def test_headers_of_uniform_layouts_are_those_of_version_1() -> None:
    """As the program before groups wrote them: an old data folder is read, and an older program reads ours."""
    layout = KVLayout.uniform(layers=2, kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
    info = BlockInfo(BlockKey(b"k" * 32), BlockKey(b"p" * 32), "t", BlockFormat(b"n" * 32, layout), 7)
    recorded = bytes.fromhex(RECORDED).ljust(4096, b"\0")
    assert pack_header(info, [1, 2], 9) == recorded
    header = unpack_header(recorded)
    assert (header.info, header.hashes, header.segment) == (info, (1, 2), 9)


def test_records_with_scales_behind_all_heads_are_refused() -> None:
    """Recorded from the program of layout version 1, int8."""
    with pytest.raises(BadRecordError, match=r"layout\.version"):
        unpack_header(bytes.fromhex(SCALES_BEHIND_ALL_HEADS).ljust(4096, b"\0"))


RECORDED = (
    "4d504b5652454332b0af7302d1fa87f40010000002000000"
    + "6b" * 32 + "70" * 32 + "6e" * 32
    + "0100000002000000080000001000000000000000"
    + "62666c6f617431360000000000000000" + "01000000" + "74"
    + "0100000000000000" + "0200000000000000" + "0700000000000000" + "0900000000000000"
)  # fmt: skip
SCALES_BEHIND_ALL_HEADS = (
    "4d504b5652454332660d116959c99fed0010000002000000"
    + "6b" * 32 + "70" * 32 + "6e" * 32
    + "0100000002000000080000001000000000010000"
    + "696e7438000000000000000000000000" + "01000000" + "74"
    + "0100000000000000" + "0200000000000000" + "0700000000000000" + "0900000000000000"
)  # fmt: skip


def test_a_slice_of_another_layer_or_block_is_not_taken() -> None:
    header = unpack_header(header_of(KEYS[0]))
    with pytest.raises(BadRecordError):
        header.check_slices(1, memoryview(slice_of(KEYS[0], 0)))
    other = unpack_header(pack_header(info_of(KEYS[1]), block_of(KEYS[0]).hashes))
    with pytest.raises(BadRecordError):
        other.check_slices(0, memoryview(slice_of(KEYS[0], 0)))


def test_a_record_of_the_older_kind_is_read_and_its_hashes_are_made() -> None:
    block = block_of(KEYS[0])
    seeds = [int.from_bytes(KEYS[0][:8], "little") ^ layer for layer in range(LAYOUT.layers)]
    sums = [slice_hash(block.slice(layer), seed=seed) for layer, seed in enumerate(seeds)]
    older = bytearray(pack_header(block.info, sums))
    older[:8] = b"MPKVREC1"
    header = unpack_header(bytes(older))
    assert header.check_slices(0, block.data) == list(block.hashes)
    with pytest.raises(BadRecordError):
        header.check_slices(1, block.slice(0))


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
    many = BlockFormat(FORMAT.namespace, type(LAYOUT).uniform(500, 1, 1, 16, "float16"))
    long = BlockInfo(KEYS[0], KEYS[1], info.tenant, many)
    packed = pack_header(long, [1] * 500)
    assert len(packed) == 20480, "with room for a seal"
    assert unpack_header(packed).info == long


def test_a_scan_finds_all_records(tmp_path: Path) -> None:
    write_segment(tmp_path / "0").close_all()
    assert [(found.offset, found.info.key) for found in found_in(tmp_path / "0")] == [
        (0, KEYS[0]),
        (RECORD, KEYS[1]),
        (2 * RECORD, KEYS[2]),
    ]


def test_a_scan_tolerates_a_cut_tail_and_goes_on_behind_a_broken_header(tmp_path: Path) -> None:
    path = tmp_path / "0"
    files = write_segment(path)
    files.truncate(path, 3 * RECORD - 1)
    assert [found.info.key for found in found_in(path)] == KEYS[:2]
    files.write(path, [b"\xff"], 50)
    assert [(found.offset, found.info.key) for found in found_in(path)] == [(RECORD, KEYS[1])]
    files.write(path, [bytes(4096)], RECORD)
    assert found_in(path) == []
    files.close_all()


def record_of(key: BlockKey, block_format: BlockFormat, tenant: str) -> bytes:
    block = block_of(key, tenant, block_format)
    record = pack_header(block.info, block.hashes) + bytes(block.data)
    return record.ljust(record_size(block.info), b"\0")


@pytest.mark.parametrize("piece", [4096, 4096 * 5, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_a_scan_finds_what_looking_everywhere_finds(tmp_path: Path, seed: int, piece: int) -> None:
    """Records of several kinds, some broken, with remains between them and headers of several pages."""
    dice = random.Random(seed)
    deep = uniform_like(LAYOUT, layers=600)
    formats = [FORMAT, OTHER_FORMAT, BlockFormat(b"w" * 32, deep), BlockFormat(b"n" * 32, deep)]
    data, expected, broken = bytearray(), [], 0
    for key in keys_of(60, f"scan-{seed}"):
        block_format, tenant = dice.choice(formats), dice.choice(["", "a", "b"])
        record = bytearray(record_of(key, block_format, tenant))
        if dice.random() < 0.2:
            record[dice.choice([3, 20, 30, 100, 4000])] ^= 1
            broken += 1
        else:
            expected.append((len(data), key, block_format, tenant, len(record)))
        data += record + bytes(4096 * dice.choice([0, 0, 0, 1, 3]))
    (tmp_path / "0").write_bytes(data)
    records = found_in(tmp_path / "0", piece_bytes=piece)
    found = [(at, info.key, info.format, info.tenant, nbytes) for at, nbytes, info, _ in records]
    assert (found, broken > 3) == (expected, True)


class CountedFiles(FileLayer):
    """Notes how much each read of a scan asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.peeks: list[int] = []

    def peek(self, path: Path, nbytes: int, offset: int) -> bytes:
        self.peeks.append(nbytes)
        return super().peek(path, nbytes, offset)


def test_a_scan_reads_small_records_together_and_of_large_ones_the_headers(tmp_path: Path) -> None:
    large = BlockFormat(b"n" * 32, uniform_like(LAYOUT, block_size=1024))
    keys = keys_of(80)
    data = b"".join(record_of(key, FORMAT, "") for key in keys[:64])
    (tmp_path / "0").write_bytes(data + b"".join(record_of(key, large, "") for key in keys[64:]))
    files = CountedFiles()
    size = (tmp_path / "0").stat().st_size
    assert [found.info.key for found in scan_segment(files, tmp_path / "0", size, piece_bytes=16 * RECORD)] == keys
    files.close_all()
    assert files.peeks == [16 * RECORD] * 5 + [4096] * 15


def test_reading_behind_the_end_is_a_bad_record(tmp_path: Path) -> None:
    files = write_segment(tmp_path / "0", 1)
    with pytest.raises(BadRecordError):
        read_whole(files, tmp_path / "0", memoryview(bytearray(10)), RECORD - 5)
    files.close_all()


def test_a_record_of_another_block_is_not_taken(tmp_path: Path) -> None:
    files = write_segment(tmp_path / "0", 2)
    assert unpack_header(read_record(files, tmp_path / "0", KEYS[1], RECORD, RECORD)).info.key == KEYS[1]
    with pytest.raises(BadRecordError, match="another block"):
        read_record(files, tmp_path / "0", KEYS[1], 0, RECORD)
    files.close_all()


def test_segments_are_listed_by_age_and_other_files_left_alone(tmp_path: Path) -> None:
    for number in (12, 3):
        segment_path(tmp_path, number).write_bytes(b"x" * number)
    (tmp_path / "notes.txt").write_bytes(b"")
    assert list(list_segments(tmp_path).items()) == [(3, 3), (12, 12)]
