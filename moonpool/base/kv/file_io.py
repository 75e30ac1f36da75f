"""Reads slices from files straight to their destination with their hashes, and writes files with many parts.

Native code does the reads (`kernels/kv/reading.cpp`), many in one call and without the interpreter's lock; without
native code, Python reads slice by slice through the page cache. Aligned writes bypass the page cache.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.native_copy import hash_address
from moonpool.base.kv.native_library import library
from moonpool.base.native.build import BuildError

SCRATCH_BYTES = 1 << 20
"""A thread's memory for direct reads, if the destination cannot take a direct read."""
SECTOR = 4096
"""Alignment for direct reads and writes: offset, length and memory."""
_IOV_MAX = 512


class FileSpan(NamedTuple):
    """Bytes to read from a file.

    Attributes:
        offset: first byte's offset.
        out: memory for these bytes, of the same length.
        slice_bytes: bytes in each slice with a wanted hash; 0 where none are.
    """

    offset: int
    out: memoryview
    slice_bytes: int = 0


class ReadOutcome(NamedTuple):
    """What has been read.

    Attributes:
        spans: number of leading spans that are whole.
        hashes: the slices' hashes.
        error: what kept the next span from being read; None at the end of the file.
    """

    spans: int
    hashes: list[int]
    error: OSError | None = None


Read = Callable[[int, int, Sequence[FileSpan]], ReadOutcome]
"""Blocking. Takes (descriptor, sector, spans).

`sector` is 0, or, if the file is open for direct reads, the divisor of offsets, lengths and memory addresses.
"""


def _own_memory(nbytes: int) -> mmap.mmap:
    """Page-aligned memory that a forked process does not share: both processes' reads would overwrite each other."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _AlignedMemory(threading.local):
    """One thread's page-aligned memory, made at first use."""

    def __init__(self) -> None:
        self.scratch = memoryview(_own_memory(SCRATCH_BYTES))
        self.aligned = memoryview(_own_memory(SCRATCH_BYTES))


_memory = _AlignedMemory()


def aligned_memory(nbytes: int) -> memoryview:
    """This thread's page-aligned memory, valid until the thread's next call. Larger requests get new memory."""
    return _memory.aligned[:nbytes] if nbytes <= SCRATCH_BYTES else memoryview(_own_memory(nbytes))


def read_slice_by_slice(fd: int, sector: int, spans: Sequence[FileSpan]) -> ReadOutcome:
    """A `Read` in Python; `sector` must be 0."""
    assert not sector, "direct reads are native code's"
    hashes: list[int] = []
    for number, (offset, out, size) in enumerate(spans):
        done = 0
        try:
            while done < len(out) and (count := os.preadv(fd, [out[done:]], offset + done)):
                done += count
        except OSError as error:
            return ReadOutcome(number, hashes, error)
        if done < len(out):
            return ReadOutcome(number, hashes)
        hashes += [slice_hash(out[at : at + size]) for at in range(0, len(out), size)] if size else []
    return ReadOutcome(len(spans), hashes)


def load_native_read(path: Path) -> Read:
    """A built library's `Read`; raises OSError or AttributeError if missing."""
    native, hash_function = ctypes.CDLL(str(path)).mp_read, hash_address()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    native.argtypes = (ctypes.c_int, number, pointer, number, pointer, number, pointer, pointer, pointer)
    native.restype = number

    def read(fd: int, sector: int, spans: Sequence[FileSpan]) -> ReadOutcome:
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
        return ReadOutcome(count, hashes[:slices].tolist(), failure)

    return read


def _slices(spans: Sequence[FileSpan]) -> int:
    return sum(len(out) // size for _, out, size in spans if size)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) else 0


@functools.cache
def slice_reader() -> Read:
    """Blocking: builds the library if need be. Native code, or `read_slice_by_slice` if not available."""
    try:
        return load_native_read(library())
    except (BuildError, OSError, AttributeError, ImportError):
        return read_slice_by_slice  # `moonpool.base.kv.native_copy` tells why


Buffer = bytes | bytearray | memoryview


def write_all(fd: int, parts: Iterable[Buffer], offset: int) -> int:
    """Blocking. Writes parts from `offset` on; returns where they end.

    Raises:
        OSError: a part may have been written.
    """
    views, at = _views(parts), 0
    while at < len(views):
        count = os.pwritev(fd, views[at : at + _IOV_MAX], offset)
        offset += count
        while at < len(views) and count >= len(views[at]):
            count -= len(views[at])
            at += 1
        if count:
            views[at] = views[at][count:]
    return offset


def write_direct(fd: int, parts: Sequence[Buffer], offset: int) -> int:
    """The same, where `fd` is open for direct writes. What is not aligned is copied.

    Offset and total length are multiples of `SECTOR`, and so are the lengths between two aligned parts.
    """
    for some in _aligned(parts):
        offset = write_all(fd, some, offset)
    return offset


def _aligned(parts: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    memory, ready, start, used = aligned_memory(SCRATCH_BYTES), list[memoryview](), 0, 0
    for aligned, some in itertools.groupby(_views(parts), _is_aligned):
        if aligned:
            ready += some
            continue
        for view in some:
            while len(view):
                count = min(len(view), len(memory) - used)
                memory[used : used + count] = view[:count]
                view, used = view[count:], used + count
                if used == len(memory):
                    yield [*ready, memory[start:]]
                    ready, start, used = [], 0, 0
        ready.append(memory[start:used])
        start = used
    yield ready


def _is_aligned(view: memoryview) -> bool:
    if view.readonly:
        return False
    return not (ctypes.addressof(ctypes.c_char.from_buffer(view)) | len(view)) % SECTOR


def _views(parts: Iterable[Buffer]) -> list[memoryview]:
    return [memoryview(part).cast("B") for part in parts if len(part)]
