"""Opening a data folder: lock it, and find out what it still holds.

Owns the folder's arrangement and everything that is done once at start: trust the index where it agrees with the
segment files, have it made anew from them where it is lost (rebuild.py). Must not know of budgets or eviction. All of
it blocks.

    DATA_DIR/lock          held by the one process that uses the folder
    DATA_DIR/unsynced      holds the boot's id while blocks may not have reached the device (durability "process")
    DATA_DIR/index/        LMDB
    DATA_DIR/segments/     0000000000000001.seg, ...
"""

import dataclasses
import fcntl
import os
import pathlib

import lmdb

from moonpool.errors import ConfigError
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import ENTRY, Catalogue, Segment
from services.kvstore.ssd.commit import Durability
from services.kvstore.ssd.full_device import is_full, probe
from services.kvstore.ssd.index import Index, IndexChange, IndexImage, IndexLostError, remove_index
from services.kvstore.ssd.rebuild import rebuild
from services.kvstore.ssd.records import ALIGN
from services.kvstore.ssd.segments import SegmentFile, list_segments, segment_path, sync_folder

_log = get_logger(__name__)

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


class DataFolder:
    """A data folder that this process alone uses.

    Raises:
        ConfigError: naming `data_dir`: it cannot be made or written, or another process has it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.segments = path / "segments"
        self.index = path / "index"
        self._lock_fd = -1
        try:
            self.segments.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._probe()
        except BlockingIOError as error:
            self.close()
            raise ConfigError("data_dir", f"{path} is used by another process") from error
        except OSError as error:
            self.close()
            raise ConfigError("data_dir", f"{path} cannot be used: {error.strerror or error}") from error

    def _probe(self) -> None:
        """Finds a read-only folder now rather than at the first write. A full one is good for reading."""
        try:
            probe(self.segments, ALIGN)
        except OSError as error:
            if not is_full(error):
                raise
            _log.warning("the device is full", path=str(self.path))

    @property
    def _mark(self) -> pathlib.Path:
        return self.path / "unsynced"

    def unsynced(self) -> str | None:
        """The boot in which blocks were last left unsynced; None when none were, "" when it is not known."""
        try:
            return self._mark.read_text().strip()
        except FileNotFoundError:
            return None

    def leave_unsynced(self) -> None:
        """From now on blocks may not reach the device.

        Raises:
            OSError: that could not be noted.
        """
        if (boot := boot_id()) and self.unsynced() == boot:
            return  # written anew it could be lost: the device may be full
        with self._mark.open("w") as file:
            file.write(boot)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.path)

    def all_synced(self) -> None:
        """Everything has reached the device.

        Raises:
            OSError: that could not be noted.
        """
        self._mark.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlocks the folder; twice does no harm."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def boot_id() -> str:
    """Names this run of the machine; "" where it has no name."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclasses.dataclass(slots=True)
class Recovered:
    """What a data folder holds.

    Attributes:
        index: the open index, which agrees with the rest; a `NoIndex` when there was no room to make a lost one anew.
        catalogue: all segments and blocks; the files are exactly these.
        next_segment: an id that was never used.
        durability: what commits survive from now on.
        rebuilt: the index was lost and made anew from the segments.
        lost_blocks: blocks that the index named and the segments do not hold.
        unsynced: what a life before has left unsynced may still be so.
    """

    index: Index
    catalogue: Catalogue
    next_segment: int
    durability: Durability = "power"
    rebuilt: bool = False
    lost_blocks: int = 0
    unsynced: bool = False


