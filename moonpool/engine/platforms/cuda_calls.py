"""CUDA runtime calls that torch does not offer: registered host memory, and many copies in one call."""

import ctypes
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

_STREAM_ORDER = 1
"""Sources are read in the stream's order."""
_EITHER_WAY = 4
"""Whether memory is the host's or the GPU's follows from the address."""
_BATCHES_SINCE = 13
"""Version of CUDA; cudaMemcpyBatchAsync has another signature before."""


class CallRefused(Exception):  # noqa: N818 - nothing is wrong: the caller does without
    """CUDA's runtime refused a call, or lacks the call; the message says which."""


class RuntimeLibrary(Protocol):
    """What is called of `libcudart`; each call returns 0 or the number of an error."""

    def cudaHostRegister(self, memory: object, nbytes: object, flags: object) -> int:  # noqa: N802 - CUDA's name
        """Pin host memory."""

    def cudaHostUnregister(self, memory: object) -> int:  # noqa: N802 - CUDA's name
        """Unpin host memory."""

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name
        """Return the last error, and forget the error."""

    def cudaMemcpy2DAsync(self, *arguments: object) -> int:  # noqa: N802 - CUDA's name
        """Give a copy of rows to a stream, with bytes between them on both sides."""

    def cudaMemcpyBatchAsync(self, *arguments: object) -> int:  # noqa: N802 - CUDA's name
        """Give many copies to a stream."""


class _Attributes(ctypes.Structure):
    """Copy attributes for CUDA's runtime, as the runtime lays them out."""

    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("order", "source_kind", "source", "target_kind", "target", "flags")
    )


class CudaRuntime:
    """CUDA's runtime.

    Args:
        library: the runtime's library.
        major: the runtime's version.
    """

    def __init__(self, library: RuntimeLibrary, major: int) -> None:
        self._library, self.batches = library, major >= _BATCHES_SINCE

    @classmethod
    def load(cls) -> Self:
        """Return the runtime that torch uses.

        Raises:
            CallRefused: the library is not where the loader looks.
        """
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            return cls(ctypes.CDLL(f"libcudart.so.{major}"), int(major))
        except (OSError, ValueError) as error:
            raise CallRefused(f"CUDA's runtime cannot be called: {error}") from error

    def register(self, memory: Tensor) -> None:
        """Pin host memory that was allocated elsewhere, such as a shared pool.

        Raises:
            CallRefused: the runtime refused.
        """
        code = self._library.cudaHostRegister(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), ctypes.c_uint(0)
        )
        self._check(code, f"cudaHostRegister of {memory.nbytes} bytes")

    def unregister(self, memory: Tensor) -> None:
        """Unpin registered memory.

        Raises:
            CallRefused: the runtime refused.
        """
        self._check(self._library.cudaHostUnregister(ctypes.c_void_p(memory.data_ptr())), "cudaHostUnregister")

    def copy_rows(self, target: Tensor, source: Tensor, runs: np.ndarray, stream: int) -> None:
        """Give row copies to a stream, as one call.

        Args:
            target: [rows, bytes per row] in GPU memory, or registered.
            source: alike.
            runs: int64 [runs, 2]: first row and number of rows for each run.
            stream: handle; not that of the default stream.

        Raises:
            CallRefused: the runtime refused, or is older than 13.0; no byte is copied.
        """
        if not self.batches:
            raise CallRefused(f"cudaMemcpyBatchAsync has another signature before CUDA {_BATCHES_SINCE}")
        row = source.stride(0) * source.element_size()
        begin, sizes = (np.ascontiguousarray(column).astype(np.uint64) for column in row * runs.T)
        places = [begin + np.uint64(tensor.data_ptr()) for tensor in (target, source)]
        attributes, first = _Attributes(_STREAM_ORDER), ctypes.c_size_t(0)
        code = self._library.cudaMemcpyBatchAsync(
            *(ctypes.c_void_p(array.ctypes.data) for array in (*places, sizes)),
            ctypes.c_size_t(len(runs)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
        )
        self._check(code, f"cudaMemcpyBatchAsync of {len(runs)} copies")

    def copy_spaced_rows(self, target: Tensor, source: Tensor, runs: np.ndarray, stream: int) -> None:
        """As `copy_rows`, of rows with other bytes between them on either side, as a call for each run.

        Raises:
            CallRefused: the runtime refused.
        """
        for first, count in runs.tolist():
            places = [
                (ctypes.c_void_p(rows.data_ptr() + first * rows.stride(0)), ctypes.c_size_t(rows.stride(0)))
                for rows in (target, source)
            ]
            sizes = ctypes.c_size_t(target.shape[1]), ctypes.c_size_t(count)
            code = self._library.cudaMemcpy2DAsync(
                *places[0], *places[1], *sizes, ctypes.c_int(_EITHER_WAY), ctypes.c_void_p(stream)
            )
            self._check(code, f"cudaMemcpy2DAsync of {count} rows")

    def _check(self, code: int, what: str) -> None:
        if code:
            self._library.cudaGetLastError()  # else torch would raise the error after torch's next kernel
            raise CallRefused(f"{what}: error {code}")


def runs_of(rows: Tensor) -> np.ndarray:
    """Return the runs of adjacent numbers, int64 [runs, 2]: first number and count.

    Args:
        rows: int64, rising numbers.
    """
    numbers = rows.numpy()
    first = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    return np.stack((numbers[first], np.diff(first, append=len(numbers))), axis=1)
