"""Reads and writes of open files that the `os` module lacks: direct reads of any alignment, early write-back.

Everything here blocks. Why these ways: docs/adr/0004-ssd-tier.md.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

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

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: memoryview | None = None

    def get(self) -> memoryview:
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, self._nbytes))
        return self._memory


_scratch = _Scratch(SCRATCH_BYTES)
_header = _Scratch(HEADER_BYTES)


def header_memory(nbytes: int) -> memoryview:
    """This thread's memory for a header, valid until its next call."""
    return _header.get()[:nbytes] if nbytes <= HEADER_BYTES else memoryview(bytearray(nbytes))


def is_full(error: BaseException) -> bool:
    """Whether the error means that the device is full."""
    if isinstance(error, lmdb.DiskError):
        return True
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_aligned(out: memoryview) -> bool:
    return not len(out) % SECTOR and not ctypes.addressof(ctypes.c_char.from_buffer(out)) % SECTOR


def read_direct(fd: int, outs: Sequence[memoryview], offset: int) -> int:
    """Fills `outs` one after the other from `offset` on, past the page cache, whatever their alignment.

    Returns:
        Bytes read: fewer than asked for only at the end of the file.

    Raises:
        OSError: the read failed; EINVAL where the file system has no direct reads.
    """
    if not offset % SECTOR and all(_is_aligned(out) for out in outs):
        return read_cached(fd, outs, offset)  # no copy needed; only the last count, at the end of the file, is odd
    scratch = _scratch.get()
    end = offset + sum(len(out) for out in outs)
    position = offset
    target, filled = 0, 0
    while position < end:
        begin = position - position % SECTOR
        want = min(-(-(end - begin) // SECTOR) * SECTOR, SCRATCH_BYTES)
        got = os.preadv(fd, [scratch[:want]], begin)
        stop = min(begin + got, end)
        if stop <= position:
            break
        while position < stop:
            out = outs[target]
            count = min(len(out) - filled, stop - position)
            out[filled : filled + count] = scratch[position - begin : position - begin + count]
            position += count
            filled += count
            if filled == len(out):
                target, filled = target + 1, 0
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


def _find_sync_file_range() -> Any:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):  # not Linux
        return None


_sync_file_range = _find_sync_file_range()


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Starts writing a range to the device, so that a later sync waits less. A hint: errors are ignored."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
