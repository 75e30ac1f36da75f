"""Plans of the SSD tier, from their making to their end.

Owns what is stored, removed and carried over together, and what the books say once that has succeeded or failed. Must
not know of LMDB, files' contents, DRAM, sessions or asyncio, nor of who reads the tier or asks for room.

Between `plan` and `committed`/`failed` the segment files and the index are the writer thread's (commit.py); the books
and everything else here belongs to the event loop. A segment that goes stays readable until the plan is done: what is
carried over has its place there till then.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from moonpool.kv.blocks import DramBlock
from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.backend import WritePlan
from services.kvstore.ssd.catalogue import Catalogue, Row, Segment
from services.kvstore.ssd.commit import Append, Committer, Work, ends
from services.kvstore.ssd.full_device import is_full
from services.kvstore.ssd.index import Slot
from services.kvstore.ssd.names import Names
from services.kvstore.ssd.reclaim import Victim
from services.kvstore.ssd.records import ALIGN, record_size
from services.kvstore.ssd.space import Space


@dataclasses.dataclass(slots=True)
class _Plan:
    """A plan of this tier: what the writer thread does, and how to take it back."""

    work: Work
    victims: list[Victim]
    dead: int


class Plans:
    """The plans of one tier, one at a time.

    Args:
        books: what the tier holds.
        space: where records may go.
        committer: does the plans.
        on_tenants_gone: told tenants of whom nothing is left.

    Attributes:
        names: formats and tenants on their way to the index.
        written_bytes: records written, headers, padding and carried ones included.
        user_bytes: of new blocks in them.
        carried_bytes: of carried records.
        dropped_segments: segments that were reclaimed.
        lost_blocks: blocks that could not be read when they were to be carried over.
    """

    def __init__(
        self,
        books: Catalogue,
        space: Space,
        committer: Committer,
        on_tenants_gone: Callable[[Iterable[str]], None],
    ) -> None:
        self._books = books
        self._space = space
        self._committer = committer
        self._on_tenants_gone = on_tenants_gone
        self._dead: list[Slot] = []
        self._nameless: list[Segment] = []  # forgotten; the file is not deleted yet
        self._deleted: list[Segment] = []  # the file may be gone; not forgotten yet
        self._leaving: list[Segment] = []  # read by someone, for the last time
        self._device_full = False
        self.names = Names(books)
        self.written_bytes = 0
        self.user_bytes = 0
        self.carried_bytes = 0
        self.dropped_segments = 0
        self.lost_blocks = 0

    @property
    def leftovers(self) -> Sequence[Segment]:
        """Segments that the books do not have any more, and whose files may still be open."""
        return (*self._nameless, *self._deleted, *self._leaving)

    @property
    def leaving(self) -> Sequence[Segment]:
        """Those of them that are still being read."""
        return self._leaving

    @property
    def unforgotten(self) -> Sequence[Segment]:
        """Those of them that the index still has: their names stay."""
        return self._deleted

    @property
    def outstanding(self) -> bool:
        """Whether slots or segments wait to be forgotten on disk."""
        return bool(self._dead or self._nameless or self._deleted)

    def bury(self, key: BlockKey) -> None:
        """Forgets a block; the index hears of it with the next plan."""
        place = self._books.forget(key)
        if place is not None:
            self._dead.append((place[0].number, place[1]))

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
        work.names = self.names.change()
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
        self._on_tenants_gone(self.names.settle(work.names, written=work.named))

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
            self.bury(key)
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
