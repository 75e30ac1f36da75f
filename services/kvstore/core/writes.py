"""The writing side: sessions bring blocks, whole blocks become VISIBLE, committed ones DURABLE.

Owns open writing sessions, blocks that wait for the durable tier, and who is told what. Must not know of streams,
threads or clocks: commits are done elsewhere, `next_plan` and `plan_done` are their two ends.

A block that waits for the durable tier is held, so that DRAM cannot fill with more than its budget: when the device
is slower than the writers, `open` finds no room and the writers wait.
"""

import collections
from collections.abc import Callable, Sequence

from moonpool.errors import InvalidRequest, Overloaded
from moonpool.kv.blocks import DramBlock
from moonpool.kv.frames import OpenRun
from services.kvstore.core.assembly import Assembler, Assembly, PutSession, PutSpec
from services.kvstore.core.holdings import Holdings
from services.kvstore.ssd.commit import WritePlan
from services.kvstore.ssd.records import record_size
from services.kvstore.ssd.tier import SsdTier
from services.kvstore.tenancy.tenants import Account

Indices = Callable[[Sequence[int]], None]
RETRY_AFTER_S = 1.0


class Writes:
    """Sessions and the queue to the durable tier.

    Args:
        holdings: both tiers.
        max_sessions: open sessions at most.
        batch_bytes: most bytes in one commit, unless one block is larger.
        durable_account: what tenants are granted in the durable tier, which keeps it.

    Attributes:
        on_work: called when the durable tier has something to do.
    """

    def __init__(
        self, holdings: Holdings, *, max_sessions: int, batch_bytes: int, durable_account: Account | None = None
    ) -> None:
        self._holdings = holdings
        self._max_sessions = max_sessions
        self._batch_bytes = batch_bytes
        self._durable_account = durable_account
        self._assembler = Assembler(holdings.dram.allocate)
        self._pending: collections.deque[DramBlock] = collections.deque()
        self._committing: WritePlan | None = None
        self._awaiting: dict[bytes, list[tuple[PutSession, int]]] = {}
        self.on_work: Callable[[], None] = lambda: None
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
        """Their bytes."""
        return self._assembler.nbytes

    @property
    def pending(self) -> int:
        """Visible blocks on their way to the durable tier."""
        return len(self._pending) + (len(self._committing.blocks) if self._committing else 0)

    @property
    def awaited(self) -> int:
        """Blocks of which some session waits to hear that they are durable."""
        return len(self._awaiting)

    def lane(self, tenant: str) -> str | None:
        """Who has to wait for room behind each other: a tenant at its own quota, or (None) all without one."""
        return None if self._holdings.dram.account.grants.quota(tenant) is None else tenant

    def open(
        self, spec: PutSpec, on_visible: Indices, on_durable: Indices, *, now: float = 0.0, again: bool = False
    ) -> PutSession | None:
        """Opens a session.

        Args:
            spec: what will be written.
            on_visible: told indices of blocks that others can read from now on.
            on_durable: told indices of blocks that survive a restart from now on, present ones among them.
            now: the time.
            again: this was tried before, in vain: what is present was used once, however long the session waits.

        Returns:
            The session, or None while there is no room; `Holdings.on_room` tells when to try again.

        Raises:
            InvalidRequest: it can never be opened.
            Overloaded: too many sessions are open, or pins and guarantees of others leave too little; waiting for room
                would be in vain.
        """
        if self.sessions >= self._max_sessions:
            raise Overloaded("too many writing sessions", reason="kvstore_sessions", retry_after_s=RETRY_AFTER_S)
        holdings, dram = self._holdings, self._holdings.dram
        present = [index for index, key in enumerate(spec.keys) if key in holdings]
        for index in present:
            if holdings.format_of(spec.keys[index]) != spec.format:
                raise InvalidRequest("keys", "a key exists already in another format")
        needed = self._assembler.new_keys(spec, present) * spec.format.layout.block_bytes
        dram.check_possible(needed, spec.tenant, now)
        if not again:  # before room is made, which may evict them all the same
            holdings.touch([spec.keys[index] for index in present])
        if not holdings.reserve(needed, spec.tenant):
            return None
        session = PutSession(spec, present, on_visible, on_durable)
        self._assembler.open(session)
        for index in present:
            self._await_durable(session, index)
        return session

    def durable_present(self, session: PutSession) -> list[int]:
        """Those present blocks of a session that are durable already."""
        return [index for index in session.present if self._holdings.durable(session.spec.keys[index])]

    def write(self, session: PutSession, runs: Sequence[OpenRun]) -> None:
        """Takes an opened frame of a session, and makes visible what became whole.

        Raises:
            FrameError: it does not belong to the session; close it.
            Overloaded: there is no memory; the same.
        """
        assert not session.closed
        whole = self._assembler.write(session, runs)
        if not whole:
            return
        blocks = self._holdings.insert([DramBlock(block.info, block.data, block.all_hashes()) for block in whole])
        self.blocks_put += len(blocks)
        self._make_durable(blocks)
        self._tell_visible(whole)

    def arrived(self, blocks: Sequence[DramBlock]) -> None:
        """Blocks came into DRAM in another way; whoever was writing them is told and need not go on."""
        self._make_durable([block for block in blocks if not self._holdings.durable(block.info.key)])
        whole = [found for block in blocks if (found := self._assembler.arrived(block.info.key)) is not None]
        for assembly in whole:
            self._holdings.unreserve(assembly.info.nbytes, assembly.info.tenant)
        self._tell_visible(whole)

    def _make_durable(self, blocks: Sequence[DramBlock]) -> None:
        if self._holdings.backend is None or not blocks:
            return
        for block in blocks:
            self._holdings.dram.hold(block)
        self._pending.extend(blocks)
        self.on_work()

    def _tell_visible(self, whole: Sequence[Assembly]) -> None:
        visible: dict[PutSession, list[int]] = {}
        for assembly in whole:
            for writer, index in assembly.writers.items():
                visible.setdefault(writer, []).append(index)
                self._await_durable(writer, index)
        for writer, indices in visible.items():
            if writer.complete:
                self._holdings.dram.arrived(writer.spec.keys)
            durable = [index for index in indices if self._holdings.durable(writer.spec.keys[index])]
            writer.on_visible(indices)
            if durable:
                writer.on_durable(durable)

    def close(self, session: PutSession) -> None:
        """Ends a session, whole or not; what is unfinished is forgotten. Twice does no harm."""
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
            self._holdings.unreserve(nbytes, tenant)

    def next_plan(self) -> WritePlan | None:
        """The next batch for `SsdTier.commit`; None when there is nothing to do, or one is under way."""
        backend = self._holdings.backend
        if backend is None or self._committing is not None:
            return None
        if not self._pending and not backend.has_housekeeping:
            return None
        blocks: Sequence[DramBlock] = ()
        while self._pending and not blocks:
            blocks = self._within_quotas(backend, self._next_batch())
        plan = self._committing = backend.plan(blocks)
        self._holdings.gone(plan.removed)
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

    def _within_quotas(self, backend: SsdTier, blocks: Sequence[DramBlock]) -> Sequence[DramBlock]:
        """Those that may be stored, older ones of their tenants going for them; the others stay here for a while."""
        account = self._durable_account
        if account is None or not account.grants.has_quotas:
            return blocks
        taken: list[DramBlock] = []
        coming: collections.Counter[str] = collections.Counter()
        for block in blocks:
            tenant, size = block.info.tenant, record_size(block.info)
            excess = account.over_quota(tenant, coming[tenant] + size)
            if excess:
                pinned = self._holdings.dram.pins.__contains__
                self._holdings.gone(backend.forget_oldest(tenant, excess, pinned))
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
        backend = self._holdings.backend
        assert plan is not None
        assert backend is not None
        if error is not None:
            self.failed_batches += 1
            backend.failed(plan, error)
            self._holdings.gone(plan.lost)
            if again:
                self._pending.extendleft(reversed(plan.blocks))
            else:
                self._not_durable(plan.blocks)
            return
        backend.committed(plan)
        self._holdings.gone(plan.lost)
        self.blocks_durable += len(plan.blocks)
        durable: dict[PutSession, list[int]] = {}
        for block in plan.blocks:
            for session, index in self._awaiting.pop(block.info.key, ()):
                durable.setdefault(session, []).append(index)
        self._holdings.let_go(plan.blocks)
        for session, indices in durable.items():
            session.on_durable(indices)

    def _await_durable(self, session: PutSession, index: int) -> None:
        key = session.spec.keys[index]
        if self._holdings.backend is not None and not self._holdings.durable(key):
            self._awaiting.setdefault(key, []).append((session, index))

    def _not_durable(self, blocks: Sequence[DramBlock]) -> None:
        """These stay in DRAM for as long as there is room; nobody is told that they are safe."""
        self.blocks_not_durable += len(blocks)
        for block in blocks:
            self._awaiting.pop(block.info.key, None)
        self._holdings.let_go(blocks)

    def check_invariants(self) -> None:
        """Waiting blocks are held, in DRAM and not durable; waiting sessions are open."""
        self._assembler.check_invariants()
        waiting = [*self._pending, *(self._committing.blocks if self._committing else ())]
        assert all(self._holdings.dram.get(block.info.key) is block for block in waiting)
        assert all(block.holds > 0 and not self._holdings.durable(block.info.key) for block in waiting)
        for key, entries in self._awaiting.items():
            assert entries
            assert all(not session.closed and session.spec.keys[index] == key for session, index in entries)
