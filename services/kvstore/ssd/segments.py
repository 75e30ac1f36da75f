"""Segment files: records, one after the other, appended once and never changed.

Owns reading, appending and cutting of one file. Must not know of the index, budgets or events. All functions
may block and belong into a worker thread; reading from several threads while one appends is safe (`pread`, `pwrite`).
"""

import errno
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Sequence

from services.kvstore.ssd.device import open_direct, read_cached, read_direct, start_writeback, write
from services.kvstore.ssd.records import ALIGN, BadRecordError, RecordHeader, header_bytes_of, unpack_header
from services.kvstore.ssd.scan import Found, scan

_NAME = re.compile(r"(\d{16})\.seg")


def segment_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    """The file of a segment."""
    return folder / f"{number:016d}.seg"


def list_segments(folder: pathlib.Path) -> dict[int, int]:
    """Segments in a folder: id -> bytes in the file, ascending by id.

    Raises:
        OSError: the folder cannot be read.
    """
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and entry.is_file():
                found[int(match[1])] = entry.stat().st_size
    return dict(sorted(found.items()))


class SegmentFile:
    """One segment file, opened when it is first needed.

    Args:
        path: the file.
        direct: read blocks past the page cache where the file system can.
    """

    def __init__(self, path: pathlib.Path, *, direct: bool = False) -> None:
        self.path = path
        self._direct = direct
        self._fd = -1
        self._direct_fd = -1
        self._lock = threading.Lock()

    def _open(self, create: bool = False) -> int:
        with self._lock:
            if self._fd < 0:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
                self._fd = os.open(self.path, flags, 0o640)
                if self._direct:  # then only headers are read this way, and the kernel should not read on behind them
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            return self._fd

    def _open_direct(self) -> int:
        with self._lock:
            if self._direct and self._direct_fd < 0:
                self._direct_fd = open_direct(self.path)
                self._direct = self._direct_fd >= 0
            return self._direct_fd

    def open_readers(self) -> None:
        """Opens the file for readers, so that they can read it when its name is gone.

        Raises:
            OSError: it cannot be opened.
        """
        self._open()
        self._open_direct()

    def read(self, outs: Sequence[memoryview], offset: int) -> None:
        """Fills `outs`, one after the other, from `offset` on.

        Raises:
            BadRecordError: the file ends before.
            OSError: it cannot be read.
        """
        if self._read(outs, offset) != sum(len(out) for out in outs):
            raise BadRecordError("the segment ends inside the record")

    def _read(self, outs: Sequence[memoryview], offset: int) -> int:
        if self._direct and (fd := self._open_direct()) >= 0:
            try:
                return read_direct(fd, outs, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # the descriptor stays open: other threads may be reading with it
        return read_cached(self._open(), outs, offset)

    def read_header(self, offset: int) -> RecordHeader:
        """Reads the header of the record at `offset`.

        Raises:
            BadRecordError: there is no intact one.
            OSError: it cannot be read.
        """
        start = os.pread(self._open(), ALIGN, offset)
        size = header_bytes_of(start)
        if size > len(start):
            start += os.pread(self._open(), size - len(start), offset + len(start))
        return unpack_header(start)

    def append(self, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
        """Writes parts one after the other from `offset` on; makes the file if need be.

        Raises:
            OSError: they cannot be written.
        """
        write(self._open(create=True), parts, offset)

    def start_writeback(self, offset: int, nbytes: int) -> None:
        """Lets the device begin with what was appended."""
        start_writeback(self._open(), offset, nbytes)

    def sync(self) -> None:
        """Returns once everything written is on the device.

        Raises:
            OSError: it is not.
        """
        os.fdatasync(self._open())

    def uncache(self, offset: int, nbytes: int) -> None:
        """Gives up page cache for a range that was synced: what stays in memory is for the DRAM tier to decide."""
        os.posix_fadvise(self._open(), offset, nbytes, os.POSIX_FADV_DONTNEED)

    def truncate(self, size: int) -> None:
        """Cuts the file.

        Raises:
            OSError: it cannot be cut.
        """
        os.ftruncate(self._open(), size)

    def scan(self) -> Iterator[Found]:
        """All intact records in the file; see `scan.scan`."""
        return scan(self._open())

    def close(self) -> None:
        """Closes the file; twice does no harm."""
        with self._lock:
            for fd in (self._fd, self._direct_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._direct_fd = -1

    def unlink(self) -> None:
        """Removes the file's name; who has it open may read on. An absent one is fine.

        Raises:
            OSError: it cannot be removed.
        """
        self.path.unlink(missing_ok=True)

    def delete(self) -> None:
        """Closes and removes the file; an absent one is fine.

        Raises:
            OSError: it cannot be removed.
        """
        self.close()
        self.unlink()


def sync_folder(folder: pathlib.Path) -> None:
    """Makes new and removed names in a folder durable.

    Raises:
        OSError: they are not.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
