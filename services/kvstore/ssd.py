"""The SSD tier: blocks as records in segment files, found through an index that LMDB keeps.

Owns which record holds which block, the budget of bytes, and the order of steps that makes a block durable: record
written, segment synced, then the index transaction that names it. Room is made by whole segments, oldest first: their
keys leave the index in one transaction, then the file goes. Must not know of DRAM, sessions, events or asyncio.

Threads: see backend.py. Between `plan` and `committed`/`failed` the segment files and the index are the writer
thread's; everything else here belongs to the event loop.
"""

import contextlib
import dataclasses
import errno
from collections.abc import Iterator, Sequence

from moonpool.kv.keys import BlockKey
from services.kvstore.backend import BlockReader, WritePlan
from services.kvstore.blocks import BlockFormat, DramBlock
from services.kvstore.index import Index, IndexChange, Location
from services.kvstore.record_reader import Segment, SsdReader
from services.kvstore.records import ALIGN, pack_header, record_size
from services.kvstore.recovery import DataFolder, Recovered
from services.kvstore.segments import SegmentFile, segment_path, sync_folder


@dataclasses.dataclass(slots=True)
class _Append:
    """Where one block of a plan goes."""

    segment: Segment
    offset: int
    block: DramBlock


@dataclasses.dataclass(slots=True)
class _Work:
    """What the writer thread does for one plan."""

    appends: list[_Append]
    forgotten: list[BlockKey]
    dropped: list[Segment]
    change: IndexChange
    removals_done: bool = False


