"""What the writer thread does for one plan: carry over, remove, append.

Owns the order of steps that makes a block durable and keeps it so: records written, segments synced, then the index
transaction that names them; a file goes only after the transaction that forgets it and that names elsewhere what was
carried over from it. Must not know of the event loop's books: it reads what a plan tells it and writes down what
happened. All of it blocks.

Two transactions at most: the first carries and removes, so that its room is there, the second stores new blocks.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Literal

from moonpool.errors import MoonpoolError
from moonpool.kv.blocks import DramBlock
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import ENTRY, Row, Segment
from services.kvstore.ssd.index import Index, IndexChange, Slot
from services.kvstore.ssd.record_reader import read_record
from services.kvstore.ssd.records import ALIGN, pack_header
from services.kvstore.ssd.segments import sync_folder

_log = get_logger(__name__)

Durability = Literal["power", "process"]
"""What a block that was committed survives: a loss of power, or the death of this process only."""


WRITE_BYTES = 4 << 20
"""So much is written at once; the device begins with it while the next is being prepared."""


@dataclasses.dataclass(slots=True)
class Append:
    """One record to be written: `block`, or what lies in a `slot` of a segment that goes."""

    segment: Segment
    row: Row
    block: DramBlock | None = None
    source: tuple[Segment, int] | None = None

    @property
    def offset(self) -> int:
        """Where it goes, in bytes."""
        return self.row[1] * ALIGN

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.offset + self.row[2] * ALIGN


@dataclasses.dataclass(slots=True)
class Work:
    """One plan, and what became of it.

    Attributes:
        carry: records of segments that go, to be written anew.
        store: records of new blocks.
        dropped: slots that are dead from now on.
        removed: segments to forget and to delete.
        full: the device is full: what holds nothing is deleted first, since the index may need its room to forget it.
        nameless: segments that were forgotten before, and whose files could not be deleted then.
        names: formats and tenants that the index does not know yet, or need not know any more.
        named: the index has them.
        cleared: the first transaction was committed.
        lost: carried records that could not be read.
        undeleted: files that could not be deleted.
    """

    carry: list[Append] = dataclasses.field(default_factory=list)
    store: list[Append] = dataclasses.field(default_factory=list)
    dropped: list[Slot] = dataclasses.field(default_factory=list)
    removed: list[Segment] = dataclasses.field(default_factory=list)
    full: bool = False
    nameless: list[Segment] = dataclasses.field(default_factory=list)
    names: IndexChange = dataclasses.field(default_factory=IndexChange)
    named: bool = False
    cleared: bool = False
    lost: list[Append] = dataclasses.field(default_factory=list)
    undeleted: list[Segment] = dataclasses.field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether the plan gets nothing further."""
        return not (self.carry or self.store or self.dropped or self.removed)

    @property
    def carried(self) -> list[Append]:
        """What was carried over, once `cleared`."""
        lost = {id(append) for append in self.lost}
        return [append for append in self.carry if id(append) not in lost]


def ends(appends: Iterable[Append]) -> dict[Segment, int]:
    """Where the segments of appends end after them."""
    return {append.segment: append.end for append in appends}


