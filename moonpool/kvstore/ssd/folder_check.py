"""Check of a data folder that no store uses: each record against its header and its hashes."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import lmdb

from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.index import Index, IndexImage, IndexLostError
from moonpool.kvstore.ssd.reader import read_record
from moonpool.kvstore.ssd.records import BadRecordError
from moonpool.kvstore.ssd.segment import Segment
from moonpool.kvstore.ssd.segment_files import list_segments, scan_segment, segment_path

_MAX_FAULTS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class FolderFault:
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
    bytes_read: int = 0  # for records with computed checksums
    faults: list[FolderFault] = dataclasses.field(
        default_factory=list
    )  # the first thousand: a store would answer a miss
    fault_count: int = 0
    index_error: str | None = None  # what is wrong with the index; a store would rebuild the index from the segments
    records_error: str = ""  # what is wrong with the records of conductors; a store would keep the intact ones
    damaged: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # segments and offsets of bad records
    key_ids: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )  # keys that encrypt intact records, and how many each

    @property
    def ok(self) -> bool:
        return not (self.fault_count or self.index_error or self.records_error)

    def add(self, fault: FolderFault) -> None:
        self.fault_count += 1
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(fault)


def check_blocks(path: Path, on_segment: Callable[[int, int], None]) -> VerifyReport:
    """Check segments and index in an unused data folder; change nothing.

    `on_segment` is called with the number of checked segments and the total. Raises OSError if the folder cannot be
    read.
    """
    folder, reading, catalogue = path / "segments", FileLayer(direct=True), None
    files = list_segments(folder)
    report = VerifyReport()
    try:
        with contextlib.closing(Index(None, path / "index")) as index:
            image = index.load()
        report.index_error = image.damage or None
        catalogue = _catalogue(folder, files, image)
        newer = len(files.keys() - image.segments.keys())  # may have the files of as many named segments
        for number in sorted(image.segments.keys() - files.keys())[newer:]:
            report.add(FolderFault(number, None, None, "the index names a segment that is not there"))
    except (IndexLostError, lmdb.Error) as error:
        report.index_error = str(error)

    for done, number in enumerate(files, 1):
        _check_segment(report, reading, segment_path(folder, number), number, files[number], catalogue)
        on_segment(done, len(files))
    reading.close_all()
    return report


def _catalogue(folder: Path, files: dict[int, int], image: IndexImage) -> Catalogue:
    catalogue = Catalogue()
    for number in files:
        path, kinds = segment_path(folder, number), image.kinds.get(number, [])
        segment = Segment(number, path, image.segments.get(number, 0), named=kinds)
        catalogue.add(segment, image.entries.get(number, b""), image.dropped.get(number, ()))
    return catalogue


def _check_segment(
    report: VerifyReport, files: FileLayer, path: Path, number: int, size: int, catalogue: Catalogue | None
) -> None:
    report.segments += 1
    named: dict[int, int] = {}
    segment: Segment | None = None
    if catalogue is not None:
        segment = catalogue.segments[number]
        named = {segment.offset(row): row for row in catalogue.live_rows(segment)}
        if size < segment.size:
            report.add(FolderFault(number, None, None, f"the segment has {size} bytes instead of {segment.size}"))
    for found in scan_segment(files, path, size):
        report.records += 1
        row = named.pop(found.offset, None)
        if segment is not None and row is None:
            report.dead += 1
            continue
        report.bytes_read += found.nbytes
        try:
            if segment is not None and row is not None:
                if (segment.keys[row], segment.nbytes(row)) != (found.info.key, found.nbytes):
                    raise BadRecordError("the index names another block")
                if segment.kind(row) != found.kind:
                    raise BadRecordError("the index names another format, tenant or key")
            read_record(files, path, found.info.key, found.offset, found.nbytes)
            report.blocks += 1
            if found.kind.key_id:
                report.key_ids[found.kind.key_id] += 1
        except (BadRecordError, OSError) as error:
            report.add(FolderFault(number, found.offset, found.info.key, str(error)))
            report.damaged.append((number, found.offset))
    for offset, row in named.items():
        assert segment is not None
        report.add(FolderFault(number, offset, segment.keys[row], "the index names a record that is not there"))
