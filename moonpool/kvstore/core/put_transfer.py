"""A put under way: it brings blocks; whole blocks become VISIBLE, blocks committed to the SSD tier DURABLE.

Several puts may write one block, each different layers and heads, or the same (`Assembly`).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

from moonpool.base.errors import FrameError, InvalidRequest
from moonpool.base.kv.blocks import MAX_TENANT_BYTES, NO_PARENT, BlockFormat, BlockInfo, DramBlock
from moonpool.base.kv.frames import DamagedSliceError, FrameOpener, OpenedRun, SliceRun, bind_all, frame_shape
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.native_copy import copy_verified
from moonpool.base.kv_transfer.slice_bitmap import SliceBitmap

MAX_TRANSFER_BLOCKS = 16384
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
    def account(self) -> str:
        """Whose quotas and guarantees the blocks count to."""
        return self.format.account(self.tenant)

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
        """Write a parsed frame into the frame's blocks; yield whole blocks, which the caller must finish at once.

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


def _check_full(run: SliceRun, layout: KVLayout) -> None:
    if run.valid_tokens != layout.block_size:
        raise FrameError(f"{run}: only full blocks are stored")


def copy_whole_blocks(
    spec: PutSpec, data: BytesLike, hashes: Sequence[int], present: Collection[int], allocate: Allocate
) -> list[DramBlock]:
    """Copy and verify all slices of a transfer's whole blocks; return those blocks that are not `present`.

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


PORTION_BLOCKS, PORTION_BYTES = 128, 4 << 20  # written at once: the event loop is held for a few ms at most


def split_portions(runs: Sequence[OpenedRun]) -> list[list[OpenedRun]]:
    """Split a parsed frame into parts with at least a slice each, that hold the event loop only for a moment."""
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
