"""A core's journal: a snapshot of the state, then each event with a checksum over the actions; and the journal's rerun.

A rerun feeds the same events to the same core and compares the actions.

A journal has two files in one folder, `NAME.0` and `NAME.1`. When the newer file reaches half the size limit, the older
file is overwritten. Each file begins with a snapshot, so each can be rerun alone. Cores see no user text, so a journal
contains none.

Format: the magic line, then pickles, each preceded by the pickle's length (4 bytes, little-endian): the core, then
(now, event, crc32 over the actions' digest) per event. The reader accepts classes of Moonpool's cores and plain
containers only.
"""

import io
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moonpool.base.errors import MoonpoolError
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.base.telemetry.logs import get_logger

log = get_logger(__name__)
MAGIC = b"moonpool journal 1\n"
_LENGTH = struct.Struct("<I")
CORE_MODULES = re.compile(
    r"(moonpool\.base\.(kv|sampling_params|scheduling)|moonpool\.conductor\.(core|placement)|moonpool\.engine\.(prefill|decode)\.core)(\..*)?"
)
"""Modules with classes that a journal may name."""
_PLAIN_CLASSES = {
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


class JournalEntry(NamedTuple):
    """One event as handled."""

    now: float
    event: Any
    crc: int


def actions_crc(actions: Sequence[object]) -> int:
    """Checksum by which a rerun compares actions."""
    return zlib.crc32(digest_of(*actions))


class JournalWriter:
    """Writes a journal of bounded size. If writing fails, the journal ends with a warning, and the core goes on.

    Args:
        folder: made if missing.
        name: the files' name, without number.
        max_bytes: for both files together. A snapshot larger than half this limit is still written.
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
        """Begins a file with a snapshot when the current file is full; called before the core gets an event."""
        if not self._ended and (self._file is None or self._file.tell() - self._events_begin >= self._half):
            with self._ending_on_error():
                self._begin(core)

    def record(self, now: float, event: object, actions: Sequence[object]) -> None:
        """Writes an event that was handled. The event reaches the file when the buffer is full, or at `close`."""
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


def read_journal(path: Path, modules: re.Pattern[str] = CORE_MODULES) -> tuple[Any, Iterator[JournalEntry]]:
    """Reads a journal's file, which may name only these modules' classes.

    Returns:
        The core at the file's begin, and the events since. An event that was being written when the process ended is
        left out.

    Raises:
        JournalError: not a journal, damaged, or holding something else than cores and events; the iterator too.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise JournalError(f"{path} is not a journal")
    values = _read_values(path, data, modules)
    for core in values:
        return core, (JournalEntry(*value) for value in values)
    raise JournalError(f"{path} ends before its snapshot is whole")


def _read_values(path: Path, data: bytes, modules: re.Pattern[str]) -> Iterator[Any]:
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
        if (module, name) in _PLAIN_CLASSES:
            return super().find_class(module, name)
        found = super().find_class(module, name) if self._modules.fullmatch(module) else None
        if not isinstance(found, type):
            raise JournalError(
                f"it names {module}.{name}, which is no class of a core of this version: if another version of "
                "Moonpool wrote the journal, rerun the journal with that version"
            )
        return found


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event with actions that differ from the recorded actions."""

    index: int
    entry: JournalEntry
    actions: tuple[Any, ...]
    """What the core did this time."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """The result for one journal file."""

    path: Path
    core: Any
    """The core after the last event that was rerun."""
    events: int
    difference: Difference | None


def journal_files(path: Path) -> list[Path]:
    """A journal's files: the file itself, or all journals in a folder, older halves first.

    Raises:
        JournalError: there is none.
    """
    found = sorted((p for p in path.glob("*.[01]")), key=_file_age) if path.is_dir() else [path]
    if not found or not all(p.is_file() for p in found):
        raise JournalError(f"there is no journal at {path}")
    return found


def _file_age(path: Path) -> tuple[str, int]:
    return path.stem, path.stat().st_mtime_ns


ShowEvent = Callable[[int, JournalEntry, list[Any]], None]


def rerun(
    path: Path, show: ShowEvent | None = None, *, check: int = 0, modules: re.Pattern[str] = CORE_MODULES
) -> Rerun:
    """Reruns one file; stops at the first action that differs.

    Args:
        path: a journal's file.
        show: called with each event and the event's actions, before they are compared.
        check: look at the core's invariants after every so many events; 0 = never.
        modules: modules with classes that the journal may name.

    Raises:
        JournalError: the file is damaged.
        AssertionError: one of the core's invariants does not hold.
    """
    core, entries = read_journal(path, modules)
    count = 0
    for count, entry in enumerate(entries, 1):  # the count is the result
        actions: list[Any] = []
        core.handle(entry.now, entry.event, actions)
        if show is not None:
            show(count, entry, actions)
        if actions_crc(actions) != entry.crc:
            return Rerun(path, core, count, Difference(count, entry, tuple(actions)))
        if check and count % check == 0:
            core.check_invariants()
    return Rerun(path, core, count, None)
