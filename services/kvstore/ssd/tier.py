"""The SSD tier: blocks as records in segment files, found through an index that LMDB keeps.

Owns the tier as others see it: what is here, how it is read, what it forgets, how it is opened and closed. How blocks
come and segments go is in plans.py. Must not know of DRAM, sessions, events or asyncio. Threads: see backend.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import lmdb

from moonpool.kv.blocks import BlockFormat, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.telemetry.logs import get_logger
from services.kvstore.ssd.backend import BlockReader, WritePlan
from services.kvstore.ssd.catalogue import Catalogue
from services.kvstore.ssd.commit import Committer, Durability
from services.kvstore.ssd.plans import Plans
from services.kvstore.ssd.quota import OldestFirst
from services.kvstore.ssd.reclaim import Keeps
from services.kvstore.ssd.record_reader import SsdReader
from services.kvstore.ssd.recovery import DataFolder, Recovered, recover
from services.kvstore.ssd.segments import sync_folder
from services.kvstore.ssd.space import Space
from services.kvstore.tenancy.tenants import Account

_log = get_logger(__name__)

MIN_LIVE_SHARE = 0.5
"""What `compact` asks of a segment unless told otherwise."""


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
        durability: what its commits survive.
    """

    def __init__(
        self,
        folder: DataFolder,
        recovered: Recovered,
        capacity_bytes: int,
        segment_bytes: int,
        *,
        keeps: Keeps | None = None,
        account: Account | None = None,
    ) -> None:
        self.durability = recovered.durability
        self._folder = folder
        self._index = recovered.index
        self._books: Catalogue = recovered.catalogue
        self._space = Space(
            self._books,
            folder.segments,
            capacity_bytes,
            segment_bytes,
            recovered.next_segment,
            direct=recovered.durability == "power",
        )
        self._unsynced_from = 0 if recovered.unsynced else recovered.next_segment
        self._oldest = OldestFirst(self._books)
        committer = Committer(recovered.index, folder.segments, recovered.durability)
        self._plans = Plans(self._books, self._space, committer, self._oldest.forget)
        self.protect(keeps, account)

    def protect(self, keeps: Keeps | None, account: Account | None = None) -> None:
        """Says what must stay; once, before the first plan.

        Args:
            keeps: whether a block (key, tenant, bytes of its record) must stay; None for none.
            account: told of every record that comes or goes, and of those that are here at once.
        """
        self._space.keeps = keeps
        self._books.keep_account(account)

    def __contains__(self, key: bytes) -> bool:
        return key in self._books

    def __len__(self) -> int:
        return len(self._books)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._books)

    def part(self, number: int) -> Iterable[BlockKey]:
        """Keys of the blocks in one part."""
        return self._books.part(number)

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Keys of the blocks, the last written first, in steps in which at most `step` records are looked at."""
        return self._books.newest_first(step)

    @property
    def readers(self) -> int:
        """Blocks that are being read, of segments that are to go too."""
        return sum(segment.readers for segment in (*self._books.segments.values(), *self._plans.leaving))

    @property
    def indexed(self) -> bool:
        """Whether there is an index; else there was no room for one, and the next start reads all segments."""
        return self._index.kept

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
    def written_bytes(self) -> int:
        """Records written, headers, padding and carried ones included."""
        return self._plans.written_bytes

    @property
    def user_bytes(self) -> int:
        """Of new blocks in `written_bytes`."""
        return self._plans.user_bytes

    @property
    def write_amplification(self) -> float:
        """Bytes written over bytes of new blocks, in this process' life; 1.0 before the first."""
        return self.written_bytes / self.user_bytes if self.user_bytes else 1.0

    @property
    def carried_bytes(self) -> int:
        """Of carried records."""
        return self._plans.carried_bytes

    @property
    def dropped_segments(self) -> int:
        """Segments that were reclaimed."""
        return self._plans.dropped_segments

    @property
    def lost_blocks(self) -> int:
        """Blocks that could not be read when they were to be carried over."""
        return self._plans.lost_blocks

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
        self._plans.bury(reader.key)
        return True

    def forget_oldest(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Gives up the tenant's oldest blocks, together at least `nbytes` of records, but none that `stays`."""
        keys = self._oldest.find(tenant, nbytes, stays)
        for key in keys:
            self._plans.bury(key)
        return keys

    @property
    def has_housekeeping(self) -> bool:
        """Whether slots or segments wait to be forgotten on disk, or the tier is over its budget."""
        return self._plans.outstanding or self._space.has_work

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
        return self._plans.plan(blocks)

    def commit(self, plan: WritePlan) -> None:
        """Blocking, in the writer thread."""
        self._plans.commit(plan)

    def committed(self, plan: WritePlan) -> None:
        """The plan's blocks are here from now on."""
        self._plans.committed(plan)

    def failed(self, plan: WritePlan, error: BaseException) -> None:
        """None of the plan's blocks is here."""
        self._plans.failed(plan, error)

    def close(self) -> None:
        """Blocking. Closes all files and unlocks the folder; what was not synced on the way is synced now."""
        written = [segment for segment in self._books.segments.values() if segment.number >= self._unsynced_from]
        try:
            if self.durability == "process":
                for segment in written:
                    segment.file.sync()
                sync_folder(self._folder.segments)
                self._index.sync()
                self._folder.all_synced()
        except (OSError, lmdb.Error) as error:
            _log.error("what was written may not survive a loss of power", error=str(error))
        for segment in (*self._books.segments.values(), *self._plans.leftovers):
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
        segments = [*self._books.segments.values(), *self._plans.unforgotten]
        self._books.formats.check_invariants(number for segment in segments for number in segment.formats)
        self._books.tenants.check_invariants(number for segment in segments for number in segment.tenants)


def open_tier(
    path: Path,
    capacity_bytes: int,
    segment_bytes: int,
    *,
    durability: Durability = "power",
    keeps: Keeps | None = None,
    account: Account | None = None,
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
