"""Writing transfers: they bring blocks; whole blocks become VISIBLE, blocks committed to the SSD tier DURABLE.

Several transfers may write one block, each different layers and heads, or the same. DRAM for a block is reserved when
the first bytes come, for this block or for a block shortly before. Blocks that come whole, a transfer's blocks all in
one frame with the opening, need no transfer (`put_whole`).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from moonpool.base.errors import FrameError, InvalidRequest, Overloaded
from moonpool.base.kv.blocks import MAX_TENANT_BYTES, NO_PARENT, BlockFormat, BlockInfo, DramBlock
from moonpool.base.kv.delete_kv import DeletionIndex, KVSelection
from moonpool.base.kv.frames import DamagedSliceError, FrameOpener, OpenedRun, SliceRun, bind_all, frame_shape
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.native_copy import copy_verified
from moonpool.base.kv_transfer.slice_bitmap import SliceBitmap
from moonpool.kvstore.core.tiered_store import TieredStore, WriteQueue
from moonpool.kvstore.dram.arena import RETRY_AFTER_S
from moonpool.kvstore.eviction.tenants import sum_by_tenant

MAX_TRANSFER_BLOCKS = 16384
PORTION_BLOCKS, PORTION_BYTES = 128, 4 << 20  # written at once: the event loop is held for a few ms at most
RESERVED_AHEAD_BYTES = 4 << 20  # most DRAM reserved for a transfer's next blocks together with a frame's
_NO_DATA = memoryview(b"")
Indices = Callable[[Sequence[int]], None]
Allocate = Callable[[int], memoryview]


@dataclasses.dataclass(slots=True)
class PutSpec:
    """A writing transfer's declaration: blocks, and the layers and heads that the transfer brings.

    Raises:
        InvalidRequest: naming the field of PutOpen that is wrong.
    """

    format: BlockFormat
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]  # one for each key, or none when they are unknown
    tenant: str
    layers: range
    heads: range
    written_at: int = 0  # what the transfer's blocks get
    forgotten: Collection[str] = ()  # deletions that the writer knows to be older than the blocks
    durable: bool = False  # the writer needs durable blocks, whatever the SSD tier admits

    def __post_init__(self) -> None:
        if not 0 < len(self.keys) <= MAX_TRANSFER_BLOCKS:
            raise InvalidRequest("keys", f"a transfer has 1 to {MAX_TRANSFER_BLOCKS} keys, not {len(self.keys)}")
        if len(set(self.keys)) != len(self.keys):
            raise InvalidRequest("keys", "a key occurs twice")
        if self.parents and len(self.parents) != len(self.keys):
            raise InvalidRequest("parent_keys", f"{len(self.parents)} parents for {len(self.keys)} keys")
        if len(self.tenant.encode()) > MAX_TENANT_BYTES:
            raise InvalidRequest("tenant", f"has more than {MAX_TENANT_BYTES} bytes")
        self.format.layout.check_part(self.layers, self.heads)

    @property
    def all_heads(self) -> bool:
        return len(self.heads) == self.format.layout.head_shares

    @property
    def whole_blocks(self) -> bool:
        return len(self.layers) == self.format.layout.layers and self.all_heads

    def info(self, index: int) -> BlockInfo:
        parent = self.parents[index] if self.parents else NO_PARENT
        return BlockInfo(self.keys[index], parent, self.tenant, self.format, self.written_at)


@dataclasses.dataclass(slots=True, eq=False)
class Assembly:
    """One unfinished block. A transfer may open thousands, so that most is made with the first bytes only."""

    spec: PutSpec  # first transfer's spec, which gives tenant and parent
    index: int  # of the block in that transfer
    data: memoryview = _NO_DATA  # DRAM memory from the first bytes on
    hashes: dict[int, int] = dataclasses.field(init=False)  # by layer, of layers that are whole
    parts: dict[int, int] = dataclasses.field(init=False)  # layer -> one bit per arrived head, for incomplete layers
    reserved: bool = False  # the bytes are reserved in DRAM
    writers: dict["PutTransfer", int] = dataclasses.field(default_factory=dict)  # with the index of the block there

    @property
    def key(self) -> BlockKey:
        return self.spec.keys[self.index]

    @property
    def nbytes(self) -> int:
        return self.spec.format.layout.block_bytes

    def target(self, layer: int, place: slice, heads: int, allocate: Allocate) -> memoryview | None:
        """Memory for some heads (a bit each) of a layer, which lie at `place`; None when that layer has come.

        Overwritten bytes do not count until the new bytes are known to be intact.
        """
        if not self.data:
            self.data, self.hashes, self.parts = allocate(self.nbytes), {}, {}
        elif layer in self.hashes:
            return None
        if self.parts and (have := self.parts.pop(layer, 0) & ~heads):
            self.parts[layer] = have
        return self.data[place]

    def received(self, layer: int, heads: int, value: int | None) -> bool:
        """Some heads of a layer have come, intact; whether the block is whole with them.

        `value` is the hash of the whole layer; without a value the hash is made here once the layer is whole.
        """
        layout = self.spec.format.layout
        if value is None:
            have = self.parts.pop(layer, 0) | heads
            if have.bit_count() < layout.head_shares:
                self.parts[layer] = have
                return False
            value = bind(slice_hash(self.data[layout.place(layer)]), self.key, layer)
        self.hashes[layer] = value
        return len(self.hashes) == layout.layers

    def block(self) -> DramBlock:
        hashes = [self.hashes[layer] for layer in range(self.spec.format.layout.layers)]
        return DramBlock(self.spec.info(self.index), self.data, hashes)


class PutTransfer:
    """One writing transfer; see `PutTransfers.open`."""

    def __init__(
        self, spec: PutSpec, present: list[int], on_visible: Indices, on_durable: Indices, on_ended: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.present = present  # indices of blocks that existed at the opening
        self.on_visible = on_visible
        self.on_durable = on_durable
        self.on_ended = on_ended
        self.unfinished: dict[int, Assembly] = {}  # by index
        self.reserved_bytes = 0  # DRAM bytes since the opening
        self.closed = False
        self.opener = FrameOpener(spec.format.layout, spec.heads, spec.keys)
        self.received = SliceBitmap(spec.layers, len(spec.keys), spec.heads)

    @property
    def complete(self) -> bool:
        return not self.unfinished

    def unreserved_of(self, runs: Sequence[OpenedRun]) -> list[Assembly]:
        """Blocks for which a frame brings bytes and no DRAM is reserved yet."""
        starting: dict[int, Assembly] = {}
        for run, _, _ in runs:
            for index in range(run.first_block, run.first_block + run.block_count):
                block = self.unfinished.get(index)
                if block is not None and not block.reserved:
                    starting[index] = block
        return list(starting.values())

    def next_blocks(self, first: int) -> list[Assembly]:
        """Blocks from `first` on without DRAM, in all no more bytes than have been reserved so far."""
        count = min(self.reserved_bytes, RESERVED_AHEAD_BYTES) // self.spec.format.layout.block_bytes
        found = map(self.unfinished.get, range(first, first + count))
        return [block for block in found if block is not None and not block.reserved]

    def take(self, runs: Sequence[OpenedRun], allocate: Allocate) -> Iterator[Assembly]:
        """Writes a parsed frame into the frame's blocks; yields whole blocks, which the caller must finish at once.

        Raises:
            DamagedSliceError: bytes do not match their hash.
            FrameError: the frame does not belong to the transfer.
            Overloaded: there is no memory.
        """
        unfinished, layout, all_heads = self.unfinished, self.spec.format.layout, self.spec.all_heads
        for run, data, hashes in runs:
            _check_full(run, layout)
            values = self.opener.unbound(run, hashes)
            self.received.accept(run)
            layer, first, count = run.layer, run.first_block, run.block_count
            size = len(data) // count
            begin = layout.place(layer).start + run.head_begin * layout.share_bytes(layer)
            place, heads = slice(begin, begin + size), (1 << run.head_end) - (1 << run.head_begin)
            wanted: list[Assembly | None] = []
            targets: list[memoryview] = []
            for index in range(first, first + count):
                block = unfinished.get(index)  # None: present, or finished by another transfer
                target = None if block is None else block.target(layer, place, heads, allocate)
                wanted.append(None if target is None else block)
                targets.append(memoryview(bytearray(size)) if target is None else target)
            good = copy_verified(targets, data, values)
            for block, value in zip(wanted[:good], hashes, strict=False):
                if block is not None and block.received(layer, heads, value if all_heads else None):
                    yield block
            if good < count:
                raise DamagedSliceError(layer, first + good)


def copy_whole_blocks(
    spec: PutSpec, data: BytesLike, hashes: Sequence[int], present: Collection[int], allocate: Allocate
) -> list[DramBlock]:
    """Copies and verifies all slices of a transfer's whole blocks; returns those blocks that are not `present`.

    Raises what `PutTransfer.take` does.
    """
    layout, count = spec.format.layout, len(spec.keys)
    memory = {at: allocate(layout.block_bytes) for at in range(count) if at not in present}
    spare = memoryview(bytearray(layout.largest_slice_bytes if present else 0))  # for unneeded slices
    shape = frame_shape(spec.layers, count, spec.heads, layout.block_size)
    targets = [
        memory[block][layout.place(layer)] if block in memory else spare[: layout.slice_bytes(layer)]
        for layer, block in shape.cells
    ]
    good = copy_verified(targets, data, bind_all(hashes, shape.bindings(spec.keys)))
    if good < len(targets):
        raise DamagedSliceError(*shape.cells[good])
    return [DramBlock(spec.info(at), memory[at], hashes[at::count]) for at in memory]


def _check_full(run: SliceRun, layout: KVLayout) -> None:
    if run.valid_tokens != layout.block_size:
        raise FrameError(f"{run}: only full blocks are stored")


def split_portions(runs: Sequence[OpenedRun]) -> list[list[OpenedRun]]:
    """Splits a parsed frame into parts with at least a slice each, that hold the event loop only for a moment."""
    first = min((run.first_block for run, _, _ in runs), default=0)
    last = max((run.first_block + run.block_count for run, _, _ in runs), default=0)
    if last - first <= PORTION_BLOCKS and sum(len(data) for _, data, _ in runs) <= PORTION_BYTES:
        return [list(runs)]
    parts: list[list[OpenedRun]] = [[]]
    slices = nbytes = 0
    for run, data, hashes in runs:
        size, at = len(data) // run.block_count, 0
        while at < run.block_count:
            count = min(PORTION_BLOCKS - slices, (PORTION_BYTES - nbytes) // size, run.block_count - at)
            if count <= 0 and parts[-1]:
                parts.append([])
                slices = nbytes = 0
                continue
            count = max(1, count)
            some = run._replace(first_block=run.first_block + at, block_count=count)
            parts[-1].append(OpenedRun(some, data[at * size : (at + count) * size], hashes[at : at + count]))
            slices, nbytes, at = slices + count, nbytes + count * size, at + count
    return parts


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

    def wait_group(self, tenant: str) -> str | None:
        """The group in which a tenant's transfers wait for room: the tenant if the tenant has a quota, else None."""
        return None if self._tiers.dram.account.quota(tenant) is None else tenant

    def open(
        self, spec: PutSpec, on_visible: Indices, on_durable: Indices, on_ended: Callable[[], None], *, now: float = 0.0
    ) -> PutTransfer | None:
        """Opens a transfer. Opening neither evicts nor reserves: both happen when data comes.

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
        dram.check_possible((len(spec.keys) - len(present)) * size, spec.tenant, now)
        if len(present) < len(spec.keys) and not dram.can_reserve(size, spec.tenant):
            return None
        transfer = PutTransfer(spec, present, on_visible, on_durable, on_ended)
        self._add_transfer(transfer)
        for index in present:
            self._await_durable(transfer, index)
        self._touch_present(spec, present)
        tiers.listener.transfers_changed()
        return transfer

    def put_whole(self, spec: PutSpec, data: BytesLike, hashes: Sequence[int], now: float) -> list[int] | None:
        """Stores whole blocks, all in one piece, layer after layer; None, without effect, if a transfer is needed.

        Returns the indices of those that were here already. A transfer is needed without room, or if the put would hold
        the event loop for long. Raises what `open` and `write` do.
        """
        tiers, size, count = self._tiers, spec.format.layout.block_bytes, len(spec.keys)
        if count > PORTION_BLOCKS or count * size > PORTION_BYTES or spec.durable:
            return None
        self.check_not_deleted(spec)
        present = self._present(spec)
        nbytes = size * (count - len(present))
        if not tiers.dram.has_room(nbytes, spec.tenant):  # no block is evicted for damaged bytes
            copy_whole_blocks(spec, data, hashes, range(count), tiers.dram.arena.allocate)
        if present:
            self._touch_present(spec, present)  # before others are evicted
        if not tiers.reserve({spec.tenant: nbytes}):
            tiers.dram.check_possible(nbytes, spec.tenant, now)
            return None
        try:
            blocks = copy_whole_blocks(spec, data, hashes, set(present), tiers.dram.arena.allocate)
        except BaseException:
            tiers.unreserve({spec.tenant: nbytes})
            raise
        tiers.insert(blocks)
        self.blocks_put += len(blocks)
        self.arrived(blocks)
        tiers.dram.arrived(spec.keys)
        return present

    def make_room(self, spec: PutSpec) -> None:
        """After a put: evicts ahead for the next put if that is little, but no block from this put."""
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
        """Reserves DRAM for the blocks that begin with a frame: for all of them, or (False) for none.

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
            for tenant, nbytes in _by_tenant(starting).items():
                self._tiers.dram.check_possible(nbytes, tenant, now)
            return False
        for block in starting:
            block.reserved = True
            transfer.reserved_bytes += block.nbytes
        return True

    def write(self, transfer: PutTransfer, runs: Sequence[OpenedRun], *, now: float = 0.0) -> bool:
        """Takes an opened frame of a transfer and makes whole blocks visible; False, with no effect, without room.

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
            self._tiers.unreserve(_by_tenant(each for each in whole if each.reserved))
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
        """Ends a transfer and forgets the transfer's unfinished blocks. Idempotent."""
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
        """Checks that the writer knows of all deletions that concern a transfer's blocks.

        Raises:
            DeletedBlocksError: the writer does not know a deletion; the blocks may be older.
        """
        if self.deletions:
            known = self.deletions.matching(spec.keys, spec.tenant, spec.format.namespace)
            if not set(spec.forgotten).issuperset(known):
                raise DeletedBlocksError("keys", "they may be older than a deletion of such blocks")

    def end_matching(self, selection: KVSelection) -> None:
        """Ends transfers that bring blocks of a selection: such blocks are being deleted."""
        specs = {transfer: transfer.spec for transfer in self.transfers}
        self._end([at for at, it in specs.items() if selection.touches(it.keys, it.tenant, it.format.namespace)])

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
    return sum_by_tenant([(block.spec.tenant, block.nbytes) for block in blocks])
