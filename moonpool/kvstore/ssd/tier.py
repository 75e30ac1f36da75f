"""The SSD tier: blocks as records in segment files, found through an index that LMDB keeps.

Methods belong to the event loop, are quick and touch no device, but for those that say they block. Between `plan` and
`committed` or `failed` a disk's segment files and index are a writer thread's (moonpool/kvstore/write_behind.py). A
reclaimed segment stays readable until the plan is done: until then, carried blocks have their place there.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import lmdb

from moonpool.base.errors import ConfigError
from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.keys import BlockKey
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.eviction.tenants import TenantAccount
from moonpool.kvstore.ssd.admission import SsdAdmission
from moonpool.kvstore.ssd.catalogue import Catalogue, RecordLocation
from moonpool.kvstore.ssd.committer import Committer
from moonpool.kvstore.ssd.data_folder import DataFolder, Durability
from moonpool.kvstore.ssd.encryption import Keyring
from moonpool.kvstore.ssd.files import ALIGN, MAX_OPEN, FileLayer, is_full
from moonpool.kvstore.ssd.index import MAP_BYTES
from moonpool.kvstore.ssd.reader import SsdReader
from moonpool.kvstore.ssd.records import record_size, resembles_records
from moonpool.kvstore.ssd.recovery import Recovery
from moonpool.kvstore.ssd.segment import RecordKind, RowId, Segment
from moonpool.kvstore.ssd.segment_files import list_segments
from moonpool.kvstore.ssd.segment_space import SegmentSpace
from moonpool.kvstore.ssd.write_plan import Append, PlanState, Victim, WritePlan, pack_entries, segment_ends

log = get_logger(__name__)


@dataclasses.dataclass(eq=False)
class Disk:
    """One of the tier's data folders: room, and what the next plan tells the index or the device."""

    folder: DataFolder
    space: SegmentSpace
    committer: Committer
    out: bool = False  # failed: no block is found there, and no block is written
    full: bool = False  # found by the last plan
    unchecked: bool = False  # the next plan checks the index
    dead: list[RowId] = dataclasses.field(default_factory=list)  # unknown to the index
    doomed: list[RecordLocation] = dataclasses.field(default_factory=list)  # to be overwritten
    dooming: bool = False  # a plan does so, or deletes the files of the next two
    nameless: list[Segment] = dataclasses.field(default_factory=list)  # forgotten by the index; the file is there yet
    forgotten: list[Segment] = dataclasses.field(default_factory=list)  # the file may go; the index knows it yet
    deleting: dict[Segment, Future[None]] = dataclasses.field(default_factory=dict)  # files, in another thread
    leaving: list[Segment] = dataclasses.field(default_factory=list)  # removed, and still being read

    @property
    def erasing(self) -> bool:
        """Whether there are records to be overwritten, or files to be deleted, which may hold such."""
        left = any(not deletion.done() or deletion.exception() for deletion in self.deleting.values())
        return left or self.dooming or bool(self.doomed or self.forgotten or self.nameless or self.space.tails)

    @property
    def has_housekeeping(self) -> bool:
        return self.erasing or self.unchecked or bool(self.dead) or self.space.has_work

    def hear(self) -> None:
        """Of deletions that are over: those that failed are to be tried again."""
        for segment, deletion in list(self.deleting.items()):
            if deletion.done() and (error := self.deleting.pop(segment).exception()) is not None:
                log.error("a segment could not be deleted", path=str(segment.path), error=str(error))
                self.nameless.append(segment)


