"""Recovers a data folder from index and segments.

Records that the index does not name are read and adopted: all records if the index is lost, else records in segments
and segment ends newer than the index, and in segments with damaged values in the index. All functions block.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import lmdb

from moonpool.base import world
from moonpool.base.errors import ConfigError
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.data_folder import DataFolder
from moonpool.kvstore.ssd.disk_index import DiskIndex
from moonpool.kvstore.ssd.files import ALIGN, FileLayer, is_full, lacks_memory
from moonpool.kvstore.ssd.index import MAP_BYTES, IndexChange, IndexImage, IndexLostError
from moonpool.kvstore.ssd.reader import read_record
from moonpool.kvstore.ssd.records import BadRecordError
from moonpool.kvstore.ssd.segment import ENTRY, RowId, Segment
from moonpool.kvstore.ssd.segment_files import ScannedRecord, list_segments, scan_segment, segment_path

log = get_logger(__name__)
_SCAN_THREADS = 8
_PROGRESS_STEPS = 10
_SPARE_BYTES = 1 << 20


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
            for segment in [segment for segment in catalogue.segments.values() if segment.disk == folder.disk]:
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
        """Fill the catalogue, and make the files agree; entries of what the index does not name."""
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
            records = [record for record in found if not self.index.usable or _is_whole(files, path, record)]
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
        own = {
            segment.number: segment for segment in self.catalogue.segments.values() if segment.disk == self.folder.disk
        }
        changed = [segment for number, segment in own.items() if segment.size != image.segments.get(number)]
        gone = [number for number in image.segments if number not in own]
        if self._lost or gone:
            blocks = len(self._lost) + sum(len(image.entries.get(number, b"")) // ENTRY.size for number in gone)
            log.warning("segments are missing or cut off; their blocks are dropped", blocks=blocks, segments=len(gone))
        sizes = {segment.number: segment.size for segment in changed}
        return IndexChange(gone, self._lost, adopted, sizes, {segment.number: segment.named for segment in changed})

    def _tell(self, change: IndexChange, *, is_stale: bool) -> None:
        """Tell the index what to learn, in one transaction; write a lost or stale one anew.

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
    """Cut a file with `size` bytes behind the last record; delete a file without records. Returns the bytes freed."""
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
