"""Calls of CUDA's runtime that torch does not offer: host memory that is registered, and many copies in one call."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class CallRefused(Exception):  # noqa: N818  # not a fault of the check: the runtime lacks the call or the memory
    """The runtime refused a call, or lacks the call; the message says which."""


@contextmanager
def registered(host: Tensor) -> Iterator[None]:
    """Pin memory that was allocated elsewhere, such as a shared pool, for the time of the context.

    Raises:
        CallRefused: the runtime refused.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if code:
        raise CallRefused(f"cudaHostRegister of {host.nbytes} bytes: error {code}")
    try:
        yield
    finally:
        runtime.cudaHostUnregister(host.data_ptr())


class _Attributes(ctypes.Structure):
    """What CUDA's runtime is told of copies, as the runtime lays it out."""

    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("order", "source_kind", "source", "target_kind", "target", "flags")
    )


_STREAM_ORDER = 1


class BatchedCopies:
    """Many copies as one call, `cudaMemcpyBatchAsync`, prepared once.

    Args:
        pairs: (target, source), of one size each pair; kept alive by the caller.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        count = len(pairs)
        self._count = count
        self._targets = (ctypes.c_void_p * count)(*(target.data_ptr() for target, _ in pairs))
        self._sources = (ctypes.c_void_p * count)(*(source.data_ptr() for _, source in pairs))
        self._sizes = (ctypes.c_size_t * count)(*(target.nbytes for target, _ in pairs))
        self._attributes, self._first = _Attributes(_STREAM_ORDER), ctypes.c_size_t(0)

    def __call__(self, stream: torch.cuda.Stream) -> None:
        """Give the copies to a stream.

        Raises:
            CallRefused: the runtime refused, or is older than 13.0.
        """
        version = torch.version.cuda or ""
        major = version.partition(".")[0]
        if not major.isdecimal() or int(major) < 13:
            raise CallRefused(f"cudaMemcpyBatchAsync has another signature before CUDA 13, this is {version}")
        call = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyBatchAsync
        rest = (ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1))
        code = call(
            self._targets,
            self._sources,
            self._sizes,
            ctypes.c_size_t(self._count),
            *rest,
            ctypes.c_void_p(stream.cuda_stream),
        )
        if code:
            raise CallRefused(f"cudaMemcpyBatchAsync of {self._count} copies: error {code}")
