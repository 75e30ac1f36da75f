"""Writing sessions: they bring blocks, whole blocks become VISIBLE, blocks committed to the SSD tier DURABLE.

DRAM for a block is reserved when its first bytes come, or those of a block shortly before it. Blocks that come whole,
all of a session in one frame with its opening, need no session (`put_whole`): the usual way of a few small blocks.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from moonpool.errors import InvalidRequest, Overloaded
from moonpool.kv.blocks import DramBlock
from moonpool.kv.deletions import Deletions
from moonpool.kv.frames import OpenRun
from moonpool.kv.keys import BlockKey
from moonpool.kv.scattered import Bytes
from moonpool.kv.selection import Selection
from services.kvstore.core.assembly import PORTION_BLOCKS, PORTION_BYTES, Assembly, Indices, PutSession, PutSpec, landed
from services.kvstore.core.tiered_store import TieredStore
from services.kvstore.core.write_queue import WriteQueue
from services.kvstore.dram.arena import RETRY_AFTER_S
from services.kvstore.tenancy.tenants import sum_by_tenant

MAX_OPEN_KEYS = 1 << 18  # of all open sessions together
PUTS_AHEAD = 8  # for which room is made at once


class DeletedBlocks(InvalidRequest):
    """Blocks may be older than a deletion of such blocks."""


class Writes:
    """All writing sessions, at most `max_sessions`.

    Attributes:
        queue: blocks on their way to the SSD tier, in batches of `batch_bytes`.
        unfinished: blocks that are being written.
        awaiting: sessions that wait for a block to become durable, each with its index there.
        deletions: those that this store knows of: what is older must not come back.
    """

    def __init__(self, tiers: TieredStore, deletions: Deletions, *, max_sessions: int, batch_bytes: int) -> None:
        self._tiers = tiers
        self._max_sessions = max_sessions
        self.open_keys = 0  # of all open sessions
        self.queue = WriteQueue(tiers, self._durable, batch_bytes)
        self.sessions: set[PutSession] = set()
        self.unfinished: dict[BlockKey, Assembly] = {}
        self.awaiting: dict[BlockKey, list[tuple[PutSession, int]]] = {}
        self.deletions = deletions
        self.blocks_put = 0

    def lane(self, tenant: str) -> str | None:
        """In which queue a tenant's sessions wait for room: its own when it has a quota, or (None) the common one."""
        return None if self._tiers.dram.account.quota(tenant) is None else tenant

    def open(
        self, spec: PutSpec, on_visible: Indices, on_durable: Indices, on_ended: Callable[[], None], *, now: float = 0.0
    ) -> PutSession | None:
        """Opens a session; evicts and reserves nothing, since that is done when data comes.

        `on_visible` is told indices of blocks that others can read from now on, `on_durable` of those that survive a
        restart, present ones among them, `on_ended` that the session has ended, as blocks of it were deleted or found
        damaged. Returns None while there is no room for one more block; `StoreListener.room` tells when to try again.
        Raises InvalidRequest if it can never be opened, Overloaded if too many are, or others' pins leave too little.
        """
        self.check_not_deleted(spec)
        if len(self.sessions) >= self._max_sessions or self.open_keys + len(spec.keys) > MAX_OPEN_KEYS:
            raise Overloaded("too many writing sessions", reason="kvstore_sessions", retry_after_s=RETRY_AFTER_S)
        tiers, dram, size = self._tiers, self._tiers.dram, spec.format.layout.block_bytes
        present = self._present(spec)
        dram.check_possible((len(spec.keys) - len(present)) * size, spec.tenant, now)
        if len(present) < len(spec.keys) and not dram.can_reserve(size, spec.tenant):
            return None
        session = PutSession(spec, present, on_visible, on_durable, on_ended)
        self._expect(session)
        for index in present:
            self._await_durable(session, index)
        self._offered(spec, present)
        tiers.listener.sessions_changed()
        return session

    def put_whole(self, spec: PutSpec, data: Bytes, hashes: Sequence[int], now: float) -> list[int] | None:
        """Stores whole blocks, all in one piece, layer after layer; None, without effect, when it takes a session.

        Returns the indices of those that were here already. It takes a session when there is no room, or when it would
        hold the event loop for long. Raises what `open` and `write` do.
        """
        tiers, size, count = self._tiers, spec.format.layout.block_bytes, len(spec.keys)
        if count > PORTION_BLOCKS or count * size > PORTION_BYTES or spec.durable:
            return None
        self.check_not_deleted(spec)
        present = self._present(spec)
        nbytes = size * (count - len(present))
        if not tiers.dram.has_room(nbytes, spec.tenant):  # nothing is evicted for bytes that are not intact
            landed(spec, data, hashes, range(count), tiers.dram.arena.allocate)
        if present:
            self._offered(spec, present)  # before others are evicted
        if not tiers.reserve({spec.tenant: nbytes}):
            tiers.dram.check_possible(nbytes, spec.tenant, now)
            return None
        try:
            blocks = landed(spec, data, hashes, set(present), tiers.dram.arena.allocate)
        except BaseException:
            tiers.unreserve({spec.tenant: nbytes})
            raise
        tiers.insert(blocks)
        self.blocks_put += len(blocks)
        self.arrived(blocks)
        tiers.dram.arrived(spec.keys)
        return present

    def make_room(self, spec: PutSpec) -> None:
        """After a put: evicts what some more would, but none of its own, if that is little: the next need not wait."""
        dram, nbytes = self._tiers.dram, len(spec.keys) * spec.format.layout.block_bytes
        if nbytes > dram.capacity_bytes // 64 or dram.has_room(nbytes, spec.tenant):
            return
        most = min(dram.capacity_bytes, dram.account.quota(spec.tenant) or dram.capacity_bytes) // 64
        ahead = max(nbytes, min(PUTS_AHEAD * nbytes, most))
        stay = [block for key in spec.keys if (block := dram.get(key)) is not None]
        for block in stay:
            dram.hold(block)
        if self._tiers.reserve({spec.tenant: ahead}):
            self._tiers.unreserve({spec.tenant: ahead})
        self._tiers.release(stay)

    def _offered(self, spec: PutSpec, present: Sequence[int]) -> None:
        """A writer brought blocks that are here: a use, and a reason to try again what the SSD tier did not take."""
        keys = [spec.keys[index] for index in present]
        self._tiers.touch(keys)
        self.queue.add(filter(None, map(self._tiers.dram.get, keys)), used=True)

    def _present(self, spec: PutSpec) -> list[int]:
        """Indices of blocks that are here; raises InvalidRequest if one is, or is being written, in another format."""
        return [index for index, key in enumerate(spec.keys) if self._is_present(key, spec)]

    def _is_present(self, key: BlockKey, spec: PutSpec) -> bool:
        found = self._tiers.format_of(key)
        unfinished = self.unfinished.get(key) if found is None else None
        there = found if unfinished is None else unfinished.spec.format
        if there is not None and there is not spec.format and there != spec.format:
            raise InvalidRequest("keys", "a key exists already, or is being written, in another format")
        return found is not None

    def _expect(self, session: PutSession) -> None:
        present = set(session.present)
        for index, key in enumerate(session.spec.keys):
            if index in present:
                continue
            block = self.unfinished.get(key)
            if block is None:
                block = self.unfinished[key] = Assembly(session.spec, index)
            block.writers[session] = index
            session.unfinished[index] = block
        self.sessions.add(session)
        self.open_keys += len(session.spec.keys)

    def durable_of(self, session: PutSession, indices: Sequence[int]) -> list[int]:
        return [index for index in indices if self._tiers.durable(session.spec.keys[index])]

    def reserve(self, session: PutSession, runs: Sequence[OpenRun], *, now: float = 0.0) -> bool:
        """Reserves DRAM for those blocks of a frame whose first bytes it brings, all or (False) none.

        Where there is room, the session's next blocks get theirs too: as much as it has had so far. Raises Overloaded
        when pins and guarantees of others leave too little; the session must be closed then.
        """
        begun = session.begun_by(runs)
        if not begun:
            return True
        ahead = session.next_blocks(max(block.writers[session] for block in begun) + 1)
        if ahead and self._tiers.reserve(_by_tenant([*begun, *ahead])):
            begun += ahead
        elif not self._tiers.reserve(_by_tenant(begun)):
            for tenant, nbytes in _by_tenant(begun).items():
                self._tiers.dram.check_possible(nbytes, tenant, now)
            return False
        for block in begun:
            block.reserved = True
            session.reserved_bytes += block.nbytes
        return True

    def write(self, session: PutSession, runs: Sequence[OpenRun], *, now: float = 0.0) -> bool:
        """Takes an opened frame of a session and makes whole blocks visible; False, with no effect, without room.

        What it raises ends the session: FrameError, or Overloaded for want of memory.
        """
        assert not session.closed
        if not self.reserve(session, runs, now=now):
            return False
        whole: list[Assembly] = []
        try:
            for block in session.take(runs, self._tiers.dram.arena.allocate):
                self._finish(block)
                whole.append(block)
        finally:
            if whole:
                blocks = self._tiers.insert([assembly.block() for assembly in whole])
                self.blocks_put += len(blocks)
                self.queue.add(blocks)
                self._tell_visible(whole)
        return True

    def _finish(self, block: Assembly) -> None:
        del self.unfinished[block.key]
        for session, index in block.writers.items():
            del session.unfinished[index]

    def arrived(self, blocks: Sequence[DramBlock]) -> None:
        """Blocks came into DRAM in another way; tells the sessions that write them, which need not go on."""
        self.queue.add(blocks)
        if whole := [found for block in blocks if (found := self.unfinished.get(block.info.key)) is not None]:
            for assembly in whole:
                self._finish(assembly)
            self._tiers.unreserve(_by_tenant(each for each in whole if each.reserved))
            self._tell_visible(whole)

    def _tell_visible(self, whole: Sequence[Assembly]) -> None:
        visible: dict[PutSession, list[int]] = {}
        for assembly in whole:
            for writer, index in assembly.writers.items():
                visible.setdefault(writer, []).append(index)
                self._await_durable(writer, index)
        for writer, indices in visible.items():
            if writer.complete:
                self._tiers.dram.arrived(writer.spec.keys)
            durable = self.durable_of(writer, indices)
            writer.on_visible(indices)
            if durable:
                writer.on_durable(durable)

    def close(self, session: PutSession) -> None:
        """Ends a session and forgets its unfinished blocks. Idempotent."""
        if session.closed:
            return
        session.closed = True
        self.sessions.remove(session)
        self.open_keys -= len(session.spec.keys)
        left_alone: list[Assembly] = []
        for block in session.unfinished.values():
            del block.writers[session]
            if not block.writers:
                del self.unfinished[block.key]
                left_alone.append(block)
        session.unfinished.clear()
        self._tiers.unreserve(_by_tenant(block for block in left_alone if block.reserved))
        for key in self.awaiting.keys() & session.spec.keys:
            if left := [entry for entry in self.awaiting.pop(key) if entry[0] is not session]:
                self.awaiting[key] = left
        self._tiers.listener.sessions_changed()

    def check_not_deleted(self, spec: PutSpec) -> None:
        """Raises DeletedBlocks if a deletion of a session's blocks is known here of which its writer does not know."""
        if self.deletions:
            known = self.deletions.concerning(spec.keys, spec.tenant, spec.format.namespace)
            if not set(spec.forgotten).issuperset(known):
                raise DeletedBlocks("keys", "they may be older than a deletion of such blocks")

    def forget(self, selection: Selection) -> None:
        """Blocks are being deleted: sessions that bring such blocks end."""
        self._end({session for session in self.sessions if session.spec.is_among(selection)})

    def recall(self, blocks: Collection[DramBlock]) -> None:
        """Blocks have left DRAM for good: none of them becomes durable, and who waits for that hears it."""
        self._end([entry[0] for block in blocks for entry in self.awaiting.get(block.info.key, ())])
        self.queue.recall(blocks)

    def _end(self, sessions: Iterable[PutSession]) -> None:
        for session in sessions:
            if not session.closed:
                session.on_ended()
                self.close(session)

    def _durable(self, keys: Sequence[BlockKey]) -> None:
        durable: dict[PutSession, list[int]] = {}
        for key in keys:
            for session, index in self.awaiting.pop(key, ()):
                durable.setdefault(session, []).append(index)
        for session, indices in durable.items():
            session.on_durable(indices)

    def awaits(self, session: PutSession) -> bool:
        return self._tiers.ssd is not None and not all(map(self._tiers.durable, session.spec.keys))

    def _await_durable(self, session: PutSession, index: int) -> None:
        key = session.spec.keys[index]
        if self._tiers.ssd is not None and not self._tiers.durable(key):
            self.awaiting.setdefault(key, []).append((session, index))
            if session.spec.durable and (block := self._tiers.dram.get(key)) is not None:
                self.queue.add([block], used=True)


def _by_tenant(blocks: Iterable[Assembly]) -> dict[str, int]:
    return sum_by_tenant([(block.spec.tenant, block.nbytes) for block in blocks])