class Committer:
    """Does plans, one at a time.

    Args:
        index: the durable index.
        folder: of the segment files.
        durability: what a commit survives.
    """

    def __init__(self, index: Index, folder: pathlib.Path, durability: Durability) -> None:
        self._index = index
        self._folder = folder
        self._sync = durability == "power"

    def run(self, work: Work) -> None:
        """Does a plan.

        Raises:
            OSError, lmdb.Error: it could not be done; `work.cleared` tells how far it came.
        """
        try:
            self._clear(work)
            if work.store:
                slots = {segment: len(segment.keys) for segment in ends(work.store)}
                for append in work.carried:
                    if append.segment in slots:
                        slots[append.segment] += 1
                self._commit(work, work.store, slots, IndexChange())
        except BaseException:
            self._cut(work)
            raise

    def _clear(self, work: Work) -> None:
        """The first transaction, and the files that go with it."""
        if work.full:
            for segment in work.removed:
                if not segment.live_bytes:
                    segment.file.unlink()
        if work.carry or work.removed or work.dropped:
            for append in work.carry:
                self._carry(append, work)
            carried = work.carried
            slots = {segment: len(segment.keys) for segment in ends(carried)}
            removals = IndexChange([segment.number for segment in work.removed], work.dropped)
            self._commit(work, carried, slots, removals)
        work.cleared = True
        for segment in (*work.nameless, *work.removed):
            try:
                segment.file.unlink()
            except OSError as error:
                _log.error("a segment could not be deleted", path=str(segment.file.path), error=str(error))
                work.undeleted.append(segment)

    def _carry(self, append: Append, work: Work) -> None:
        """Copies one verified record. One that cannot be read is lost; one that cannot be written fails the plan."""
        assert append.source is not None
        segment, slot = append.source
        try:
            segment.file.open_readers()
            record = read_record(segment.file, segment.keys[slot], segment.offset(slot), segment.nbytes(slot))
        except (MoonpoolError, OSError) as error:
            _log.warning("a stored block is bad", key=append.row[0].hex()[:16], error=str(error))
            work.lost.append(append)
            return
        self._append(append.segment, [record], append.offset, append.end)

    def _commit(self, work: Work, appends: list[Append], slots: dict[Segment, int], removals: IndexChange) -> None:
        """Writes new blocks, syncs, and names everything in the index.

        Args:
            work: for what the index does not know yet.
            appends: what is named; carried records are written already.
            slots: the first slot of them in each of their segments.
            removals: what the transaction forgets.
        """
        entries: dict[Segment, bytearray] = {segment: bytearray() for segment in slots}
        self._write([append for append in appends if append.block is not None])
        for append in appends:
            entries[append.segment] += ENTRY.pack(*append.row)
        sizes = ends(appends)
        if self._sync:
            self._make_durable(sizes)
        self._index.commit(
            dataclasses.replace(
                removals,
                entries={(segment.number, slots[segment]): bytes(packed) for segment, packed in entries.items()},
                segments={segment.number: size for segment, size in sizes.items()},
                formats=work.names.formats,
                tenants=work.names.tenants,
                unused_formats=work.names.unused_formats,
                unused_tenants=work.names.unused_tenants,
            )
        )
        work.named = True

    def _write(self, appends: list[Append]) -> None:
        """Writes new blocks, those that lie one behind the other together."""
        parts: list[bytes | memoryview] = []
        for number, append in enumerate(appends):
            if not parts:
                first = append
            assert append.block is not None
            parts += _record(append.block)
            after = appends[number + 1] if number + 1 < len(appends) else None
            if (
                after is None
                or (after.segment, after.offset) != (append.segment, append.end)
                or append.end - first.offset >= WRITE_BYTES
            ):
                self._append(append.segment, parts, first.offset, append.end)
                parts.clear()

    def _append(self, segment: Segment, parts: Sequence[bytes | bytearray | memoryview], start: int, end: int) -> None:
        segment.file.append(parts, start)
        if self._sync:
            segment.file.start_writeback(start, end - start)

    def _make_durable(self, sizes: dict[Segment, int]) -> None:
        for segment, size in sizes.items():
            segment.file.sync()
            segment.file.uncache(segment.size, size - segment.size)
        if any(not segment.size for segment in sizes):
            sync_folder(self._folder)

    def _cut(self, work: Work) -> None:
        """Takes back what was written behind the committed ends, as far as the device lets us."""
        committed = ends(work.carried) if work.cleared else {}
        for segment in ends((*work.carry, *work.store)):
            with contextlib.suppress(OSError):
                segment.file.truncate(committed.get(segment, segment.size))


def _record(block: DramBlock) -> list[bytes | memoryview]:
    data = memoryview(block.data)
    header = pack_header(block.info, block.hashes)
    padding = -len(data) % ALIGN
    return [header, data, bytes(padding)] if padding else [header, data]
