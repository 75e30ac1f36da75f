"""Reading slices of files and hashing them, by native code and without it."""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.base.kv.file_io import (
    SCRATCH_BYTES,
    FileSpan,
    Read,
    ReadOutcome,
    aligned_memory,
    read_slice_by_slice,
    slice_reader,
)
from moonpool.base.kv.keys import slice_hash
from moonpool.base.native.build import BuildError, compiler

SECTOR = 4096
DATA = (bytes(range(251)) * (3 * SCRATCH_BYTES // 251))[: 2 * SCRATCH_BYTES + 5 * SECTOR]


def native() -> Read:
    """This machine's; skips where there is no compiler."""
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    found = slice_reader()
    assert found is not read_slice_by_slice
    return found


@pytest.fixture(params=["native", "slice by slice"])
def read(request: pytest.FixtureRequest) -> Read:
    return native() if request.param == "native" else read_slice_by_slice


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    (path / "file").write_bytes(DATA)
    fd = os.open(path / "file", os.O_RDONLY | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def spans_of(*places: tuple[int, int], page: int = 0) -> list[FileSpan]:
    """Spans at (offset, length), each a slice with memory of its own that begins `page` bytes into a page."""
    outs = [memoryview(mmap.mmap(-1, page + length + 1))[page : page + length] for _, length in places]
    return [FileSpan(offset, out, length) for (offset, length), out in zip(places, outs, strict=True)]


def whole(spans: list[FileSpan]) -> ReadOutcome:
    """What reading all of them gives; checks that they hold what the file does."""
    hashes: list[int] = []
    for offset, out, size in spans:
        assert out == DATA[offset : offset + len(out)]
        hashes += [slice_hash(out[at : at + size]) for at in range(0, len(out), size or 1) if size]
    return ReadOutcome(len(spans), hashes)


PLACES = [(0, 4096), (4096, 100), (4196, 9), (12_288, 70_000), (7, 1), (20, 0), (20, SCRATCH_BYTES + 1), (500, 500)]


def test_spans_are_read_and_hashed_whether_or_not_they_lie_side_by_side(tmp_path: Path, read: Read) -> None:
    spans = spans_of(*PLACES)
    spans[1] = FileSpan(spans[1].offset, spans[1].out)
    spans[3] = FileSpan(spans[3].offset, spans[3].out, 7_000)
    with opened(tmp_path) as fd:
        outcome = read(fd, 0, spans)
    assert outcome == whole(spans)
    assert len(outcome.hashes) == 5 + 10  # none of what is empty or has no slices


def test_more_spans_side_by_side_than_one_call_of_the_system_takes(tmp_path: Path, read: Read) -> None:
    spans = spans_of(*((at * 10, 10) for at in range(200)))
    with opened(tmp_path) as fd:
        assert read(fd, 0, spans) == whole(spans)


@pytest.mark.parametrize("page", [0, 9])
def test_direct_reads_go_anywhere(tmp_path: Path, page: int) -> None:
    """Straight to whole pages, else through memory that is; past its size too."""
    read, aligned = native(), [(0, SECTOR), (SECTOR, 2 * SECTOR), (8 * SECTOR, SECTOR)]
    for places in (aligned, PLACES, [(5, 2 * SCRATCH_BYTES), (2 * SCRATCH_BYTES + 5, 3)]):
        spans = spans_of(*places, page=page)
        with opened(tmp_path, os.O_DIRECT) as fd:
            outcome = read(fd, SECTOR, spans)
        if outcome.error is not None and outcome.error.errno == errno.EINVAL:
            pytest.skip("this file system has no direct reads")
        assert outcome == whole(spans)


def test_what_the_file_ends_inside_of_has_not_come(tmp_path: Path, read: Read) -> None:
    spans = spans_of((0, 10), (len(DATA) - 10, 10), (len(DATA) - 10, 11), (0, 5))
    with opened(tmp_path) as fd:
        assert read(fd, 0, spans) == whole(spans[:2])
        assert read(fd, 0, spans_of((len(DATA) + SECTOR, 10))) == ReadOutcome(0, [])


def test_the_end_of_the_file_between_spans_side_by_side(tmp_path: Path, read: Read) -> None:
    spans = spans_of((len(DATA) - 20, 10), (len(DATA) - 10, 10), (len(DATA), 10))
    with opened(tmp_path) as fd:
        assert read(fd, 0, spans) == whole(spans[:2])


def test_an_error_is_told_with_what_had_come(tmp_path: Path, read: Read) -> None:
    with opened(tmp_path) as fd:
        spans = spans_of((0, 10), (-5, 10))
        count, hashes, error = read(fd, 0, spans)
    assert (count, hashes) == whole(spans[:1])[:2]
    assert error is not None
    assert error.errno == errno.EINVAL


def test_aligned_memory_is_the_threads_own_and_grows() -> None:
    first, again = aligned_memory(10), aligned_memory(20)
    first[:] = b"0123456789"
    assert bytes(again[:10]) == b"0123456789"
    large = aligned_memory(SCRATCH_BYTES + 1)
    assert len(large) == SCRATCH_BYTES + 1
    assert bytes(again[:10]) == b"0123456789"


@pytest.mark.parametrize("nbytes", [SECTOR, SCRATCH_BYTES + SECTOR])
def test_a_forked_process_has_aligned_memory_of_its_own(nbytes: int) -> None:
    memory = aligned_memory(nbytes)
    memory[:5] = b"ours."
    child = os.fork()
    if child == 0:
        memory[:5] = b"other"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory[:5]) == b"ours."
