"""Copying and verifying in one go, by native code and without it."""

import itertools
import logging
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.base.kv.iovec import Iovec
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.native_copy import IN_TWO_PASSES, CopyFunction, CopyFunctions, SliceCopier, copy_verified
from moonpool.base.native.build import BuildError, compiler

SIZES = (1, 7, 4096, 40_000, 100_001)


def native() -> CopyFunctions:
    """This machine's; skips where there is no compiler."""
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    found = copy_verified.prepare()
    assert found is not IN_TWO_PASSES
    return found


@pytest.fixture(params=["native", "two passes"])
def ways(request: pytest.FixtureRequest) -> CopyFunctions:
    return native() if request.param == "native" else IN_TWO_PASSES


@pytest.fixture(params=["at once", "in a thread"])
def landing(ways: CopyFunctions, request: pytest.FixtureRequest) -> Iterator[CopyFunction]:
    if request.param == "at once":
        yield ways.land
    else:
        with ThreadPoolExecutor(1) as thread:
            yield lambda *given: thread.submit(ways.later(*given)).result()


def source(nbytes: int) -> memoryview:
    return memoryview((bytes(range(251)) * (nbytes // 251 + 1))[:nbytes])


def pieces(data: memoryview) -> list[memoryview]:
    ends = [sum(SIZES[: count + 1]) for count in range(len(SIZES))]
    return [data[end - size : end] for end, size in zip(ends, SIZES, strict=True)]


def test_pieces_come_to_their_targets_and_are_verified_there(landing: CopyFunction) -> None:
    data = source(sum(SIZES))
    memory = bytearray(2 * len(data))
    targets = pieces(memoryview(memory)[100:])[::-1]
    cut, at = [], 0
    for target in targets:
        cut.append(data[at : at + len(target)])
        at += len(target)
    assert landing(targets, data, [slice_hash(piece) for piece in cut]) == len(SIZES)
    assert [bytes(target) for target in targets] == [bytes(piece) for piece in cut]
    assert memory[:100] == bytes(100)
    assert memory[100 + len(data) :] == bytes(len(memory) - 100 - len(data))


@pytest.mark.parametrize("wrong", range(len(SIZES)))
def test_it_says_how_many_leading_pieces_are_intact(landing: CopyFunction, wrong: int) -> None:
    data = source(sum(SIZES))
    hashes = [slice_hash(piece) ^ (number == wrong) for number, piece in enumerate(pieces(data))]
    assert landing(pieces(memoryview(bytearray(len(data)))), data, hashes) == wrong


@pytest.mark.parametrize(
    ("targets", "nbytes", "hashes"), [([4, 4], 8, 1), ([4, 4], 8, 3), ([4, 4], 9, 2), ([4, 4], 7, 2), ([4], 8, 1)]
)
def test_nothing_is_written_past_a_target_and_misfits_are_refused(
    landing: CopyFunction, targets: list[int], nbytes: int, hashes: int
) -> None:
    data, memory = source(nbytes), memoryview(bytearray(64))
    views = [memory[16 * number : 16 * number + size] for number, size in enumerate(targets)]
    values = [slice_hash(data[4 * number : 4 * number + 4]) for number in range(hashes)]
    with pytest.raises(ValueError, match="targets of"):
        landing(views, data, values)
    for number, size in enumerate(targets):
        assert memory[16 * number + size : 16 * number + 16] == bytes(16 - size)


def test_memory_that_cannot_be_written_is_refused(landing: CopyFunction) -> None:
    with pytest.raises(BufferError):
        landing([memoryview(bytes(4))], source(4), [slice_hash(source(4))])


def test_what_lies_there_already_is_verified_only(ways: CopyFunctions) -> None:
    data = memoryview(bytearray(source(sum(SIZES))))
    hashes = [slice_hash(piece) for piece in pieces(data)]
    assert ways.later(pieces(data), None, hashes)() == len(SIZES)
    data[sum(SIZES[:4]) - 1] ^= 1
    assert ways.later(pieces(data), None, hashes)() == 3
    with pytest.raises(ValueError, match="no bytes"):
        native().later(pieces(data), None, hashes[1:])


def test_memory_is_held_until_it_has_been_written() -> None:
    memory, data = bytearray(8), bytearray(source(8))
    work = native().later([memoryview(memory)], memoryview(data), [slice_hash(data)])
    for held in (memory, data):
        with pytest.raises(BufferError):
            held.clear()
    assert work() == 1
    assert memory == data
    memory.clear()


def library(error: Exception) -> Callable[[], Path]:
    def build_it() -> Path:
        raise error

    return build_it


def not_a_library(path: Path) -> Callable[[], Path]:
    path.write_text("no library")
    return lambda: path


def test_without_native_code_it_goes_in_two_passes_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for build_it in (library(BuildError("no C++ compiler found")), not_a_library(tmp_path / "it.so")):
        caplog.clear()
        lander = SliceCopier(build_it)
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                assert lander([memoryview(bytearray(4))], source(4), [slice_hash(source(4))]) == 1
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "slices are copied and hashed in two passes, native code cannot be had"
        ]
        assert lander.prepare() is IN_TWO_PASSES


def test_a_library_that_copies_nothing_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one would be that was built wrongly, or for another processor."""
    native()
    source_file, built = tmp_path / "it.cpp", tmp_path / "it.so"
    source_file.write_text("""
        #include <cstdint>
        extern "C" void mp_init(void*) {}
        extern "C" int64_t mp_land(void*, void*, void*) { return 7; }
        extern "C" void* mp_begin(void*, void*, void*) { return reinterpret_cast<void*>(1); }
        extern "C" int64_t mp_run(void*) { return 7; }
        extern "C" void mp_end(void*) {}
    """)
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(built), str(source_file)], check=True)
    assert SliceCopier(lambda: built).prepare() is IN_TWO_PASSES
    assert "it copies or hashes wrongly" in caplog.text


def test_bytes_that_lie_apart_come_together(landing: CopyFunction) -> None:
    data = source(sum(SIZES))
    cuts = [0, 5, 4100, 4101, 60_000, len(data)]
    scattered = Iovec([memoryview(bytes(data[begin:end])) for begin, end in itertools.pairwise(cuts)])
    memory = bytearray(len(data))
    assert landing(pieces(memoryview(memory)), scattered, [slice_hash(piece) for piece in pieces(data)]) == len(SIZES)
    assert memory == data
    with pytest.raises(ValueError, match="targets of"):
        landing(pieces(memoryview(memory)), scattered[:-1], [slice_hash(piece) for piece in pieces(data)])


def test_bytes_that_lie_apart_are_cut_as_if_they_did_not() -> None:
    data = bytes(range(30))
    scattered = Iovec([memoryview(data)[begin:end] for begin, end in ((0, 7), (7, 7), (7, 20), (20, 30))])
    assert (len(scattered), bytes(scattered)) == (30, data)
    for begin, end in itertools.combinations_with_replacement(range(31), 2):
        assert bytes(scattered[begin:end]) == data[begin:end]
        assert scattered[begin:end].nbytes == end - begin
