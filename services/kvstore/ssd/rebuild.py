"""Making a lost index anew from the segment files.

Owns the reading of all records and the writing of an index that names them. Must not know of budgets, eviction, or why
the index is lost. All of it blocks. Reading needs no room on the device; where there is none for an index, what was
read is served all the same, and the next start reads it again.
"""

import collections
import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import lmdb

from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import ENTRY, Catalogue, Segment
from services.kvstore.ssd.full_device import is_full
from services.kvstore.ssd.index import Index, IndexChange, NoIndex, Slot, remove_index
from services.kvstore.ssd.records import ALIGN, RecordKind
from services.kvstore.ssd.scan import Found
from services.kvstore.ssd.segments import SegmentFile, segment_path

_log = get_logger(__name__)

_SCAN_THREADS = 8
_ENTRIES_PER_VALUE = 4096
_BYTES_PER_COMMIT = 8 << 20
_PROGRESS_STEPS = 10
_SPARE_BYTES = 1 << 20


def rebuild(
    segments: pathlib.Path, files: Mapping[int, int], index: pathlib.Path, map_bytes: int, *, sync: bool
) -> tuple[Catalogue, Index]:
    """Finds all records, later ones replacing earlier ones of the same key, and makes an index of them.

    Args:
        segments: folder of the segment files.
        files: their numbers, ascending, and sizes.
        index: the index's folder; what is there is deleted.
        map_bytes: as for `Index`.
        sync: as for `Index`; segments are read past the page cache then.

    Returns:
        What was found, and the new index; a `NoIndex` when the device is full.

    Raises:
        OSError, lmdb.Error: the files cannot be read, or the index cannot be written; where there are no files, as at
            a first start, for want of room too.
    """
    catalogue, new = Catalogue({}, {}), _NewIndex(index, map_bytes, sync=sync)
    try:
        for number, found in _scan(segments, files):
            file = SegmentFile(segment_path(segments, number), direct=sync)
            if not found:
                file.delete()
                continue
            end = found[-1].offset + found[-1].kind.record_bytes
            if end < files[number]:
                file.truncate(end)
                file.close()
            packed = _pack(catalogue, found)
            catalogue.load(Segment(number, file, end), packed)
            new.add(number, end, packed)
        new.finish(catalogue)
    except BaseException:
        new.index.close()
        raise
    if new.error is not None:
        if not files:
            raise new.error
        _log.error(
            "the device is too full for an index: all that the segments hold is served, but every start reads them "
            "anew; free some room and start again",
            path=str(index),
            needed_bytes=sum(len(segment.keys) for segment in catalogue.segments.values()) * ENTRY.size + _SPARE_BYTES,
            error=str(new.error),
        )
    return catalogue, new.index


class _NewIndex:
    """The index that is being made.

    Attributes:
        index: it; a `NoIndex` once it was given up.
        error: why that was; None while it was not.
    """

    def __init__(self, path: pathlib.Path, map_bytes: int, *, sync: bool) -> None:
        self.index: Index = NoIndex()
        self.error: Exception | None = None
        self._path = path
        self._entries: dict[Slot, bytes] = {}
        self._sizes: dict[int, int] = {}
        self._pending_bytes = 0
        remove_index(path)
        with self._unless_full():
            self.index = Index(path, map_bytes, sync=sync)

    @contextlib.contextmanager
    def _unless_full(self) -> Iterator[None]:
        """Gives the index up, and its room back, when the device is full. Until it is finished nobody believes it."""
        try:
            yield
        except (OSError, lmdb.Error) as error:
            if not is_full(error):
                raise
            self.error = error
            self.index.close()
            self.index = NoIndex()
            remove_index(self._path)

    def add(self, number: int, end: int, packed: bytes) -> None:
        """A segment, and all its entries."""
        step = _ENTRIES_PER_VALUE * ENTRY.size
        for at in range(0, len(packed), step):
            self._entries[number, at // ENTRY.size] = packed[at : at + step]
        self._sizes[number] = end
        self._pending_bytes += len(packed)
        if self._pending_bytes >= _BYTES_PER_COMMIT:
            self._commit(IndexChange(entries=self._entries, segments=self._sizes))

    def finish(self, catalogue: Catalogue) -> None:
        """That was all."""
        formats, tenants = catalogue.formats.by_number, catalogue.tenants.by_number
        self._commit(IndexChange(entries=self._entries, segments=self._sizes, formats=formats, tenants=tenants))
        with self._unless_full():
            self.index.finish_rebuild()

    def _commit(self, change: IndexChange) -> None:
        with self._unless_full():
            self.index.commit(change)
        self._entries, self._sizes, self._pending_bytes = {}, {}, 0


def _scan(folder: pathlib.Path, files: Mapping[int, int]) -> Iterator[tuple[int, list[Found]]]:
    """All records of all segments, segment by segment; several are read at once."""

    def scan(number: int) -> list[Found]:
        file = SegmentFile(segment_path(folder, number), direct=True)
        try:
            return list(file.scan())
        finally:
            file.close()

    blocks, step = 0, max(1, len(files) // _PROGRESS_STEPS)
    waiting, ahead = iter(files), collections.deque[tuple[int, Future[list[Found]]]]()
    with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="kvstore-scan") as pool:
        for done in range(1, len(files) + 1):
            for number in itertools.islice(waiting, 2 * _SCAN_THREADS - len(ahead)):  # what is found takes memory
                ahead.append((number, pool.submit(scan, number)))
            number, future = ahead.popleft()
            found = future.result()
            yield number, found
            blocks += len(found)
            if done % step == 0 or done == len(files):
                _log.info("segments read", segments=done, of=len(files), blocks=blocks)


def _pack(catalogue: Catalogue, found: Sequence[Found]) -> bytes:
    """Entries of records."""
    numbers: dict[RecordKind, tuple[int, int, int]] = {}
    pack, rows = ENTRY.pack, []
    for offset, key, kind in found:
        if (rest := numbers.get(kind)) is None:
            names = catalogue.formats.number(kind.format), catalogue.tenants.number(kind.tenant)
            rest = numbers[kind] = (kind.record_bytes // ALIGN, *names)
        rows.append(pack(key, offset // ALIGN, *rest))
    return b"".join(rows)
