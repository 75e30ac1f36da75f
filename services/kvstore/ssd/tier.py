"""The SSD tier: blocks as records in segment files, found through an index that LMDB keeps.

Methods belong to the event loop, are quick and touch no device, but for those that say they block. Between `plan` and
`committed` or `failed` the segment files and the index are the writer thread's (commit.py). A segment that is reclaimed
stays readable until the plan is done: what is carried over has its place there till then.
"""

from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import lmdb

from moonpool.kv.blocks import DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import Kind, Place, Segment, Slot
from services.kvstore.ssd.commit import Append, Committer, Victim, WritePlan, ends, pack
from services.kvstore.ssd.files import Files, is_full
from services.kvstore.ssd.index import MAP_BYTES
from services.kvstore.ssd.reader import SsdReader
from services.kvstore.ssd.records import ALIGN, record_size
from services.kvstore.ssd.recovery import DataFolder, Durability, Recovery
from services.kvstore.ssd.space import Space
from services.kvstore.tenancy.tenants import Account, TenantBytes

log = get_logger(__name__)


class SsdTier:
    """A bounded, durable set of blocks. Made by `open_tier`.

    While a segment of which much must stay is rewritten, the files may exceed the budget by what is carried. `commit`
    does a plan, blocking, in the writer thread; then its blocks are as durable as `durability` says.
    """

    def __init__(
        self, found: Recovery, capacity_bytes: int, segment_bytes: int, pins: Container[BlockKey], account: Account
    ) -> None:
        self.account = account
        self.catalogue = found.catalogue
        self.durability = found.folder.durability
        self.indexed = found.index is not None  # else there was no room for one: the next start reads all segments
        self.written_bytes = 0  # of records in this process' life, headers, padding and carried ones included
        self.user_bytes = 0  # of new blocks in them
        self.carried_bytes = self.dropped_segments = 0
        self.lost_blocks = 0  # found bad when they were to be carried over
        self._folder = folder = found.folder
        self._files = folder.files
        self._index = found.index
        first = found.next_segment
        self.space = Space(self.catalogue, folder.segments, capacity_bytes, segment_bytes, first, pins, account)
        self.commit = Committer(self._files, found.index, folder.segments, sync=self.durability == "power").run
        self._dead: list[Slot] = []  # the index does not know it
        self._doomed: list[Place] = []  # to be overwritten
        self._dooming = False  # a plan does so
        self._nameless: list[Segment] = []  # forgotten by the index; the file is not deleted yet
        self._forgotten: list[Segment] = []  # the file may be deleted; not forgotten by the index yet
        self._leaving: list[Segment] = []  # removed, and still being read
        self._device_full = False

    @property
    def readers(self) -> int:
        """Blocks that are being read, of removed segments too."""
        return sum(segment.readers for segment in (*self.catalogue.segments.values(), *self._leaving))

    def reader(self, key: BlockKey) -> SsdReader:
        found = self.catalogue.find(key)
        assert found is not None
        segment, slot = found
        segment.used[slot] = 1
        return SsdReader(self._files, segment, slot)

    def drop(self, reader: SsdReader) -> bool:
        """Marks a bad record dead; False when the block lies elsewhere by now. Only for a `BadRecordError`."""
        if not self.catalogue.is_live(reader.segment, reader.slot):
            return False
        self.forget([reader.key])
        return True

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are not here any more; the index learns it with the next plan."""
        self._dead += filter(None, map(self.catalogue.forget, keys))

    def erase(self, places: Iterable[Place]) -> list[BlockKey]:
        """Blocks are not here any more, and their records are overwritten with the next plan; keys of live ones."""
        places = list(places)
        live = [segment.keys[slot] for segment, slot in places if self.catalogue.is_live(segment, slot)]
        self.forget(live)
        for segment, slot in places:
            segment.erased.add(slot)
        self._doomed += places
        return live

    @property
    def erasing(self) -> bool:
        """Whether there are records to be overwritten, or files to be deleted, which may hold such."""
        return self._dooming or bool(self._doomed or self._forgotten or self._nameless)

    @property
    def has_housekeeping(self) -> bool:
        """Whether a plan without blocks has something to do: to forget on disk, or to come back to the budget."""
        return bool(self._dead or self._doomed or self._nameless or self._forgotten) or self.space.has_work

    def plan(self, blocks: Sequence[DramBlock]) -> WritePlan:
        """Places blocks that are not here into segments; old segments make room for them, and go at once."""
        victims: list[Victim] = []
        full, self._device_full = self._device_full, False
        if full:
            self.space.give_up(sum(record_size(block.info) for block in blocks), victims)
        taken, rejected, given_up = [], [], []
        coming = TenantBytes()
        for block in blocks:
            assert block.info.key not in self.catalogue
            tenant, size = block.info.tenant, record_size(block.info)
            if excess := self.account.over_quota(tenant, coming[tenant] + size):
                oldest = self.catalogue.oldest_of(tenant, excess, self.space.pins.__contains__)
                self.forget(oldest)
                given_up += oldest
            fits = not self.account.over_quota(tenant, coming[tenant] + size)
            if fits and self.space.make_room(coming.total_bytes + size, victims):
                taken.append(block)
                coming.add(tenant, size)
            else:
                rejected.append(block)
        if not blocks:
            self.space.make_room(0, victims)
            self.space.compact_one(victims)
        self.space.used_bytes += coming.total_bytes
        carry, store = self._place(taken, victims)
        known = self._forgotten, self._nameless, self._dead
        self._forgotten, self._nameless, self._dead = [], [], []
        erase = [place for place in self._doomed if place[0].number in self.catalogue.segments]
        self._dooming, self._doomed = bool(self._doomed), []
        return WritePlan(taken, rejected, given_up, victims, *known, full, carry, store, erase)

    def _place(self, blocks: Sequence[DramBlock], victims: Sequence[Victim]) -> tuple[list[Append], list[Append]]:
        """Gives every record its place. Sizes of segments change only when the plan is done."""
        carry, store = [], []
        sizes: dict[Segment, int] = {}
        for source in ((victim.segment, slot) for victim in victims for slot in victim.carried):
            old, slot = source
            segment, start = self.space.place(old.lengths[slot], sizes)
            row = old.keys[slot], start, old.lengths[slot], segment.number_of(old.kind(slot)), old.written[slot]
            carry.append(Append(segment, row, source=source))
        for block in blocks:
            info, length = block.info, record_size(block.info) // ALIGN
            segment, start = self.space.place(length, sizes)
            number = segment.number_of(Kind(info.format, info.tenant))
            store.append(Append(segment, (info.key, start, length, number, info.written_at), block))
        return carry, store

    def committed(self, plan: WritePlan) -> None:
        self._dooming = False
        self._clear(plan)
        self._add(plan.store)
        self.user_bytes += sum(block.info.nbytes for block in plan.blocks)
        self._settle(plan)

    def failed(self, plan: WritePlan, error: BaseException) -> None:
        """The plan failed: none of its blocks is here. What may have been written lies behind the committed ends.

        A full device gives up its oldest segment, as if the budget were smaller, and carries over only what it must.
        """
        self._dooming = False
        if plan.cleared:
            self._clear(plan)
        else:
            self._doomed += plan.erase
            self._nameless += plan.nameless
            self._forgotten += plan.forgotten
            self._dead += plan.dead
            for victim in plan.victims:
                if plan.full and not victim.carried:  # its file may be deleted
                    self._forgotten.append(self.catalogue.segments.pop(victim.segment.number))
                    continue
                victim.segment.going = False
                self._dead += [(victim.segment.number, slot) for slot in victim.removed]
        if plan.unreadable is not None:
            self.space.pass_over(plan.unreadable)
        self.space.active = None
        self._device_full = is_full(error)
        self._settle(plan)

    def _clear(self, plan: WritePlan) -> None:
        """The plan's first transaction was committed."""
        self._doomed += plan.unerased
        self.space.rewrite(segment for segment, _ in plan.unerased)
        removed = plan.removed_segments
        numbers = {segment.number for segment in removed}
        self._dead = [slot for slot in self._dead if slot[0] not in numbers]
        for append in plan.carry:
            if append.bad and self.catalogue.find(append.key) == append.source:
                self.catalogue.forget(append.key)
                self.lost_blocks += 1
                plan.lost.append(append.key)
        carried = plan.carried
        dropped = [append.key for append in carried if self.catalogue.find(append.key) != append.source]
        self._add(carried)
        # A reader found them bad, or they were deleted, while they were being copied.
        self.erase(place for key in dropped if (place := self.catalogue.find(key)) is not None)
        self.carried_bytes += sum(append.row[2] * ALIGN for append in carried)
        for segment in removed:
            self.catalogue.remove(segment)
        self.dropped_segments += len(removed)
        self._nameless += plan.undeleted
        for segment in (*plan.nameless, *removed):
            if segment not in plan.undeleted:
                segment.removed = True
                if not segment.readers:
                    self._files.close_later(segment.path)
        self._leaving = [segment for segment in (*self._leaving, *removed) if segment.readers]

    def _add(self, appends: Sequence[Append]) -> None:
        for segment, size in ends(appends).items():
            segment.size = size
        for segment, packed in pack(appends).items():
            self.catalogue.add(segment, packed)
        self.written_bytes += sum(append.row[2] * ALIGN for append in appends)

    def _settle(self, plan: WritePlan) -> None:
        for segment in ends((*plan.carry, *plan.store)):
            if not segment.size and self.catalogue.segments.pop(segment.number, None) is not None:
                self._nameless.append(segment)
                self.space.active = None
        self.space.recount()

    def close(self) -> None:
        """Blocking. Closes all files and unlocks the folder; what was not synced on the way is synced now."""
        try:
            if self.durability == "process":
                for segment in self.catalogue.segments.values():
                    self._files.sync(segment.path)
                self._files.sync_folder(self._folder.segments)
                if self._index is not None:
                    self._index.sync()
                self._folder.all_synced()
        except (OSError, lmdb.Error) as error:
            log.error("what was written may not survive a loss of power", error=str(error))
        self.abandon()

    def abandon(self) -> None:
        """Blocking. Closes all files and unlocks the folder without bringing anything to the device."""
        self._files.close_all()
        if self._index is not None:
            self._index.close()
        self._folder.close()


def open_tier(
    path: Path,
    capacity_bytes: int,
    segment_bytes: int,
    *,
    durability: Durability = "power",
    pins: Container[BlockKey] = (),
    account: Account | None = None,
    files: Files | None = None,
    map_bytes: int = MAP_BYTES,
) -> SsdTier:
    """Blocking. Locks the data folder `path`, made if need be, finds out what it holds, and opens the tier on it.

    At `segment_bytes` a segment is closed and the next begun; a larger record gets one of its own. Blocks in `pins`
    stay, and those that `account` guarantees, which is kept up to date. `map_bytes` is the size of the index's memory
    map to begin with. Raises ConfigError naming `data_dir` when the folder cannot be used.
    """
    files, account = files or Files(direct=durability == "power"), account or Account()
    folder = DataFolder(path, files, durability)
    try:
        found = Recovery(folder, account, map_bytes)
    except BaseException:
        folder.close()
        files.close_all()
        raise
    tier = SsdTier(found, capacity_bytes, segment_bytes, pins, account)
    blocks, nbytes = len(tier.catalogue), tier.space.used_bytes
    log.info("ssd tier open", path=str(path), blocks=blocks, bytes=nbytes, rebuilt=found.rebuilt)
    return tier
