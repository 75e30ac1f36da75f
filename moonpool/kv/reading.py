"""Slices of files are read straight to where they belong, and hashed there: many in one call, without Python's lock.

Native code does it (native/reading.cpp), in the library of `moonpool.kv.landing`. Where that cannot be had, Python does
the same slice by slice, through the page cache only.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kernels.native.build import BuildError
from moonpool.kv.hashes import slice_hash
from moonpool.kv.landing import hash_address
from moonpool.kv.library import library

SCRATCH_BYTES = 1 << 20
"""Memory of a thread for direct reads to where no direct read can go."""


class Span(NamedTuple):
    """Some bytes of a file.

    Attributes:
        offset: of the first.
        out: memory for them, as long as they are.
        slice_bytes: of each of the slices that they are, whose hashes are wanted; 0 where none are.
    """

    offset: int
    out: memoryview
    slice_bytes: int = 0


class Outcome(NamedTuple):
    """What has been read.

    Attributes:
        spans: how many leading ones are whole.
        hashes: of the slices in them.
        error: what kept the next one from being read; None at the end of the file.
    """

    spans: int
    hashes: list[int]
    error: OSError | None = None


Read = Callable[[int, int, Sequence[Span]], Outcome]
"""Blocking. Takes (descriptor, sector, spans).

`sector` is 0, or, where the file is open for direct reads, what their offsets, lengths and memory must be multiples of.
"""


class _Memory(threading.local):
    """Page-aligned memory of one thread, made when it is first used."""

    def __init__(self) -> None:
        self.scratch = memoryview(mmap.mmap(-1, SCRATCH_BYTES))
        self.aligned = memoryview(mmap.mmap(-1, SCRATCH_BYTES))


_memory = _Memory()


def aligned_memory(nbytes: int) -> memoryview:
    """This thread's page-aligned memory, valid until its next call; a new one where it is larger than usual."""
    return _memory.aligned[:nbytes] if nbytes <= SCRATCH_BYTES else memoryview(mmap.mmap(-1, nbytes))


def read_slice_by_slice(fd: int, sector: int, spans: Sequence[Span]) -> Outcome:
    """A `Read` in Python; `sector` must be 0."""
    assert not sector, "direct reads are native code's"
    hashes: list[int] = []
    for number, (offset, out, size) in enumerate(spans):
        done = 0
        try:
            while done < len(out) and (count := os.preadv(fd, [out[done:]], offset + done)):
                done += count
        except OSError as error:
            return Outcome(number, hashes, error)
        if done < len(out):
            return Outcome(number, hashes)
        hashes += [slice_hash(out[at : at + size]) for at in range(0, len(out), size)] if size else []
    return Outcome(len(spans), hashes)


def load_native(path: Path) -> Read:
    """The `Read` of a built library; raises OSError or AttributeError when it has none."""
    native, hash_function = ctypes.CDLL(str(path)).mp_read, hash_address()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    native.argtypes = (ctypes.c_int, number, pointer, number, pointer, number, pointer, pointer, pointer)
    native.restype = number

    def read(fd: int, sector: int, spans: Sequence[Span]) -> Outcome:
        fields: list[int] = []
        for offset, out, size in spans:
            fields += offset, _address(out), len(out), size
        slices = _slices(spans)
        asked, hashes, error = array("q", fields), array("Q", bytes(8 * slices)), ctypes.c_int()
        memory = _address(_memory.scratch), SCRATCH_BYTES
        found = hash_function, hashes.buffer_info()[0], ctypes.addressof(error)
        count: int = native(fd, sector, asked.buffer_info()[0], len(spans), *memory, *found)
        failure = OSError(error.value, os.strerror(error.value)) if error.value else None
        slices = slices if count == len(spans) else _slices(spans[:count])
        return Outcome(count, hashes[:slices].tolist(), failure)

    return read


def _slices(spans: Sequence[Span]) -> int:
    return sum(len(out) // size for _, out, size in spans if size)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) else 0


@functools.cache
def slice_reader() -> Read:
    """Blocking: builds the library if need be. Native code, or where it cannot be had `read_slice_by_slice`."""
    try:
        return load_native(library())
    except (BuildError, OSError, AttributeError, ImportError):
        return read_slice_by_slice  # `moonpool.kv.landing` tells why
