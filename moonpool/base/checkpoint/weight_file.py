"""A file of arranged weights that the processes of one machine share, and later starts use again.

The first process writes the file while the others wait; then all map it, so that the system holds each page once. A
second file, written last, says that the first is whole, what lies in it, and a checksum of each piece. Who opens a file
that no other process has open compares the checksums: a damaged file would give wrong tokens without a word, and is
written anew. On a full disk, files that no process has open make room, the least recently used first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from moonpool.base.json_parts import parse_json
from moonpool.base.telemetry.logs import get_logger

#: Seconds between two looks at a file that another process writes.
POLL_S = 0.2
#: Seconds without use after which a file is removed.
KEPT_S = 30 * 86400.0
#: Bytes behind one checksum: several threads share a large file.
PIECE_BYTES = 64 << 20
_SUFFIX = ".weights"
_READ_BYTES = 8 << 20
"""Bytes of a piece that are mapped at a time."""
_ALIGNED = 2 << 20
"""Of large pages: where a mapping begins."""
#: Of a file by which `gives_large_pages` asks the system: it holds a whole large page of x86-64 and AArch64.
_PROBE_BYTES = 4 << 20
Piece = tuple[int, int, str]
"""First byte, bytes, and checksum."""
log = get_logger(__name__)


class WeightFile:
    """The file for `name`, open and locked until `close`.

    Attributes:
        descriptor: of the file.
        notes: what its writer said, if the file is whole; None: this process writes the file.
    """

    def __init__(self, folder: Path, name: str, waiting: Callable[[], None] = lambda: None) -> None:
        """Open the file; waits for a process that writes or checks it, and calls `waiting` meanwhile.

        Raises:
            OSError: the folder or the file cannot be used, or is another user's.
        """
        _own_folder(folder)
        self._allocated: list[tuple[int, int]] = []
        self._folder, self._path = folder, folder / f"{name}{_SUFFIX}"
        self._whole = self._path.with_suffix(".json")
        self.descriptor, self.notes = self._open(waiting)
        self._closed = False
        if self.notes is None:
            self._whole.unlink(missing_ok=True)
            os.ftruncate(self.descriptor, 0)
            self._remove_unused(time.time() - KEPT_S)

    def _open(self, waiting: Callable[[], None]) -> tuple[int, Any]:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            alone = True
            try:
                while not _locked(file, fcntl.LOCK_EX):
                    # Another process writes, or uses a whole file.
                    if _locked(file, fcntl.LOCK_SH):
                        alone = False  # the first of them has compared the checksums
                        break
                    waiting()
                    time.sleep(POLL_S)
                if os.fstat(file).st_nlink:  # else it was removed before we had it
                    notes = self._read_notes(file, alone=alone)
                    if notes is not None:
                        fcntl.flock(file, fcntl.LOCK_SH)
                        os.utime(file)
                        return file, notes
                    if not _locked(file, fcntl.LOCK_EX):
                        # Others have the file open, none writes, and the file is not whole: they keep it alone.
                        self._unlink(file)
                    elif os.fstat(file).st_nlink:  # nobody removed the file before it was locked
                        return file, None
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            waiting()
            time.sleep(POLL_S)

    def _unlink(self, file: int) -> None:
        """Remove the path if the path still means this file."""
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file).st_ino == self._path.stat().st_ino:
                self._path.unlink()

    def _read_notes(self, file: int, *, alone: bool) -> Any:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            text, _, checksum = self._whole.read_bytes().rpartition(b"\n")
            if checksum.decode() != xxhash.xxh3_128_hexdigest(text):
                return None
            found = parse_json(text)
            pieces = [(int(begin), int(nbytes), str(checksum)) for begin, nbytes, checksum in found["pieces"]]
            if found["bytes"] != os.fstat(file).st_size:
                return None
            if alone and not _match(file, pieces):
                log.warning("arranged weights are damaged: they are made anew", path=str(self._path))
                return None
            return found["notes"]
        return None

    def allocate(self, begin: int, nbytes: int) -> None:
        """Give bytes of the file their place on the disk.

        Raises:
            OSError: there is no room, also without files that no process uses.
        """
        while True:
            try:
                os.posix_fallocate(self.descriptor, begin, nbytes)  # told here, not where the memory is written to
                self._allocated.append((begin, nbytes))
                return
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._remove_unused(None):
                    raise

    def finish(self, notes: Any) -> None:
        """The file is whole; `notes`, for JSON, are told to its later users."""
        os.fsync(self.descriptor)
        made = self._whole.with_suffix(f".{os.getpid()}")
        pieces = _checksums(self.descriptor, list(_joined(self._allocated)))
        text = json.dumps({"bytes": os.fstat(self.descriptor).st_size, "pieces": pieces, "notes": notes}).encode()
        made.write_bytes(text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode())
        with made.open("rb") as written:
            os.fsync(written.fileno())
        made.replace(self._whole)
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Give the file up; what is mapped stays. A file that is not whole is removed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._whole.exists():
            self._path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _remove_unused(self, before: float | None) -> bool:
        """Remove a file that no process has open: those last used before a time, or the least recent one."""
        others = [path for path in self._folder.glob(f"*{_SUFFIX}") if path != self._path]
        removed = False
        for path in sorted(others, key=_used_at):
            if (before is None or _used_at(path) < before) and _remove_if_unused(path):
                removed = True
                if before is None:
                    break
        return removed


def _own_folder(folder: Path) -> None:
    """Make the folder if need be, for this user alone.

    Raises:
        OSError: the folder cannot be made, or is another user's.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the folder of arranged weights is another user's", str(folder))
    folder.chmod(0o700)  # whoever may write there decides what the model says


