"""The SSD tier: blocks as records in segment files, found through an index that LMDB keeps.

Owns the plans, from their making to their end: what is stored, removed and carried over, and what the books say once
that has succeeded or failed. Must not know of DRAM, sessions, events or asyncio.

Threads: see backend.py. Between `plan` and `committed`/`failed` the segment files and the index are the writer
thread's (commit.py); the catalogue and everything else here belongs to the event loop.

A segment that goes stays readable until the plan is done: what is carried over has its place there till then.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb

from moonpool.kv.keys import BlockKey
from moonpool.telemetry.logs import get_logger
from services.kvstore.backend import BlockReader, WritePlan
from services.kvstore.blocks import BlockFormat, DramBlock
from services.kvstore.catalogue import Catalogue, Row, Segment
from services.kvstore.commit import Append, Committer, Durability, Work, ends, is_full
from services.kvstore.index import Slot
from services.kvstore.names import Names
from services.kvstore.protection import TierAccount
from services.kvstore.quota import OldestFirst
from services.kvstore.reclaim import Keeps, Victim
from services.kvstore.record_reader import SsdReader
from services.kvstore.records import ALIGN, record_size
from services.kvstore.recovery import DataFolder, Recovered, recover
from services.kvstore.segments import sync_folder
from services.kvstore.space import Space

_log = get_logger(__name__)

MIN_LIVE_SHARE = 0.5
"""What `compact` asks of a segment unless told otherwise."""


@dataclasses.dataclass(slots=True)
class _Plan:
    """A plan of this tier: what the writer thread does, and how to take it back."""

    work: Work
    victims: list[Victim]
    dead: int


class SsdTier:
    """A `Backend` over segment files and LMDB.

    Args:
        folder: the locked data folder.
        recovered: what it held when it was opened.
        capacity_bytes: budget for the segment files together. While a segment of which much must be kept is rewritten,
            they may exceed it by what is carried.
        segment_bytes: size at which a segment is closed and the next begun; a larger record gets one of its own.
        keeps: what must never be given up; see `protect`.
        account: told of all records; see `protect`.

    Attributes:
        written_bytes: records written, headers, padding and carried ones included.
        user_bytes: of new blocks in them.
        carried_bytes: of carried records.
        dropped_segments: segments that were reclaimed.
        lost_blocks: blocks that could not be read when they were to be carried over.
    """

    def __init__(
        self,
        folder: DataFolder,
        recovered: Recovered,
        capacity_bytes: int,
        segment_bytes: int,
        *,
        keeps: Keeps | None = None,
        account: TierAccount | None = None,
    ) -> None:
        self.durability = recovered.durability
        self._folder = folder
        self._index = recovered.index
        self._books: Catalogue = recovered.catalogue
        self._committer = Committer(recovered.index, folder.segments, recovered.durability)
        self._space = Space(
            self._books,
            folder.segments,
            capacity_bytes,
            segment_bytes,
            recovered.next_segment,
            direct=recovered.durability == "power",
        )
        self._first_segment = recovered.next_segment
        self._dead: list[Slot] = []
        self._nameless: list[Segment] = []  # forgotten; the file is not deleted yet
        self._deleted: list[Segment] = []  # the file may be gone; not forgotten yet
        self._leaving: list[Segment] = []
        self._device_full = False
        self._names = Names(self._books)
        self.written_bytes = 0
        self.user_bytes = 0
        self.carried_bytes = 0
        self.dropped_segments = 0
        self.lost_blocks = 0
        self._oldest = OldestFirst(self._books)
        self.protect(keeps, account)

    def protect(self, keeps: Keeps | None, account: TierAccount | None = None) -> None:
        """Says what must stay; once, before the first plan.

        Args:
            keeps: whether a block (key, tenant, bytes of its record) must stay; None for none.
            account: told of every record that comes or goes, and of those that are here at once.
        """
        self._space.keeps = keeps
        self._books.keep_account(account)

    def __contains__(self, key: object) -> bool:
        return key in self._books

    def __len__(self) -> int:
        return len(self._books)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._books)

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Keys of the blocks, the last written first, in steps in which at most `step` records are looked at."""
        return self._books.newest_first(step)

    @property
    def readers(self) -> int:
        """Blocks that are being read, of segments that are to go too."""
        return sum(segment.readers for segment in (*self._books.segments.values(), *self._leaving))

    @property
    def segments(self) -> int:
        """Number of segment files."""
        return len(self._books.segments)

    @property
    def capacity_bytes(self) -> int:
        """The budget."""
        return self._space.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, live or dead."""
        return self._space.used_bytes

    @property
    def live_bytes(self) -> int:
        """Of `used_bytes`, those of records that are blocks' only ones."""
        return self._books.live_bytes

    @property
    def write_amplification(self) -> float:
        """Bytes written over bytes of new blocks, in this process' life; 1.0 before the first."""
        return self.written_bytes / self.user_bytes if self.user_bytes else 1.0

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        """The block's format; None when it is not here."""
        found = self._books.find(key)
        return None if found is None else self._books.formats[found[0].formats[found[1]]]

    def tenant_of(self, key: BlockKey) -> str | None:
        """Whose block it is; None when it is not here."""
        found = self._books.find(key)
        return None if found is None else self._books.tenants[found[0].tenants[found[1]]]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These were used, from DRAM or from here: those that are here are worth carrying over once."""
        self._books.touch(keys)

    def reader(self, key: BlockKey) -> SsdReader:
        """Begins reading a block that is here."""
        found = self._books.find(key)
        assert found is not None
        segment, slot = found
        segment.read[slot] = 1
        return SsdReader(segment, slot, self._books.formats[segment.formats[slot]])

    def drop(self, reader: BlockReader) -> bool:
        """Forgets the record of `reader`; False when the block lies elsewhere by now."""
        assert isinstance(reader, SsdReader)
        if not self._books.lives(reader.segment, reader.slot):
            return False
        self._bury(reader.key)
        return True

    def _bury(self, key: BlockKey) -> None:
        place = self._books.forget(key)
        if place is not None:
            self._dead.append((place[0].number, place[1]))

    def forget_oldest(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Gives up the tenant's oldest blocks, together at least `nbytes` of records, but none that `stays`."""
        keys = self._oldest.find(tenant, nbytes, stays)
        for key in keys:
            self._bury(key)
        return keys

    @property
    def has_housekeeping(self) -> bool:
        """Whether slots or segments wait to be forgotten on disk, or the tier is over its budget."""
        return bool(self._dead or self._nameless or self._deleted) or self._space.has_work

    def compact(self, min_live_share: float = MIN_LIVE_SHARE) -> int:
        """Has all segments rewritten of which less than this share of a full segment is live; by the next plans.

        Args:
            min_live_share: 0 to 1.

        Returns:
            How many segments that are. Wake whoever plans.
        """
        assert 0 <= min_live_share <= 1
        return self._space.compact(min_live_share)

    def plan(self, blocks: Sequence[DramBlock]) -> WritePlan:
        """Places blocks into segments; old segments make room for them."""
        victims: list[Victim] = []
        self._space.begin()
        full, self._device_full = self._device_full, False
        if full:
            self._space.give_up(sum(record_size(block.info) for block in blocks), victims)
        taken: list[tuple[DramBlock, int]] = []
        rejected, coming = [], 0
        for block in blocks:
            assert block.info.key not in self._books
            size = record_size(block.info)
            if self._space.make_room(coming + size, victims):
                taken.append((block, size))
                coming += size
            else:
                rejected.append(block)
        if not blocks:
            self._space.make_room(0, victims)
            self._space.compact_one(victims)
        self._space.used_bytes += coming
        work = self._work(taken, victims)
        work.full = full
        removed = [key for victim in victims for _, key in victim.removed]
        plan = _Plan(work, victims, len(self._dead))
        return WritePlan([block for block, _ in taken], rejected, removed, plan, idle=work.idle)

    def _work(self, blocks: Sequence[tuple[DramBlock, int]], victims: Sequence[Victim]) -> Work:
        """Gives every record its place. Sizes of segments change only when the plan is done."""
        removed = [*self._deleted, *(victim.segment for victim in victims)]
        work = Work(removed=removed, nameless=list(self._nameless))
        going = {segment.number for segment in work.removed}
        work.dropped = [slot for slot in self._dead if slot[0] not in going]
        sizes: dict[Segment, int] = {}
        for victim in victims:
            for slot in victim.carried:
                key, _, length, block_format, tenant = self._books.row(victim.segment, slot)
                segment, start = self._space.place(length, sizes)
                row: Row = (key, start, length, block_format, tenant)
                work.carry.append(Append(segment, row, source=(victim.segment, slot)))
        books = self._books
        for block, nbytes in blocks:
            info = block.info
            length = nbytes // ALIGN
            segment, start = self._space.place(length, sizes)
            row = (info.key, start, length, books.formats.number(info.format), books.tenants.number(info.tenant))
            work.store.append(Append(segment, row, block=block))
        work.names = self._names.change()
        return work

    def commit(self, plan: WritePlan) -> None:
        """Blocking, in the writer thread: removals first, so that their room is there; then data, sync, index."""
        self._committer.run(plan.work.work)

    def committed(self, plan: WritePlan) -> None:
        """The plan's blocks are here from now on."""
        work: Work = plan.work.work
        self._cleared(plan)
        self._add(work.store)
        self._space.recount()
        self.user_bytes += sum(append.block.info.nbytes for append in work.store if append.block is not None)
        self._settle_names(work)

    def failed(self, plan: WritePlan, error: BaseException) -> None:
        """None of the plan's blocks is here. What may have been written is behind committed ends and never named.

        A full device gives up its oldest segment, as if the budget were smaller, and carries over only what it must.
        """
        work: Work = plan.work.work
        if work.cleared:
            self._cleared(plan)
        else:
            for victim in plan.work.victims:
                if work.full and not victim.carried:  # its file may be gone
                    self._deleted.append(self._books.segments.pop(victim.segment.number))
                    continue
                victim.segment.going = False
                self._dead += [(victim.segment.number, slot) for slot, _ in victim.removed]
        for segment in ends((*work.carry, *work.store)):
            if not segment.size and self._books.segments.pop(segment.number, None) is not None:
                self._nameless.append(segment)
        self._space.recount()
        self._space.active = None
        self._device_full = is_full(error)
        self._settle_names(work)

    def _settle_names(self, work: Work) -> None:
        self._oldest.forget(self._names.settle(work.names, written=work.named))

    def _cleared(self, plan: WritePlan) -> None:
        """The plan's first transaction was committed."""
        work: Work = plan.work.work
        numbers = {segment.number for segment in work.removed}
        self._dead = [slot for slot in self._dead[plan.work.dead :] if slot[0] not in numbers]
        for append in work.lost:
            if self._is_current(append):
                self._books.forget(append.row[0])
                self.lost_blocks += 1
                plan.lost.append(append.row[0])
        dropped = [append.row[0] for append in work.carried if not self._is_current(append)]
        self._add(work.carried)
        for key in dropped:  # a reader found it bad while it was being copied
            self._bury(key)
        self.carried_bytes += sum(append.row[2] * ALIGN for append in work.carried)
        for segment in work.removed:
            self._books.remove(segment)
            self.dropped_segments += 1
        self._deleted = []
        self._nameless = list(work.undeleted)
        for segment in (*work.nameless, *work.removed):
            if segment not in work.undeleted:
                segment.drop_file()
        self._leaving = [segment for segment in (*self._leaving, *work.removed) if segment.readers]

    def _is_current(self, append: Append) -> bool:
        """Whether the block still has its place where it was carried over from."""
        return append.source is not None and self._books.lives(*append.source)

    def _add(self, appends: Sequence[Append]) -> None:
        """These records are committed."""
        for segment, size in ends(appends).items():
            segment.size = size
            self._books.add(segment, [append.row for append in appends if append.segment is segment])
        self.written_bytes += sum(append.row[2] * ALIGN for append in appends)

    def close(self) -> None:
        """Blocking. Closes all files and unlocks the folder; what was not synced on the way is synced now."""
        written = [segment for segment in self._books.segments.values() if segment.number >= self._first_segment]
        try:
            if self.durability == "process":
                for segment in written:
                    segment.file.sync()
                sync_folder(self._folder.segments)
                self._index.sync()
                self._folder.all_synced()
        except (OSError, lmdb.Error) as error:
            _log.error("what was written may not survive a loss of power", error=str(error))
        for segment in (*self._books.segments.values(), *self._nameless, *self._deleted, *self._leaving):
            segment.file.close()
        self._index.close()
        self._folder.close()

    def check_invariants(self) -> None:
        """The books agree with each other. Only between plans."""
        self._books.check_invariants()
        assert self.used_bytes == sum(segment.size for segment in self._books.segments.values())
        assert all(segment.size and not segment.going for segment in self._books.segments.values())
        assert all(segment.readers >= 0 for segment in self._books.segments.values())
        assert self.live_bytes <= self.used_bytes
        segments = [*self._books.segments.values(), *self._deleted]
        self._books.formats.check_invariants(number for segment in segments for number in segment.formats)
        self._books.tenants.check_invariants(number for segment in segments for number in segment.tenants)


def open_tier(
    path: Path,
    capacity_bytes: int,
    segment_bytes: int,
    *,
    durability: Durability = "power",
    keeps: Keeps | None = None,
    account: TierAccount | None = None,
) -> SsdTier:
    """Blocking. Locks a data folder and finds out what it holds; arguments as for `SsdTier` and `recover`.

    Raises:
        ConfigError: naming `data_dir`: the folder cannot be used.
    """
    folder = DataFolder(path)
    try:
        recovered = recover(folder, durability=durability)
        return SsdTier(folder, recovered, capacity_bytes, segment_bytes, keeps=keeps, account=account)
    except BaseException:
        folder.close()
        raise
