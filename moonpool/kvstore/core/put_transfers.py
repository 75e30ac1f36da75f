"""All puts under way.

DRAM for a block is reserved when the first bytes come, for this block or for a block shortly before. Blocks that come
whole, a put's blocks all in one frame with the opening, need no transfer (`put_whole`).
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.delete_kv import DeletionIndex, KVSelection
from moonpool.base.kv.frames import OpenedRun
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.core.put_transfer import (
    PORTION_BLOCKS,
    PORTION_BYTES,
    Assembly,
    Indices,
    PutSpec,
    PutTransfer,
    copy_whole_blocks,
)
from moonpool.kvstore.core.tiered_store import TieredStore
from moonpool.kvstore.core.write_queue import WriteQueue
from moonpool.kvstore.dram.arena import RETRY_AFTER_S
from moonpool.kvstore.eviction.tenants import sum_by_tenant

MAX_OPEN_KEYS = 1 << 18  # of all open transfers together
PUTS_AHEAD = 8  # for which room is made at once


class DeletedBlocksError(InvalidRequest):
    """Blocks may be older than a deletion of such blocks."""


class PutTransfers:
    """All writing transfers, at most `max_transfers`.

    Attributes:
        queue: blocks on their way to the SSD tier, in batches of `batch_bytes`.
        unfinished: blocks that are being written.
        awaiting: transfers that wait for a block to become durable, each with the block's index there.
        deletions: those that this store knows of: what is older must not come back.
    """

    def __init__(self, tiers: TieredStore, deletions: DeletionIndex, *, max_transfers: int, batch_bytes: int) -> None:
        self._tiers = tiers
        self._max_transfers = max_transfers
        self.open_keys = 0  # of all open transfers
        self.queue = WriteQueue(tiers, self._durable, batch_bytes)
        self.transfers: dict[PutTransfer, None] = {}
        self.unfinished: dict[BlockKey, Assembly] = {}
        self.awaiting: dict[BlockKey, list[tuple[PutTransfer, int]]] = {}
        self.deletions = deletions
        self.blocks_put = 0

    def wait_group(self, account: str) -> str | None:
        """The group in which a tenant's, or pictures', transfers wait for room: one for each quota, else None."""
        return None if self._tiers.dram.account.quota(account) is None else account

    def open(
        self, spec: PutSpec, on_visible: Indices, on_durable: Indices, on_ended: Callable[[], None], *, now: float = 0.0
    ) -> PutTransfer | None:
        """Open a transfer. Opening neither evicts nor reserves: both happen when data comes.

        Args:
            spec: the blocks, and the layers and heads of them that the writer brings.
            on_visible: called with indices of blocks that readers find from now on.
            on_durable: called with indices of blocks that survive a restart, also for blocks that were present.
            on_ended: called if the transfer ends because some blocks were deleted or found damaged.
            now: seconds, for the end of pins.

        Returns:
            The transfer; None while there is no room for one more block. `StoreListener.room` tells when to try again.

        Raises:
            InvalidRequest: the transfer can never be opened.
            DeletedBlocksError: the blocks may be older than a deletion.
            Overloaded: too many transfers are open, or pins of others leave too little DRAM.
        """
        self.check_not_deleted(spec)
        if len(self.transfers) >= self._max_transfers or self.open_keys + len(spec.keys) > MAX_OPEN_KEYS:
            raise Overloaded("too many writing transfers", reason="kvstore_transfers", retry_after_s=RETRY_AFTER_S)
        tiers, dram, size = self._tiers, self._tiers.dram, spec.format.layout.block_bytes
        present = self._present(spec)
        dram.check_possible((len(spec.keys) - len(present)) * size, spec.account, now)
        if len(present) < len(spec.keys) and not dram.can_reserve(size, spec.account):
            return None
        transfer = PutTransfer(spec, present, on_visible, on_durable, on_ended)
        self._add_transfer(transfer)
        for index in present:
            self._await_durable(transfer, index)
        self._touch_present(spec, present)
        tiers.listener.transfers_changed()
        return transfer

    def put_whole(self, spec: PutSpec, data: BytesLike, hashes: Sequence[int], now: float) -> list[int] | None:
        """Store whole blocks, all in one piece, layer after layer; None, without effect, if a transfer is needed.

        Returns the indices of those that were here already. A transfer is needed without room, or if the put would hold
        the event loop for long. Raises what `open` and `write` do.
        """
        tiers, size, count = self._tiers, spec.format.layout.block_bytes, len(spec.keys)
        # More would hold the event loop; and DURABLE takes a second answer.
        if count > PORTION_BLOCKS or count * size > PORTION_BYTES or spec.durable:
            return None
        self.check_not_deleted(spec)
        present = self._present(spec)
        nbytes = size * (count - len(present))
        if not tiers.dram.has_room(nbytes, spec.account):  # no block is evicted for damaged bytes
            copy_whole_blocks(spec, data, hashes, range(count), tiers.dram.arena.allocate)
        if present:
            self._touch_present(spec, present)  # before others are evicted
        if not tiers.reserve({spec.account: nbytes}):
            tiers.dram.check_possible(nbytes, spec.account, now)
            return None
        try:
            blocks = copy_whole_blocks(spec, data, hashes, set(present), tiers.dram.arena.allocate)
        except BaseException:
            tiers.unreserve({spec.account: nbytes})
            raise
        tiers.insert(blocks)
        self.blocks_put += len(blocks)
        self.arrived(blocks)
        tiers.dram.arrived(spec.keys)
        return present

    def make_room(self, spec: PutSpec) -> None:
        """After a put: evicts ahead for the next put if that is little, but no block from this put."""
        dram, nbytes = self._tiers.dram, len(spec.keys) * spec.format.layout.block_bytes
        if nbytes > dram.capacity_bytes // 64 or dram.has_room(nbytes, spec.account):
            return
        most = min(dram.capacity_bytes, dram.account.quota(spec.account) or dram.capacity_bytes) // 64
        ahead = max(nbytes, min(PUTS_AHEAD * nbytes, most))
        # What was just put must not go for what may come (ADR 38).
        stay = [block for key in spec.keys if (block := dram.get(key)) is not None]
        for block in stay:
            dram.hold(block)
        if self._tiers.reserve({spec.account: ahead}):
            self._tiers.unreserve({spec.account: ahead})
        self._tiers.release(stay)

    def _touch_present(self, spec: PutSpec, present: Sequence[int]) -> None:
        """A writer brought blocks that are here: a use, and a reason to retry blocks that the SSD tier did not take."""
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

    def _add_transfer(self, transfer: PutTransfer) -> None:
        present = set(transfer.present)
        for index, key in enumerate(transfer.spec.keys):
            if index in present:
                continue
            block = self.unfinished.get(key)
            if block is None:
                block = self.unfinished[key] = Assembly(transfer.spec, index)
            block.writers[transfer] = index
            transfer.unfinished[index] = block
        self.transfers[transfer] = None
        self.open_keys += len(transfer.spec.keys)

    def durable_of(self, transfer: PutTransfer, indices: Sequence[int]) -> list[int]:
        return [index for index in indices if self._tiers.durable(transfer.spec.keys[index])]

    def reserve(self, transfer: PutTransfer, runs: Sequence[OpenedRun], *, now: float = 0.0) -> bool:
        """Reserve DRAM for the blocks that begin with a frame: for all of them, or (False) for none.

        If there is room, the transfer's next blocks get room too: as many bytes as the transfer has had so far.

        Raises:
            Overloaded: pins and guarantees of others leave too little; the caller must close the transfer.
        """
        starting = transfer.unreserved_of(runs)
        if not starting:
            return True
        ahead = transfer.next_blocks(max(block.writers[transfer] for block in starting) + 1)
        if ahead and self._tiers.reserve(_by_tenant([*starting, *ahead])):
            starting += ahead
        elif not self._tiers.reserve(_by_tenant(starting)):
            # No writer waits for pinned memory: refused at once if pins leave too little.
            for tenant, nbytes in _by_tenant(starting).items():
                self._tiers.dram.check_possible(nbytes, tenant, now)
            return False
        for block in starting:
            block.reserved = True
            transfer.reserved_bytes += block.nbytes
        return True

    def write(self, transfer: PutTransfer, runs: Sequence[OpenedRun], *, now: float = 0.0) -> bool:
        """Take an opened frame of a transfer and make whole blocks visible; False, with no effect, without room.

        An exception ends the transfer: FrameError, or Overloaded for want of memory.
        """
        assert not transfer.closed
        if not self.reserve(transfer, runs, now=now):
            return False
        whole: list[Assembly] = []
        try:
            for block in transfer.take(runs, self._tiers.dram.arena.allocate):
                self._finish(block)
                whole.append(block)
        finally:
            if whole:
                blocks = self._tiers.insert([assembly.block() for assembly in whole])
                self.blocks_put += len(blocks)
                self.queue.add(blocks)
                self._report_visible(whole)
        return True

    def _finish(self, block: Assembly) -> None:
        del self.unfinished[block.key]
        for transfer, index in block.writers.items():
            del transfer.unfinished[index]

    def arrived(self, blocks: Sequence[DramBlock]) -> None:
        """Blocks came into DRAM in another way; tells the transfers that write them, which need not go on."""
        self.queue.add(blocks)
        if whole := [found for block in blocks if (found := self.unfinished.get(block.info.key)) is not None]:
            for assembly in whole:
                self._finish(assembly)
            self._tiers.unreserve(_by_tenant(assembly for assembly in whole if assembly.reserved))
            self._report_visible(whole)

    def _report_visible(self, whole: Sequence[Assembly]) -> None:
        visible: dict[PutTransfer, list[int]] = {}
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

    def close(self, transfer: PutTransfer) -> None:
        """End a transfer and forget the transfer's unfinished blocks. Idempotent."""
        if transfer.closed:
            return
        transfer.closed = True
        del self.transfers[transfer]
        self.open_keys -= len(transfer.spec.keys)
        abandoned: list[Assembly] = []
        for block in transfer.unfinished.values():
            del block.writers[transfer]
            if not block.writers:
                del self.unfinished[block.key]
                abandoned.append(block)
        transfer.unfinished.clear()
        self._tiers.unreserve(_by_tenant(block for block in abandoned if block.reserved))
        for key in [key for key in transfer.spec.keys if key in self.awaiting]:
            if left := [entry for entry in self.awaiting.pop(key) if entry[0] is not transfer]:
                self.awaiting[key] = left
        self._tiers.listener.transfers_changed()

    def check_not_deleted(self, spec: PutSpec) -> None:
        """Check that the writer knows of all deletions that concern a transfer's blocks.

        Raises:
            DeletedBlocksError: the writer does not know a deletion; the blocks may be older.
        """
        if self.deletions:
            known = self.deletions.matching(spec.keys, spec.tenant, spec.format.namespace)
            if not set(spec.forgotten).issuperset(known):
                raise DeletedBlocksError("keys", "they may be older than a deletion of such blocks")

    def end_matching(self, selection: KVSelection) -> None:
        """End transfers that bring blocks of a selection: such blocks are being deleted."""
        specs = {transfer: transfer.spec for transfer in self.transfers}
        self._end(
            [at for at, spec in specs.items() if selection.touches(spec.keys, spec.tenant, spec.format.namespace)]
        )

    def on_removed(self, blocks: Collection[DramBlock]) -> None:
        """Blocks have left DRAM for good: they never become durable, and transfers that wait for that end."""
        self._end([entry[0] for block in blocks for entry in self.awaiting.get(block.info.key, ())])
        self.queue.recall(blocks)

    def _end(self, transfers: Iterable[PutTransfer]) -> None:
        for transfer in transfers:
            if not transfer.closed:
                transfer.on_ended()
                self.close(transfer)

    def _durable(self, keys: Sequence[BlockKey]) -> None:
        durable: dict[PutTransfer, list[int]] = {}
        for key in keys:
            for transfer, index in self.awaiting.pop(key, ()):
                durable.setdefault(transfer, []).append(index)
        for transfer, indices in durable.items():
            transfer.on_durable(indices)

    def awaits(self, transfer: PutTransfer) -> bool:
        return self._tiers.ssd is not None and not all(map(self._tiers.durable, transfer.spec.keys))

    def _await_durable(self, transfer: PutTransfer, index: int) -> None:
        key = transfer.spec.keys[index]
        if self._tiers.ssd is not None and not self._tiers.durable(key):
            self.awaiting.setdefault(key, []).append((transfer, index))
            if transfer.spec.durable and (block := self._tiers.dram.get(key)) is not None:
                self.queue.add([block], used=True)


def _by_tenant(blocks: Iterable[Assembly]) -> dict[str, int]:
    return sum_by_tenant([(block.spec.account, block.nbytes) for block in blocks])
