"""Ways to the device that the `os` module lacks or that want care: direct reads and early write-back.

Owns alignment, the memory that direct reads land in, and what to do where a file system has no direct reads. Must not
know of records or segments. Everything here blocks. Why these ways: docs/adr/0004-ssd-tier.md.
"""

import ctypes
import errno
import mmap
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

SECTOR = 4096
"""What direct reads are aligned to: offset, length and memory."""

SCRATCH_BYTES = 2 << 20
"""Memory of a thread that reads directly; a larger read is done in so large pieces."""

HEADER_BYTES = 64 << 10
"""Headers up to this size are read without an allocation."""

_SYNC_FILE_RANGE_WRITE = 2
_IOV_MAX = 512


class _Scratch(threading.local):
    """Page-aligned memory of one thread, made when it reads first."""

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
    """This thread's memory for a header, good until it asks again."""
    return _header.get()[:nbytes] if nbytes <= HEADER_BYTES else memoryview(bytearray(nbytes))


def _is_aligned(out: memoryview) -> bool:
    return not len(out) % SECTOR and not ctypes.addressof(ctypes.c_char.from_buffer(out)) % SECTOR


def open_direct(path: pathlib.Path) -> int:
    """A descriptor for direct reads; -1 where the file system has none.

    Raises:
        OSError: the file cannot be opened.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return -1
        raise


def read_direct(fd: int, outs: Sequence[memoryview], offset: int) -> int:
    """Fills `outs`, one after the other, from `offset` on, past the page cache; any alignment will do.

    Returns:
        Bytes read: fewer than wanted only where the file ends.

    Raises:
        OSError: they cannot be read; EINVAL where the file system refuses direct reads after all.
    """
    if not offset % SECTOR and all(_is_aligned(out) for out in outs):
        return read_cached(fd, outs, offset)  # no copy needed; where the file ends a count may be odd, and is the last
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
    """As `read_direct`, for a descriptor that asks for no alignment: through the page cache.

    Raises:
        OSError: they cannot be read.
    """
    views = [out for out in outs if len(out)]
    position = offset
    while views:
        count = os.preadv(fd, views[:_IOV_MAX], position)
        if not count:
            break
        position += count
        _advance(views, count)
    return position - offset


def write(fd: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> int:
    """Writes parts one after the other from `offset` on; returns how many bytes.

    Raises:
        OSError: they cannot be written.
    """
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    position = offset
    while views:
        count = os.pwritev(fd, views[:_IOV_MAX], position)
        position += count
        _advance(views, count)
    return position - offset


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
    """Lets the device begin with what was written, so that a later sync waits less. Only a hint: errors are ignored."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
