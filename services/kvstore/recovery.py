"""Opening a data folder: lock it, and find out what it still holds.

Owns the folder's arrangement and everything that is done once at start: trust the index where it agrees with the
segment files, rebuild it from them where it is lost. Must not know of budgets or eviction. All of it blocks.

    DATA_DIR/lock          held by the one process that uses the folder
    DATA_DIR/index/        LMDB
    DATA_DIR/segments/     0000000000000001.seg, ...
"""

import dataclasses
import fcntl
import os
import pathlib

import lmdb

from moonpool.errors import ConfigError
from moonpool.kv.keys import BlockKey
from moonpool.telemetry.logs import get_logger
from services.kvstore.blocks import BlockFormat
from services.kvstore.index import Index, IndexChange, IndexImage, IndexLostError, Location, remove_index
from services.kvstore.segments import SegmentFile, list_segments, segment_path

_log = get_logger(__name__)

_BLOCKS_PER_TRANSACTION = 16384


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
        """Finds a read-only folder now rather than at the first write."""
        probe = self.segments / "probe"
        probe.write_bytes(b"")
        probe.unlink()

    def close(self) -> None:
        """Unlocks the folder; twice does no harm."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


@dataclasses.dataclass(slots=True)
class Recovered:
    """What a data folder holds.

    Attributes:
        index: the open index, which agrees with the rest.
        formats: format id -> format.
        segments: segment id -> committed bytes; the files are exactly these.
        blocks: key -> packed `Location`.
        next_segment: an id that was never used.
        rebuilt: the index was lost and made anew from the segments.
        lost_blocks: blocks that the index named and the segments do not hold.
    """

    index: Index
    formats: dict[int, BlockFormat]
    segments: dict[int, int]
    blocks: dict[BlockKey, bytes]
    next_segment: int
    rebuilt: bool = False
    lost_blocks: int = 0


def recover(folder: DataFolder, map_bytes: int = 64 << 20) -> Recovered:
    """Finds what is in the folder and makes index and files agree.

    Args:
        folder: the locked folder.
        map_bytes: size of the index's memory map to begin with.

    Raises:
        ConfigError: naming `data_dir`: the folder cannot be read or written.
    """
    try:
        files = list_segments(folder.segments)
        try:
            index = Index(folder.index, map_bytes)
            try:
                image = index.load()
            except BaseException:
                index.close()
                raise
        except IndexLostError as error:
            if files:
                _log.warning("rebuilding the index from the segments", reason=str(error), segments=len(files))
            remove_index(folder.index)
            return _rebuild(folder, Index(folder.index, map_bytes), files)
        try:
            return _reconcile(folder, index, image, files)
        except BaseException:
            index.close()
            raise
    except (OSError, lmdb.Error) as error:
        raise ConfigError("data_dir", f"{folder.path} cannot be used: {error}") from error


def _reconcile(folder: DataFolder, index: Index, image: IndexImage, files: dict[int, int]) -> Recovered:
    """Drops from the index what the files do not hold, and from the files what the index does not name."""
    ends = {number: min(size, files[number]) for number, size in image.segments.items() if number in files}
    for number, size in files.items():
        file = SegmentFile(segment_path(folder.segments, number))
        if number not in ends:  # never committed, or dropped just before the process ended
            file.delete()
        elif size > ends[number]:  # the tail was never committed
            file.truncate(ends[number])
            file.close()
    lost = [key for key, packed in image.blocks.items() if not _holds(ends, image.formats, packed)]
    for key in lost:
        del image.blocks[key]
    gone = image.segments.keys() - ends.keys()
    if lost or gone:
        _log.warning("segments are missing or cut off; their blocks are dropped", blocks=len(lost), segments=len(gone))
        index.commit(IndexChange(removed_blocks=lost, removed_segments=gone, segments=ends))
    return Recovered(
        index,
        image.formats,
        ends,
        image.blocks,
        next_segment=max([*files, *image.segments], default=0) + 1,
        lost_blocks=len(lost),
    )


def _holds(ends: dict[int, int], formats: dict[int, BlockFormat], packed: bytes) -> bool:
    location = Location.unpack(packed)
    return location.format in formats and location.offset + location.record_bytes <= ends.get(location.segment, 0)


def _rebuild(folder: DataFolder, index: Index, files: dict[int, int]) -> Recovered:
    """Makes a new index of all records found, later ones replacing earlier ones of the same key."""
    formats: dict[BlockFormat, int] = {}
    blocks: dict[BlockKey, bytes] = {}
    ends: dict[int, int] = {}
    try:
        for number in files:
            file = SegmentFile(segment_path(folder.segments, number))
            end = 0
            for offset, header in file.scan():
                form = formats.setdefault(header.info.format, len(formats) + 1)
                blocks[header.info.key] = Location(number, offset, header.record_bytes, form).pack()
                end = offset + header.record_bytes
            if end:
                file.truncate(end)
                file.close()
                ends[number] = end
            else:
                file.delete()
        by_number = {number: block_format for block_format, number in formats.items()}
        index.commit(IndexChange(segments=ends, formats=by_number))
        keys = list(blocks)
        for start in range(0, len(keys), _BLOCKS_PER_TRANSACTION):
            index.commit(
                IndexChange(blocks={key: blocks[key] for key in keys[start : start + _BLOCKS_PER_TRANSACTION]})
            )
        index.finish_rebuild()
    except BaseException:
        index.close()
        raise
    next_segment = max(files, default=0) + 1
    return Recovered(index, by_number, ends, blocks, next_segment, rebuilt=bool(files))
