"""The segment log: where the next record goes, which segment is reclaimed, and what a commit writes.

Reclaimed oldest first, with a second chance: a block used since written is written anew once, into the newest segment;
at most half a segment is spared so. Blocks that are pinned, or that a guarantee covers, are always carried over.

A commit writes records, syncs segments, and then names them in an index transaction. A reclaimed segment's file goes
after the transaction that forgets the segment; the file of a new segment is renamed before.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from functools import partial
from pathlib import Path

from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.file_io import Buffer
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.ssd.encryption import EncryptionKey, RecordCipher
from moonpool.kvstore.ssd.files import ALIGN, FileLayer
from moonpool.kvstore.ssd.index import (
    ENTRY,
    MAX_SEGMENT_BYTES,
    Catalogue,
    DiskIndex,
    IndexChange,
    IndexEntry,
    RecordLocation,
    RowId,
    Segment,
)
from moonpool.kvstore.ssd.records import BadRecordError, pack_header, read_record, rewrite_record, segment_path

log = get_logger(__name__)
_ZEROS = bytes(ALIGN)


@dataclasses.dataclass(slots=True)
class Append:
    """One record to be written into `segment`: a new `block`, or the record at `source`, which is carried over."""

    segment: Segment
    entry: IndexEntry
    block: DramBlock | None = None
    encryption: EncryptionKey | None = None  # of the new block; None: stays in plaintext
    source: tuple[Segment, int] | None = None
    bad: bool = False  # what is at the source is not what was written

    @property
    def key(self) -> BlockKey:
        return self.entry[0]

    @property
    def offset(self) -> int:
        return self.entry[1] * ALIGN

    @property
    def end(self) -> int:
        return self.offset + self.entry[2] * ALIGN

    def parts(self) -> tuple[Buffer, ...]:
        """The record of a new block; an encrypted one is another one each time."""
        assert self.block is not None
        block, number = self.block, self.segment.number
        padding = bytes(-block.info.nbytes % ALIGN)
        if self.encryption is None:
            return pack_header(block.info, block.hashes, number), block.data, padding
        seal, slices = RecordCipher.new(self.encryption, block.info).seal(
            map(block.slice, range(len(block.hashes))), block.hashes
        )
        hashes = [bind(slice_hash(data), block.info.key, layer) for layer, data in enumerate(slices)]
        return pack_header(block.info, hashes, number, seal), *slices, padding


def segment_ends(appends: Iterable[Append]) -> dict[Segment, int]:
    """Where the segments of appends end after them."""
    return {append.segment: append.end for append in appends}


def pack_entries(appends: Iterable[Append]) -> dict[Segment, bytes]:
    """The entries of appends, by segment."""
    entries: dict[Segment, bytearray] = {}
    for append in appends:
        entries.setdefault(append.segment, bytearray()).extend(ENTRY.pack(*append.entry))
    return {segment: bytes(packed) for segment, packed in entries.items()}


@dataclasses.dataclass(slots=True)
class Victim:
    """A segment that is reclaimed."""

    segment: Segment
    carried: list[int] = dataclasses.field(default_factory=list)  # rows of blocks that are written anew, oldest first
    carried_bytes: int = 0  # of their records
    removed: list[int] = dataclasses.field(default_factory=list)  # rows of blocks that are not here any more

    @property
    def freed_bytes(self) -> int:
        return self.segment.size - self.carried_bytes


class PlanState(Enum):
    """How far a plan has come; `TRANSITIONS` has the changes that may happen."""

    PLANNED = "planned"
    """Made by `SsdTier.plan`; a thread may be writing what is carried over."""
    CLEARED = "cleared"
    """The first transaction was committed: victims are forgotten, and carried blocks have new places."""
    COMMITTED = "committed"
    """All blocks are durable."""
    FAILED = "failed"
    """None of the blocks is durable. What was cleared stays cleared."""


TRANSITIONS: Mapping[PlanState, frozenset[PlanState]] = {
    PlanState.PLANNED: frozenset({PlanState.CLEARED, PlanState.FAILED}),
    PlanState.CLEARED: frozenset({PlanState.COMMITTED, PlanState.FAILED}),
    PlanState.COMMITTED: frozenset(),
    PlanState.FAILED: frozenset(),
}
"""For each state the ones that may follow. A plan begins as PLANNED."""


@dataclasses.dataclass(slots=True)
class WritePlan:
    """One batch. Made by `SsdTier.plan`, done by `SsdTier.commit`, ended by `committed` or `failed`.

    `full`: segments without anything to carry are deleted first, since the index may need their room to forget them.
    """

    disk: int
    blocks: list[DramBlock]  # durable once the batch is committed
    rejected: list[DramBlock]  # find no room; not written
    given_up: list[BlockKey]  # over-quota tenants' older blocks, for the new blocks
    victims: list[Victim]
    forgotten: list[Segment]  # to be forgotten by the index; their files may be deleted already
    nameless: list[Segment]  # the index has forgotten them; their files could not be deleted
    dead: list[RowId]  # the index does not know that they are
    full: bool
    carry: list[Append]
    store: list[Append]
    reuse: dict[Segment, Segment]  # new segments that take over reclaimed segments' files
    deleting: dict[Segment, Future[None]]  # files, in another thread: earlier plans', and then this plan's
    erase: list[RecordLocation]  # records to be overwritten
    tails: dict[Segment, int]  # files to be cut off at these ends of the segments
    check_index: bool = False
    cut: list[Segment] = dataclasses.field(default_factory=list)  # of these, what the device took
    unerased: list[RecordLocation] = dataclasses.field(default_factory=list)  # of these, what the device did not take
    erase_error: OSError | None = None  # why the device did not take something of both, the last reason
    state: PlanState = PlanState.PLANNED  # changes by `move` only
    unreadable: Segment | None = None  # the segment that failed the plan
    lost: list[BlockKey] = dataclasses.field(default_factory=list)  # of bad records, once the plan has ended
    written_bytes: int = 0  # of records that count, once the plan has ended
    indexed: list[IndexChange] = dataclasses.field(default_factory=list)  # what the index was told

    def move(self, state: PlanState) -> None:
        """Changes the state, along `TRANSITIONS` only."""
        assert state in TRANSITIONS[self.state], f"a plan cannot go from {self.state} to {state}"
        self.state = state

    @property
    def cleared(self) -> bool:
        """Whether the first transaction was committed, of a plan that has not ended."""
        return self.state is PlanState.CLEARED

    @property
    def removed(self) -> list[BlockKey]:
        return self.given_up + [victim.segment.keys[row] for victim in self.victims for row in victim.removed]

    @property
    def removed_segments(self) -> list[Segment]:
        return [*self.forgotten, *(victim.segment for victim in self.victims)]

    @property
    def erases(self) -> bool:
        """Whether deleted blocks must be gone from the device with the plan."""
        return bool(self.erase or self.tails or self.forgotten or self.nameless)

    @property
    def idle(self) -> bool:
        """Whether committing the plan changes nothing."""
        erased = len(self.erase) > len(self.unerased)
        return not (self.carry or self.store or self.dead or erased or self.removed_segments)

    @property
    def carried(self) -> list[Append]:
        return [append for append in self.carry if not append.bad]


@dataclasses.dataclass(frozen=True, slots=True)
class Committer:
    """Does plans, one at a time. On the event loop's side, a committer changes only the plan."""

    files: FileLayer
    index: DiskIndex
    folder: Path
    sync: bool  # a commit survives a loss of power

    def run(self, plan: WritePlan) -> None:
        """Does a plan. On an error `plan.state` tells how far the plan came."""
        try:
            if plan.check_index:
                self.index.check()
            self._erase(plan)
            if plan.erases and not self.sync:  # a lost power would bring back files that older copies were in
                wait(plan.deleting.values())
                self.files.sync_all()
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

        If the device refuses this for a segment, the segment stays on the list and delays no other work.
        """
        by_segment: dict[Segment, list[RecordLocation]] = {}
        for place in plan.erase:
            by_segment.setdefault(place[0], []).append(place)
        for segment, places in by_segment.items():
            try:
                for _, row in places:
                    self.files.write(segment.path, [_ZEROS] * segment.lengths[row], segment.offset(row))
                self.files.sync(segment.path)
            except OSError as error:
                plan.unerased += places
                plan.erase_error = error

    def _trim(self, plan: WritePlan) -> None:
        for segment, size in plan.tails.items():
            try:
                self.files.truncate(segment.path, size)
                plan.cut.append(segment)
            except OSError as error:  # tried again with the next plan
                plan.erase_error = error

    def _take_over(self, reuse: Mapping[Segment, Segment]) -> None:
        """Gives files to new segments before what they hold is overwritten; a start forgets what has no file."""
        for segment, old in reuse.items():
            self.files.rename(old.path, segment.path)
        if reuse and self.sync:
            self.files.sync_folder(self.folder)

    def _carry(self, append: Append, plan: WritePlan) -> None:
        """Copies one verified record, but not a bad record.

        If the record cannot be read, another segment may do: EAGAIN.
        """
        assert append.source is not None
        segment, row = append.source
        try:
            record = read_record(self.files, segment.path, append.key, segment.offset(row), segment.nbytes(row))
        except BadRecordError as error:
            log.warning("a stored block is bad", key=append.key.hex()[:16], error=str(error))
            append.bad = True
            return
        except OSError as error:
            plan.unreadable = segment
            raise OSError(errno.EAGAIN, f"a segment cannot be read: {error}", str(segment.path)) from error
        rewrite_record(record, append.segment.number)
        self.files.write(append.segment.path, [record], append.offset)

    def _write(self, appends: Sequence[Append]) -> None:
        for segment, some in itertools.groupby(appends, lambda append: append.segment):
            written = list(some)
            self.files.write(segment.path, [part for one in written for part in one.parts()], written[0].offset)

    def _commit(self, plan: WritePlan, appends: Sequence[Append]) -> None:
        """Names what was appended; the first transaction carries the removals, then their files go."""
        sizes = segment_ends(appends)
        if self.sync:
            for segment in sizes:
                self.files.sync(segment.path)
            if not all(segment.size or segment in plan.reuse for segment in sizes):
                self.files.sync_folder(self.folder)
        going = set() if plan.cleared else {segment.number for segment in plan.removed_segments}
        dropped = [] if plan.cleared else [row for row in plan.dead if row[0] not in going]
        if appends or going or dropped:
            before = collections.Counter(append.segment for append in (plan.carried if plan.cleared else ()))
            entries = {
                (one.number, len(one.keys) + before[one]): packed for one, packed in pack_entries(appends).items()
            }
            committed = {segment.number: size for segment, size in sizes.items()}
            kinds = {segment.number: segment.named for segment in sizes}
            change = IndexChange(going, dropped, entries, committed, kinds)
            self.index.commit(change, plan.indexed)
            plan.indexed.append(change)
        if not plan.cleared:
            plan.move(PlanState.CLEARED)
            self._delete(plan)

    def _delete(self, plan: WritePlan) -> None:
        """Begins to delete what the index has forgotten; that takes long where a device is told which blocks are free.

        A deleting plan waits for earlier deletions, so that at most one plan's files are beyond the budget; so does a
        plan that stores nothing.
        """
        read = {victim.segment for victim in plan.victims if victim.carried}
        going = [one for one in (*plan.nameless, *plan.removed_segments) if one not in plan.reuse.values()]
        if going or not plan.store:
            wait(plan.deleting.values())
        for segment in going:
            readable, durable = segment in read or segment.readers > 0, self.sync or plan.erases
            unlink = partial(self.files.unlink, readable=readable, durable=durable)
            plan.deleting[segment] = self.files.later(unlink, segment.path)

    def _cut(self, plan: WritePlan) -> None:
        """Takes back what was written behind the committed ends, as far as the device lets us."""
        committed = segment_ends(plan.carried) if plan.cleared else {}
        for segment in segment_ends((*plan.carry, *plan.store)):
            with contextlib.suppress(OSError):
                self.files.truncate(segment.path, committed.get(segment, segment.size))


MIN_SEGMENTS = 8  # from this many on, the budget leaves room for carried records before the old file is deleted
MAX_VICTIMS = 16  # per plan, unless more pay: a store full of kept blocks must not be rewritten for one
SPARED_DIVISOR = 2  # at most this fraction of what could become free is carried over for recent use
LOOK_AT = 8  # segments asked about per choice, once a removable segment was found
MAX_LOOKED_AT = 64  # the same, while there was none
ASK_AGAIN = 64  # plans in which a segment is passed over after too much had to stay: asking walks all its blocks


@dataclasses.dataclass(eq=False)
class SegmentSpace:
    """Room for records on one disk, together at most `capacity_bytes`. Used while a plan is made."""

    catalogue: Catalogue
    disk: int
    folder: Path
    capacity_bytes: int
    segment_bytes: int
    next_segment: int
    pins: Container[BlockKey]
    active: Segment | None = None  # is appended to; a file of an earlier life never is
    used_bytes: int = 0  # of all segments, live or dead, as they will be after the plan under way
    _thin: list[int] = dataclasses.field(default_factory=list)
    _plans: int = 0

    def __post_init__(self) -> None:
        roomy = self.capacity_bytes >= MIN_SEGMENTS * self.segment_bytes
        self._reserve = self.segment_bytes // 2 if roomy else 0
        self.segment_bytes = min(self.segment_bytes, MAX_SEGMENT_BYTES // 2)
        self._full_at = self.capacity_bytes  # the device has no room for more, as far as is known
        self.recount()

    @property
    def segments(self) -> list[Segment]:
        """All of this disk, oldest first."""
        return [segment for segment in self.catalogue.segments.values() if segment.disk == self.disk]

    def recount(self, *, full: bool = False) -> None:
        """A plan has ended; the plan found the device `full`, or not."""
        self._plans += 1
        self.used_bytes = sum(max(segment.size, segment.room) for segment in self.segments)
        if full or self.used_bytes > self._full_at:
            self._full_at = self.used_bytes if full else self.capacity_bytes

    @property
    def has_work(self) -> bool:
        return bool(self._thin) or self.used_bytes > self.capacity_bytes

    @property
    def tails(self) -> list[Segment]:
        """Segments without further appends whose files still hold older segments' bytes."""
        return [segment for segment in self.segments if segment.room > segment.size and segment is not self.active]

    @property
    def turn(self) -> tuple[int, int]:
        """Orders disks: the disk with most room, in segments, comes first, else the disk with fewest plans so far."""
        return (self.used_bytes - min(self._full_at, self.capacity_bytes)) // self.segment_bytes, self._plans

    def compact(self, min_live_share: float) -> int:
        """Has the next plans rewrite segments with a live share below this part of a full segment; how many."""
        self._thin = [
            segment.id
            for segment in self.segments
            if segment is not self.active
            and segment.live.total_bytes < min_live_share * max(segment.size, self.segment_bytes)
        ]
        return len(self._thin)

    def rewrite(self, segments: Iterable[Segment]) -> None:
        """Has the next plans rewrite some segments, which goes with the end of their files."""
        for segment in dict.fromkeys(segments):
            if segment is self.active:
                self.active = None
            if segment.id not in self._thin:
                self._thin.append(segment.id)

    def make_room(self, nbytes: int, victims: list[Victim]) -> bool:
        """Reclaims segments until so many bytes fit; False when they cannot. Adds to `victims`."""
        limit = self.capacity_bytes - self._reserve
        if nbytes > limit:
            return False
        while (incoming := self._with(nbytes)) > limit and _may_take_more(nbytes, victims):
            spare = self.capacity_bytes - incoming + nbytes - sum(victim.segment.size for victim in victims)
            if not self._reclaim(victims, max(0, spare), cheaply=incoming <= self.capacity_bytes):
                break
        return self._with(nbytes) <= self.capacity_bytes

    def _with(self, nbytes: int) -> int:
        """Bytes of all files with so many more in them; the active one may have room for some."""
        room = 0 if self.active is None else max(0, self.active.room - self.active.size)
        return self.used_bytes + max(0, nbytes - room)

    def give_up(self, nbytes: int, victims: list[Victim]) -> None:
        """Reclaims at least one segment, and enough to free `nbytes`, whatever the budget."""
        while len(victims) < MAX_VICTIMS and self._reclaim(victims, 0):
            if sum(victim.freed_bytes for victim in victims) >= nbytes:
                break

    def compact_one(self, victims: list[Victim]) -> None:
        """Has the next thin segment rewritten, with all live records inside."""
        while self._thin and not victims:
            segment = self.catalogue.segments.get(self._thin.pop(0))
            if segment is not None and segment is not self.active and not segment.going and not segment.readers:
                victims.append(self._take(segment, range(len(segment.keys))))

    def pass_over(self, segment: Segment) -> None:
        """A segment cannot be read: others are reclaimed for a while."""
        segment.kept_share, segment.asked_at = 1.0, self._plans

    def _reclaim(self, victims: list[Victim], spare_bytes: int, *, cheaply: bool = False) -> bool:
        """Empties the next segment without readers into `victims`; False if there is none. The active one comes last.

        At most `spare_bytes` are carried over for having been used; `cheaply`: not if most must be carried over.
        """
        idle = [one for one in self.segments if not one.readers and not one.going and one.size]
        segment = self._choose(one for one in idle if one is not self.active)
        if segment is None and self.active in idle:
            segment = self._choose([self.active])
        if segment is None or (cheaply and segment.kept_share > 0.5):
            return False
        free_bytes = round(segment.size * (1 - segment.kept_share))
        victims.append(self._take(segment, self._spared(segment, min(spare_bytes, free_bytes // SPARED_DIVISOR))))
        return True

    def _choose(self, segments: Iterable[Segment]) -> Segment | None:
        """The first among `segments` (oldest first, none empty) from which at least half would become free.

        Failing that, among the first few the segment that would free most; None if no segment would. A segment is asked
        about once in `ASK_AGAIN` plans, but always before removal: `kept_share` is up to date.
        """
        best: Segment | None = None
        looked = 0
        for segment in segments:
            if self._plans - segment.asked_at >= ASK_AGAIN:
                if looked >= (MAX_LOOKED_AT if best is None else LOOK_AT):
                    break
                looked += 1
                self._ask(segment)
            if segment.asked_at != self._plans and segment.kept_share <= 0.5:
                self._ask(segment)
            if segment.kept_share <= 0.5:
                return segment
            if segment.kept_share < (1 if best is None else best.kept_share):
                best = segment
        if best is not None:
            self._ask(best)
        return best if best is not None and best.kept_share < 1 else None

    def _ask(self, segment: Segment) -> None:
        rows = self.catalogue.live_rows(segment)
        kept_bytes = sum(segment.nbytes(row) for row in rows if self._is_kept(segment, row))
        segment.kept_share = kept_bytes / segment.size
        segment.asked_at = self._plans

    def _is_kept(self, segment: Segment, row: int) -> bool:
        tenant = segment.kind(row).tenant
        return segment.keys[row] in self.pins or self.catalogue.account.guards(tenant, segment.nbytes(row))

    def _take(self, segment: Segment, spared: Container[int]) -> Victim:
        """Carries the blocks that must stay and `spared` rows, which keep their place for now; forgets the others.

        One after the other, so that a tenant's guarantee holds for all together.
        """
        victim = Victim(segment)
        for row in self.catalogue.live_rows(segment):
            if row in spared or self._is_kept(segment, row):
                victim.carried.append(row)
                victim.carried_bytes += segment.nbytes(row)
            else:
                self.catalogue.forget(segment.keys[row])
                victim.removed.append(row)
        segment.going = True
        if segment is self.active:
            self.active = None
        self.used_bytes -= victim.freed_bytes
        return victim

    def _spared(self, segment: Segment, nbytes: int) -> set[int]:
        """Rows with used blocks, the youngest, together at most `nbytes`."""
        spared: set[int] = set()
        if not nbytes or 1 not in segment.used:
            return spared
        for row in range(len(segment.keys) - 1, -1, -1):
            if segment.used[row] and self.catalogue.is_live(segment, row):
                nbytes -= segment.nbytes(row)
                if nbytes < 0:
                    break
                spared.add(row)
        return spared

    def reusable(self, victims: Iterable[Victim], doomed: Container[Segment]) -> list[Segment]:
        """Segments whose files new segments may take over: without readers, and with distinguishable records.

        Much smaller segments are left out, as each generation would make more of them. Segments with records to be
        overwritten are left out: if the device does not overwrite a record, the file must go.
        """
        most = self.segment_bytes
        found = [one.segment for one in victims if not one.carried and one.segment not in doomed]
        return [one for one in found if one.overwritable and most <= 2 * one.size <= 2 * most and one.room <= one.size]

    def place(
        self, length: int, sizes: dict[Segment, int], free: list[Segment], reuse: dict[Segment, Segment]
    ) -> tuple[Segment, int]:
        """A segment with room for a record, and the place inside (in units of `ALIGN`); `sizes` are the ends so far.

        A new segment takes over a `free` segment's file, as `reuse` then says; while free segments are there, no
        segment grows beyond its file.
        """
        segment = self.active
        start = sizes.get(segment, segment.size) if segment is not None else 0
        if segment is None or (start and start + length * ALIGN > (segment.room if free else self.segment_bytes)):
            path, start = segment_path(self.folder, self.next_segment), 0
            segment = self.active = Segment(self.next_segment, path, disk=self.disk, overwritable=True)
            self.next_segment += 1
            self.catalogue.segments[segment.id] = segment
            if free:
                old = reuse[segment] = free.pop(0)
                segment.room = old.size
        sizes[segment] = start + length * ALIGN
        return segment, start // ALIGN


def _may_take_more(nbytes: int, victims: Sequence[Victim]) -> bool:
    """Whether a plan may reclaim another segment: beyond the first few only for new records, while it pays."""
    freed = sum(victim.freed_bytes for victim in victims)
    carried = sum(victim.carried_bytes for victim in victims)
    return len(victims) < MAX_VICTIMS or carried <= freed < nbytes
