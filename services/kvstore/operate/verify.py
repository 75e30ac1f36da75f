"""Checks a data folder that no kvstore uses: every record against its checksums, and the index against the records.

Nothing in the folder is changed. All functions block.
"""

import contextlib
import dataclasses
import fcntl
import pathlib
from collections.abc import Callable

import lmdb

from moonpool.errors import ConfigError
from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.catalogue import Catalogue, Segment
from services.kvstore.ssd.files import Files
from services.kvstore.ssd.index import Index, IndexImage, IndexLostError
from services.kvstore.ssd.reader import list_segments, read_record, scan, segment_path
from services.kvstore.ssd.records import BadRecordError

_MAX_FAULTS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One difference between the folder and a consistent store; `offset` and `key` are None for a whole segment."""

    segment: int
    offset: int | None
    key: BlockKey | None
    what: str


@dataclasses.dataclass(slots=True)
class VerifyReport:
    """What a check found: segments that were read, whole records in them, and faults."""

    segments: int = 0
    records: int = 0
    blocks: int = 0  # intact records that the index names
    dead: int = 0  # records that the index does not name: replaced, dropped, or never committed
    bytes_read: int = 0  # of records whose checksums were computed
    faults: list[Fault] = dataclasses.field(default_factory=list)  # the first thousand: a store would answer a miss
    fault_count: int = 0
    index_error: str | None = None  # why the index cannot be used; a store would rebuild it from the segments

    @property
    def ok(self) -> bool:
        return not self.fault_count and self.index_error is None

    def add(self, fault: Fault) -> None:
        self.fault_count += 1
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(fault)


def verify(path: pathlib.Path, on_segment: Callable[[int, int], None] = lambda done, of: None) -> VerifyReport:
    """Checks a data folder; `on_segment` is called with the number of segments done, and of all.

    Raises ConfigError when `path` holds no store, cannot be read, or is used by a kvstore.
    """
    try:
        lock = (path / "lock").open("rb")
    except OSError as error:
        raise ConfigError("data_dir", f"{path} holds no store: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _verify(path, on_segment)
        except BlockingIOError as error:
            raise ConfigError("data_dir", f"{path} is used by another process") from error
        except (OSError, lmdb.Error) as error:
            raise ConfigError("data_dir", f"{path} cannot be read: {error}") from error


def _verify(path: pathlib.Path, on_segment: Callable[[int, int], None]) -> VerifyReport:
    folder, reading, catalogue = path / "segments", Files(direct=True), None
    files = list_segments(folder)
    report = VerifyReport()
    try:
        with contextlib.closing(Index(None, path / "index")) as index:
            image = index.load()
        catalogue = _catalogue(folder, files, image)
        newer = len(files.keys() - image.segments.keys())  # may have the files of as many that it does name
        for number in sorted(image.segments.keys() - files.keys())[newer:]:
            report.add(Fault(number, None, None, "the index names a segment that is not there"))
    except (IndexLostError, lmdb.Error) as error:
        report.index_error = str(error)

    for done, number in enumerate(files, 1):
        _check_segment(report, reading, segment_path(folder, number), number, files[number], catalogue)
        on_segment(done, len(files))
    reading.close_all()
    return report


def _catalogue(folder: pathlib.Path, files: dict[int, int], image: IndexImage) -> Catalogue:
    catalogue = Catalogue()
    for number in files:
        path, kinds = segment_path(folder, number), image.kinds.get(number, [])
        segment = Segment(number, path, image.segments.get(number, 0), named=kinds)
        catalogue.add(segment, image.entries.get(number, b""), image.dropped.get(number, ()))
    return catalogue


def _check_segment(
    report: VerifyReport, files: Files, path: pathlib.Path, number: int, size: int, catalogue: Catalogue | None
) -> None:
    report.segments += 1
    named: dict[int, int] = {}
    segment = None if catalogue is None else catalogue.segments[number]
    if catalogue is not None and segment is not None:
        named = {segment.offset(slot): slot for slot in catalogue.live_slots(segment)}
        if size < segment.size:
            report.add(Fault(number, None, None, f"the segment has {size} bytes instead of {segment.size}"))
    for found in scan(files, path, size):
        report.records += 1
        slot = named.pop(found.offset, None)
        if segment is not None and slot is None:
            report.dead += 1
            continue
        report.bytes_read += found.nbytes
        try:
            if segment is not None and slot is not None:
                if (segment.keys[slot], segment.nbytes(slot)) != (found.info.key, found.nbytes):
                    raise BadRecordError("the index names another block")
                if segment.kind(slot) != (found.info.format, found.info.tenant):
                    raise BadRecordError("the index names another format or tenant")
            read_record(files, path, found.info.key, found.offset, found.nbytes)
            report.blocks += 1
        except (BadRecordError, OSError) as error:
            report.add(Fault(number, found.offset, found.info.key, str(error)))
    for offset, slot in named.items():
        assert segment is not None
        report.add(Fault(number, offset, segment.keys[slot], "the index names a record that is not there"))
