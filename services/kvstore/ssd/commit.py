"""What the writer thread does for one plan: carry over, remove, append. Everything here blocks.

To keep blocks durable, records are written, segments synced, and then an index transaction names them. A file goes
after the transaction that forgets it; one for a new segment is renamed before. There is one transaction, or, where
something is carried over, two: the first carries and removes, so that its room is free, the second stores new blocks.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from moonpool.kv.blocks import DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.kv.writing import Buffer
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import ENTRY, Place, Row, Segment, Slot
from services.kvstore.ssd.files import Files
from services.kvstore.ssd.index import Index, IndexChange
from services.kvstore.ssd.reader import read_record
from services.kvstore.ssd.records import ALIGN, BadRecordError, move, pack_header

log = get_logger(__name__)

_ZEROS = bytes(ALIGN)


@dataclasses.dataclass(slots=True)
class Append:
    """One record to be written into `segment`: a new `block`, or the record at `source`, which is carried over."""

    segment: Segment
    row: Row
    block: DramBlock | None = None
    source: tuple[Segment, int] | None = None
    bad: bool = False  # what is at the source is not what was written

    @property
    def key(self) -> BlockKey:
        return self.row[0]

    @property
    def offset(self) -> int:
        return self.row[1] * ALIGN

    @property
    def end(self) -> int:
        return self.offset + self.row[2] * ALIGN

    def parts(self) -> tuple[Buffer, ...]:
        """The record of a new block."""
        assert self.block is not None
        data = memoryview(self.block.data)
        return pack_header(self.block.info, self.block.hashes, self.segment.number), data, bytes(-len(data) % ALIGN)


def ends(appends: Iterable[Append]) -> dict[Segment, int]:
    """Where the segments of appends end after them."""
    return {append.segment: append.end for append in appends}


def pack(appends: Iterable[Append]) -> dict[Segment, bytes]:
    """The entries of appends, by segment."""
    entries: dict[Segment, bytearray] = {}
    for append in appends:
        entries.setdefault(append.segment, bytearray()).extend(ENTRY.pack(*append.row))
    return {segment: bytes(packed) for segment, packed in entries.items()}


@dataclasses.dataclass(slots=True)
class Victim:
    """A segment that is reclaimed."""

    segment: Segment
    carried: list[int] = dataclasses.field(default_factory=list)  # slots of blocks that are written anew, oldest first
    carried_bytes: int = 0  # of their records
    removed: list[int] = dataclasses.field(default_factory=list)  # slots of blocks that are not here any more

    @property
    def freed_bytes(self) -> int:
        return self.segment.size - self.carried_bytes


@dataclasses.dataclass(slots=True)
class WritePlan:
    """One batch. Made by `SsdTier.plan`, done by `SsdTier.commit`, ended by `committed` or `failed`.

    `full`: segments without anything to carry are deleted first, since the index may need their room to forget them.
    """

    disk: int
    blocks: list[DramBlock]  # durable once the batch is committed
    rejected: list[DramBlock]  # find no room; not written
    given_up: list[BlockKey]  # older blocks of tenants at their quotas, for the new ones
    victims: list[Victim]
    forgotten: list[Segment]  # to be forgotten by the index; their files may be deleted already
    nameless: list[Segment]  # the index has forgotten them; their files could not be deleted
    dead: list[Slot]  # the index does not know that they are
    full: bool
    carry: list[Append]
    store: list[Append]
    reuse: dict[Segment, Segment]  # new segments that take over the files of reclaimed ones
    deleting: dict[Segment, Future[None]]  # files, in another thread: of earlier plans, and then of this one
    erase: list[Place]  # records to be overwritten
    tails: dict[Segment, int]  # files to be cut off at these ends of the segments
    cut: list[Segment] = dataclasses.field(default_factory=list)  # of these, what the device took
    unerased: list[Place] = dataclasses.field(default_factory=list)  # of these, what the device did not take
    erase_error: OSError | None = None  # why the device did not take something of both, the last reason
    cleared: bool = False  # first transaction committed: victims are forgotten, what was carried has its new place
    unreadable: Segment | None = None  # the plan failed for it
    lost: list[BlockKey] = dataclasses.field(default_factory=list)  # of bad records, once the plan has ended
    written_bytes: int = 0  # of records that count, once the plan has ended

    @property
    def removed(self) -> list[BlockKey]:
        return self.given_up + [victim.segment.keys[slot] for victim in self.victims for slot in victim.removed]

    @property
    def removed_segments(self) -> list[Segment]:
        return [*self.forgotten, *(victim.segment for victim in self.victims)]

    @property
    def idle(self) -> bool:
        """Whether committing it changes nothing."""
        erased = len(self.erase) > len(self.unerased)
        return not (self.carry or self.store or self.dead or erased or self.removed_segments)

    @property
    def carried(self) -> list[Append]:
        return [append for append in self.carry if not append.bad]


@dataclasses.dataclass(frozen=True, slots=True)
class Committer:
    """Does plans, one at a time. Changes nothing of the event loop's but the plan."""

    files: Files
    index: Index | None  # None when there was no room for one
    folder: Path
    sync: bool  # a commit survives a loss of power

    def run(self, plan: WritePlan) -> None:
        """Does a plan. On an error `plan.cleared` tells how far it came."""
        try:
            self._erase(plan)
            if plan.full:
                self._free(plan)
            for append in plan.carry:
                self._carry(append, plan)
            if plan.carry or not plan.store:
                self._commit(plan, plan.carried)
            self._take_over(plan.reuse)
            self._trim(plan)
            if plan.store:
                self._write(plan.store)
                self._commit(plan, plan.store)
        except BaseException:
            self._cut(plan)
            raise

    def _free(self, plan: WritePlan) -> None:
        """Deletes segments that have nothing to carry: a full device may have no room to forget them before."""
        wait(plan.deleting.values())
        for segment in (one for one in plan.removed_segments if not one.live):
            self.files.unlink(segment.path)

    def _erase(self, plan: WritePlan) -> None:
        """Overwrites records with zeros, on the device: no start finds them, with an index or without.

        A segment that the device does not take it for stays to be done, and keeps nothing else from being done.
        """
        by_segment: dict[Segment, list[Place]] = {}
        for place in plan.erase:
            by_segment.setdefault(place[0], []).append(place)
        for segment, places in by_segment.items():
            try:
                for _, slot in places:
                    self.files.write(segment.path, [_ZEROS] * segment.lengths[slot], segment.offset(slot))
                self.files.sync(segment.path)
            except OSError as error:
                plan.unerased += places
                plan.erase_error = error

    def _trim(self, plan: WritePlan) -> None:
        for segment, size in plan.tails.items():
            try:
                self.files.truncate(segment.path, size)
                plan.cut.append(segment)
            except OSError as error:  # it is tried again with the next plan
                plan.erase_error = error

    def _take_over(self, reuse: Mapping[Segment, Segment]) -> None:
        """Gives files to new segments before what they hold is overwritten; a start forgets what has no file."""
        for segment, old in reuse.items():
            self.files.rename(old.path, segment.path)
        if reuse and self.sync:
            self.files.sync_folder(self.folder)

    def _carry(self, append: Append, plan: WritePlan) -> None:
        """Copies one verified record, but not a bad one. When it cannot be read, another segment may do: EAGAIN."""
        assert append.source is not None
        segment, slot = append.source
        try:
            record = read_record(self.files, segment.path, append.key, segment.offset(slot), segment.nbytes(slot))
        except BadRecordError as error:
            log.warning("a stored block is bad", key=append.key.hex()[:16], error=str(error))
            append.bad = True
            return
        except OSError as error:
            plan.unreadable = segment
            raise OSError(errno.EAGAIN, f"a segment cannot be read: {error}", str(segment.path)) from error
        move(record, append.segment.number)
        self.files.write(append.segment.path, [record], append.offset)

    def _write(self, appends: Sequence[Append]) -> None:
        for segment, some in itertools.groupby(appends, lambda append: append.segment):
            written = list(some)
            self.files.write(segment.path, [part for one in written for part in one.parts()], written[0].offset)

    def _commit(self, plan: WritePlan, appends: Sequence[Append]) -> None:
        """Names what was appended; with the first transaction goes what is to go, and then its files."""
        sizes = ends(appends)
        if self.sync:
            for segment in sizes:
                self.files.sync(segment.path)
            if not all(segment.size or segment in plan.reuse for segment in sizes):
                self.files.sync_folder(self.folder)
        going = set() if plan.cleared else {segment.number for segment in plan.removed_segments}
        dropped = [] if plan.cleared else [slot for slot in plan.dead if slot[0] not in going]
        if self.index is not None and (appends or going or dropped):
            before = collections.Counter(append.segment for append in (plan.carried if plan.cleared else ()))
            entries = {(one.number, len(one.keys) + before[one]): packed for one, packed in pack(appends).items()}
            committed = {segment.number: size for segment, size in sizes.items()}
            kinds = {segment.number: segment.named for segment in sizes}
            self.index.commit(IndexChange(going, dropped, entries, committed, kinds))
        if not plan.cleared:
            plan.cleared = True
            self._delete(plan)

    def _delete(self, plan: WritePlan) -> None:
        """Begins to delete what the index has forgotten; that takes long where a device is told which blocks are free.

        A plan that deletes waits for those before it, so that no more than one plan's files are beyond the budget; so
        does one that stores nothing.
        """
        read = {victim.segment for victim in plan.victims if victim.carried}
        going = [one for one in (*plan.nameless, *plan.removed_segments) if one not in plan.reuse.values()]
        if going or not plan.store:
            wait(plan.deleting.values())
        for segment in going:
            unlink = partial(self.files.unlink, readable=segment in read or segment.readers > 0, durable=self.sync)
            plan.deleting[segment] = self.files.later(unlink, segment.path)

    def _cut(self, plan: WritePlan) -> None:
        """Takes back what was written behind the committed ends, as far as the device lets us."""
        committed = ends(plan.carried) if plan.cleared else {}
        for segment in ends((*plan.carry, *plan.store)):
            with contextlib.suppress(OSError):
                self.files.truncate(segment.path, committed.get(segment, segment.size))
