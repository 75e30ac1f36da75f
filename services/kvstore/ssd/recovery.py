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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import lmdb

from moonpool.errors import ConfigError
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import ENTRY, Catalogue, Segment, Slot
from services.kvstore.ssd.files import Files, is_full
from services.kvstore.ssd.index import MAP_BYTES, Index, IndexChange, IndexImage, IndexLostError
from services.kvstore.ssd.reader import Found, list_segments, read_record, scan, segment_path
from services.kvstore.ssd.records import ALIGN, BadRecordError
from services.kvstore.tenancy.tenants import Account

log = get_logger(__name__)

_SCAN_THREADS = 8
_PROGRESS_STEPS = 10
_SPARE_BYTES = 1 << 20

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

    def settle(self, durability: Durability) -> Durability:
        """Deals with blocks that an earlier process left unsynced, and notes whether this one will.

        After a restart of the machine the index of a process that did not sync is worth nothing: it is deleted.
        Returns what commits will survive.
        """
        boot, now = self._noted_boot(), self.files.boot_id()
        is_same_boot = bool(boot) and boot == now
        if boot is not None and not is_same_boot:
            log.warning("the machine restarted before everything was synced; rebuilding the index")
            self.files.remove_folder(self.index)
        elif is_same_boot and durability == "power":
            self.files.sync_all()
        if durability == "process":
            try:
                if not is_same_boot:  # noted already; written anew it could be lost, as the device may be full
                    self.files.write_note(self._note, now)
                return "process"
            except OSError as error:
                if not is_full(error):
                    raise
                log.warning("the device is too full to do without syncs; durability is power", error=str(error))
        self.all_synced()  # half a note would say that something is not synced
        return "power"

    def _noted_boot(self) -> str | None:
        """The boot in which blocks were last left unsynced; None when none were, "" when it is not known."""
        return self._note.read_text().strip() if self._note.exists() else None

    def all_synced(self) -> None:
        self.files.unlink(self._note)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


@dataclasses.dataclass(slots=True)
class Recovered:
    """What a data folder holds.

    Attributes:
        index: it agrees with the rest; None when there was no room to rebuild a lost one.
        next_segment: a number that was never used.
        durability: what commits survive from now on.
        rebuilt: the index was lost and made anew from the segments.
        lost_blocks: blocks that the index names and the segments do not hold.
        adopted_blocks: records that the index did not name.
    """

    index: Index | None
    catalogue: Catalogue
    next_segment: int
    durability: Durability
    rebuilt: bool
    lost_blocks: int = 0
    adopted_blocks: int = 0

    def close(self) -> None:
        if self.index is not None:
            self.index.close()


def recover(
    folder: DataFolder, durability: Durability, account: Account | None = None, map_bytes: int = MAP_BYTES
) -> Recovered:
    """Finds what is in the folder and makes index and files agree. ConfigError naming `data_dir`: it cannot be used."""
    with contextlib.ExitStack() as on_error:
        try:
            sizes = list_segments(folder.segments)
            durability = folder.settle(durability)
            open_index = functools.partial(Index, folder.files, folder.index, map_bytes, sync=durability == "power")
            index, image = _load(folder, open_index, is_first_start=not sizes)
            catalogue = Catalogue(image.formats, image.tenants, account)
            next_segment = max([0, *sizes, *image.segments]) + 1
            found = Recovered(index, catalogue, next_segment, durability, rebuilt=bool(sizes) and index is None)
            on_error.callback(found.close)
            adopted = _fill(found, folder, sizes, image)
            _tell(found, folder, _difference(found, image, adopted), open_index)
        except (OSError, lmdb.Error) as error:
            raise ConfigError("data_dir", f"{folder.path} cannot be used: {error}") from error
        on_error.pop_all()
    return found


def _load(
    folder: DataFolder, open_index: Callable[[], Index], *, is_first_start: bool
) -> tuple[Index | None, IndexImage]:
    """The index and what it holds; where it cannot be used, None and nothing, and what there is of it is deleted."""
    index = None
    try:
        index = open_index()
        return index, index.load()
    except (OSError, lmdb.Error, IndexLostError) as error:
        if index is not None:
            index.close()
        if not isinstance(error, IndexLostError) and not is_full(error):  # opening what is whole needs no room
            raise
        if not is_first_start:
            log.warning("rebuilding the index from the segments", reason=str(error))
    folder.files.remove_folder(folder.index)
    return None, IndexImage()


