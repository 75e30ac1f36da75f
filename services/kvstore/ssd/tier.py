"""The SSD tier: blocks as records in segment files, found through an index that LMDB keeps.

Methods belong to the event loop, are quick and touch no device, but for those that say they block. Between `plan` and
`committed` or `failed` the segment files and the index are the writer thread's (commit.py). A segment that is reclaimed
stays readable until the plan is done: what is carried over has its place there till then.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb

from moonpool.kv.blocks import BlockFormat, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.catalogue import Segment, Slot
from services.kvstore.ssd.commit import Append, Committer, Victim, WritePlan, ends, pack
from services.kvstore.ssd.files import Files, is_full
from services.kvstore.ssd.index import MAP_BYTES
from services.kvstore.ssd.reader import SsdReader
from services.kvstore.ssd.records import ALIGN, record_size
from services.kvstore.ssd.recovery import DataFolder, Durability, Recovered, recover
from services.kvstore.ssd.space import Keeps, Space
from services.kvstore.tenancy.tenants import Account

log = get_logger(__name__)

MIN_LIVE_SHARE = 0.5
"""Share of a segment that must be live, for `compact`, unless told otherwise."""


class SsdTier:
    """A bounded, durable set of blocks. Made by `open_tier`.

    While a segment of which much must stay is rewritten, the segment files may exceed `capacity_bytes` by what is
    carried.

    Attributes:
        account: what tenants are granted and have here.
        indexed: there is an index; else there was no room for one, and the next start reads all segments.
        written_bytes: records written in this process' life, headers, padding and carried ones included.
        user_bytes: of new blocks in them.
        lost_blocks: blocks that were found bad when they were to be carried over.
    """

    def __init__(
        self,
        folder: DataFolder,
        recovered: Recovered,
        capacity_bytes: int,
        segment_bytes: int,
        keeps: Keeps | None,
        account: Account,
    ) -> None:
        self.account = account
        self.durability = recovered.durability
        self.capacity_bytes = capacity_bytes
        self.indexed = recovered.index is not None
        self.written_bytes = self.user_bytes = self.carried_bytes = self.dropped_segments = self.lost_blocks = 0
        self._folder = folder
        self._files = folder.files
        self._index = recovered.index
        self._catalogue = recovered.catalogue
        first = recovered.next_segment
        self._space = Space(self._catalogue, folder.segments, capacity_bytes, segment_bytes, first, keeps)
        self._committer = Committer(self._files, recovered.index, folder.segments, sync=recovered.durability == "power")
        self._unsynced_from = 0 if recovered.unsynced else first
        self._dead: list[Slot] = []  # the index does not know it
        self._nameless: list[Segment] = []  # forgotten by the index; the file is not deleted yet
        self._forgotten: list[Segment] = []  # the file may be deleted; not forgotten by the index yet
        self._leaving: list[Segment] = []  # removed, and still being read
        self._device_full = False
        self.part = self._catalogue.part
        self.newest_first = self._catalogue.newest_first
        self.touch = self._catalogue.touch

    def __contains__(self, key: bytes) -> bool:
        return key in self._catalogue

    def __len__(self) -> int:
        return len(self._catalogue)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._catalogue)

    @property
    def readers(self) -> int:
        """Blocks that are being read, of removed segments too."""
        return sum(segment.readers for segment in (*self._catalogue.segments.values(), *self._leaving))

    @property
    def segments(self) -> int:
        return len(self._catalogue.segments)

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, live or dead."""
        return self._space.used_bytes

    @property
    def live_bytes(self) -> int:
        return self._catalogue.live_bytes

    @property
    def tenant_bytes(self) -> dict[str, int]:
        """`live_bytes` by tenant, counted anew: slow."""
        return self._catalogue.tenant_bytes()

    @property
    def write_amplification(self) -> float:
        """Bytes written over bytes of new blocks, in this process' life; 1.0 before the first."""
        return self.written_bytes / self.user_bytes if self.user_bytes else 1.0

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        found = self._catalogue.find(key)
        return None if found is None else self._catalogue.formats[found[0].formats[found[1]]]

    def tenant_of(self, key: BlockKey) -> str | None:
        found = self._catalogue.find(key)
        return None if found is None else self._catalogue.tenants[found[0].tenants[found[1]]]

    def reader(self, key: BlockKey) -> SsdReader:
        """Begins reading a block that is here."""
        found = self._catalogue.find(key)
        assert found is not None
        segment, slot = found
        segment.used[slot] = 1
        return SsdReader(self._files, segment, slot, self._catalogue.formats[segment.formats[slot]])

    def drop(self, reader: SsdReader) -> bool:
        """Marks a bad record dead; False when the block lies elsewhere by now. Only for a `BadRecordError`."""
        if not self._catalogue.is_live(reader.segment, reader.slot):
            return False
        self._mark_dead(reader.key)
        return True

    def forget_oldest(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Gives up a tenant's oldest blocks, at least `nbytes` of records, but none that `stays`; their keys."""
        keys = self._catalogue.oldest_of(tenant, nbytes, stays)
        self._mark_dead(*keys)
        return keys

    def _mark_dead(self, *keys: BlockKey) -> None:
        self._dead += [slot for slot in map(self._catalogue.forget, keys) if slot is not None]

    @property
    def has_housekeeping(self) -> bool:
        """Whether a plan without blocks has something to do: to forget on disk, or to come back to the budget."""
        return bool(self._dead or self._nameless or self._forgotten) or self._space.has_work

    def compact(self, min_live_share: float = MIN_LIVE_SHARE) -> int:
        """Has the next plans rewrite segments of which less than this share (0 to 1) is live; how many those are."""
        assert 0 <= min_live_share <= 1
        return self._space.compact(min_live_share)

    def plan(self, blocks: Sequence[DramBlock]) -> WritePlan:
        """Places blocks that are not here into segments; old segments make room for them, and go at once."""
        victims: list[Victim] = []
        full, self._device_full = self._device_full, False
        if full:
            self._space.give_up(sum(record_size(block.info) for block in blocks), victims)
        taken, rejected, coming = [], [], 0
        for block in blocks:
            assert block.info.key not in self._catalogue
            size = record_size(block.info)
            if self._space.make_room(coming + size, victims):
                taken.append(block)
                coming += size
            else:
                rejected.append(block)
        if not blocks:
            self._space.make_room(0, victims)
            self._space.compact_one(victims)
        self._space.used_bytes += coming
        carry, store = self._place(taken, victims)
        change = self._catalogue.formats.change(), self._catalogue.tenants.change()
        known = self._forgotten, self._nameless, self._dead
        self._forgotten, self._nameless, self._dead = [], [], []
        return WritePlan(taken, rejected, victims, *known, *change, full, carry, store)

    def _place(self, blocks: Sequence[DramBlock], victims: Sequence[Victim]) -> tuple[list[Append], list[Append]]:
        """Gives every record its place. Sizes of segments change only when the plan is done."""
        carry, store = [], []
        sizes: dict[Segment, int] = {}
        for victim in victims:
            for slot in victim.carried:
                key, _, length, *ids = victim.segment.row(slot)
                segment, start = self._space.place(length, sizes)
                carry.append(Append(segment, (key, start, length, ids[0], ids[1]), source=(victim.segment, slot)))
        formats, tenants = self._catalogue.formats, self._catalogue.tenants
        for block in blocks:
            info, length = block.info, record_size(block.info) // ALIGN
            segment, start = self._space.place(length, sizes)
            row = info.key, start, length, formats.id_of(info.format), tenants.id_of(info.tenant)
            store.append(Append(segment, row, block))
        return carry, store

    def commit(self, plan: WritePlan) -> None:
        """Blocking, in the writer thread. The blocks are as durable as `durability` says, unless an error is raised."""
        self._committer.run(plan)

    def committed(self, plan: WritePlan) -> None:
        """The plan was committed: its blocks are here from now on."""
        self._clear(plan)
        self._add(plan.store)
        self.user_bytes += sum(block.info.nbytes for block in plan.blocks)
        self._settle(plan)

    def failed(self, plan: WritePlan, error: BaseException) -> None:
        """The plan failed: none of its blocks is here. What may have been written lies behind the committed ends.

        A full device gives up its oldest segment, as if the budget were smaller, and carries over only what it must.
        """
        if plan.cleared:
            self._clear(plan)
        else:
            self._nameless += plan.nameless
            self._forgotten += plan.forgotten
            self._dead += plan.dead
            for victim in plan.victims:
                if plan.full and not victim.carried:  # its file may be deleted
                    self._forgotten.append(self._catalogue.segments.pop(victim.segment.number))
                    continue
                victim.segment.going = False
                self._dead += [(victim.segment.number, slot) for slot, _ in victim.removed]
        if plan.unreadable is not None:
            self._space.pass_over(plan.unreadable)
        for segment in ends((*plan.carry, *plan.store)):
            if not segment.size and self._catalogue.segments.pop(segment.number, None) is not None:
                self._nameless.append(segment)
        self._space.active = None
        self._device_full = is_full(error)
        self._settle(plan)

    def _clear(self, plan: WritePlan) -> None:
        """The plan's first transaction was committed."""
        removed = plan.removed_segments
        numbers = {segment.number for segment in removed}
        self._dead = [slot for slot in self._dead if slot[0] not in numbers]
        for append in plan.bad:
            if self._is_current(append):
                self._catalogue.forget(append.key)
                self.lost_blocks += 1
                plan.lost.append(append.key)
        carried = plan.carried
        dropped = [append.key for append in carried if not self._is_current(append)]
        self._add(carried)
        self._mark_dead(*dropped)  # a reader found them bad while they were being copied
        self.carried_bytes += sum(append.row[2] * ALIGN for append in carried)
        for segment in removed:
            self._catalogue.remove(segment)
        self.dropped_segments += len(removed)
        self._nameless += plan.undeleted
        for segment in (*plan.nameless, *removed):
            if segment not in plan.undeleted:
                segment.removed = True
                if not segment.readers:
                    self._files.close_later(segment.path)
        self._leaving = [segment for segment in (*self._leaving, *removed) if segment.readers]

    def _is_current(self, append: Append) -> bool:
        """Whether the block still has its place where it was carried over from."""
        return append.source is not None and self._catalogue.is_live(*append.source)

    def _add(self, appends: Sequence[Append]) -> None:
        """These records are committed."""
        for segment, size in ends(appends).items():
            segment.size = size
        for segment, packed in pack(appends).items():
            self._catalogue.add(segment, packed)
        self.written_bytes += sum(append.row[2] * ALIGN for append in appends)

    def _settle(self, plan: WritePlan) -> None:
        self._space.recount()
        self._catalogue.formats.settle(plan.formats, written=plan.named)
        self._catalogue.forget_tenants(self._catalogue.tenants.settle(plan.tenants, written=plan.named))

    def close(self) -> None:
        """Blocking. Closes all files and unlocks the folder; what was not synced on the way is synced now."""
        try:
            if self.durability == "process":
                self._sync()
        except (OSError, lmdb.Error) as error:
            log.error("what was written may not survive a loss of power", error=str(error))
        self.abandon()

    def _sync(self) -> None:
        for segment in self._catalogue.segments.values():
            if segment.number >= self._unsynced_from:
                self._files.sync(segment.path)
        self._files.sync_folder(self._folder.segments)
        if self._index is not None:
            self._index.sync()
        self._folder.all_synced()

    def abandon(self) -> None:
        """Blocking. Closes all files and unlocks the folder without bringing anything to the device."""
        self._files.close_all()
        if self._index is not None:
            self._index.close()
        self._folder.close()

    def check_invariants(self) -> None:
        """Segments, places, bytes and ids agree with each other. Only between plans."""
        self._catalogue.check_invariants(self._forgotten)
        assert self.used_bytes == sum(segment.size for segment in self._catalogue.segments.values())
        assert self.live_bytes <= self.used_bytes


def open_tier(
    path: Path,
    capacity_bytes: int,
    segment_bytes: int,
    *,
    durability: Durability = "power",
    keeps: Keeps | None = None,
    account: Account | None = None,
    files: Files | None = None,
    map_bytes: int = MAP_BYTES,
) -> SsdTier:
    """Blocking. Locks the data folder `path`, made if need be, finds out what it holds, and opens the tier on it.

    At `segment_bytes` a segment is closed and the next begun; a larger record gets one of its own. `keeps` says which
    blocks must stay. `account` is told of every record that comes or goes, and of those that are here at once;
    `map_bytes` is the size of the index's memory map to begin with.

    Raises:
        ConfigError: naming `data_dir`: the folder cannot be used.
    """
    files, account = files or Files(direct=durability == "power"), account or Account()
    folder = DataFolder(path, files)
    try:
        recovered = recover(folder, durability, account, map_bytes)
    except BaseException:
        folder.close()
        files.close_all()
        raise
    tier = SsdTier(folder, recovered, capacity_bytes, segment_bytes, keeps, account)
    log.info(
        "ssd tier open",
        path=str(path),
        blocks=len(tier),
        bytes=tier.used_bytes,
        rebuilt=recovered.rebuilt,
        lost_blocks=recovered.lost_blocks,
        adopted_blocks=recovered.adopted_blocks,
    )
    return tier
