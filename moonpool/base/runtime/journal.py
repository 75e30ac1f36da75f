"""A core's journal: a snapshot of the state, then each event with a checksum over the actions; and the journal's rerun.

A rerun feeds the same events to the same core and compares the actions.

A journal has two files in one folder, `NAME.0` and `NAME.1`. When the newer file reaches half the size limit, the older
file is overwritten. Each file begins with a snapshot, so each can be rerun alone. Cores see no user text, so a journal
contains none.

Format: the magic line, then values of `moonpool.base.runtime.core_codec`, each preceded by its length and its crc32 (4
bytes each, little-endian): the core, then (now, event, crc32 over the actions' digest) per event. A journal from
elsewhere runs no code: it may name the classes of `moonpool.base.runtime.core_classes`, and nothing else.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moonpool.base.errors import MoonpoolError
from moonpool.base.runtime.core_classes import core_classes
from moonpool.base.runtime.core_codec import CodecError, CoreDecoder, CoreEncoder
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.base.telemetry.logs import get_logger

log = get_logger(__name__)
MAGIC = b"moonpool journal 2\n"
_PICKLED = b"moonpool journal 1\n"
_HEAD = struct.Struct("<II")


class JournalError(MoonpoolError):
    """A journal is damaged, or is none."""


class CoreError(JournalError):
    """Failure of a core at an event: a defect that the journal recorded, or a journal that is no core's own."""


class JournalEntry(NamedTuple):
    """One event as handled."""

    now: float
    event: Any
    crc: int


def actions_crc(actions: Sequence[object]) -> int:
    """Return the checksum by which a rerun compares actions."""
    return zlib.crc32(digest_of(*actions))


class JournalWriter:
    """Writer of a journal of bounded size. If writing fails, the journal ends with a warning, and the core goes on.

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
        self._encoder = CoreEncoder()
        self._events_begin = 0
        self._ended = False
        for path in self._paths:
            path.unlink(missing_ok=True)

    def before(self, core: object) -> None:
        """Begin a file with a snapshot when the current file is full; called before the core gets an event."""
        if not self._ended and (self._file is None or self._file.tell() - self._events_begin >= self._half):
            with self._ending_on_error():
                self._begin(core)

    def record(self, now: float, event: object, actions: Sequence[object]) -> None:
        """Write an event that was handled. The event reaches the file when the buffer is full, or at `close`."""
        if not self._ended:
            with self._ending_on_error():
                self._write((now, event, actions_crc(actions)))

    def close(self) -> None:
        """Write what is buffered; may be called again."""
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
        self._encoder = CoreEncoder()  # each file describes its classes
        self._write(core)
        self._file.flush()  # a process that is killed leaves a journal that can be read
        self._events_begin = self._file.tell()

    def _write(self, value: object) -> None:
        assert self._file is not None, "before() opens the file"
        data = self._encoder.encode(value)
        self._file.write(_HEAD.pack(len(data), zlib.crc32(data)))
        self._file.write(data)


def read_journal(path: Path, modules: Sequence[str] = ()) -> tuple[Any, Iterator[JournalEntry]]:
    """Read a journal's file.

    Args:
        path: the file.
        modules: modules of somebody's own policies, whose classes the journal may name, too. Their code runs.

    Returns:
        The core at the file's begin, and the events since. An event that was being written when the process ended is
        left out.

    Raises:
        JournalError: not a journal, damaged, or holding something else than cores and events; the iterator too.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    if data.startswith(_PICKLED):
        raise JournalError(
            f"{path} was written by an earlier version, as pickles, which could run code and are not read any more: "
            "rerun the journal with that version"
        )
    if not data.startswith(MAGIC):
        raise JournalError(f"{path} is not a journal")
    try:
        classes = core_classes(tuple(modules))
    except ImportError as error:
        raise JournalError(f"the classes of {', '.join(modules)} cannot be imported: {error}") from error
    values = _read_values(path, data, CoreDecoder(classes))
    for core in values:
        return core, map(partial(_entry, path), count(1), values)
    raise JournalError(f"{path} ends before its snapshot is whole")


def _read_values(path: Path, data: bytes, decoder: CoreDecoder) -> Iterator[Any]:
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        begin = at + _HEAD.size
        at = begin + size
        if at > len(data):
            return
        record = data[begin:at]
        if zlib.crc32(record) != crc:
            raise JournalError(f"{path} is damaged between bytes {begin} and {at}")
        try:
            yield decoder.decode(record)
        except CodecError as error:
            raise JournalError(f"{path} is damaged between bytes {begin} and {at}: {error}") from error


def _entry(path: Path, number: int, value: object) -> JournalEntry:
    match value:
        case (float() | int() as now, event, int() as crc):
            return JournalEntry(now, event, crc)
    raise JournalError(f"{path}: event {number} is no event of a journal")


@contextmanager
def event_of(path: Path, number: int) -> Iterator[None]:
    """Give a core an event of a journal within.

    Raises:
        CoreError: what is done within raises; names path and number.
    """
    try:
        yield
    except Exception as error:
        raise CoreError(f"{path}: the core fails at event {number}: {error!r}") from error


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
    """Return a journal's files: the file itself, or all journals in a folder, older halves first.

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


def rerun(path: Path, show: ShowEvent | None = None, *, check: int = 0, modules: Sequence[str] = ()) -> Rerun:
    """Rerun one file; stop at the first action that differs.

    Args:
        path: a journal's file.
        show: called with each event and the event's actions, before they are compared.
        check: look at the core's invariants after every so many events; 0 = never.
        modules: as of `read_journal`.

    Raises:
        JournalError: the file is damaged.
        CoreError: the core raises at an event.
        AssertionError: one of the core's invariants does not hold.
    """
    core, entries = read_journal(path, modules)
    if not hasattr(core, "handle"):
        raise JournalError(f"{path} begins with a {type(core).__name__}, which is no core")
    done = 0
    for done, entry in enumerate(entries, 1):  # the number is the result
        actions: list[Any] = []
        with event_of(path, done):
            core.handle(entry.now, entry.event, actions)
            crc = actions_crc(actions)
        if show is not None:
            show(done, entry, actions)
        if crc != entry.crc:
            return Rerun(path, core, done, Difference(done, entry, tuple(actions)))
        if check and done % check == 0:
            core.check_invariants()
    return Rerun(path, core, done, None)
