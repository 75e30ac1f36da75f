"""Writes to files of many parts, one behind the other; past the page cache straight from where they lie, if aligned."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

from moonpool.kv.reading import SCRATCH_BYTES, aligned_memory

SECTOR = 4096
"""Alignment of direct reads and writes: of offset, length and memory."""
Buffer = bytes | bytearray | memoryview

_IOV_MAX = 512


def write_all(fd: int, parts: Iterable[Buffer], offset: int) -> int:
    """Blocking. Writes parts from `offset` on; returns where they end.

    Raises:
        OSError: some of it may have been written.
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

    Offset and length of all are multiples of `SECTOR`, and so are the lengths of what lies between two aligned parts.
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