class SsdTier:
    """A bounded, durable set of blocks on some disks. Made by `open_tier`.

    Each disk has separate plans, one at a time. For a while a disk's files may exceed the budget by a plan's blocks,
    and by files being deleted. `commit` does a plan, blocking, in a writer thread; then the plan's blocks are as
    durable as `durability` says. A failing disk is left out: the disk's blocks are here no more.
    """

    def __init__(
        self, disks: Sequence[Disk], catalogue: Catalogue, admission: SsdAdmission, keyring: Keyring | None = None
    ) -> None:
        self.catalogue = catalogue
        self.keyring = keyring
        self.account = catalogue.account
        self.disks = disks
        self.admission = admission
        self.durability = disks[0].folder.durability
        self.written_bytes = 0  # written in this process' life, headers, padding and carried records included
        self.user_bytes = 0  # of new blocks in them
        self.carried_bytes = self.dropped_segments = 0
        self.lost_blocks = 0  # found bad when they were to be carried over
        self.scrubbed_bytes = self.scrub_passes = 0
        self.locked_blocks = 0  # on disk, but their keys lacked at the start
        self._note_doubles()
        self._hide_locked()

    @property
    def working(self) -> list[Disk]:
        return [disk for disk in self.disks if not disk.out]

    @property
    def disks_out(self) -> int:
        return len(self.disks) - len(self.working)

    @property
    def indexed(self) -> bool:
        """Whether all disks have an index; the next start reads all segments on a disk without one."""
        return all(disk.committer.index.usable for disk in self.disks)

    @property
    def indexes_rebuilt(self) -> int:
        return sum(disk.committer.index.rebuilt for disk in self.disks)

    def check_indexes(self) -> None:
        """Have the next plans check the indexes; damaged ones are written anew."""
        for disk in self.working:
            disk.unchecked = True

    @property
    def used_bytes(self) -> int:
        return sum(disk.space.used_bytes for disk in self.working)

    @property
    def capacity_bytes(self) -> int:
        return sum(disk.space.capacity_bytes for disk in self.working)

    def compact(self, min_live_share: float) -> int:
        return sum(disk.space.compact(min_live_share) for disk in self.working)

    def commit(self, plan: WritePlan) -> None:
        self.disks[plan.disk].committer.run(plan)

    @property
    def readers(self) -> int:
        """Blocks that are being read, of removed segments too."""
        leaving = [segment for disk in self.disks for segment in disk.leaving]
        return sum(segment.readers for segment in (*self.catalogue.segments.values(), *leaving))

    def reader(self, key: BlockKey) -> SsdReader:
        found = self.catalogue.find(key)
        assert found is not None
        segment, row = found
        segment.used[row] = 1
        return SsdReader(self.disks[segment.disk].folder.files, segment, row, self.keyring)

    def drop(self, reader: SsdReader) -> bool:
        """Mark a bad record dead; False when the block lies elsewhere by now. Only for a `BadRecordError`."""
        if not self.catalogue.is_live(reader.segment, reader.row):
            return False
        self.forget([reader.key])
        return True

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are not here any more; the indexes learn this with the next plans."""
        for segment, row in filter(None, map(self.catalogue.forget, keys)):
            self.disks[segment.disk].dead.append((segment.number, row))

    def erase(self, places: Iterable[RecordLocation]) -> list[BlockKey]:
        """Blocks are not here any more, and their records are overwritten with the next plans; keys of live records."""
        places = list(places)
        live = [segment.keys[row] for segment, row in places if self.catalogue.is_live(segment, row)]
        self.forget(live)
        for segment, row in places:
            segment.erased.add(row)
            self.disks[segment.disk].doomed.append((segment, row))
        return live

    def erase_tails(self) -> None:
        """With the next plans goes what is left in files of the older segments that they were."""
        for space in (disk.space for disk in self.working):
            for segment in [segment for segment in space.active.values() if segment.room > segment.size]:
                space.seal(segment)

    @property
    def has_housekeeping(self) -> bool:
        """Whether a plan without blocks has something to do: to forget on disk, or to come back to the budget."""
        return any(disk.has_housekeeping for disk in self.working)

    def plan(self, blocks: Sequence[DramBlock], number: int = 0) -> WritePlan:
        """Place blocks that are not here into segments of a disk; old ones make room for them, and go at once."""
        disk, victims = self.disks[number], list[Victim]()
        full, disk.full = disk.full, False
        if full:
            disk.space.give_up(sum(record_size(block.info) for block in blocks), victims)
        taken, rejected, given_up = [], [], []
        placed, incoming = dict[bool, int](), self.catalogue.incoming
        for block in blocks:
            assert block.info.key not in self.catalogue
            account, size = block.info.account, record_size(block.info)
            if excess := self.account.over_quota(account, incoming[account] + size):
                oldest = self.catalogue.oldest_of(account, excess, self.admission.pins.__contains__)
                self.forget(oldest)
                given_up += oldest
            fits = not self.account.over_quota(account, incoming[account] + size)
            kind = block.info.format.of_pictures
            coming = {**placed, kind: placed.get(kind, 0) + size}
            if fits and disk.space.make_room(coming, victims):
                taken.append(block)
                incoming.add(account, size)
                placed = coming
            else:
                rejected.append(block)
        if not blocks:
            disk.space.make_room({}, victims)
            disk.space.compact_one(victims)
        disk.space.used_bytes += sum(placed.values())
        free = [] if full else disk.space.reusable(victims, {segment for segment, _ in disk.doomed})
        carry, store, reuse = _place(disk.space, taken, free, victims, self.keyring)
        sizes = segment_ends((*carry, *store))
        tails = {
            segment: end
            for segment in disk.space.tails
            if (end := sizes.get(segment, segment.size)) < segment.room and not segment.going
        }
        disk.hear()
        disk.dooming = bool(disk.doomed or disk.forgotten or disk.nameless or tails)
        erase = [place for place in disk.doomed if place[0].id in self.catalogue.segments]
        work = disk.forgotten, disk.nameless, disk.dead, full, carry, store, reuse, dict(disk.deleting), erase, tails
        disk.forgotten, disk.nameless, disk.dead, disk.doomed = [], [], [], []
        unchecked, disk.unchecked = disk.unchecked, False
        return WritePlan(number, taken, rejected, given_up, victims, *work, check_index=unchecked)

    def committed(self, plan: WritePlan) -> None:
        plan.move(PlanState.COMMITTED)
        self._clear(plan)
        self._add(plan, plan.store)
        self.user_bytes += sum(block.info.nbytes for block in plan.blocks)
        self._settle(plan)

    def failed(self, plan: WritePlan, error: BaseException) -> None:
        """The plan failed: no block from the plan is here. What may have been written lies behind the committed ends.

        A full device gives up the oldest segment, as if the budget were smaller, and carries over only what must stay.
        """
        disk = self.disks[plan.disk]
        if plan.cleared:
            self._clear(plan)
            disk.nameless += plan.reuse.values()  # those that were not renamed yet have their files
        else:
            disk.doomed += plan.erase
            disk.nameless += plan.nameless
            disk.forgotten += plan.forgotten
            disk.dead += plan.dead
            for victim in plan.victims:
                if (plan.full and not victim.carried) or victim.segment in plan.reuse.values():  # the file may be gone
                    disk.forgotten.append(self.catalogue.segments.pop(victim.segment.id))
                    continue
                victim.segment.going = False
                disk.dead += [(victim.segment.number, row) for row in victim.removed]
        plan.move(PlanState.FAILED)
        if plan.unreadable is not None:
            disk.space.pass_over(plan.unreadable)
        disk.space.active.clear()
        disk.full = is_full(error)
        self._settle(plan)

    def _clear(self, plan: WritePlan) -> None:
        """The plan's first transaction was committed."""
        disk = self.disks[plan.disk]
        disk.doomed += plan.unerased
        disk.space.rewrite(segment for segment, _ in plan.unerased)
        removed = plan.removed_segments
        numbers = {segment.number for segment in removed}
        disk.dead = [row for row in disk.dead if row[0] not in numbers]
        for append in plan.carry:
            if append.bad and self.catalogue.find(append.key) == append.source:
                self.catalogue.forget(append.key)
                self.lost_blocks += 1
                plan.lost.append(append.key)
        carried = plan.carried
        dropped = [append.key for append in carried if self.catalogue.find(append.key) != append.source]
        self._add(plan, carried)
        # A reader found them bad, or they were deleted, while they were being copied; some are on another disk by now.
        places = filter(None, map(self.catalogue.find, dropped))
        self.erase([place for place in places if place[0].disk == plan.disk])
        self.carried_bytes += plan.written_bytes
        for segment in removed:
            self.catalogue.remove(segment)
        self.erase(self._note_doubles())
        self.dropped_segments += len(removed)
        self._gone(disk, [*plan.nameless, *removed])

    def _hide_locked(self) -> None:
        """Blocks with keys that lack count as absent.

        The indexes do not learn this: the keys may be there at a later start.
        """
        lacking = collections.Counter[tuple[str, str]]()
        for segment in self.catalogue.segments.values():
            locked = [bool(kind.key_id) and not self._has_key(kind.key_id) for kind in segment.named]
            for row in list(self.catalogue.live_rows(segment)) if any(locked) else ():
                if locked[segment.kinds[row]]:
                    lacking[segment.kind(row).key_id, segment.kind(row).tenant] += 1
                    self.catalogue.forget(segment.keys[row])
        for (key_id, tenant), blocks in lacking.items():
            log.warning(
                "a key is not in encryption_keys; blocks that it encrypts count as absent",
                key_id=key_id,
                tenant=tenant,
                blocks=blocks,
            )
        self.locked_blocks = lacking.total()

    def _has_key(self, key_id: str) -> bool:
        return self.keyring is not None and self.keyring.find(key_id) is not None

    def _note_doubles(self) -> list[RecordLocation]:
        """Have the indexes learn with the next plans which copies are dead for another copy; return these."""
        segments, doubles = self.catalogue.segments, self.catalogue.doubles
        self.catalogue.doubles = []
        doubles = [(segment, row) for segment, row in doubles if segments.get(segment.id) is segment]
        for segment, row in doubles:
            self.disks[segment.disk].dead.append((segment.number, row))
        return doubles

    def _gone(self, disk: Disk, segments: Sequence[Segment]) -> None:
        """Segments have no name any more, or their disk is left out."""
        for segment in segments:
            segment.removed = True
            if not segment.readers:
                disk.folder.files.later(disk.folder.files.close, segment.path)
        disk.leaving = [segment for segment in dict.fromkeys((*disk.leaving, *segments)) if segment.readers]

    def _add(self, plan: WritePlan, appends: Sequence[Append]) -> None:
        for segment, size in segment_ends(appends).items():
            segment.size = size
        for segment, packed in pack_entries(appends).items():
            self.catalogue.add(segment, packed)
        nbytes = sum(append.entry[2] * ALIGN for append in appends)
        plan.written_bytes += nbytes
        self.written_bytes += nbytes

    def _settle(self, plan: WritePlan) -> None:
        disk = self.disks[plan.disk]
        disk.dooming, disk.deleting = False, plan.deleting
        for segment in plan.cut:
            segment.room = 0
        for block in plan.blocks:
            self.catalogue.incoming.add(block.info.account, -record_size(block.info))
        for segment in segment_ends((*plan.carry, *plan.store)):
            if not segment.size and self.catalogue.segments.pop(segment.id, None) is not None:
                disk.nameless.append(segment)
                disk.space.seal(segment)
        disk.space.recount(full=disk.full)

    def can_spare(self, number: int) -> bool:
        """Whether the tier can go on without a disk."""
        return len(self.working) > 1 and not self.disks[number].out

    def leave_out(self, number: int) -> Iterator[list[BlockKey]]:
        """A disk has failed, between two plans: no block from the disk is here any more; their keys, by segment."""
        disk = self.disks[number]
        disk.out = True
        for segment in disk.space.segments:
            keys = [segment.keys[row] for row in self.catalogue.live_rows(segment)]
            self.catalogue.remove(segment)
            self._gone(disk, [segment])
            yield keys
        disk.dead, disk.doomed, disk.nameless, disk.forgotten, disk.deleting = [], [], [], [], {}

    def reopen(self, number: int) -> list[Segment]:
        """Blocking, between two plans.

        After a disk failed: opens the disk's files anew, as the disk may have been away.

        Returns segments that the disk has no more. Raises OSError while the disk is away.
        """
        disk = self.disks[number]
        disk.folder.files.forget_open()
        if not disk.folder.relock():
            return []
        sizes = list_segments(disk.folder.segments)
        disk.committer.index.lose()
        own = [segment for segment in list(self.catalogue.segments.values()) if segment.disk == number]
        return [segment for segment in own if segment.size > sizes.get(segment.number, 0)]

    def drop_segments(self, number: int, segments: Iterable[Segment]) -> Iterator[list[BlockKey]]:
        """Segments of a disk are not there any more, between two plans; keys of their blocks, by segment."""
        disk = self.disks[number]
        for segment in segments:
            keys = [segment.keys[row] for row in self.catalogue.live_rows(segment)]
            self.catalogue.remove(segment)
            disk.dead = [row for row in disk.dead if row[0] != segment.number]
            disk.doomed = [place for place in disk.doomed if place[0] is not segment]
            disk.space.active.clear()
            self._gone(disk, [segment])
            yield keys
        disk.space.recount()

    def close(self) -> None:
        """Blocking. Closes all files and unlocks the folders; what was not synced on the way is synced now."""
        for disk in self.working:
            try:
                for segment in disk.space.segments:
                    if segment.room > segment.size:
                        disk.folder.files.truncate(segment.path, segment.size)
                if disk.folder.durability == "process":
                    for segment in disk.space.segments:
                        disk.folder.files.sync(segment.path)
                    disk.folder.files.sync_folder(disk.folder.segments)
                    disk.committer.index.synced()
                    disk.folder.all_synced()
            except (OSError, lmdb.Error) as error:
                log.error("what was written may not survive a loss of power", error=str(error))
        self.abandon()

    def abandon(self) -> None:
        """Blocking. Closes all files and unlocks the folders without bringing anything to the devices."""
        for disk in self.disks:
            disk.folder.files.close_all()
            disk.committer.index.close()
            disk.folder.close()


