"""Parts of files are written as they are, whether the memory that they lie in is aligned or not."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.base.kv.file_io import SCRATCH_BYTES, SECTOR, Buffer, write_all, write_direct

PATTERN = bytes(index * 7 % 251 for index in range(1009)) * (3 * SCRATCH_BYTES // 1009)


def aligned(sectors: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, sectors * SECTOR))
    memory[:] = PATTERN[: sectors * SECTOR]
    return memory


def records(data: list[Buffer]) -> list[Buffer]:
    """Each with a header before it and zeros behind it, as the SSD tier writes them."""
    return [
        part for data_part in data for part in (PATTERN[5 : SECTOR + 5], data_part, bytes(-len(data_part) % SECTOR))
    ]


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    except OSError as error:
        pytest.skip(f"no direct writes here: {error}")
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "data",
    [
        [],
        [aligned(1), aligned(3)],
        [PATTERN[:100], bytearray(PATTERN[:70_001]), aligned(2)],
        [aligned(2)[512:], aligned(4)[: 3 * SECTOR], aligned(2)[1:]],
        [bytearray(PATTERN[: 2 * SCRATCH_BYTES + 9]), aligned(1), bytearray(PATTERN[:SCRATCH_BYTES])],
        [aligned(1)] * 700,
    ],
    ids=["none", "aligned", "some", "off", "long", "many"],
)
def test_direct_writes_take_any_parts(tmp_path: Path, data: list[Buffer]) -> None:
    parts = records(data)
    whole = b"".join(parts)
    for flags, write in ((0, write_all), (getattr(os, "O_DIRECT", 0), write_direct)):
        path = tmp_path / write.__name__
        path.write_bytes(b"x" * SECTOR)
        with opened(path, flags) as fd:
            assert write(fd, parts, SECTOR) == SECTOR + len(whole)
        assert path.read_bytes() == b"x" * SECTOR + whole
