"""Blocks while they are being written: which bytes have come, from which session, and when a block is whole.

Several sessions may write one block, each its own layers and heads or the same ones. A slice that comes twice has the
same bytes both times.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

from moonpool.errors import FrameError, InvalidRequest
from moonpool.kv.blocks import MAX_TENANT_BYTES, NO_PARENT, BlockFormat, BlockInfo, DramBlock
from moonpool.kv.frames import DamagedSliceError, FrameOpener, OpenRun, Run
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.kv.landing import land
from moonpool.kv.layout import KVLayout
from moonpool.kv.scattered import Bytes
from moonpool.kv.selection import Selection
from moonpool.kv.shapes import bound, frame_shape
from moonpool.streams.ledger import SliceLedger

MAX_SESSION_BLOCKS = 16384
PORTION_BLOCKS, PORTION_BYTES = 128, 4 << 20  # written at once: the event loop is held for a few ms at most
RESERVED_AHEAD_BYTES = 4 << 20  # most DRAM that is reserved for the next blocks of a session with that of a frame's

_NO_DATA = memoryview(b"")
Indices = Callable[[Sequence[int]], None]
Allocate = Callable[[int], memoryview]


@dataclasses.dataclass(slots=True)
class PutSpec:
    """What a writing session has declared: its blocks, and the layers and heads of them that it brings.

    Raises:
        InvalidRequest: naming the field of PutOpen that is wrong.
    """

    format: BlockFormat
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]  # one for each key, or none when they are unknown
    tenant: str
    layers: range
    heads: range
    written_at: int = 0  # what its blocks get
    forgotten: Collection[str] = ()  # deletions of which its writer knows that the blocks are younger
    durable: bool = False  # its writer needs them so, whatever the SSD tier admits

    def __post_init__(self) -> None:
        if not 0 < len(self.keys) <= MAX_SESSION_BLOCKS:
            raise InvalidRequest("keys", f"a session has 1 to {MAX_SESSION_BLOCKS} keys, not {len(self.keys)}")
        if len(set(self.keys)) != len(self.keys):
            raise InvalidRequest("keys", "a key occurs twice")
        if self.parents and len(self.parents) != len(self.keys):
            raise InvalidRequest("parent_keys", f"{len(self.parents)} parents for {len(self.keys)} keys")
        if len(self.tenant.encode()) > MAX_TENANT_BYTES:
            raise InvalidRequest("tenant", f"has more than {MAX_TENANT_BYTES} bytes")
        self.format.layout.check_part(self.layers, self.heads)

    @property
    def all_heads(self) -> bool:
        return len(self.heads) == self.format.layout.kv_heads

    @property
    def whole_blocks(self) -> bool:
        return len(self.layers) == self.format.layout.layers and self.all_heads

    def is_among(self, selection: Selection) -> bool:
        """Whether some of its blocks are chosen."""
        named = self.tenant in selection.tenants or self.format.namespace in selection.namespaces
        return named or not selection.keys.isdisjoint(self.keys)

    def info(self, index: int) -> BlockInfo:
        parent = self.parents[index] if self.parents else NO_PARENT
        return BlockInfo(self.keys[index], parent, self.tenant, self.format, self.written_at)


@dataclasses.dataclass(slots=True, eq=False)
class Assembly:
    """One unfinished block. A session may open thousands, so that most is made with the first bytes only."""

    spec: PutSpec  # of the session that opened it first, which gives tenant and parent
    index: int  # of the block in that session
    data: memoryview = _NO_DATA  # memory of the DRAM tier from its first bytes on
    hashes: dict[int, int] = dataclasses.field(init=False)  # by layer, of layers that are whole
    parts: dict[int, int] = dataclasses.field(init=False)  # layer -> one bit per head that has come, of other layers
    reserved: bool = False  # its bytes are, in DRAM
    writers: dict["PutSession", int] = dataclasses.field(default_factory=dict)  # with the index of the block there

    @property
    def key(self) -> BlockKey:
        return self.spec.keys[self.index]

    @property
    def nbytes(self) -> int:
        return self.spec.format.layout.block_bytes

    def target(self, layer: int, place: slice, heads: int, allocate: Allocate) -> memoryview | None:
        """Memory for some heads (a bit each) of a layer, which lie at `place`; None when that layer has come.

        Of what is overwritten now nothing counts until the new bytes are known to be intact.
        """
        if not self.data:
            self.data, self.hashes, self.parts = allocate(self.nbytes), {}, {}
        elif layer in self.hashes:
            return None
        if self.parts and (have := self.parts.pop(layer, 0) & ~heads):
            self.parts[layer] = have
        return self.data[place]

    def landed(self, layer: int, heads: int, value: int | None) -> bool:
        """Some heads of a layer have come, intact; whether the block is whole with them.

        `value` is the hash of the whole layer; without it the hash is made here when the layer is whole.
        """
        layout = self.spec.format.layout
        if value is None:
            have = self.parts.pop(layer, 0) | heads
            if have.bit_count() < layout.kv_heads:
                self.parts[layer] = have
                return False
            size = layout.slice_bytes
            value = bind(slice_hash(self.data[layer * size : (layer + 1) * size]), self.key, layer)
        self.hashes[layer] = value
        return len(self.hashes) == layout.layers

    def block(self) -> DramBlock:
        hashes = [self.hashes[layer] for layer in range(self.spec.format.layout.layers)]
        return DramBlock(self.spec.info(self.index), self.data, hashes)


class PutSession:
    """One writing session; `Writes.open` has what it tells."""

    def __init__(
        self, spec: PutSpec, present: list[int], on_visible: Indices, on_durable: Indices, on_ended: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.present = present  # indices of blocks that existed when it was opened
        self.on_visible = on_visible
        self.on_durable = on_durable
        self.on_ended = on_ended
        self.unfinished: dict[int, Assembly] = {}  # by index
        self.reserved_bytes = 0  # of DRAM since it was opened
        self.closed = False
        self.opener = FrameOpener(spec.format.layout, spec.heads, spec.keys)
        self.ledger = SliceLedger(spec.layers, len(spec.keys), spec.heads)

    @property
    def complete(self) -> bool:
        return not self.unfinished

    def begun_by(self, runs: Sequence[OpenRun]) -> list[Assembly]:
        """Blocks for which a frame brings bytes and no DRAM is reserved yet."""
        begun: dict[int, Assembly] = {}
        for run, _, _ in runs:
            for index in range(run.first_block, run.first_block + run.block_count):
                block = self.unfinished.get(index)
                if block is not None and not block.reserved:
                    begun[index] = block
        return list(begun.values())

    def next_blocks(self, first: int) -> list[Assembly]:
        """Blocks from `first` on without DRAM, in all no more bytes than have been reserved so far."""
        count = min(self.reserved_bytes, RESERVED_AHEAD_BYTES) // self.spec.format.layout.block_bytes
        found = map(self.unfinished.get, range(first, first + count))
        return [block for block in found if block is not None and not block.reserved]

    def take(self, runs: Sequence[OpenRun], allocate: Allocate) -> Iterator[Assembly]:
        """Writes a parsed frame into its blocks; yields those that are whole, which the caller must finish at once.

        Raises DamagedSliceError, FrameError when it does not belong to the session, Overloaded without memory.
        """
        unfinished, layout, all_heads = self.unfinished, self.spec.format.layout, self.spec.all_heads
        for run, data, hashes in runs:
            _check_full(run, layout)
            values = self.opener.unbound(run, hashes)
            self.ledger.accept(run)
            layer, first, count = run.layer, run.first_block, run.block_count
            size, begin = len(data) // count, layer * layout.slice_bytes + run.head_begin * layout.head_bytes
            place, heads = slice(begin, begin + size), (1 << run.head_end) - (1 << run.head_begin)
            wanted: list[Assembly | None] = []
            targets: list[memoryview] = []
            for index in range(first, first + count):
                block = unfinished.get(index)  # None: present, or finished by another session
                target = None if block is None else block.target(layer, place, heads, allocate)
                wanted.append(None if target is None else block)
                targets.append(memoryview(bytearray(size)) if target is None else target)
            good = land(targets, data, values)
            for block, value in zip(wanted[:good], hashes, strict=False):
                if block is not None and block.landed(layer, heads, value if all_heads else None):
                    yield block
            if good < count:
                raise DamagedSliceError(layer, first + good)


def landed(
    spec: PutSpec, data: Bytes, hashes: Sequence[int], present: Collection[int], allocate: Allocate
) -> list[DramBlock]:
    """Copies and verifies all slices of a session's whole blocks; returns those blocks that are not `present`.

    Raises what `PutSession.take` does.
    """
    layout, count, size = spec.format.layout, len(spec.keys), spec.format.layout.slice_bytes
    memory = {at: allocate(layout.block_bytes) for at in range(count) if at not in present}
    spare = memoryview(bytearray(size if present else 0))  # for slices that nobody needs
    shape = frame_shape(spec.layers, count, spec.heads, layout.block_tokens)
    targets = [
        memory[block][layer * size : (layer + 1) * size] if block in memory else spare for layer, block in shape.cells
    ]
    good = land(targets, data, bound(hashes, shape.bindings(spec.keys)))
    if good < len(targets):
        raise DamagedSliceError(*shape.cells[good])
    return [DramBlock(spec.info(at), memory[at], hashes[at::count]) for at in memory]


def _check_full(run: Run, layout: KVLayout) -> None:
    if run.valid_tokens != layout.block_tokens:
        raise FrameError(f"{run}: only full blocks are stored")


def portions(runs: Sequence[OpenRun]) -> list[list[OpenRun]]:
    """Splits a parsed frame into parts that hold the event loop for a moment only, of at least a slice each."""
    first = min((run.first_block for run, _, _ in runs), default=0)
    last = max((run.first_block + run.block_count for run, _, _ in runs), default=0)
    if last - first <= PORTION_BLOCKS and sum(len(data) for _, data, _ in runs) <= PORTION_BYTES:
        return [list(runs)]
    parts: list[list[OpenRun]] = [[]]
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
            parts[-1].append(OpenRun(some, data[at * size : (at + count) * size], hashes[at : at + count]))
            slices, nbytes, at = slices + count, nbytes + count * size, at + count
    return parts
