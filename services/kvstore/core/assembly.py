"""Blocks while they are being written: which bytes have come, from which session, and when a block is whole.

Several sessions may write one block, each its own layers and heads or the same ones. A slice that comes twice has the
same bytes both times.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from moonpool.errors import FrameError, InvalidRequest
from moonpool.kv.blocks import MAX_TENANT_BYTES, NO_PARENT, BlockFormat, BlockInfo, DramBlock
from moonpool.kv.frames import FrameOpener, OpenRun, Run
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.streams.ledger import SliceLedger

MAX_SESSION_BLOCKS = 16384
"""Most keys in one session."""

PORTION_BLOCKS = 128
PORTION_BYTES = 4 << 20
"""Blocks and bytes that are written without letting others have the event loop."""

AHEAD_BYTES = 4 << 20
"""Most DRAM that is reserved for the next blocks of a session with that of a frame's."""

_NO_DATA = memoryview(b"")
Indices = Callable[[Sequence[int]], None]
Allocate = Callable[[int], memoryview]


@dataclasses.dataclass(frozen=True, slots=True)
class PutSpec:
    """What a writing session has declared: its blocks, and the layers and heads of them that it brings.

    `parents` are the blocks before them in their chains, one for each key, or none when they are unknown; `written_at`
    is the time that its blocks get.

    Raises:
        InvalidRequest: naming the field of PutOpen that is wrong.
    """

    format: BlockFormat
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]
    tenant: str
    layers: range
    heads: range
    written_at: int = 0

    def __post_init__(self) -> None:
        layout = self.format.layout
        if not 0 < len(self.keys) <= MAX_SESSION_BLOCKS:
            raise InvalidRequest("keys", f"a session has 1 to {MAX_SESSION_BLOCKS} keys, not {len(self.keys)}")
        if len(set(self.keys)) != len(self.keys):
            raise InvalidRequest("keys", "a key occurs twice")
        if self.parents and len(self.parents) != len(self.keys):
            raise InvalidRequest("parent_keys", f"{len(self.parents)} parents for {len(self.keys)} keys")
        if len(self.tenant.encode()) > MAX_TENANT_BYTES:
            raise InvalidRequest("tenant", f"has more than {MAX_TENANT_BYTES} bytes")
        if not (0 <= self.layers.start < self.layers.stop <= layout.layers):
            raise InvalidRequest("layer_end", f"layers {self.layers} are not among the layout's {layout.layers}")
        if not (0 <= self.heads.start < self.heads.stop <= layout.kv_heads):
            raise InvalidRequest("head_end", f"heads {self.heads} are not among the layout's {layout.kv_heads}")
        if layout.scale_bytes and len(self.heads) != layout.kv_heads:
            raise InvalidRequest("head_end", "slices with scales are written whole")

    @property
    def all_heads(self) -> bool:
        return len(self.heads) == self.format.layout.kv_heads


@dataclasses.dataclass(slots=True, eq=False)
class Assembly:
    """One unfinished block. A session may open thousands, so that most is made with the first bytes only.

    Attributes:
        spec: of the session that opened it first, which gives tenant and parent.
        index: of the block in that session.
        data: memory of the DRAM tier from its first bytes on.
        hashes: by layer, of layers that are whole.
        parts: layer -> one bit per head that has come, of the other layers.
        reserved: its bytes are reserved in DRAM.
        writers: session -> index of the block in that session.
    """

    spec: PutSpec
    index: int
    data: memoryview = _NO_DATA
    hashes: dict[int, int] = dataclasses.field(init=False)
    parts: dict[int, int] = dataclasses.field(init=False)
    reserved: bool = False
    writers: dict["PutSession", int] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> BlockKey:
        return self.spec.keys[self.index]

    @property
    def nbytes(self) -> int:
        """Size of the whole block."""
        return self.spec.format.layout.block_bytes

    def put(self, run: Run, data: memoryview, value: int | None, allocate: Allocate) -> bool:
        """Takes the bytes of a layer's heads, unless they have come; whether the block is whole with them.

        `value` is the hash of the whole layer; without it the hash is made here when the layer is whole.
        """
        layout, layer = self.spec.format.layout, run.layer
        if not self.data:
            self.data, self.hashes, self.parts = allocate(layout.block_bytes), {}, {}
        elif layer in self.hashes:
            return False
        size = layout.slice_bytes
        begin = layer * size + run.head_begin * layout.head_bytes
        self.data[begin : begin + len(data)] = data
        if run.head_end - run.head_begin < layout.kv_heads:
            have = self.parts.pop(layer, 0) | (1 << run.head_end) - (1 << run.head_begin)
            if have.bit_count() < layout.kv_heads:
                self.parts[layer] = have
                return False
            if value is None:
                value = bind(slice_hash(self.data[layer * size : (layer + 1) * size]), self.key, layer)
        assert value is not None
        self.hashes[layer] = value
        return len(self.hashes) == layout.layers

    def block(self) -> DramBlock:
        """The whole block."""
        spec = self.spec
        parent = spec.parents[self.index] if spec.parents else NO_PARENT
        hashes = [self.hashes[layer] for layer in range(spec.format.layout.layers)]
        return DramBlock(BlockInfo(self.key, parent, spec.tenant, spec.format, spec.written_at), self.data, hashes)


