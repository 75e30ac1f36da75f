"""Bytes in several places as one piece, and new memory whose bytes need not be zeroed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.argtypes, _new_bytearray.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


def new_bytearray(nbytes: int) -> bytearray:
    """Bytes that are not made zeros first; for callers that overwrite all bytes."""
    made: bytearray = _new_bytearray(None, nbytes)
    return made


def new_bytes(nbytes: int) -> memoryview:
    """A view of a `new_bytearray`."""
    return memoryview(new_bytearray(nbytes))


class Iovec:
    """Parts that count as one run of bytes; cut and copied like a memoryview.

    Attributes:
        parts: in order.
        nbytes: total.
    """

    __slots__ = ("nbytes", "parts")

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = list(parts)
        self.nbytes = sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, where: slice) -> Iovec:
        """The bytes `[begin:end]`."""
        begin, end, step = where.indices(self.nbytes)
        assert step == 1, "bytes one behind the other"
        found = []
        for part in self.parts:
            if begin < part.nbytes and end > 0:
                found.append(part[max(begin, 0) : end])
            begin, end = begin - part.nbytes, end - part.nbytes
        return Iovec(found)

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


BytesLike = memoryview | Iovec


def iovec_parts(data: BytesLike) -> list[memoryview]:
    """The places where bytes lie."""
    return data.parts if isinstance(data, Iovec) else [data]
