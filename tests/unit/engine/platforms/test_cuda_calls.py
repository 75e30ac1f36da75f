"""Calls of CUDA's runtime, of which a library in Python does what the arguments in memory say."""

import ctypes
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from moonpool.engine.platforms.cuda_calls import CallRefused, CudaRuntime, runs_of


class Library:
    """CUDA's runtime as its documentation has it. Refuses with an error number if there is one."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.last_error = error, error
        self.registered: dict[int | None, int] = {}
        self.copied: list[int] = []

    def cudaHostRegister(self, memory: object, nbytes: object, flags: object) -> int:
        assert isinstance(memory, ctypes.c_void_p)
        assert isinstance(nbytes, ctypes.c_size_t)
        self.registered[memory.value] = nbytes.value
        return self.error

    def cudaHostUnregister(self, memory: object) -> int:
        assert isinstance(memory, ctypes.c_void_p)
        del self.registered[memory.value]
        return self.error

    def cudaGetLastError(self) -> int:
        found, self.last_error = self.last_error, 0
        return found

    def cudaMemcpy2DAsync(self, *arguments: object) -> int:
        values: list[int] = [getattr(argument, "value", 0) for argument in arguments]
        target, target_pitch, source, source_pitch, width, height, *how = values
        assert how == [4, 77]
        for row in range(0 if self.error else height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        self.copied.append(width * height)
        return self.error

    def cudaMemcpyBatchAsync(self, *arguments: object) -> int:
        *places, count, _attributes, _first, kinds, stream = arguments
        assert isinstance(count, ctypes.c_size_t)
        assert isinstance(kinds, ctypes.c_size_t)
        assert isinstance(stream, ctypes.c_void_p)
        assert (kinds.value, stream.value) == (1, 77)
        numbers = []
        for place in places:
            assert isinstance(place, ctypes.c_void_p)
            assert place.value is not None
            numbers.append((ctypes.c_uint64 * count.value).from_address(place.value))
        if not self.error:
            for target, source, nbytes in zip(*numbers, strict=True):
                ctypes.memmove(target, source, nbytes)
                self.copied.append(nbytes)
        return self.error


def slices(count: int, nbytes: int) -> Tensor:
    return torch.arange(count * nbytes, dtype=torch.int64).to(torch.uint8).view(count, nbytes)


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        ([0], [[0, 1]]),
        ([5], [[5, 1]]),
        ([0, 1, 2], [[0, 3]]),
        ([1, 3, 4, 7], [[1, 1], [3, 2], [7, 1]]),
    ],
)
def test_rows_are_copied_and_no_others(rows: list[int], runs: list[list[int]]) -> None:
    found = runs_of(torch.tensor(rows))
    assert found.tolist() == runs
    library, source = Library(), slices(8, 12)
    target = torch.full_like(source, 255)
    CudaRuntime(library, 13).copy_rows(target, source, found, 77)
    for row in range(8):
        assert torch.equal(target[row], source[row] if row in rows else torch.full_like(source[row], 255))
    assert library.copied == [12 * count for _, count in runs]


@pytest.mark.parametrize("home", [True, False])
def test_some_bytes_of_rows_are_copied_with_others_between_them(home: bool) -> None:
    library, whole, own = Library(), slices(8, 12), torch.full((8, 4), 255, dtype=torch.uint8)
    part, untouched = whole[:, 4:8], whole.clone()
    target, source = (part, own) if home else (own, part)
    expected = target.clone()
    expected[[1, 3, 4]] = source[[1, 3, 4]]
    CudaRuntime(library, 12).copy_spaced_rows(target, source, runs_of(torch.tensor([1, 3, 4])), 77)
    assert torch.equal(target, expected)
    assert torch.equal(whole[:, :4], untouched[:, :4])
    assert torch.equal(whole[:, 8:], untouched[:, 8:])
    assert library.copied == [4, 8]


def test_memory_is_registered_and_given_back() -> None:
    library, memory = Library(), slices(3, 7)
    runtime = CudaRuntime(library, 12)
    runtime.register(memory)
    assert library.registered == {memory.data_ptr(): 21}
    runtime.unregister(memory)
    assert library.registered == {}


def test_what_is_refused_says_so_and_leaves_no_error_for_torch() -> None:
    memory, runs = slices(3, 7), runs_of(torch.tensor([1]))
    runtime = CudaRuntime(library := Library(801), 13)
    calls: list[tuple[Callable[[], None], str]] = [
        (partial(runtime.register, memory), "cudaHostRegister of 21 bytes: error 801"),
        (partial(runtime.copy_rows, memory, memory, runs, 77), "cudaMemcpyBatchAsync of 1 copies: error 801"),
        (partial(runtime.copy_spaced_rows, memory, memory, runs, 77), "cudaMemcpy2DAsync of 1 rows: error 801"),
    ]
    for call, said in calls:
        library.last_error = 801
        with pytest.raises(CallRefused, match=said):
            call()
        assert library.last_error == 0


def test_cuda_12_copies_slice_by_slice() -> None:
    runtime, memory = CudaRuntime(Library(), 12), slices(3, 7)
    assert not runtime.batches
    with pytest.raises(CallRefused, match="before CUDA 13"):
        runtime.copy_rows(memory, memory, runs_of(torch.tensor([1])), 77)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_a_torch_without_cuda_has_no_runtime() -> None:
    with pytest.raises(CallRefused, match="cannot be called"):
        CudaRuntime.load()