class PutSession:
    """One writing session.

    Attributes:
        present: indices of blocks that existed when it was opened.
        on_visible: told indices of blocks that became readable.
        on_durable: told indices of blocks that became durable.
        on_forgotten: told that blocks of it were deleted, which ends it.
        unfinished: index -> block that is not whole yet.
        reserved_bytes: DRAM that was reserved for its blocks since it was opened.
        opener: opens its frames, in their order.
        ledger: slices that have come.
    """

    def __init__(self, spec: PutSpec, present: Sequence[int], on_visible: Indices, on_durable: Indices) -> None:
        self.spec = spec
        self.present = present
        self.on_visible = on_visible
        self.on_durable = on_durable
        self.on_forgotten: Callable[[], None] = lambda: None
        self.unfinished: dict[int, Assembly] = {}
        self.reserved_bytes = 0
        self.closed = False
        self.opener = FrameOpener(spec.format.layout, spec.heads, spec.keys)
        self.ledger = SliceLedger(spec.layers, len(spec.keys), spec.heads)

    @property
    def complete(self) -> bool:
        """Whether all of its blocks are whole."""
        return not self.unfinished

    @property
    def covers_whole_blocks(self) -> bool:
        """Whether it has declared all layers and heads of its blocks."""
        return len(self.spec.layers) == self.spec.format.layout.layers and self.spec.all_heads

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
        count = min(self.reserved_bytes, AHEAD_BYTES) // self.spec.format.layout.block_bytes
        found = map(self.unfinished.get, range(first, first + count))
        return [block for block in found if block is not None and not block.reserved]

    def take(self, runs: Sequence[OpenRun], allocate: Allocate) -> Iterator[Assembly]:
        """Writes an opened frame into its blocks; yields those that are whole, which the caller must finish at once.

        Raises:
            FrameError: it does not belong to the session.
            Overloaded: there is no memory.
        """
        spec, unfinished = self.spec, self.unfinished
        block_tokens, all_heads = spec.format.layout.block_tokens, spec.all_heads
        for run, data, hashes in runs:
            if run.valid_tokens != block_tokens:
                raise FrameError(f"{run}: only full blocks are stored")
            self.ledger.accept(run)
            at, size = 0, len(data) // run.block_count
            for index, value in enumerate(hashes, run.first_block):
                block = unfinished.get(index)  # None: present, or finished by another session
                part = data[at : at + size]
                at += size
                if block is not None and block.put(run, part, value if all_heads else None, allocate):
                    yield block


def portions(runs: list[OpenRun], spec: PutSpec) -> list[list[OpenRun]]:
    """Splits an opened frame into parts that hold the event loop for a moment only, whatever its slices are."""
    if not runs or (len(runs) == 1 and len(runs[0].hashes) <= PORTION_BLOCKS and len(runs[0].data) <= PORTION_BYTES):
        return [runs]
    first = min(run.first_block for run, _, _ in runs)
    last = max(run.first_block + run.block_count for run, _, _ in runs)
    if last - first <= PORTION_BLOCKS and sum(len(data) for _, data, _ in runs) <= PORTION_BYTES:
        return [runs]
    cut = [part for run in runs for part in _cut(run, spec)]
    parts: list[list[OpenRun]] = []
    slices = nbytes = 0
    for each in cut:
        slices += each.run.block_count
        nbytes += len(each.data)
        if not parts or slices > PORTION_BLOCKS or nbytes > PORTION_BYTES:
            parts.append([])
            slices, nbytes = each.run.block_count, len(each.data)
        parts[-1].append(each)
    return parts


def _cut(opened: OpenRun, spec: PutSpec) -> Iterator[OpenRun]:
    """Splits a run between blocks; a single large slice between heads, each part with the hash of the whole slice."""
    (run, data, hashes), head_bytes = opened, spec.format.layout.head_bytes
    size = len(data) // run.block_count
    if size > PORTION_BYTES and not spec.format.layout.scale_bytes:
        count = PORTION_BYTES // head_bytes
        for head in range(run.head_begin, run.head_end, count):
            part = run._replace(head_begin=head, head_end=min(head + count, run.head_end))
            at = (head - run.head_begin) * head_bytes
            yield OpenRun(part, data[at : at + count * head_bytes], hashes)
        return
    count = max(1, min(PORTION_BLOCKS, PORTION_BYTES // size))
    for at in range(0, run.block_count, count):
        some = hashes[at : at + count]
        part = run._replace(first_block=run.first_block + at, block_count=len(some))
        yield OpenRun(part, data[at * size : (at + count) * size], some)
