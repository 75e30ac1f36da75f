"""Writing sessions: they bring blocks, whole blocks become VISIBLE, blocks committed to the SSD tier DURABLE.

DRAM for a block is set aside when its first bytes come. A block that waits for the SSD tier is held, so that writers
wait for room when the device is slower than they are. A block that the device did not take stays in DRAM without a hold
and is tried again: by `retry`, or when a writer offers it again. Commits are done elsewhere, between `next_plan` and
`plan_done`.
"""

import collections
import itertools
from collections.abc import Iterable, Sequence

from moonpool.errors import InvalidRequest, Overloaded
from moonpool.kv.blocks import DramBlock
from moonpool.kv.frames import OpenRun
from moonpool.kv.keys import BlockKey
from services.kvstore.core.assembly import Assembler, Assembly, Indices, PutSession, PutSpec
from services.kvstore.core.tiered_store import TieredStore
from services.kvstore.ssd.commit import WritePlan
from services.kvstore.ssd.records import record_size
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.tenants import Account

RETRY_AFTER_S = 1.0
MAX_OPEN_KEYS = 1 << 18
"""Most keys of all open writing sessions together."""


class Writes:
    """Writing sessions and the queue to the SSD tier.

    Args:
        tiers: both tiers.
        max_sessions: open sessions at most.
        batch_bytes: most bytes in one commit, unless one block is larger.
        ssd_account: what tenants are granted in the SSD tier, which keeps it up to date.

    Attributes:
        blocks_not_durable: blocks that the SSD tier did not take at the first try.
    """

    def __init__(
        self, tiers: TieredStore, *, max_sessions: int, batch_bytes: int, ssd_account: Account | None = None
    ) -> None:
        self._tiers = tiers
        self._max_sessions = max_sessions
        self._batch_bytes = batch_bytes
        self._ssd_account = ssd_account
        self._assembler = Assembler(tiers.dram.allocate)
        self._pending: collections.deque[DramBlock] = collections.deque()
        self._queued: set[BlockKey] = set()  # of blocks in `_pending` or in the plan under way
        self._unsaved: dict[BlockKey, None] = {}  # tried in vain; some may be queued again
        self._committing: WritePlan | None = None
        self._awaiting: dict[BlockKey, list[tuple[PutSession, int]]] = {}
        self.blocks_put = 0
        self.blocks_durable = 0
        self.blocks_not_durable = 0
        self.failed_batches = 0

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return self._assembler.sessions

    @property
    def unfinished_blocks(self) -> int:
        """Blocks that are being written."""
        return len(self._assembler)

    @property
    def unfinished_bytes(self) -> int:
        """DRAM set aside for them."""
        return self._assembler.reserved_bytes

    @property
    def pending(self) -> int:
        """Visible blocks on their way to the SSD tier."""
        return len(self._queued)

    @property
    def unsaved(self) -> int:
        """Keys of blocks that the SSD tier has not taken yet; some may have left DRAM meanwhile."""
        return len(self._unsaved)

    @property
    def awaited(self) -> int:
        """Blocks that some session waits for to become durable."""
        return len(self._awaiting)

    def lane(self, tenant: str) -> str | None:
        """Which sessions wait for room in one queue: those of a tenant with a quota, or (None) all others."""
        return None if self._tiers.dram.account.grants.quota(tenant) is None else tenant

    def open(self, spec: PutSpec, on_visible: Indices, on_durable: Indices, *, now: float = 0.0) -> PutSession | None:
        """Opens a session. Evicts nothing and sets nothing aside: that is done when data comes.

        Args:
            spec: what will be written.
            on_visible: told indices of blocks that others can read from now on.
            on_durable: told indices of blocks that survive a restart from now on, present ones among them.
            now: the time.

        Returns:
            The session, or None while there is no room for one more block; `StoreListener.room` tells when to try
            again.

        Raises:
            InvalidRequest: it can never be opened.
            Overloaded: too many sessions are open, or pins and guarantees of others leave too little; waiting for room
                would be in vain.
        """
        if self.sessions >= self._max_sessions or self._assembler.keys + len(spec.keys) > MAX_OPEN_KEYS:
            raise Overloaded("too many writing sessions", reason="kvstore_sessions", retry_after_s=RETRY_AFTER_S)
        tiers, dram, size = self._tiers, self._tiers.dram, spec.format.layout.block_bytes
        present = [index for index, key in enumerate(spec.keys) if key in dram or tiers.durable(key)]
        if any(tiers.format_of(spec.keys[index]) != spec.format for index in present):
            raise InvalidRequest("keys", "a key exists already in another format")
        self._assembler.check_formats(spec)
        dram.check_possible((len(spec.keys) - len(present)) * size, spec.tenant, now)
        if len(present) < len(spec.keys) and not dram.can_reserve(size, spec.tenant):
            return None
        tiers.touch([spec.keys[index] for index in present])
        session = PutSession(spec, present, on_visible, on_durable)
        self._assembler.open(session)
        for index in present:
            self._await_durable(session, index)
        self._make_durable(block for index in present if (block := dram.get(spec.keys[index])) is not None)
        tiers.listener.sessions_changed()
        return session

    def durable_present(self, session: PutSession) -> list[int]:
        """Those present blocks of a session that are durable already."""
        return [index for index in session.present if self._tiers.durable(session.spec.keys[index])]

    def needs_room(self, session: PutSession, runs: Sequence[OpenRun]) -> bool:
        """Whether DRAM must be set aside before a frame can be written."""
        return bool(self._assembler.begun_by(session, runs))

    def write(self, session: PutSession, runs: Sequence[OpenRun], *, now: float = 0.0) -> bool:
        """Takes an opened frame of a session, and makes visible what became whole.

        Returns:
            False while there is no room; nothing has been taken then.

        Raises:
            FrameError: it does not belong to the session; close it.
            Overloaded: there is no memory, or pins and guarantees of others leave too little; the same.
        """
        assert not session.closed
        begun = self._assembler.begun_by(session, runs)
        if begun and not self._reserve(begun, now):
            return False
        whole: list[Assembly] = []
        try:
            self._assembler.write(session, runs, whole)
        finally:
            blocks = self._tiers.insert([DramBlock(block.info, block.data, block.all_hashes()) for block in whole])
            self.blocks_put += len(blocks)
            self._make_durable(blocks)
            self._tell_visible(whole)
        return True

    def _reserve(self, begun: Sequence[Assembly], now: float) -> bool:
        needed = collections.Counter[str]()
        for block in begun:
            needed[block.tenant] += block.nbytes
        for tenant, nbytes in needed.items():
            self._tiers.dram.check_possible(nbytes, tenant, now)
        for count, (tenant, nbytes) in enumerate(needed.items()):
            if not self._tiers.reserve(nbytes, tenant):
                for other, freed in itertools.islice(needed.items(), count):
                    self._tiers.dram.unreserve(freed, other)
                return False
        for block in begun:
            block.reserved = True
        return True

    def arrived(self, blocks: Sequence[DramBlock]) -> None:
        """Blocks came into DRAM in another way; sessions that write them are told and need not go on."""
        self._make_durable(blocks)
        whole = [found for block in blocks if (found := self._assembler.arrived(block.info.key)) is not None]
        for assembly in whole:
            if assembly.reserved:
                self._tiers.unreserve(assembly.nbytes, assembly.tenant)
        self._tell_visible(whole)

    def _make_durable(self, blocks: Iterable[DramBlock]) -> None:
        """Queues those blocks that are neither durable nor queued."""
        if self._tiers.ssd is None:
            return
        for block in blocks:
            key = block.info.key
            if key not in self._queued and not self._tiers.durable(key):
                self._tiers.dram.hold(block)
                self._queued.add(key)
                self._pending.append(block)
        if self._pending:
            self._tiers.listener.work()

    def _tell_visible(self, whole: Sequence[Assembly]) -> None:
        visible: dict[PutSession, list[int]] = {}
        for assembly in whole:
            for writer, index in assembly.writers.items():
                visible.setdefault(writer, []).append(index)
                self._await_durable(writer, index)
        for writer, indices in visible.items():
            if writer.complete:
                self._tiers.dram.arrived(writer.spec.keys)
            durable = [index for index in indices if self._tiers.durable(writer.spec.keys[index])]
            writer.on_visible(indices)
            if durable:
                writer.on_durable(durable)

    def close(self, session: PutSession) -> None:
        """Ends a session, whole or not; what is unfinished is forgotten. Idempotent."""
        if session.closed:
            return
        freed = self._assembler.close(session)
        for key in session.spec.keys:
            waiting = self._awaiting.get(key)
            if waiting is not None:
                waiting[:] = [entry for entry in waiting if entry[0] is not session]
                if not waiting:
                    del self._awaiting[key]
        for tenant, nbytes in freed.items():
            self._tiers.unreserve(nbytes, tenant)
        self._tiers.listener.sessions_changed()

    def next_plan(self) -> WritePlan | None:
        """The next batch for `SsdTier.commit`; None when there is nothing to do, or one is under way."""
        ssd = self._tiers.ssd
        if ssd is None or self._committing is not None or not (self._pending or ssd.has_housekeeping):
            return None
        blocks: Sequence[DramBlock] = ()
        while self._pending and not blocks:
            blocks = self._within_quotas(ssd, self._next_batch())
        plan = self._committing = ssd.plan(blocks)
        self._tiers.removed(plan.removed)
        self._not_durable(plan.rejected)
        return plan

    def _next_batch(self) -> list[DramBlock]:
        batch: list[DramBlock] = []
        nbytes = 0
        while self._pending:
            nbytes += record_size(self._pending[0].info)
            if batch and nbytes > self._batch_bytes:
                break
            batch.append(self._pending.popleft())
        return batch

    def _within_quotas(self, ssd: SsdTier, blocks: Sequence[DramBlock]) -> Sequence[DramBlock]:
        """The blocks that may be stored; for them, older blocks of their tenants go."""
        account = self._ssd_account
        if account is None or not account.grants.has_quotas:
            return blocks
        taken: list[DramBlock] = []
        coming: collections.Counter[str] = collections.Counter()
        for block in blocks:
            tenant, size = block.info.tenant, record_size(block.info)
            excess = account.over_quota(tenant, coming[tenant] + size)
            if excess:
                self._tiers.removed(ssd.forget_oldest(tenant, excess, self._tiers.dram.pins.__contains__))
            if account.over_quota(tenant, coming[tenant] + size):
                self._not_durable([block])
            else:
                taken.append(block)
                coming[tenant] += size
        return taken

    def plan_done(self, error: BaseException | None, *, again: bool = False) -> None:
        """The plan under way was committed, or not, because of `error`.

        Args:
            error: why not.
            again: what was not committed is tried again, before all others.
        """
        plan, self._committing = self._committing, None
        ssd = self._tiers.ssd
        assert plan is not None
        assert ssd is not None
        if error is not None:
            self.failed_batches += 1
            ssd.failed(plan, error)
            self._tiers.removed(plan.lost)
            if again:
                self._pending.extendleft(reversed(plan.blocks))
            else:
                self._not_durable(plan.blocks)
            return
        ssd.committed(plan)
        self._tiers.removed(plan.lost)
        self._durable(plan.blocks)

    def _durable(self, blocks: Sequence[DramBlock]) -> None:
        self.blocks_durable += len(blocks)
        durable: dict[PutSession, list[int]] = {}
        retried = False
        for block in blocks:
            key = block.info.key
            self._queued.remove(key)
            retried |= key in self._unsaved
            self._unsaved.pop(key, None)
            for session, index in self._awaiting.pop(key, ()):
                durable.setdefault(session, []).append(index)
        self._tiers.release(blocks)
        for session, indices in durable.items():
            session.on_durable(indices)
        if retried:
            self.retry()

    def _not_durable(self, blocks: Sequence[DramBlock]) -> None:
        """These stay in DRAM for as long as there is room; sessions go on waiting for them."""
        for block in blocks:
            key = block.info.key
            self._queued.remove(key)
            self.blocks_not_durable += key not in self._unsaved
            self._unsaved.pop(key, None)  # what was tried last goes to the end
            self._unsaved[key] = None
        self._tiers.release(blocks)
        if len(self._unsaved) > 2 * len(self._tiers.dram) + 1024:
            self._unsaved = dict.fromkeys(key for key in self._unsaved if key in self._tiers.dram)

    def retry(self) -> None:
        """Queues one batch of the blocks that the SSD tier did not take; when it succeeds, the next one follows."""
        batch: list[DramBlock] = []
        nbytes = 0
        for key in list(self._unsaved):
            block = self._tiers.dram.get(key)
            if block is None:
                del self._unsaved[key]
            elif key not in self._queued:
                nbytes += record_size(block.info)
                if batch and nbytes > self._batch_bytes:
                    break
                batch.append(block)
        self._make_durable(batch)

    def awaits(self, session: PutSession) -> bool:
        """Whether some block of a session is not durable yet, though there is an SSD tier."""
        return self._tiers.ssd is not None and not all(map(self._tiers.durable, session.spec.keys))

    def _await_durable(self, session: PutSession, index: int) -> None:
        key = session.spec.keys[index]
        if self._tiers.ssd is not None and not self._tiers.durable(key):
            self._awaiting.setdefault(key, []).append((session, index))

    def check_invariants(self) -> None:
        """Waiting blocks are held, in DRAM and not durable; waiting sessions are open."""
        self._assembler.check_invariants()
        waiting = [*self._pending, *(self._committing.blocks if self._committing else ())]
        assert self._queued == {block.info.key for block in waiting}
        assert len(self._queued) == len(waiting)
        assert not any(map(self._tiers.durable, self._unsaved))
        assert all(self._tiers.dram.get(block.info.key) is block for block in waiting)
        assert all(block.holds > 0 and not self._tiers.durable(block.info.key) for block in waiting)
        for key, entries in self._awaiting.items():
            assert entries
            assert all(not session.closed and session.spec.keys[index] == key for session, index in entries)