def _fill(found: Recovered, folder: DataFolder, sizes: Mapping[int, int], image: IndexImage) -> dict[Slot, bytes]:
    """Fills the catalogue, and makes the files agree with it; entries of what the index does not name."""
    catalogue, sync = found.catalogue, found.durability == "power"
    named = {number: min(size, sizes.get(number, 0)) for number, size in image.segments.items()}
    newer = {number: (named.get(number, 0), size) for number, size in sizes.items() if size > named.get(number, 0)}
    scanned = _scan(folder, newer, check=found.index is not None, sync=sync)
    entries, deleted_bytes = dict[Slot, bytes](), 0
    for number, size in sizes.items():
        segment = Segment(number, segment_path(folder.segments, number), named.get(number, 0))
        known = image.entries.get(number, b"") if segment.size else b""
        records = next(scanned) if number in newer else ()
        if records is not None:  # else it could not be read: another start may
            deleted_bytes += _trim(folder.files, segment, size, records)
        if segment.size:
            adopted = _pack(catalogue, records or ())
            catalogue.add(segment, known + adopted)
            if adopted:
                entries[number, len(known) // ENTRY.size] = adopted
    for number, slot in image.dropped:
        if number in catalogue.segments:
            catalogue.mark_dead(number, slot)
    found.adopted_blocks = sum(map(len, entries.values())) // ENTRY.size
    if newer and sync:
        folder.files.sync_folder(folder.segments)
    if newer and not found.rebuilt:
        log.warning(
            "segments hold more than the index names; intact records adopted, the rest deleted",
            segments=len(newer),
            adopted_blocks=found.adopted_blocks,
            deleted_bytes=deleted_bytes,
        )
    return entries


def _trim(files: Files, segment: Segment, size: int, records: Sequence[Found]) -> int:
    """Cuts a file of `size` bytes behind its last record, or deletes it when it has none; the bytes that went."""
    segment.size = records[-1].end if records else segment.size
    if not segment.size:
        files.unlink(segment.path)
    elif segment.size < size:
        files.truncate(segment.path, segment.size)
    return size - segment.size


def _difference(found: Recovered, image: IndexImage, adopted: Mapping[Slot, bytes]) -> IndexChange:
    """What the index must learn. Forgets blocks that it names and that the files do not hold any more."""
    catalogue = found.catalogue
    changed = [one for number, one in catalogue.segments.items() if one.size != image.segments.get(number)]
    gone = [number for number in image.segments if number not in catalogue.segments]
    lost = [
        (segment.number, slot)
        for segment in changed
        for slot in catalogue.live_slots(segment)
        if segment.offset(slot) + segment.nbytes(slot) > segment.size
    ]
    for number, slot in lost:
        catalogue.mark_dead(number, slot)
    blocks = found.lost_blocks = len(lost) + sum(len(image.entries.get(one, b"")) // ENTRY.size for one in gone)
    if lost or gone:
        log.warning("segments are missing or cut off; their blocks are dropped", blocks=blocks, segments=len(gone))
    sizes = {segment.number: segment.size for segment in changed}
    return IndexChange(gone, lost, adopted, sizes, catalogue.formats.change(), catalogue.tenants.change())


def _tell(found: Recovered, folder: DataFolder, change: IndexChange, open_index: Callable[[], Index]) -> None:
    """Tells the index in one transaction what it must learn; makes a lost one anew.

    A full device is no reason not to start: a new index is given up and its room with it, an old one stays as it is.
    """
    is_new, written = found.index is None, True
    try:
        if found.index is None:
            found.index = open_index()
        if is_new or change.segments or change.removed_segments:
            found.index.commit(change)
    except (OSError, lmdb.Error) as error:
        if not is_full(error) or (is_new and not found.rebuilt):
            raise
        if is_new:
            found.close()
            found.index = None
            folder.files.remove_folder(folder.index)
            log.error(
                "the device is too full for an index: all that the segments hold is served, but every start reads them "
                "anew; free some room and start again",
                path=str(folder.index),
                needed_bytes=len(found.catalogue) * ENTRY.size + _SPARE_BYTES,
                error=str(error),
            )
        else:
            written = False
            log.warning("the device is too full to update the index; the next start does", error=str(error))
    found.catalogue.formats.settle(written=written)
    found.catalogue.tenants.settle(written=written)


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
    formats, tenants = catalogue.formats, catalogue.tenants
    return b"".join(
        ENTRY.pack(key, at // ALIGN, kind.record_bytes // ALIGN, formats.id_of(kind.format), tenants.id_of(kind.tenant))
        for at, key, kind in found
    )
