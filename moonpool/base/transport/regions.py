"""Memory regions that two processes map: what a process exports, what a process maps, and mailboxes."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.errors import FrameError
from moonpool.base.kv.pool import F_SEAL_FUTURE_WRITE

MAX_REGION_BYTES = 1 << 46


def address_of(data: memoryview) -> int:
    """Address of writable bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """This process's memory that a peer may read: a descriptor, which the owner closes, and the mapped bytes."""

    fd: int
    data: memoryview


class SharedMemory:
    """Zeroed memory in this process that peers may read (`shared`). The last reference frees the memory."""

    def __init__(self, nbytes: int) -> None:
        """Take address space; memory is taken when touched. Raises OSError if the system has no such memory."""
        fd = os.memfd_create("moonpool-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, fd)
        os.truncate(fd, nbytes)
        data = memoryview(mmap.mmap(fd, nbytes))
        # A read-only descriptor could be opened for writing through /proc; a seal holds (ADR 25).
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.shared = SharedRegion(fd, data)


class ExportedRegions:
    """Regions that this process shows to a peer."""

    def __init__(self, shared: Sequence[SharedRegion]) -> None:
        """The regions get numbers from 1, in order."""
        self._spans = [
            (begin := address_of(each.data), begin + each.data.nbytes, number) for number, each in enumerate(shared, 1)
        ]

    def find(self, data: memoryview) -> tuple[int, int]:
        """Number of the region with some bytes, and the bytes' offset; (0, 0): the bytes lie in no region."""
        if not self._spans or data.readonly or not data.nbytes:
            return 0, 0
        begin = address_of(data)
        for first, end, number in self._spans:
            if first <= begin and begin + data.nbytes <= end:
                return number, begin - first
        return 0, 0


class Mailbox:
    """Memory that this process lends to a peer, which writes payloads there.

    The memory has no other use, so a peer that goes on writing after the connection's end does no harm.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("moonpool-mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.region = MappedRegion(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the descriptor. The mapped region stays until the region is closed."""
        os.close(self.fd)


class MappedRegion:
    """A region mapped in this process."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False) -> None:
        """Map the whole region; the descriptor can be closed afterwards.

        Raises:
            FrameError: the region has another size, or a size that may change.
            OSError: the region cannot be mapped.
        """
        if not 0 < nbytes <= MAX_REGION_BYTES or os.fstat(fd).st_size != nbytes:
            raise FrameError(f"a region has {os.fstat(fd).st_size} bytes, not {nbytes}")
        # A file that is cut under its mapping would end this process with SIGBUS.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise FrameError("a region may become shorter")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
        self._data = memoryview(self._map)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def part(self, offset: int, length: int) -> memoryview:
        """Some bytes of the region.

        Raises:
            FrameError: the bytes are not all in the region.
        """
        if offset + length > self._data.nbytes:
            raise FrameError(f"bytes {offset} to {offset + length} of a region of {self._data.nbytes}")
        return self._data[offset : offset + length]

    def close(self) -> None:
        """Unmap the region. Idempotent."""
        with contextlib.suppress(BufferError):  # still referenced: goes with the last reference
            self._data.release()
            self._map.close()


class FetchedParts(NamedTuple):
    """Copied parts of a remote region; `release` is called once the copies are not read any more."""

    parts: list[memoryview]
    release: Callable[[], None]


class RemoteRegion(ABC):
    """A peer's region that this process cannot map: bytes are copied here before they are read."""

    @abstractmethod
    async def fetch(self, places: Sequence[tuple[int, int]]) -> FetchedParts:
        """Copy parts, each given by offset and length.

        Raises:
            FrameError: a part is not in the region.
            StreamBroken: the peer cannot be reached, or the region was closed.
        """

    @abstractmethod
    def close(self) -> None:
        """End all fetching. Idempotent."""


def unmap_regions(regions: Sequence[MappedRegion]) -> None:
    """Unmap regions, on a separate thread; return at once.

    Unmapping a region after the other owners have gone gives the memory back to the system. That takes 0.3 s for each
    GB of a killed instance's pool, for which an event loop would stand still.
    """

    def close() -> None:
        for region in regions:
            region.close()

    if regions:
        try:
            threading.Thread(target=close, name="unmap").start()
        except RuntimeError:  # there are too many threads, or the process ends
            close()


class MailboxRing:
    """A mailbox's writer keeps account here: pieces are taken one behind the other and freed in that order."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken: collections.deque[tuple[int, int]] = collections.deque()

    def take(self, nbytes: int) -> int | None:
        """First of so many consecutive free bytes; None while too few are free in a row."""
        if not self._taken:
            begin, free = 0, self._nbytes
        else:
            (tail, _), (last, size) = self._taken[0], self._taken[-1]
            begin = last + size
            free = (self._nbytes if begin > tail else tail) - begin
            if begin > tail and free < nbytes:
                begin, free = 0, tail
        if nbytes > free:
            return None
        self._taken.append((begin, nbytes))
        return begin

    def free(self) -> None:
        """The oldest piece is free again."""
        self._taken.popleft()
