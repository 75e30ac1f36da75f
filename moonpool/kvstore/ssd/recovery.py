"""Recovers a data folder from index and segments, and checks a folder's blocks.

Records that the index does not name are read and adopted: all records if the index is lost, else records in segments
and segment ends newer than the index, and in segments with damaged values in the index. All functions block.
"""

import collections
import contextlib
import dataclasses
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import lmdb

from moonpool.base import world
from moonpool.base.errors import ConfigError
from moonpool.base.kv.keys import BlockKey
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.ssd.files import ALIGN, FileLayer, is_full, lacks_memory
from moonpool.kvstore.ssd.index import (
    ENTRY,
    MAP_BYTES,
    Catalogue,
    DiskIndex,
    Index,
    IndexChange,
    IndexImage,
    IndexLostError,
    RowId,
    Segment,
)
from moonpool.kvstore.ssd.records import (
    BadRecordError,
    ScannedRecord,
    list_segments,
    read_record,
    scan_segment,
    segment_path,
)

log = get_logger(__name__)
_SCAN_THREADS = 8
_PROGRESS_STEPS = 10
_SPARE_BYTES = 1 << 20
Durability = Literal["power", "process"]  # the loss that a committed block survives: power, or this process


class DataFolder:
    """A locked data folder, made if need be, of the disk with that number. `durability`: what commits survive.

    Raises:
        ConfigError: the folder cannot be made or written, or another process has the folder; names `data_dir`.
    """

    def __init__(self, path: Path, files: FileLayer, durability: Durability = "power", disk: int = 0) -> None:
        self.path = path
        self.files = files
        self.disk = disk
        self.segments = path / "segments"
        self.index = path / "index"
        self._note = path / "unsynced"
        self._lock_fd = -1
        try:
            files.make_folder(self.segments)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._probe()
            self.durability = self._settle(durability)
        except OSError as error:
            self.close()
            used = isinstance(error, BlockingIOError)
            reason = "is used by another process" if used else f"cannot be used: {error.strerror or error}"
            raise ConfigError("data_dir", f"{path} {reason}") from error

    def _probe(self) -> None:
        """Finds a read-only folder now rather than at the first write. A full one is good for reading."""
        try:
            self.files.probe(self.segments, ALIGN)
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("the device is full", path=str(self.path))

    def _settle(self, durability: Durability) -> Durability:
        """Deals with blocks that an earlier process left unsynced, and notes the boot in which this one does so.

        After a machine restart, the index from a process that did not sync is worthless: the index is deleted.
        """
        noted = self._note.read_bytes() if self._note.exists() else None
        boot, now = None if noted is None else noted.decode(errors="replace").strip(), self.files.boot_id()
        is_same_boot = bool(boot) and boot == now  # "" is a boot that is not known
        if boot is not None and not is_same_boot:
            log.warning("the machine restarted before everything was synced; rebuilding the index")
            self.files.remove_folder(self.index)
        elif is_same_boot and durability == "power":
            self.files.sync_all()
        if durability == "process":
            try:
                if not is_same_boot:  # noted already; written anew, the note could be lost, as the device may be full
                    self.files.write_note(self._note, now)
                return "process"
            except OSError as error:
                if not is_full(error):
                    raise
                log.warning("the device is too full to do without syncs; durability is power", error=str(error))
        self.all_synced()  # half a note would say that something is not synced
        return "power"

    def relock(self) -> bool:
        """Locks the folder that is at the path now; returns whether the file system has changed.

        Raises:
            OSError: no store's folder is there, or another process has the folder.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        if os.path.samestat(os.fstat(fd), os.fstat(self._lock_fd)):
            os.close(fd)
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._lock_fd)
        self._lock_fd = fd
        return True

    def all_synced(self) -> None:
        self.files.unlink(self._note)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class Recovery:
    """Adds the blocks of a data folder to a catalogue, and makes index and files agree. Blocking.

    Raises:
        ConfigError: the folder, which is closed then, cannot be used; names `data_dir`.
    """

    def __init__(self, folder: DataFolder, catalogue: Catalogue, map_bytes: int = MAP_BYTES) -> None:
        self.folder = folder
        self.catalogue = catalogue
        self._lost: list[RowId] = []  # of records that are cut off
        self._sync = folder.durability == "power"
        self.index = DiskIndex(folder.files, folder.path, catalogue, folder.disk, self._sync, map_bytes)
        try:
            sizes = list_segments(folder.segments)
            image = self._load(is_first_start=not sizes)
            self.next_segment = max([0, *sizes, *image.segments]) + 1  # was never used
            self.rebuilt = bool(sizes) and not self.index.usable  # from the segments
            adopted = self._fill(sizes, image)
            self._tell(self._difference(image, adopted), is_stale=image.stale)
        except BaseException as error:
            for segment in [one for one in catalogue.segments.values() if one.disk == folder.disk]:
                catalogue.remove(segment)
            self.index.close()
            folder.close()
            folder.files.close_all()
            if not isinstance(error, OSError | lmdb.Error):
                raise
            advice = f"; try moonpool kvstore verify --repair {folder.path}" if isinstance(error, lmdb.Error) else ""
            raise ConfigError("data_dir", f"{folder.path} cannot be used: {error}{advice}") from error

    def _load(self, *, is_first_start: bool) -> IndexImage:
        """The content of the index. An index that cannot be used, or mapped, is deleted and counts as empty."""
        try:
            self.index.open()
            image = self.index.load()
        except (OSError, lmdb.Error, IndexLostError) as error:
            if lacks_memory(error):
                self.index.do_without(error)
                return IndexImage()
            if not isinstance(error, IndexLostError) and not is_full(error):  # opening what is whole needs no room
                raise
            if not is_first_start:
                log.warning(
                    "rebuilding the index from the segments",
                    reason=str(error),
                    command=f"moonpool kvstore verify --repair {self.folder.path}",
                )
            self.index.close()
            self.folder.files.remove_folder(self.index.path)
            return IndexImage()
        if image.damage:
            log.warning(
                "rebuilding the index; reading segments with damaged values",
                reason=image.damage,
                command=f"moonpool kvstore verify --repair {self.folder.path}",
            )
        return image

    def _fill(self, sizes: Mapping[int, int], image: IndexImage) -> dict[RowId, bytes]:
        """Fills the catalogue, and makes the files agree; entries of what the index does not name."""
        folder = self.folder
        named = {number: min(size, sizes.get(number, 0)) for number, size in image.segments.items()}
        newer = {number: (named.get(number, 0), size) for number, size in sizes.items() if size > named.get(number, 0)}
        scanned = self._scan(newer)
        entries, deleted_bytes = dict[RowId, bytes](), 0
        for number, size in sizes.items():
            path, kinds = segment_path(folder.segments, number), image.kinds.get(number, [])
            segment = Segment(number, path, named.get(number, 0), folder.disk, named=kinds)
            known = image.entries.get(number, b"") if segment.size else b""
            records = next(scanned) if number in newer else ()
            if records is not None:  # else unreadable: another start may succeed
                deleted_bytes += _trim(folder.files, segment, size, records)
            if segment.size:
                adopted = _pack_rows(segment, records or ())
                dead = image.dropped.get(number, set())
                rows = enumerate(ENTRY.iter_unpack(known) if size < image.segments.get(number, 0) else ())
                cut_off = {row for row, (_, start, length, *_) in rows if (start + length) * ALIGN > size} - dead
                self._lost += [(number, row) for row in cut_off]
                self.catalogue.add(segment, known + adopted, dead | cut_off)
                if adopted:
                    entries[number, len(known) // ENTRY.size] = adopted
        if newer and self._sync:
            folder.files.sync_folder(folder.segments)
        if newer and not self.rebuilt:
            log.warning(
                "segments hold more than the index names; intact records adopted, the rest deleted",
                segments=len(newer),
                adopted_blocks=sum(map(len, entries.values())) // ENTRY.size,
                deleted_bytes=deleted_bytes,
            )
        return entries

    def _scan(self, parts: Mapping[int, tuple[int, int]]) -> Iterator[Sequence[ScannedRecord] | None]:
        """For each segment the records between two offsets, None if unreadable; several are read at once."""
        blocks, step = 0, max(1, len(parts) // _PROGRESS_STEPS)
        waiting, ahead = iter(parts.items()), collections.deque[Future[list[ScannedRecord] | None]]()
        with world.thread_pool(_SCAN_THREADS, "kvstore-scan") as pool:
            for done in range(1, len(parts) + 1):
                for number, part in itertools.islice(waiting, 2 * _SCAN_THREADS - len(ahead)):  # they take memory
                    ahead.append(pool.submit(self._read, segment_path(self.folder.segments, number), *part))
                found = ahead.popleft().result()
                blocks += len(found or ())
                if done % step == 0 or done == len(parts):
                    log.info("segments read", segments=done, of=len(parts), blocks=blocks)
                yield found

    def _read(self, path: Path, start: int, end: int) -> list[ScannedRecord] | None:
        """Records in a part of a segment; with an index, only records with whole data.

        With syncs, they are on the device: the writing process may have ended before syncing.
        """
        files = self.folder.files
        try:
            found = scan_segment(files, path, end, start)
            records = [one for one in found if not self.index.usable or _is_whole(files, path, one)]
            if records and self._sync:
                files.sync(path)
            return records
        except (OSError, MemoryError) as error:
            log.error("a segment cannot be read; it is left as it is", path=str(path), error=str(error))
            return None
        finally:
            files.close(path)

    def _difference(self, image: IndexImage, adopted: Mapping[RowId, bytes]) -> IndexChange:
        """What the index must learn: also which named blocks the files do not hold any more."""
        own = {one.number: one for one in self.catalogue.segments.values() if one.disk == self.folder.disk}
        changed = [one for number, one in own.items() if one.size != image.segments.get(number)]
        gone = [number for number in image.segments if number not in own]
        if self._lost or gone:
            blocks = len(self._lost) + sum(len(image.entries.get(one, b"")) // ENTRY.size for one in gone)
            log.warning("segments are missing or cut off; their blocks are dropped", blocks=blocks, segments=len(gone))
        sizes = {segment.number: segment.size for segment in changed}
        return IndexChange(gone, self._lost, adopted, sizes, {segment.number: segment.named for segment in changed})

    def _tell(self, change: IndexChange, *, is_stale: bool) -> None:
        """Tells the index what to learn, in one transaction; writes a lost or stale one anew.

        A full device is no reason not to start: a new index is given up with the index's room, an old index stays.
        """
        is_new = not self.index.usable or is_stale
        if self.index.waits:
            return
        try:
            if is_new:
                self.index.write_anew()
            elif change.segments or change.removed_segments:
                self.index.commit(change)
        except (OSError, lmdb.Error) as error:
            if lacks_memory(error):
                self.index.do_without(error)
                return
            if not is_full(error) or (is_new and not self.rebuilt and not is_stale):
                raise
            if is_new:
                self.index.close()
                self.folder.files.remove_folder(self.index.path)
                log.error(
                    "the device is too full for an index: all that the segments hold is served, but every start reads "
                    "them anew; free some room and start again",
                    path=str(self.index.path),
                    needed_bytes=len(self.catalogue) * ENTRY.size + _SPARE_BYTES,
                    error=str(error),
                )
            else:
                log.warning("the device is too full to update the index; the next start does", error=str(error))


def _trim(files: FileLayer, segment: Segment, size: int, records: Sequence[ScannedRecord]) -> int:
    """Cuts a file with `size` bytes behind the last record; deletes a file without records. Returns the bytes freed."""
    segment.size = records[-1].end if records else segment.size
    if not segment.size:
        files.unlink(segment.path)
    elif segment.size < size:
        files.truncate(segment.path, segment.size)
    return size - segment.size


def _is_whole(files: FileLayer, path: Path, found: ScannedRecord) -> bool:
    with contextlib.suppress(BadRecordError):
        return bool(read_record(files, path, found.info.key, found.offset, found.nbytes))
    return False


def _pack_rows(segment: Segment, found: Sequence[ScannedRecord]) -> bytes:
    packed = bytearray()
    for at, nbytes, info, of_kind in found:
        kind = segment.number_of(of_kind)
        packed += ENTRY.pack(info.key, at // ALIGN, nbytes // ALIGN, kind, info.written_at)
    return bytes(packed)


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
    """Checks segments and index in an unused data folder; changes nothing.

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
