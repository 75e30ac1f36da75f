"""The file layer of the SSD tier: its reads of segments, and every change it makes to the file system.

Tests put another layer in its place, which lets operations fail or loses what was not synced. All methods block, but
for `close_later`; reads and writes of one file from several threads are safe.
"""

import collections
import contextlib
import ctypes
import dataclasses
import errno
import functools
import mmap
import os
import resource
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmdb

SECTOR = 4096  # alignment of direct reads: offset, length and memory
SCRATCH_BYTES = 2 << 20  # memory of a thread that reads directly; a larger read is done in pieces of this size
HEADER_BYTES = 64 << 10  # headers up to this size are read without an allocation

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


def _write(fd: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
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


def _start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Starts writing a range to the device, so that a later sync waits less. A hint: errors are ignored."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


MAX_OPEN = 512  # descriptors of segments that stay open; a process may have 1,024 unless it is told otherwise
PROBE_BYTES = 1 << 20

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CACHED = os.O_RDONLY | os.O_CLOEXEC
_DIRECT = _CACHED | getattr(os, "O_DIRECT", 0)
_WRITE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


@dataclasses.dataclass(slots=True, eq=False)
class _Descriptor:
    """An open file; `fd` is -1 until it is opened. Not closed while it has users."""

    fd: int = -1
    users: int = 0
    closing: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Files:
    """Files and folders of one data folder. Failing operations raise OSError, or lmdb.Error where LMDB failed.

    `direct` reads past the page cache where the file system can. At most `max_open` descriptors stay open; the least
    recently used one is closed for the next.
    """

    def __init__(self, *, direct: bool = False, max_open: int = MAX_OPEN) -> None:
        self._direct = direct and _DIRECT != _CACHED
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: collections.OrderedDict[tuple[Path, int], _Descriptor] = collections.OrderedDict()
        self._kept: set[Path] = set()  # files without a name: only their descriptor can still read them
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-close")

    @property
    def open_files(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def _descriptor(self, path: Path, flags: int) -> Iterator[int]:
        with self._lock:
            entry = self._open.setdefault((path, flags), _Descriptor())
            self._open.move_to_end((path, flags))
            entry.users += 1
        try:
            with entry.lock:
                if entry.fd < 0:
                    entry.fd = self.open_file(path, flags)
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                if entry.fd < 0 and not entry.users and self._open.get((path, flags)) is entry:
                    del self._open[path, flags]
                surplus = self._take_surplus()
                if entry.closing and not entry.users:
                    surplus.append(entry)
            self._close(surplus)

    def _take_surplus(self) -> list[_Descriptor]:
        excess = len(self._open) - self._max_open
        if excess <= 0:
            return []
        idle = [key for key, entry in self._open.items() if not entry.users and key[0] not in self._kept]
        return [self._open.pop(key) for key in idle[:excess]]

    def _close(self, entries: Sequence[_Descriptor]) -> None:
        for entry in entries:
            if entry.fd >= 0:
                os.close(entry.fd)

    def open_file(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o640)

    def read(self, path: Path, outs: Sequence[memoryview], offset: int) -> int:
        """Fills `outs` one after the other from `offset` on; bytes read, fewer only at the end of the file."""
        if self._direct:
            try:
                with self._descriptor(path, _DIRECT) as fd:
                    return read_direct(fd, outs, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # the file system has no direct reads
        with self._descriptor(path, _CACHED) as fd:
            return read_cached(fd, outs, offset)

    def peek(self, path: Path, nbytes: int, offset: int) -> bytes:
        """Up to `nbytes` bytes, through the page cache and without reading ahead: for a walk over headers."""
        with self._descriptor(path, _CACHED) as fd:
            if self._direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return os.pread(fd, nbytes, offset)

    def write(self, path: Path, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
        """Writes parts one after the other from `offset` on; makes the file if need be."""
        with self._descriptor(path, _WRITE) as fd:
            _write(fd, parts, offset)

    def start_writeback(self, path: Path, offset: int, nbytes: int) -> None:
        with self._descriptor(path, _WRITE) as fd:
            _start_writeback(fd, offset, nbytes)

    def sync(self, path: Path) -> None:
        """Returns once everything written to the file is on the device; its name need not be."""
        with self._descriptor(path, _WRITE) as fd:
            self.flush(fd, path)

    def uncache(self, path: Path, offset: int, nbytes: int) -> None:
        """Gives up page cache of a range that was synced: the DRAM tier decides what stays in memory."""
        with self._descriptor(path, _WRITE) as fd:
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def unlink(self, path: Path, *, readable: bool = False) -> None:
        """Removes a file's name; an absent one is fine. A `readable` file can be read on until it is closed."""
        if not readable:
            self.close(path)
        elif path not in self._kept:
            with self._descriptor(path, _DIRECT if self._direct else _CACHED):
                self._kept.add(path)
        path.unlink(missing_ok=True)

    def close(self, path: Path) -> None:
        """Closes a file that has no readers. Slow for a large file without a name."""
        with self._lock:
            self._kept.discard(path)
            entries = [
                self._open.pop((path, flags)) for flags in {_CACHED, _DIRECT, _WRITE} if (path, flags) in self._open
            ]
            for entry in entries:
                entry.closing = True
            idle = [entry for entry in entries if not entry.users]
        self._close(idle)

    def close_later(self, path: Path) -> None:
        """As `close`, in a thread: for the event loop."""
        self._closer.submit(self.close, path)

    def close_all(self) -> None:
        self._closer.shutdown()
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-close")
        for path, _ in list(self._open):
            self.close(path)

    def write_note(self, path: Path, text: str) -> None:
        """Writes a small file and syncs it and its name."""
        with path.open("w") as file:
            file.write(text)
            file.flush()
            self.flush(file.fileno(), path)
        self.sync_folder(path.parent)

    def probe(self, folder: Path, nbytes: int) -> None:
        """Writes a file of `nbytes` bytes and deletes it: finds a full device or a read-only folder."""
        path = folder / "probe"
        try:
            path.write_bytes(bytes(nbytes))
        finally:
            path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Makes a folder and those around it, and syncs the names of new ones."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(exist_ok=True)
            self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Deletes a folder with all that is in it, and syncs that; an absent one is fine."""
        if path.exists():
            shutil.rmtree(path)
            self.sync_folder(path.parent)

    def sync_folder(self, folder: Path) -> None:
        """Makes new and removed names in a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.flush(fd, folder)
        finally:
            os.close(fd)

    def flush(self, fd: int, path: Path) -> None:
        """The one place that syncs: an open file, or the names in a folder."""
        (os.fsync if path.is_dir() else os.fdatasync)(fd)

    def sync_all(self) -> None:
        """Returns once everything that any process has written is on the device."""
        os.sync()

    def boot_id(self) -> str:
        """Names this run of the machine; "" where it has no name."""
        try:
            return _BOOT_ID.read_text().strip()
        except OSError:
            return ""

    def open_index(self, path: Path, map_bytes: int, *, sync: bool) -> lmdb.Environment:
        """Opens an LMDB database in a folder, both made if need be; with `sync`, each transaction is synced.

        LMDB syncs the contents of its file, but not the file's name.
        """
        self.make_folder(path)
        is_new = not (path / "data.mdb").exists()
        with self.lmdb_errors(path):
            env = open_lmdb(path, map_size=map_bytes, metasync=sync, sync=sync)
        if is_new:
            self.sync_folder(path)
        return env

    @contextlib.contextmanager
    def transaction(self, env: lmdb.Environment) -> Iterator[lmdb.Transaction]:
        """One transaction that writes; committed at the end. DiskError when the device is full."""
        with self.lmdb_errors(Path(env.path())), env.begin(write=True) as txn:
            yield txn

    def sync_index(self, env: lmdb.Environment) -> None:
        """Makes durable what was committed without syncs."""
        env.sync(True)

    @contextlib.contextmanager
    def lmdb_errors(self, folder: Path) -> Iterator[None]:
        """Turns an error without a class of its own into DiskError when the device has no room.

        LMDB says that a device is full only when not a byte fits. Where part of a page fits it reports an input/output
        error, and for a quota an error that its binding has no class for.
        """
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
    """Opens an LMDB database as the index needs it, with more settings for `lmdb.open`."""
    # lock=False: the data folder has its own lock, and a device may be too full to map a lock file.
    return lmdb.open(str(path), max_dbs=8, lock=False, readahead=False, **settings)


def raise_open_files_limit() -> None:
    """Lets this process have as many open files as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems do not permit what they name
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
