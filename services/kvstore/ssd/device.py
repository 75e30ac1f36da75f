"""Reads and writes of open files that the `os` module lacks: direct reads of any alignment, early write-back.

Everything here blocks. Why these ways: docs/adr/0004-ssd-tier.md.
"""

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Sequence

import lmdb

SECTOR = 4096
"""Alignment of direct reads: offset, length and memory."""

SCRATCH_BYTES = 2 << 20
"""Memory of a thread that reads directly; a larger read is done in pieces of this size."""

HEADER_BYTES = 64 << 10
"""Headers up to this size are read without an allocation."""

_SYNC_FILE_RANGE_WRITE = 2
_IOV_MAX = 512


class _Scratch(threading.local):
    """Page-aligned memory of one thread, made at its first read."""

    @functools.cached_property
    def body(self) -> memoryview:
        return memoryview(mmap.mmap(-1, SCRATCH_BYTES))

    @functools.cached_property
    def header(self) -> memoryview:
        return memoryview(mmap.mmap(-1, HEADER_BYTES))


_scratch = _Scratch()


def header_memory(nbytes: int) -> memoryview:
    """This thread's memory for a header, valid until its next call."""
    return _scratch.header[:nbytes] if nbytes <= HEADER_BYTES else memoryview(bytearray(nbytes))


def is_full(error: BaseException) -> bool:
    """Whether the error means that the device is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, lmdb.DiskError) or (isinstance(error, OSError) and error.errno in full)


def _is_aligned(out: memoryview) -> bool:
    return not len(out) % SECTOR and not ctypes.addressof(ctypes.c_char.from_buffer(out)) % SECTOR


def read_direct(fd: int, outs: Sequence[memoryview], offset: int) -> int:
    """Fills `outs` one after the other from `offset` on, past the page cache, whatever their alignment.

    Returns the bytes read: fewer than asked for only at the end of the file. An OSError with EINVAL says that the file
    system has no direct reads.
    """
    if not offset % SECTOR and all(_is_aligned(out) for out in outs):
        return read_cached(fd, outs, offset)  # no copy needed; only the last count, at the end of the file, is odd
    scratch = _scratch.body
    views = [out for out in outs if len(out)]
    position, end = offset, offset + sum(len(out) for out in outs)
    while position < end:
        begin = position - position % SECTOR
        want = min(-(-(end - begin) // SECTOR) * SECTOR, SCRATCH_BYTES)
        stop = min(begin + os.preadv(fd, [scratch[:want]], begin), end)
        if stop <= position:
            break
        while position < stop:
            count = min(len(views[0]), stop - position)
            views[0][:count] = scratch[position - begin : position - begin + count]
            position += count
            _advance(views, count)
    return position - offset


def read_cached(fd: int, outs: Sequence[memoryview], offset: int) -> int:
    """As `read_direct`, through the page cache."""
    views = [out for out in outs if len(out)]
    position = offset
    while views:
        count = os.preadv(fd, views[:_IOV_MAX], position)
        if not count:
            break
        position += count
        _advance(views, count)
    return position - offset


def write(fd: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
    """Writes parts one after the other from `offset` on."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        count = os.pwritev(fd, views[:_IOV_MAX], offset)
        offset += count
        _advance(views, count)


def _advance(views: list[memoryview], count: int) -> None:
    """Takes `count` bytes off the front."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Starts writing a range to the device, so that a later sync waits less. A hint: errors are ignored."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