def _place(
    space: SegmentSpace,
    blocks: Sequence[DramBlock],
    free: list[Segment],
    victims: Sequence[Victim],
    keyring: Keyring | None,
) -> tuple[list[Append], list[Append], dict[Segment, Segment]]:
    """Give every record a place, and new segments the files of `free` segments, which are told.

    Sizes of segments change only when the plan is done.
    """
    carry, store = [], []
    sizes, reuse = dict[Segment, int](), dict[Segment, Segment]()
    for old, row in ((victim.segment, row) for victim in victims for row in victim.carried):
        of_pictures = old.kind(row).format.of_pictures
        segment, start = space.place(old.lengths[row], of_pictures, sizes, [], reuse)
        segment.overwritable = segment.overwritable and old.overwritable
        entry = old.keys[row], start, old.lengths[row], segment.number_of(old.kind(row)), old.written[row]
        carry.append(Append(segment, entry, source=(old, row)))
    for block in blocks:
        info, length = block.info, record_size(block.info) // ALIGN
        segment, start = space.place(length, info.format.of_pictures, sizes, free, reuse)
        segment.overwritable = segment.overwritable and not resembles_records(block.data)
        key = None if keyring is None else keyring.newest(info.tenant)
        number = segment.number_of(RecordKind(info.format, info.tenant, "" if key is None else key.id))
        store.append(Append(segment, (info.key, start, length, number, info.written_at), block, key))
    return carry, store, reuse


