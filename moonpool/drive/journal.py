"""The journal of a core: a snapshot of its state, then each event with a checksum of the actions it led to.

Kept in two files of one folder, `NAME.0` and `NAME.1`, used in turn: the older one is overwritten when the newer one
has reached half of the bound. Each begins with a snapshot of the core, so each can be rerun alone. Cores see no text of
users, so a journal holds none.

Format: the magic line, then pickles, each behind its length (4 bytes, little-endian): the core, then (now, event,
crc32 of the actions' digest) per event. A reader takes classes of Moonpool's cores and plain containers only.
"""

import io
import pickle
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moonpool.core.digest import digest_of
from moonpool.errors import MoonpoolError
from moonpool.telemetry.logs import get_logger

log = get_logger(__name__)

MAGIC = b"moonpool journal 1\n"
_LENGTH = struct.Struct("<I")
CORE_MODULES = re.compile(r"(moonpool\.(core|cost|kv|sampling|sched)|services\.\w+\.core)(\..*)?")
"""Whose classes a journal may name."""
_PLAIN = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "bytearray"),
    ("collections", "deque"),
    ("collections", "OrderedDict"),
    ("array", "_array_reconstructor"),
    ("array", "array"),
}


class JournalError(MoonpoolError):
    """A journal is damaged, or is none."""


class Entry(NamedTuple):
    """One event as it was handled."""

    now: float
    event: Any
    crc: int


def actions_crc(actions: Sequence[object]) -> int:
    """Checksum by which a rerun compares actions."""
    return zlib.crc32(digest_of(*actions))


class JournalWriter:
    """Writes a journal of bounded size. One that cannot be written any more ends, with a warning: the core goes on.

    Args:
        folder: is made when it is missing.
        name: of the journal's files, without their number.
        max_bytes: of both files together. A snapshot that is larger than half of it is still written.
    """

    def __init__(self, folder: Path, name: str, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = folder / f"{name}.0", folder / f"{name}.1"
        self._half = max_bytes // 2
        self._turns = 0
        self._file: BinaryIO | None = None
        self._events_begin = 0
        self._ended = False
        for path in self._paths:
            path.unlink(missing_ok=True)

    def before(self, core: object) -> None:
        """Begins a file with a snapshot when the current one is full; called before the core gets an event."""
        if not self._ended and (self._file is None or self._file.tell() - self._events_begin >= self._half):
            with self._ending_on_error():
                self._begin(core)

    def record(self, now: float, event: object, actions: Sequence[object]) -> None:
        """Writes an event that was handled. It reaches the file when the buffer is full, or at `close`."""
        if not self._ended:
            with self._ending_on_error():
                self._write((now, event, actions_crc(actions)))

    def close(self) -> None:
        """Writes what is buffered; may be called again."""
        self._ended = True
        if self._file is not None:
            with self._ending_on_error():
                self._file.close()

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._ended = True
            log.warning("the journal cannot be written any more", error=str(error))

    def _begin(self, core: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._paths[self._turns % 2].open("wb")
        self._turns += 1
        self._file.write(MAGIC)
        self._write(core)
        self._file.flush()  # a process that is killed leaves a journal that can be read
        self._events_begin = self._file.tell()

    def _write(self, value: object) -> None:
        assert self._file is not None, "before() opens the file"
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._file.write(_LENGTH.pack(len(data)))
        self._file.write(data)


def read_journal(path: Path, modules: re.Pattern[str] = CORE_MODULES) -> tuple[Any, Iterator[Entry]]:
    """Reads one file of a journal, which may name classes of these modules only.

    Returns:
        The core as it was at the file's begin, and the events since. An event that was being written when the process
        ended is left out.

    Raises:
        JournalError: not a journal, damaged, or holding something else than cores and events; the iterator too.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise JournalError(f"{path} is not a journal")
    values = _values(path, data, modules)
    for core in values:
        return core, (Entry(*value) for value in values)
    raise JournalError(f"{path} ends before its snapshot is whole")


def _values(path: Path, data: bytes, modules: re.Pattern[str]) -> Iterator[Any]:
    at = len(MAGIC)
    while at + _LENGTH.size <= len(data):
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            return
        try:
            yield _Unpickler(io.BytesIO(data[begin:end]), modules).load()
        except Exception as error:  # damaged pickles raise nearly anything
            raise JournalError(f"{path} is damaged between bytes {begin} and {end}: {error}") from error
        at = end


class _Unpickler(pickle.Unpickler):
    """Loads classes of cores and plain containers only: a journal from elsewhere must not run code."""

    def __init__(self, file: io.BytesIO, modules: re.Pattern[str]) -> None:
        super().__init__(file)
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        found = super().find_class(module, name) if self._modules.fullmatch(module) else None
        if not isinstance(found, type):
            raise JournalError(f"it names {module}.{name}, which is no class of a core")
        return found
