"""What a data folder holds: what its index names, and what its segments hold besides. Everything here blocks.

Records that the index does not name are read and adopted: all of them where the index is lost, else those of segments
and ends of segments that are newer than it. Reading needs no room on the device; where there is none for an index, what
was read is served all the same, and the next start reads it again.
"""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import lmdb

from moonpool.errors import ConfigError
from moonpool.kv.blocks import BlockFormat
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import ENTRY, Catalogue, IdChange, Segment, Slot
from services.kvstore.ssd.files import Files, is_full
from services.kvstore.ssd.index import MAP_BYTES, Index, IndexChange, IndexImage, IndexLostError
from services.kvstore.ssd.reader import Found, list_segments, read_record, scan, segment_path
from services.kvstore.ssd.records import ALIGN, BadRecordError, RecordKind
from services.kvstore.tenancy.tenants import Account

log = get_logger(__name__)

Durability = Literal["power", "process"]
"""What a block that was committed survives: a loss of power, or the death of this process only."""


class DataFolder:
    """A locked data folder, made if need be.

    Raises:
        ConfigError: naming `data_dir`: it cannot be made or written, or another process has it.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self.files = files
        self.segments = path / "segments"
        self.index = path / "index"
        self._note = path / "unsynced"
        self._lock_fd = -1
        try:
            files.make_folder(self.segments)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._probe()
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

    def settle(self, durability: Durability) -> tuple[Durability, bool]:
        """Deals with blocks that an earlier process left unsynced, and notes whether this one will.

        After a restart of the machine the index of a process that did not sync is worth nothing: it is deleted.
        Returns what commits will survive, and whether an earlier process' blocks may still be unsynced.
        """
        boot, now = self._noted_boot(), self.files.boot_id()
        is_same_boot = bool(boot) and boot == now
        if boot is not None and not is_same_boot:
            log.warning("the machine restarted before everything was synced; rebuilding the index")
            self.files.remove_folder(self.index)
        elif is_same_boot and durability == "power":
            self.files.sync_all()
        if durability == "process":
            if is_same_boot:  # noted already; written anew it could be lost, as the device may be full
                return "process", True
            try:
                self.files.write_note(self._note, now)
                return "process", False
            except OSError as error:
                if not is_full(error):
                    raise
                log.warning("the device is too full to do without syncs; durability is power", error=str(error))
        if boot is not None or durability == "process":  # half a note would say that something is not synced
            self.all_synced()
        return "power", False

    def _noted_boot(self) -> str | None:
        """The boot in which blocks were last left unsynced; None when none were, "" when it is not known."""
        return self._note.read_text().strip() if self._note.exists() else None

    def all_synced(self) -> None:
        self.files.unlink(self._note)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


log = get_logger(__name__)

_SCAN_THREADS = 8
_ENTRIES_PER_VALUE = 4096
_BYTES_PER_COMMIT = 8 << 20
_PROGRESS_STEPS = 10
_SPARE_BYTES = 1 << 20


@dataclasses.dataclass(slots=True)
class Recovered:
    """What a data folder holds.

    Attributes:
        index: it agrees with the rest; None when there was no room to rebuild a lost one.
        next_segment: a number that was never used.
        durability: what commits survive from now on.
        unsynced: what an earlier process has left unsynced may still be so.
        rebuilt: the index was lost and made anew from the segments.
        lost_blocks: blocks that the index names and the segments do not hold.
        adopted_blocks: records that the index did not name.
    """

    index: Index | None
    catalogue: Catalogue
    next_segment: int
    durability: Durability
    unsynced: bool
    rebuilt: bool
    lost_blocks: int = 0
    adopted_blocks: int = 0


def recover(
    folder: DataFolder, durability: Durability, account: Account | None = None, map_bytes: int = MAP_BYTES
) -> Recovered:
    """Finds what is in the folder and makes index and files agree. ConfigError naming `data_dir`: it cannot be used."""
    try:
        sizes = list_segments(folder.segments)
        durability, unsynced = folder.settle(durability)
        update = _IndexUpdate(folder, map_bytes, sync=durability == "power", is_first_start=not sizes)
        try:
            catalogue = Catalogue(update.image.formats, update.image.tenants, account)
            found = Recovered(None, catalogue, 1, durability, unsynced, bool(sizes) and update.is_new)
            _fill(found, folder, sizes, update)
        except BaseException:
            update.close()
            raise
    except (OSError, lmdb.Error) as error:
        raise ConfigError("data_dir", f"{folder.path} cannot be used: {error}") from error
    return found


class _IndexUpdate:
    """The index as it was found, and what it must learn, told in portions.

    A full device is no reason not to start: a new index is given up and its room with it, an old one stays as it is.

    Attributes:
        index: None once it was given up.
        image: what it held.
        is_new: it was lost, and is made anew.
        error: why it was not told everything.
    """

    def __init__(self, folder: DataFolder, map_bytes: int, *, sync: bool, is_first_start: bool) -> None:
        self.index: Index | None = None
        self.image = IndexImage()
        self.is_new = False
        self.error: Exception | None = None
        self._folder = folder
        self._needs_room = is_first_start
        self._entries: dict[Slot, bytes] = {}
        self._sizes: dict[int, int] = {}
        self._open = functools.partial(Index, folder.files, folder.index, map_bytes, sync=sync)
        try:
            self._load()
        except IndexLostError as error:
            if not is_first_start:
                log.warning("rebuilding the index from the segments", reason=str(error))
            self.is_new = True
            self._discard()
            with self._unless_full():
                self.index = self._open()

    def _load(self) -> None:
        try:
            self.index = self._open()
        except (OSError, lmdb.Error) as error:
            if not is_full(error):  # opening what is whole needs no room
                raise
            raise IndexLostError(f"there is none: {error}") from error
        self.image = self.index.load()

    @contextlib.contextmanager
    def _unless_full(self) -> Iterator[None]:
        try:
            yield
        except (OSError, lmdb.Error) as error:
            if self._needs_room or not is_full(error):
                raise
            self.error = error
            if self.is_new:
                self._discard()

    def _discard(self) -> None:
        self.close()
        self.index = None
        self._folder.files.remove_folder(self._folder.index)

    def add(self, segment: Segment, first: int, packed: bytes, catalogue: Catalogue) -> None:
        """Entries of the slots of a segment from `first` on."""
        step = _ENTRIES_PER_VALUE * ENTRY.size
        for at in range(0, len(packed), step):
            self._entries[segment.number, first + at // ENTRY.size] = packed[at : at + step]
        self._sizes[segment.number] = segment.size
        if len(self._entries) * step >= _BYTES_PER_COMMIT:
            self._commit(catalogue, IndexChange())

    def _commit(self, catalogue: Catalogue, removals: IndexChange) -> tuple[IdChange[BlockFormat], IdChange[str]]:
        ids = catalogue.formats.change(), catalogue.tenants.change()
        sizes = {**removals.segments, **self._sizes}
        if self.index is not None and self.error is None and (sizes or removals.removed_segments):
            with self._unless_full():
                self.index.commit(IndexChange(removals.removed_segments, removals.dropped, self._entries, sizes, *ids))
        self._entries, self._sizes = {}, {}
        return ids

    def finish(self, catalogue: Catalogue, removals: IndexChange) -> None:
        """Tells the index the rest, and declares a new one whole."""
        ids = self._commit(catalogue, removals)
        if self.index is not None and self.is_new:
            with self._unless_full():
                self.index.finish_rebuild()
        written = self.index is None or self.error is None
        catalogue.formats.settle(ids[0], written=written)
        catalogue.tenants.settle(ids[1], written=written)
        if self.error is not None and self.is_new:
            log.error(
                "the device is too full for an index: all that the segments hold is served, but every start reads them "
                "anew; free some room and start again",
                path=str(self._folder.index),
                needed_bytes=sum(len(one.keys) for one in catalogue.segments.values()) * ENTRY.size + _SPARE_BYTES,
                error=str(self.error),
            )
        elif self.error is not None:
            log.warning("the device is too full to update the index; the next start does", error=str(self.error))

    def close(self) -> None:
        if self.index is not None:
            self.index.close()


def _fill(recovered: Recovered, folder: DataFolder, sizes: Mapping[int, int], update: _IndexUpdate) -> None:
    """Fills the catalogue, and makes index and files agree with it."""
    catalogue, image = recovered.catalogue, update.image
    named = {number: min(size, sizes[number]) for number, size in image.segments.items() if number in sizes}
    newer = {number: named.get(number, 0) for number, size in sizes.items() if size > named.get(number, 0)}
    found = _scan(
        folder,
        {number: (start, sizes[number]) for number, start in newer.items()},
        check=not update.is_new,
        sync=recovered.durability == "power",
    )
    if newer and recovered.durability == "power":
        folder.files.sync_folder(folder.segments)
    recovered.unsynced |= bool(newer)
    deleted, cut_bytes = 0, 0
    for number, size in sizes.items():
        segment = Segment(number, segment_path(folder.segments, number), named.get(number, 0))
        known = image.entries.get(number, b"") if number in named else b""
        records = next(found) if number in newer else ()
        if records is not None:  # else it could not be read: another start may
            segment.size = records[-1].end if records else segment.size
            cut_bytes += size - segment.size
            if not segment.size:
                folder.files.unlink(segment.path)
                deleted += 1
            elif segment.size < size:
                folder.files.truncate(segment.path, segment.size)
        if not segment.size:
            continue
        adopted = _pack(catalogue, records or ())
        catalogue.add(segment, known + adopted)
        if adopted:
            update.add(segment, len(known) // ENTRY.size, adopted, catalogue)
            recovered.adopted_blocks += len(adopted) // ENTRY.size
    if newer and not recovered.rebuilt:
        log.warning(
            "segments hold more than the index names; intact records adopted, the rest deleted",
            segments=len(newer),
            adopted_blocks=recovered.adopted_blocks,
            deleted_segments=deleted,
            deleted_bytes=cut_bytes,
        )
    for number, slot in image.dropped:
        if number in catalogue.segments:
            catalogue.mark_dead(number, slot)
    update.finish(catalogue, _forget_missing(recovered, image, named))
    recovered.index = update.index
    recovered.next_segment = max([*sizes, *image.segments], default=0) + 1


def _forget_missing(recovered: Recovered, image: IndexImage, named: Mapping[int, int]) -> IndexChange:
    """Forgets blocks that the files do not hold any more; what the index must forget."""
    catalogue = recovered.catalogue
    cut = [catalogue.segments[number] for number, end in named.items() if end < image.segments[number] and end]
    gone = [number for number in image.segments if not named.get(number)]
    lost = [
        (segment.number, slot)
        for segment in cut
        for slot in catalogue.live_slots(segment)
        if segment.offset(slot) + segment.nbytes(slot) > segment.size
    ]
    for number, slot in lost:
        catalogue.mark_dead(number, slot)
    recovered.lost_blocks = len(lost) + sum(len(image.entries.get(number, b"")) // ENTRY.size for number in gone)
    if cut or gone:
        log.warning(
            "segments are missing or cut off; their blocks are dropped",
            blocks=recovered.lost_blocks,
            segments=len(gone),
        )
    return IndexChange(gone, lost, segments={segment.number: segment.size for segment in cut})


def _scan(
    folder: DataFolder, parts: Mapping[int, tuple[int, int]], *, check: bool, sync: bool
) -> Iterator[Sequence[Found] | None]:
    """The records between two offsets of each segment, segment by segment; several are read at once.

    None for a segment that cannot be read. With `check`, records whose data are damaged are left out. With `sync`,
    records are on the device when they are returned: the process that wrote them may have ended before its own sync.
    """

    def read(number: int) -> list[Found] | None:
        path, (start, end) = segment_path(folder.segments, number), parts[number]
        try:
            found = scan(folder.files, path, end, start)
            records = [one for one in found if not check or _is_whole(folder.files, path, one)]
            if records and sync:
                folder.files.sync(path)
            return records
        except OSError as error:
            log.error("a segment cannot be read; it is left as it is", path=str(path), error=str(error))
            return None
        finally:
            folder.files.close(path)

    blocks, step = 0, max(1, len(parts) // _PROGRESS_STEPS)
    waiting, ahead = iter(parts), collections.deque[Future[list[Found] | None]]()
    with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="kvstore-scan") as pool:
        for done in range(1, len(parts) + 1):
            for number in itertools.islice(waiting, 2 * _SCAN_THREADS - len(ahead)):  # what is found takes memory
                ahead.append(pool.submit(read, number))
            found = ahead.popleft().result()
            blocks += len(found or ())
            if done % step == 0 or done == len(parts):
                log.info("segments read", segments=done, of=len(parts), blocks=blocks)
            yield found


def _is_whole(files: Files, path: Path, found: Found) -> bool:
    try:
        read_record(files, path, found.key, found.offset, found.kind.record_bytes)
    except BadRecordError:
        return False
    return True


def _pack(catalogue: Catalogue, found: Sequence[Found]) -> bytes:
    """Entries of records."""

    @functools.cache
    def rest(kind: RecordKind) -> tuple[int, int, int]:
        ids = catalogue.formats.id_of(kind.format), catalogue.tenants.id_of(kind.tenant)
        return kind.record_bytes // ALIGN, *ids

    return b"".join(ENTRY.pack(key, offset // ALIGN, *rest(kind)) for offset, key, kind in found)