class SsdTier:
    """A `Backend` over segment files and LMDB.

    Args:
        folder: the locked data folder.
        recovered: what it held when it was opened.
        capacity_bytes: budget for the segment files together.
        segment_bytes: size at which a segment is closed and the next begun; a larger record gets one of its own.
    """

    def __init__(self, folder: DataFolder, recovered: Recovered, capacity_bytes: int, segment_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self._folder = folder
        self._index: Index = recovered.index
        self._formats = dict(recovered.formats)
        self._format_ids = {block_format: number for number, block_format in self._formats.items()}
        self._locations = recovered.blocks
        self._segments = {
            number: Segment(number, SegmentFile(segment_path(folder.segments, number)), size)
            for number, size in sorted(recovered.segments.items())
        }
        for key, packed in self._locations.items():
            self._segments[Location.unpack(packed).segment].keys.append(key)
        self._next_segment = recovered.next_segment
        self._active: Segment | None = None  # a file of an earlier life is never appended to
        self._forgotten: list[BlockKey] = []
        self._doomed: list[Segment] = []
        self._device_full = False
        self.used_bytes = sum(segment.size for segment in self._segments.values())
        self.written_bytes = 0
        self.dropped_segments = 0

    def __contains__(self, key: object) -> bool:
        return key in self._locations

    def __len__(self) -> int:
        return len(self._locations)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._locations)

    @property
    def readers(self) -> int:
        """Blocks that are being read, of segments that are to go too."""
        return sum(segment.readers for segment in (*self._segments.values(), *self._doomed))

    @property
    def segments(self) -> int:
        """Number of segment files."""
        return len(self._segments)

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        """The block's format; None when it is not here."""
        packed = self._locations.get(key)
        return None if packed is None else self._formats[Location.unpack(packed).format]

    def reader(self, key: BlockKey) -> SsdReader:
        """Begins reading a block that is here."""
        location = Location.unpack(self._locations[key])
        return SsdReader(self._segments[location.segment], key, self._formats[location.format], location.offset)

    def drop(self, reader: BlockReader) -> bool:
        """Forgets the record of `reader`; False when the block lies elsewhere by now."""
        assert isinstance(reader, SsdReader)
        packed = self._locations.get(reader.key)
        if packed is None:
            return False
        location = Location.unpack(packed)
        if (location.segment, location.offset) != (reader.segment.number, reader.offset):
            return False
        del self._locations[reader.key]
        self._forgotten.append(reader.key)
        return True

    @property
    def has_housekeeping(self) -> bool:
        """Whether keys or segments wait to be forgotten on disk, or the tier is over its budget."""
        return bool(self._forgotten or self._doomed) or self.used_bytes > self.capacity_bytes

    def plan(self, blocks: Sequence[DramBlock]) -> WritePlan:
        """Places blocks into segments, oldest segments making room for them."""
        removed: list[BlockKey] = []
        if self._device_full:
            self._device_full = False
            self._drop_oldest(removed)
        taken, rejected, room_taken = [], [], 0
        for block in blocks:
            assert block.info.key not in self._locations
            size = record_size(block.info)
            if self._make_room(room_taken + size, removed):
                taken.append(block)
                room_taken += size
            else:
                rejected.append(block)
        if not blocks:
            self._make_room(0, removed)
        work = self._place(taken)
        self.used_bytes += room_taken
        return WritePlan(taken, rejected, removed, work)

    def _make_room(self, nbytes: int, removed: list[BlockKey]) -> bool:
        while self.used_bytes + nbytes > self.capacity_bytes:
            if nbytes > self.capacity_bytes or not self._drop_oldest(removed):
                return False
        return True

    def _drop_oldest(self, removed: list[BlockKey]) -> bool:
        """Takes the oldest segment that nobody reads or appends to out of the books; False if there is none."""
        for segment in self._segments.values():
            if not segment.readers and segment is not self._active:
                break
        else:
            if self._active is None or self._active.readers:
                return False
            segment, self._active = self._active, None
        del self._segments[segment.number]
        for key in segment.keys:
            packed = self._locations.get(key)
            if packed is not None and Location.unpack(packed).segment == segment.number:
                del self._locations[key]
                removed.append(key)
                self._forgotten.append(key)
        segment.keys.clear()
        self.used_bytes -= segment.size
        self._doomed.append(segment)
        self.dropped_segments += 1
        return True

    def _place(self, blocks: Sequence[DramBlock]) -> _Work:
        """Gives every block its place. Sizes of segments change only when the plan is committed."""
        appends: list[_Append] = []
        locations: dict[BlockKey, bytes] = {}
        sizes: dict[int, int] = {}
        formats: dict[int, BlockFormat] = {}
        for block in blocks:
            size = record_size(block.info)
            segment = self._active
            if segment is not None:
                end = sizes.get(segment.number, segment.size)
                if end and end + size > self.segment_bytes:
                    segment = None
            if segment is None:
                segment = self._new_segment()
            offset = sizes.get(segment.number, segment.size)
            sizes[segment.number] = offset + size
            number = self._format_id(block.info.format)
            formats[number] = block.info.format
            locations[block.info.key] = Location(segment.number, offset, size, number).pack()
            appends.append(_Append(segment, offset, block))
        change = IndexChange(blocks=locations, segments=sizes, formats=formats)
        return _Work(appends, list(self._forgotten), list(self._doomed), change)

    def _new_segment(self) -> Segment:
        number = self._next_segment
        self._next_segment += 1
        self._active = Segment(number, SegmentFile(segment_path(self._folder.segments, number)))
        self._segments[number] = self._active
        return self._active

    def _format_id(self, block_format: BlockFormat) -> int:
        number = self._format_ids.get(block_format)
        if number is None:
            number = max(self._formats, default=0) + 1
            self._format_ids[block_format] = number
            self._formats[number] = block_format
        return number

    def commit(self, plan: WritePlan) -> None:
        """Blocking, in the writer thread: removals first, so that their room is there; then data, sync, index."""
        work: _Work = plan.work
        self._commit_removals(work)
        if not work.appends:
            return
        try:
            self._commit_blocks(work)
        except BaseException:
            for segment in {append.segment.number: append.segment for append in work.appends}.values():
                with contextlib.suppress(OSError):
                    segment.file.truncate(segment.size)
            raise

    def _commit_removals(self, work: _Work) -> None:
        if work.forgotten or work.dropped:
            self._index.commit(
                IndexChange(
                    removed_blocks=work.forgotten, removed_segments=[segment.number for segment in work.dropped]
                )
            )
            for segment in work.dropped:
                segment.file.delete()
            work.removals_done = True

    def _commit_blocks(self, work: _Work) -> None:
        touched = {}
        for append in work.appends:
            info = append.block.info
            slices = [append.block.slice(layer) for layer in range(info.format.layout.layers)]
            padding = bytes(-info.nbytes % ALIGN)
            append.segment.file.append([pack_header(info, slices), append.block.data, padding], append.offset)
            touched[append.segment.number] = append.segment
        for segment in touched.values():
            segment.file.sync()
        if any(not segment.size for segment in touched.values()):
            sync_folder(self._folder.segments)
        self._index.commit(work.change)

    def committed(self, plan: WritePlan) -> None:
        """The plan's blocks are here from now on."""
        work: _Work = plan.work
        self._removals_done(work)
        for append in work.appends:
            append.segment.keys.append(append.block.info.key)
        for number, size in work.change.segments.items():
            segment = self._segments[number]
            self.written_bytes += size - segment.size
            segment.size = size
        self._locations.update((BlockKey(key), packed) for key, packed in work.change.blocks.items())

    def failed(self, plan: WritePlan, error: BaseException) -> None:
        """Nothing was stored. What may have been written lies behind the committed end and is never named.

        A full device gives up its oldest segment, as if the budget were smaller.
        """
        work: _Work = plan.work
        if work.removals_done:
            self._removals_done(work)
        for number, size in work.change.segments.items():
            segment = self._segments[number]
            self.used_bytes -= size - segment.size
            if not segment.size:
                del self._segments[number]
                self._doomed.append(segment)
        self._active = None
        self._device_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)

    def _removals_done(self, work: _Work) -> None:
        del self._forgotten[: len(work.forgotten)]
        del self._doomed[: len(work.dropped)]

    def close(self) -> None:
        """Blocking. Closes all files and unlocks the folder."""
        for segment in (*self._segments.values(), *self._doomed):
            segment.file.close()
        self._index.close()
        self._folder.close()

    def check_invariants(self) -> None:
        """Every location lies inside its segment, and the bytes add up. Only between plans."""
        assert self.used_bytes == sum(segment.size for segment in self._segments.values())
        assert all(segment.readers >= 0 for segment in self._segments.values())
        for key, packed in self._locations.items():
            location = Location.unpack(packed)
            segment = self._segments[location.segment]
            assert location.offset + location.record_bytes <= segment.size
            assert key in segment.keys
            assert location.format in self._formats