def in_use(folder: Path, name: str) -> bool:
    """Tell whether a process of this machine has a whole file mapped whose name begins with `name`."""
    for note in folder.glob(f"{name}-*.json"):
        with contextlib.suppress(OSError):
            file = os.open(note.with_suffix(_SUFFIX), os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _locked(file, fcntl.LOCK_EX):
                    return True
            finally:
                os.close(file)
    return False


def gives_large_pages(folder: Path) -> bool:
    """Tell whether the system maps files of this folder, which is made if need be, on large pages.

    Weights on small pages cost a decode step up to a tenth of its time (`moonpool.engine.kernels.memory`). Kernel and
    file system decide; the answer is found out with a small file that is gone afterwards.

    Raises:
        OSError: the folder cannot be used, or is another user's.
    """
    _own_folder(folder)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
        with mmap.mmap(file.fileno(), _PROBE_BYTES) as memory:
            advise_large_pages(memory)
            memory[:: mmap.PAGESIZE] = bytes(_PROBE_BYTES // mmap.PAGESIZE)
            first = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(first)
            del first  # else the memory cannot be given back
            return large_bytes(address) > 0


def large_bytes(address: int) -> int:
    """Return the bytes on large pages of the file that this process has mapped at an address; 0 if not told."""
    found = False
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                begin, _, end = name.partition("-")
                found = int(begin, 16) <= address < int(end, 16)
            elif found and name == "FilePmdMapped:":
                return int(rest.split()[0]) << 10
    return 0


def advise_large_pages(memory: mmap.mmap) -> None:
    """Ask for large pages in memory that nothing has read or written yet."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield first byte and bytes of pieces over the ranges, which come in order; holes between them are left out."""
    start = end = 0
    for begin, nbytes in [*ranges, (-1, 0)]:
        if begin != end:
            yield from ((at, min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES))
            start = begin
        end = begin + nbytes


def _checksums(file: int, places: list[tuple[int, int]]) -> list[Piece]:
    """Return the pieces at these places of a file; cores share the work."""
    if not places:
        return []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(lambda place: _checksum(file, *place), places))


def _checksum(file: int, begin: int, nbytes: int) -> Piece:
    """Return a piece of the file, of which little is mapped at a time: pages that are mapped twice count twice."""
    found = xxhash.xxh3_128()
    for at in range(begin, begin + nbytes, _READ_BYTES):
        first, end = at // _ALIGNED * _ALIGNED, min(at + _READ_BYTES, begin + nbytes)
        with mmap.mmap(file, end - first, access=mmap.ACCESS_READ, offset=first) as data, memoryview(data) as view:
            advise_large_pages(data)  # who reads the file first decides how the system holds it
            with view[at - first :] as part:
                found.update(part)
    return begin, nbytes, found.hexdigest()


def _match(file: int, pieces: list[Piece]) -> bool:
    return _checksums(file, [(begin, nbytes) for begin, nbytes, _ in pieces]) == pieces


def _used_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _remove_if_unused(path: Path) -> bool:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _locked(file, fcntl.LOCK_EX):
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink()
                return True
        finally:
            os.close(file)
    return False


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
