"""The writing side: sessions bring blocks, whole blocks become VISIBLE, committed ones DURABLE.

Owns open writing sessions, blocks that wait for the durable tier, and who is told what. Must not know of streams,
threads or clocks: commits are done elsewhere, `next_plan` and `plan_done` are their two ends.

A block that waits for the durable tier is held, so that DRAM cannot fill with more than its budget: when the device
is slower than the writers, `open` finds no room and the writers wait.
"""

import collections
from collections.abc import Callable, Sequence

from moonpool.errors import InvalidRequest, Overloaded
from moonpool.kv.frames import Run
from services.kvstore.assembly import Assembler, PutSession, PutSpec
from services.kvstore.backend import WritePlan
from services.kvstore.blocks import DramBlock
from services.kvstore.holdings import Holdings
from services.kvstore.records import record_size

Indices = Callable[[Sequence[int]], None]
RETRY_AFTER_S = 1.0


class Writes:
    """Sessions and the queue to the durable tier.

    Args:
        holdings: both tiers.
        max_sessions: open sessions at most.
        batch_bytes: most bytes in one commit, unless one block is larger.

    Attributes:
        on_work: called when the durable tier has something to do.
    """

    def __init__(self, holdings: Holdings, *, max_sessions: int, batch_bytes: int) -> None:
        self._holdings = holdings
        self._max_sessions = max_sessions
        self._batch_bytes = batch_bytes
        self._assembler = Assembler()
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

    def open(self, spec: PutSpec, on_visible: Indices, on_durable: Indices) -> PutSession | None:
        """Opens a session.

        Args:
            spec: what will be written.
            on_visible: told indices of blocks that others can read from now on.
            on_durable: told indices of blocks that survive a restart from now on, present ones among them.

        Returns:
            The session, or None while there is no room; `Holdings.on_room` tells when to try again.

        Raises:
            InvalidRequest: it can never be opened.
            Overloaded: too many sessions are open.
        """
        if self.sessions >= self._max_sessions:
            raise Overloaded("too many writing sessions", reason="kvstore_sessions", retry_after_s=RETRY_AFTER_S)
        holdings, dram = self._holdings, self._holdings.dram
        present = [index for index, key in enumerate(spec.keys) if key in holdings]
        for index in present:
            if holdings.format_of(spec.keys[index]) != spec.format:
                raise InvalidRequest("keys", "a key exists already in another format")
        needed = self._assembler.new_keys(spec, present) * spec.format.layout.block_bytes
        if needed > dram.capacity_bytes:
            raise InvalidRequest("keys", f"the session needs {needed} bytes, all DRAM has {dram.capacity_bytes}")
        dram.touch([spec.keys[index] for index in present])  # before room is made, which may evict them all the same
        if not holdings.reserve(needed):
            return None
        session = PutSession(spec, present, on_visible, on_durable)
        self._assembler.open(session)
        for index in present:
            self._await_durable(session, index)
        return session

    def durable_present(self, session: PutSession) -> list[int]:
        """Those present blocks of a session that are durable already."""
        return [index for index in session.present if self._holdings.durable(session.spec.keys[index])]

    def write(self, session: PutSession, runs: Sequence[tuple[Run, memoryview]]) -> None:
        """Takes an opened frame of a session, and makes visible what became whole.

        Raises:
            FrameError: it does not belong to the session; close it.
        """
        assert not session.closed
        whole = self._assembler.write(session, runs)
        if not whole:
            return
        blocks = self._holdings.insert([DramBlock(assembly.info, assembly.data) for assembly in whole])
        self.blocks_put += len(blocks)
        visible: dict[PutSession, list[int]] = {}
        for assembly in whole:
            for writer, index in assembly.writers.items():
                visible.setdefault(writer, []).append(index)
                self._await_durable(writer, index)
        if self._holdings.backend is not None:
            for block in blocks:
                self._holdings.dram.hold(block)
            self._pending.extend(blocks)
        for writer, indices in visible.items():
            if writer.complete:
                self._holdings.dram.touch(writer.spec.keys)
            writer.on_visible(indices)
        self.on_work()

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
        self._holdings.unreserve(freed)

    def next_plan(self) -> WritePlan | None:
        """The next batch for `Backend.commit`; None when there is nothing to do, or one is under way."""
        backend = self._holdings.backend
        if backend is None or self._committing is not None:
            return None
        if not self._pending and not backend.has_housekeeping:
            return None
        blocks: list[DramBlock] = []
        nbytes = 0
        while self._pending:
            nbytes += record_size(self._pending[0].info)
            if blocks and nbytes > self._batch_bytes:
                break
            blocks.append(self._pending.popleft())
        plan = self._committing = backend.plan(blocks)
        self._holdings.gone(plan.removed)
        self._not_durable(plan.rejected)
        return plan

    def plan_done(self, error: BaseException | None) -> None:
        """The plan under way was committed, or not, because of `error`."""
        plan, self._committing = self._committing, None
        backend = self._holdings.backend
        assert plan is not None
        assert backend is not None
        if error is not None:
            self.failed_batches += 1
            backend.failed(plan, error)
            self._not_durable(plan.blocks)
            return
        backend.committed(plan)
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
