"""Blocks while they are being written: which bytes have come, from which session, and when a block is whole.

Several sessions may write one block, each its own layers and heads or the same ones. A slice that comes twice has the
same bytes both times. A block stays here while a session is open that may bring more of it.
"""

import dataclasses
from collections.abc import Callable, Sequence

from moonpool.errors import FrameError, InvalidRequest
from moonpool.kv.blocks import MAX_TENANT_BYTES, NO_PARENT, BlockFormat, BlockInfo, DramBlock
from moonpool.kv.frames import FrameOpener, OpenRun, Run, split_run
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.streams.ledger import SliceLedger
from services.kvstore.tenancy.tenants import TenantBytes

MAX_SESSION_BLOCKS = 16384
"""Most keys in one session."""

_NO_DATA = memoryview(b"")
Indices = Callable[[Sequence[int]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class PutSpec:
    """What a writing session has declared: its blocks, and the layers and heads of them that it brings.

    `parents` are the blocks before them in their chains, one for each key, or none when they are unknown.

    Raises:
        InvalidRequest: naming the field of PutOpen that is wrong.
    """

    format: BlockFormat
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]
    tenant: str
    layers: range
    heads: range

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


@dataclasses.dataclass(slots=True, eq=False)
class Assembly:
    """One unfinished block. A session may open thousands, so that most is made with the first bytes only.

    Attributes:
        spec: of the session that opened it first, which gives tenant and parent.
        index: of the block in that session.
        missing: number of (layer, head) pairs whose bytes have not come.
        data: memory of the DRAM tier from its first bytes on.
        hashes: by layer, of layers that came whole.
        heads: layer -> one bit per head whose bytes are in `data`.
        reserved: its bytes are reserved in DRAM.
        writers: session -> index of the block in that session.
    """

    spec: PutSpec
    index: int
    missing: int
    data: memoryview = _NO_DATA
    hashes: dict[int, int] = dataclasses.field(init=False)
    heads: dict[int, int] = dataclasses.field(init=False)
    reserved: bool = False
    writers: dict["PutSession", int] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> BlockKey:
        return self.spec.keys[self.index]

    @property
    def nbytes(self) -> int:
        """Size of the whole block."""
        return self.spec.format.layout.block_bytes

    def put(self, run: Run, offset: int, data: memoryview, value: int, allocate: Callable[[int], memoryview]) -> None:
        """Takes the bytes of one layer's heads and their hash, unless all of them have come already."""
        layout = self.spec.format.layout
        if not self.data:
            self.data, self.hashes, self.heads = allocate(layout.block_bytes), {}, {}
        have = self.heads.get(run.layer, 0)
        new = ((1 << run.head_end - run.head_begin) - 1 << run.head_begin) & ~have
        if not new:
            return
        begin = run.layer * layout.slice_bytes + offset
        self.data[begin : begin + len(data)] = data
        if run.head_end - run.head_begin == layout.kv_heads:
            self.hashes[run.layer] = value
        self.heads[run.layer] = have | new
        self.missing -= new.bit_count()

    def block(self) -> DramBlock:
        """The whole block. Computes the hashes of layers that several writers brought in parts."""
        spec, size, hashes = self.spec, self.spec.format.layout.slice_bytes, []
        for layer in range(spec.format.layout.layers):
            value = self.hashes.get(layer)
            if value is None:
                value = bind(slice_hash(self.data[layer * size : (layer + 1) * size]), self.key, layer)
            hashes.append(value)
        parent = spec.parents[self.index] if spec.parents else NO_PARENT
        return DramBlock(BlockInfo(self.key, parent, spec.tenant, spec.format), self.data, hashes)


class PutSession:
    """One writing session.

    Attributes:
        present: indices of blocks that existed when it was opened.
        on_visible: told indices of blocks that became readable.
        on_durable: told indices of blocks that became durable.
        unfinished: index -> block that is not whole yet.
        opener: opens its frames, in their order.
        ledger: slices that have come.
    """

    def __init__(self, spec: PutSpec, present: Sequence[int], on_visible: Indices, on_durable: Indices) -> None:
        self.spec = spec
        self.present = present
        self.on_visible = on_visible
        self.on_durable = on_durable
        self.unfinished: dict[int, Assembly] = {}
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
        layout = self.spec.format.layout
        return len(self.spec.layers) == layout.layers and len(self.spec.heads) == layout.kv_heads


class Assembler:
    """All unfinished blocks, and the sessions that write them.

    Args:
        allocate: memory for a whole block.

    Attributes:
        keys: number of keys of all open sessions together.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self.blocks: dict[BlockKey, Assembly] = {}
        self.sessions: set[PutSession] = set()
        self.keys = 0

    def check_formats(self, spec: PutSpec) -> None:
        """Raises InvalidRequest when a block of a session is being written in another format."""
        for block in filter(None, map(self.blocks.get, spec.keys)):
            if block.spec.format != spec.format:
                raise InvalidRequest("keys", "a key is being written in another format")

    def open(self, session: PutSession) -> None:
        """Takes a session; its blocks that are not present are expected from now on."""
        spec, present = session.spec, set(session.present)
        missing = spec.format.layout.layers * spec.format.layout.kv_heads
        for index, key in enumerate(spec.keys):
            if index in present:
                continue
            block = self.blocks.get(key)
            if block is None:
                block = self.blocks[key] = Assembly(spec, index, missing)
            block.writers[session] = index
            session.unfinished[index] = block
        self.sessions.add(session)
        self.keys += len(spec.keys)

    def begun_by(self, session: PutSession, runs: Sequence[OpenRun]) -> list[Assembly]:
        """Blocks whose first bytes a frame brings, so that no DRAM is reserved for them yet."""
        begun: dict[int, Assembly] = {}
        for run, _, _ in runs:
            for index in range(run.first_block, run.first_block + run.block_count):
                block = session.unfinished.get(index)
                if block is not None and not block.reserved:
                    begun[index] = block
        return list(begun.values())

    def write(self, session: PutSession, runs: Sequence[OpenRun], whole: list[Assembly]) -> None:
        """Takes an opened frame whose blocks are reserved in DRAM.

        Blocks that become whole leave the assembler and are appended to `whole`, also when this raises.

        Raises:
            FrameError: it does not belong to the session, which must be closed.
            Overloaded: there is no memory; the session must be closed.
        """
        layout = session.spec.format.layout
        for run, data, hashes in runs:
            if run.valid_tokens != layout.block_tokens:
                raise FrameError(f"{run}: only full blocks are stored")
            session.ledger.accept(run)
            for (index, offset, part), value in zip(split_run(run, data, layout), hashes, strict=True):
                block = session.unfinished.get(index)
                if block is None:  # present, or finished by another session
                    continue
                block.put(run, offset, part, value, self._allocate)
                if not block.missing:
                    self._finish(block)
                    whole.append(block)

    def _finish(self, block: Assembly) -> None:
        del self.blocks[block.key]
        for session, index in block.writers.items():
            del session.unfinished[index]

    def arrived(self, key: BlockKey) -> Assembly | None:
        """Forgets and returns a block that came whole in another way; None when it was not expected."""
        block = self.blocks.get(key)
        if block is not None:
            self._finish(block)
        return block

    def close(self, session: PutSession) -> TenantBytes:
        """Ends a session and forgets blocks without another writer; returns the reserved bytes of those, by tenant."""
        session.closed = True
        self.sessions.remove(session)
        self.keys -= len(session.spec.keys)
        freed = TenantBytes()
        for block in session.unfinished.values():
            del block.writers[session]
            if not block.writers:
                del self.blocks[block.key]
                freed.add(block.spec.tenant, block.nbytes * block.reserved)
        session.unfinished.clear()
        return freed

    def check_invariants(self) -> None:
        """Checks that blocks and their writers know each other, and that no block is whole."""
        for key, block in self.blocks.items():
            assert block.key == key
            assert block.writers
            assert block.missing
            assert block.reserved or not block.data
            for session, index in block.writers.items():
                assert session in self.sessions
                assert session.unfinished[index] is block
                assert session.spec.keys[index] == key
        assert self.keys == sum(len(session.spec.keys) for session in self.sessions)
        for session in self.sessions:
            assert not session.closed
            for index, block in session.unfinished.items():
                assert self.blocks[session.spec.keys[index]] is block
