"""The SSD tier's file layer: segment reads, and every change to the file system.

Tests put another layer in place, which lets operations fail or loses unsynced data. All methods block, but for `later`;
several threads can safely read and write one file.
"""

import collections
import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lmdb

from moonpool.base import world
from moonpool.base.kv.file_io import (
    SECTOR,
    Buffer,
    FileSpan,
    ReadOutcome,
    read_slice_by_slice,
    slice_reader,
    write_all,
    write_direct,
)

MAX_OPEN = 512  # segments that stay open; a process may have 1,024 open files by default
PROBE_BYTES = 1 << 20
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of files and folders: KV and records tell what users wrote."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CACHED = os.O_RDONLY | os.O_CLOEXEC
_DIRECT = _CACHED | getattr(os, "O_DIRECT", 0)
_WRITE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_WRITE_DIRECT = _WRITE | (_DIRECT & ~_CACHED)
_ALL_FLAGS = _CACHED, _DIRECT, _WRITE, _WRITE_DIRECT


def is_full(error: BaseException) -> bool:
    """Whether the error means that the device is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, lmdb.DiskError) or (isinstance(error, OSError) and error.errno in full)


def lacks_memory(error: BaseException) -> bool:
    """Whether the error means that the system gives no memory: it tells nothing about device or data, and may pass."""
    return isinstance(error, lmdb.MemoryError | MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )


ALIGN = 4096


class _File:
    """An open file, closed with the last reference, so never during a call."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class FileLayer:
    """One data folder's files and folders. Failing operations raise OSError, or lmdb.Error where LMDB failed.

    `direct` keeps segments out of the page cache: reads and writes bypass the cache if the file system can. At most
    `max_open` files stay open.
    """

    def __init__(self, *, direct: bool = False, max_open: int = MAX_OPEN) -> None:
        self._direct = direct
        self._read = slice_reader()
        self._writes_direct = direct and _DIRECT != _CACHED
        self._reads_direct = self._writes_direct and self._read is not read_slice_by_slice
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: collections.OrderedDict[tuple[Path, int], _File] = collections.OrderedDict()
        self._kept: set[Path] = set()  # files without a name: only while they are open they can be read
        self._closer = world.thread_pool(1, "kvstore-close")

    def _file(self, path: Path, flags: int) -> _File:
        closed = []  # once the lock is released: the last close of a large file without a name takes long
        with self._lock:
            file = self._open.pop((path, flags), None) or _File(os.open(path, flags, PRIVATE))
            self._open[path, flags] = file
            if len(self._open) > self._max_open:
                idle = [key for key in self._open if key[0] not in self._kept]
                closed += [self._open.pop(key) for key in idle[: len(self._open) - self._max_open]]
        return file

    def read(self, path: Path, spans: Sequence[FileSpan]) -> ReadOutcome:
        """Read spans of a file and hash them, as far as they come; OSError where the file cannot be opened."""
        if self._reads_direct:
            try:
                file = self._file(path, _DIRECT)
                outcome = self._read(file.fd, SECTOR, spans)
            except OSError as error:
                outcome = ReadOutcome(0, [], error)
            if outcome.error is None or outcome.error.errno != errno.EINVAL:
                return outcome
            self._reads_direct = False  # the file system has no direct reads
        file = self._file(path, _CACHED)
        return self._read(file.fd, 0, spans)

    def peek(self, path: Path, nbytes: int, offset: int) -> bytes:
        """Up to `nbytes` bytes, through the page cache and without reading ahead: for a walk over headers."""
        file = self._file(path, _CACHED)
        if self._direct:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(file.fd, nbytes, offset)

    def write(self, path: Path, parts: Sequence[Buffer], offset: int) -> None:
        """Write parts one after the other from `offset` on; make the file if need be."""
        if self._writes_direct:
            try:
                file = self._file(path, _WRITE_DIRECT)
                write_direct(file.fd, parts, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._writes_direct = False  # the file system has no direct writes
        file = self._file(path, _WRITE)
        write_all(file.fd, parts, offset)

    def sync(self, path: Path) -> None:
        """Return once everything written to the file is on the device; the name need not be."""
        file = self._file(path, _WRITE)
        self.flush(file.fd, path)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def unlink(self, path: Path, *, readable: bool = False, durable: bool = False) -> None:
        """Remove a name, also on the device if `durable`; an absent one is fine. `readable`: until closed."""
        if readable:
            self._kept.add(path)  # before opening: another may close what is not kept
            self._file(path, _DIRECT if self._reads_direct else _CACHED)
        else:
            self.close(path)
        path.unlink(missing_ok=True)
        if durable:  # else a start without an index may find deleted data there
            self.sync_folder(path.parent)

    def rename(self, path: Path, new: Path) -> None:
        """Give a file that has no readers another name."""
        self.close(path)
        path.rename(new)

    def close(self, path: Path) -> None:
        """Close a file that has no readers. Slow for a large file without a name."""
        with self._lock:
            self._kept.discard(path)
            closed = [self._open.pop((path, flags), None) for flags in _ALL_FLAGS]
        del closed  # with the lock released

    def forget_open(self) -> None:
        """Close files that have a name: their descriptors may be of a file system that is gone. Readers go on."""
        with self._lock:
            closed = [self._open.pop(key) for key in list(self._open) if key[0] not in self._kept]
        del closed  # with the lock released

    def later(self, change: Callable[[Path], None], path: Path) -> "Future[None]":
        """Close or delete a file in a thread, which does one after the other."""
        return self._closer.submit(change, path)

    def close_all(self) -> None:
        self._closer.shutdown()
        self._closer = world.thread_pool(1, "kvstore-close")
        for path, _ in list(self._open):
            self.close(path)

    def write_note(self, path: Path, text: str) -> None:
        """Write a small file; sync content and name."""
        with path.open("w") as file:
            file.write(text)
            file.flush()
            self.flush(file.fileno(), path)
        self.sync_folder(path.parent)

    def probe(self, folder: Path, nbytes: int) -> None:
        """Write a file with `nbytes` bytes and delete the file: finds a full device or a read-only folder."""
        path = folder / "probe"
        try:
            path.write_bytes(bytes(nbytes))
        finally:
            path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Make a folder and parents for this user alone, and sync the new folders' names."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder with all contents, and sync the deletion; an absent one is fine."""
        if path.exists():
            shutil.rmtree(path)
            self.sync_folder(path.parent)

    def sync_folder(self, folder: Path) -> None:
        file = _File(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        self.flush(file.fd, folder)

    def flush(self, fd: int, path: Path) -> None:
        """The one place that syncs: an open file, or the names in a folder."""
        (os.fsync if path.is_dir() else os.fdatasync)(fd)

    def sync_all(self) -> None:
        """Return once everything that any process has written is on the device."""
        os.sync()

    def boot_id(self) -> str:
        """Name this run of the machine; "" without a name."""
        return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""

    def open_index(self, path: Path, map_bytes: int, *, sync: bool) -> lmdb.Environment:
        """Open an LMDB database in a folder, both made if need be; with `sync`, each transaction is synced."""
        self.make_folder(path)
        is_new = not (path / "data.mdb").exists()
        with self.lmdb_errors(path):
            env = open_lmdb(path, map_size=map_bytes, metasync=sync, sync=sync)
        if is_new:
            self.sync_folder(path)  # LMDB syncs the file's contents, but not the file's name
        return env

    @contextlib.contextmanager
    def transaction(self, env: lmdb.Environment) -> Iterator[lmdb.Transaction]:
        """One transaction that writes; committed at the end. DiskError when the device is full."""
        with self.lmdb_errors(Path(env.path())), env.begin(write=True) as txn:
            yield txn

    def sync_index(self, env: lmdb.Environment) -> None:
        env.sync(True)

    @contextlib.contextmanager
    def lmdb_errors(self, folder: Path) -> Iterator[None]:
        """Turn an error without a class into DiskError if the device is full: LMDB has such errors."""
        try:
            yield
        except lmdb.Error as error:
            try:
                if type(error) is lmdb.Error:
                    self.probe(folder, PROBE_BYTES)
            except OSError as failure:
                if is_full(failure):
                    raise lmdb.DiskError(f"{error}; {failure}") from error
            raise


def open_lmdb(path: Path, **settings: Any) -> lmdb.Environment:
    """Open an LMDB database as the index needs, with more settings for `lmdb.open`."""
    # lock=False: the data folder has a separate lock, and a device may be too full to map a lock file.
    env = lmdb.open(str(path), max_dbs=8, lock=False, readahead=False, mode=PRIVATE, **settings)
    with contextlib.suppress(OSError):  # older versions made a file that everybody could read; it may be another user's
        (path / "data.mdb").chmod(PRIVATE)
    return env