def open_tier(
    paths: Sequence[Path],
    capacity_bytes: int,
    segment_bytes: int,
    *,
    durability: Durability = "power",
    account: TenantAccount | None = None,
    admission: SsdAdmission | None = None,
    keyring: Keyring | None = None,
    files: Sequence[FileLayer] = (),
    map_bytes: int = MAP_BYTES,
) -> SsdTier:
    """Open the SSD tier on data folders: lock the folders, made if need be, and read what they hold. Blocking.

    If some of several folders cannot be used, the tier leaves them out.

    Args:
        paths: data folders, one a disk.
        capacity_bytes: bytes that each folder may have.
        segment_bytes: size at which a segment is closed and the next begins. A larger record gets a separate segment.
        durability: what commits survive.
        account: bytes by tenant, which the tier keeps up to date; guaranteed blocks stay.
        admission: which blocks the tier takes; pinned blocks stay.
        keyring: keys that encrypt blocks; None: blocks are stored in plaintext.
        files: file access of each folder; empty = as usual.
        map_bytes: first size of an index's memory map.

    Raises:
        ConfigError: no folder can be used; names `data_dir`.
    """
    admission, catalogue, disks = admission or SsdAdmission(), Catalogue(account), list[Disk]()
    layers = files or [FileLayer(direct=durability == "power", max_open=MAX_OPEN // len(paths)) for _ in paths]
    for path, layer in zip(paths, layers, strict=True):
        try:
            folder = DataFolder(path, layer, durability, len(disks))
            found = Recovery(folder, catalogue, map_bytes)
        except ConfigError as error:
            if len(paths) == 1:
                raise
            log.error("a disk is left out", error=str(error))
            failure = error
            continue
        where, first = (folder.disk, folder.segments), found.next_segment
        space = SegmentSpace(catalogue, *where, capacity_bytes, segment_bytes, first, admission.pins)
        committer = Committer(layer, found.index, folder.segments, sync=folder.durability == "power")
        disks.append(Disk(folder, space, committer))
        blocks, nbytes = sum(len(segment.keys) for segment in space.segments), space.used_bytes
        log.info("ssd tier open", path=str(path), blocks=blocks, bytes=nbytes, rebuilt=found.rebuilt)
    if not disks:
        raise failure
    return SsdTier(disks, catalogue, admission, keyring)