def recover(folder: DataFolder, map_bytes: int = 64 << 20, *, durability: Durability = "power") -> Recovered:
    """Finds what is in the folder and makes index and files agree.

    Args:
        folder: the locked folder.
        map_bytes: size of the index's memory map to begin with.
        durability: what commits survive: "power", the loss of power; "process", the death of this process only.

    Raises:
        ConfigError: naming `data_dir`: the folder cannot be read or written.
    """
    try:
        files = list_segments(folder.segments)
        unsynced = _settle(folder, durability)
        if durability == "process":
            durability = _unsynced(folder)
        sync = durability == "power"
        try:
            index, image = _load(folder, map_bytes, sync=sync)
        except IndexLostError as error:
            if files:
                _log.warning("rebuilding the index from the segments", reason=str(error), segments=len(files))
            catalogue, index = rebuild(folder.segments, files, folder.index, map_bytes, sync=sync)
            recovered = Recovered(index, catalogue, max(files, default=0) + 1, rebuilt=bool(files))
        else:
            try:
                recovered = _reconcile(folder, index, image, files, direct=sync)
            except BaseException:
                index.close()
                raise
    except (OSError, lmdb.Error) as error:
        raise ConfigError("data_dir", f"{folder.path} cannot be used: {error}") from error
    recovered.durability, recovered.unsynced = durability, unsynced
    return recovered


def _settle(folder: DataFolder, durability: Durability) -> bool:
    """Deals with what a life without syncs has left: nothing of its index can be believed after a loss of power.

    Returns:
        Whether something may still be unsynced.
    """
    boot = folder.unsynced()
    if boot is None:
        return False
    if boot and boot == boot_id():
        if durability == "process":
            return True
        os.sync()
    else:
        _log.warning("the machine was restarted before everything was synced: the index is not believed")
        remove_index(folder.index)
    folder.all_synced()
    return False


def _unsynced(folder: DataFolder) -> Durability:
    """From now on blocks may not reach the device; where not even that can be noted, they must."""
    try:
        folder.leave_unsynced()
    except OSError as error:
        if not is_full(error):
            raise
        folder.all_synced()  # half a note would say that something is not
        _log.warning("the device is too full to do without syncs: durability is power", error=str(error))
        return "power"
    return "process"


def _load(folder: DataFolder, map_bytes: int, *, sync: bool) -> tuple[Index, IndexImage]:
    """The index and what it holds.

    Raises:
        IndexLostError: it is not usable.
        OSError, lmdb.Error: it cannot be read.
    """
    try:
        index = Index(folder.index, map_bytes, sync=sync)
    except (OSError, lmdb.Error) as error:
        if not is_full(error):  # opening what is whole needs no room
            raise
        raise IndexLostError(f"there is none: {error}") from error
    try:
        return index, index.load()
    except BaseException:
        index.close()
        raise


def _reconcile(
    folder: DataFolder, index: Index, image: IndexImage, files: dict[int, int], *, direct: bool
) -> Recovered:
    """Drops from the index what the files do not hold, and from the files what the index does not name."""
    ends = {number: min(size, files[number]) for number, size in image.segments.items() if number in files}
    for number, size in files.items():
        file = SegmentFile(segment_path(folder.segments, number))
        if number not in ends:  # never committed, or dropped just before the process ended
            file.delete()
        elif size > ends[number]:  # the tail was never committed
            file.truncate(ends[number])
            file.close()
    catalogue = Catalogue(image.formats, image.tenants)
    for number, end in ends.items():
        segment = Segment(number, SegmentFile(segment_path(folder.segments, number), direct=direct), end)
        catalogue.load(segment, image.entries.get(number, b""))
    for number, slot in image.dropped:
        if number in ends:
            catalogue.bury(number, slot)
    cut = [catalogue.segments[number] for number, end in ends.items() if end < image.segments[number]]
    lost = [
        (segment.number, slot)
        for segment in cut
        for slot in catalogue.live_slots(segment)
        if segment.offset(slot) + segment.nbytes(slot) > segment.size
    ]
    for number, slot in lost:
        catalogue.bury(number, slot)
    gone = image.segments.keys() - ends.keys()
    lost_blocks = len(lost) + sum(len(image.entries.get(number, b"")) // ENTRY.size for number in gone)
    if cut or gone:
        _log.warning(
            "segments are missing or cut off; their blocks are dropped", blocks=lost_blocks, segments=len(gone)
        )
        try:
            sizes = {segment.number: segment.size for segment in cut}
            index.commit(IndexChange(removed_segments=gone, dropped=lost, segments=sizes))
        except lmdb.Error as error:
            if not is_full(error):
                raise
            _log.warning("the device is too full to note that: the next start finds it again", error=str(error))
    return Recovered(index, catalogue, max([*files, *image.segments], default=0) + 1, lost_blocks=lost_blocks)
