"""Blocks while they are being written: which bytes have come, from which session, and when a block is whole.

Several sessions may write one block, each its own layers and heads or the same ones. A slice that comes twice has the
same meaning both times. A block stays here as long as a session that may bring more of it.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from moonpool.errors import FrameError, InvalidRequest
from moonpool.kv.blocks import MAX_TENANT_BYTES, NO_PARENT, BlockFormat, BlockInfo
from moonpool.kv.frames import FrameOpener, OpenRun, Run, split_run
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.streams.ledger import SliceLedger

MAX_SESSION_BLOCKS = 16384
"""Most keys in one session."""

_NO_DATA = memoryview(b"")
Indices = Callable[[Sequence[int]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class PutSpec:
    """What a writing session has declared.

    Attributes:
        format: of all its blocks.
        keys: the blocks, in the order of their indices.
        parents: a key each; the blocks before them in their chains.
        tenant: whose blocks they are.
        layers: layers that this session brings.
        heads: heads that it brings.

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
        if len(self.parents) != len(self.keys):
            raise InvalidRequest("parent_keys", f"{len(self.parents)} parents for {len(self.keys)} keys")
        if len(self.tenant.encode()) > MAX_TENANT_BYTES:
            raise InvalidRequest("tenant", f"has more than {MAX_TENANT_BYTES} bytes")
        if not (0 <= self.layers.start < self.layers.stop <= layout.layers):
            raise InvalidRequest("layer_end", f"layers {self.layers} are not among the layout's {layout.layers}")
        if not (0 <= self.heads.start < self.heads.stop <= layout.kv_heads):
            raise InvalidRequest("head_end", f"heads {self.heads} are not among the layout's {layout.kv_heads}")
        if layout.scale_bytes and len(self.heads) != layout.kv_heads:
            raise InvalidRequest("head_end", "slices with scales are written whole")

    def info(self, index: int) -> BlockInfo:
        """One of the blocks."""
        return BlockInfo(self.keys[index], self.parents[index], self.tenant, self.format)


def parents_of(keys: Sequence[BlockKey], parents: Sequence[BlockKey]) -> Sequence[BlockKey]:
    """The parents a writer gave, or unknown ones if it gave none."""
    return parents or [NO_PARENT] * len(keys)


class Assembly:
    """One unfinished block. A session may open thousands, so that most is made with the first bytes only.

    Args:
        spec: of the session that opened it first, which gives tenant and parent.
        index: of the block in that session.

    Attributes:
        data: memory of the DRAM tier from its first bytes on.
        hashes: by layer, of layers that came whole.
        reserved: DRAM has been set aside for it.
        missing: (layer, head) pairs whose bytes have not come.
        writers: session -> index of the block in that session.
    """

    __slots__ = ("_heads", "_index", "_spec", "data", "hashes", "missing", "reserved", "writers")

    hashes: dict[int, int]
    _heads: dict[int, int]  # layer -> one bit per head whose bytes are in `data`

    def __init__(self, spec: PutSpec, index: int) -> None:
        self._spec = spec
        self._index = index
        self.data = _NO_DATA
        self.reserved = False
        self.missing = spec.format.layout.layers * spec.format.layout.kv_heads
        self.writers: dict[PutSession, int] = {}

    @property
    def key(self) -> BlockKey:
        return self._spec.keys[self._index]

    @property
    def info(self) -> BlockInfo:
        return self._spec.info(self._index)

    @property
    def format(self) -> BlockFormat:
        return self._spec.format

    @property
    def tenant(self) -> str:
        return self._spec.tenant

    @property
    def nbytes(self) -> int:
        """Size of the whole block."""
        return self._spec.format.layout.block_bytes

    def put(self, run: Run, offset: int, data: memoryview, value: int, allocate: Callable[[int], memoryview]) -> None:
        """Takes the bytes of one layer's heads and their hash, unless all of them have come already."""
        layout = self.format.layout
        if not self.data:
            self.data, self.hashes, self._heads = allocate(layout.block_bytes), {}, {}
        have = self._heads.get(run.layer, 0)
        new = ((1 << run.head_end - run.head_begin) - 1 << run.head_begin) & ~have
        if not new:
            return
        begin = run.layer * layout.slice_bytes + offset
        self.data[begin : begin + len(data)] = data
        if run.head_end - run.head_begin == layout.kv_heads:
            self.hashes[run.layer] = value
        self._heads[run.layer] = have | new
        self.missing -= new.bit_count()

    def all_hashes(self) -> list[int]:
        """One per layer. That of a layer which several writers brought in parts is made here."""
        size, layers = self.format.layout.slice_bytes, range(self.format.layout.layers)
        for layer in layers:
            if layer not in self.hashes:
                data = self.data[layer * size : (layer + 1) * size]
                self.hashes[layer] = bind(slice_hash(data), self.key, layer)
        return [self.hashes[layer] for layer in layers]


class PutSession:
    """One writing session.

    Args:
        spec: what it declared.
        present: indices of blocks that existed when it was opened.
        on_visible: told indices of blocks that became readable.
        on_durable: told indices of blocks that became durable.

    Attributes:
        unfinished: index -> block that is not whole yet.
        opener: opens its frames, in their order.
    """

    def __init__(self, spec: PutSpec, present: Sequence[int], on_visible: Indices, on_durable: Indices) -> None:
        self.spec = spec
        self.present = present
        self.on_visible = on_visible
        self.on_durable = on_durable
        self.unfinished: dict[int, Assembly] = {}
        self.closed = False
        self.opener = FrameOpener(spec.format.layout, spec.heads, spec.keys)
        self._ledger = SliceLedger(spec.layers, len(spec.keys), spec.heads)

    @property
    def complete(self) -> bool:
        """All of its blocks are whole."""
        return not self.unfinished

    @property
    def covers_whole_blocks(self) -> bool:
        """It has declared to bring everything of its blocks."""
        layout = self.spec.format.layout
        return len(self.spec.layers) == layout.layers and len(self.spec.heads) == layout.kv_heads

    def accept(self, run: Run) -> None:
        """Records that a run has come.

        Raises:
            FrameError: the session did not declare it, it has come before, or its block is not full.
        """
        if run.valid_tokens != self.spec.format.layout.block_tokens:
            raise FrameError(f"{run}: only full blocks are stored")
        self._ledger.accept(run)


class Assembler:
    """All unfinished blocks, and the sessions that write them.

    Args:
        allocate: memory for a whole block.

    Attributes:
        keys: of all open sessions together.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._blocks: dict[BlockKey, Assembly] = {}
        self._sessions: set[PutSession] = set()
        self.keys = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of unfinished blocks for which DRAM has been set aside."""
        return sum(block.nbytes for block in self._blocks.values() if block.reserved)

    def check_formats(self, spec: PutSpec) -> None:
        """Checks that no block of a session is being written in another format.

        Raises:
            InvalidRequest: one is.
        """
        for key in spec.keys:
            block = self._blocks.get(key)
            if block is not None and block.format != spec.format:
                raise InvalidRequest("keys", "a key is being written in another format")

    def open(self, session: PutSession) -> None:
        """Takes a session; its blocks that are not present are expected from now on."""
        present = set(session.present)
        for index, key in enumerate(session.spec.keys):
            if index in present:
                continue
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = Assembly(session.spec, index)
            block.writers[session] = index
            session.unfinished[index] = block
        self._sessions.add(session)
        self.keys += len(session.spec.keys)

    def begun_by(self, session: PutSession, runs: Sequence[OpenRun]) -> list[Assembly]:
        """Blocks of which a frame brings the first bytes, so that no DRAM has been set aside for them."""
        found: dict[int, Assembly] = {}
        for run, _, _ in runs:
            for index in range(run.first_block, run.first_block + run.block_count):
                block = session.unfinished.get(index)
                if block is not None and not block.reserved:
                    found[index] = block
        return list(found.values())

    def write(self, session: PutSession, runs: Sequence[OpenRun], whole: list[Assembly]) -> None:
        """Takes an opened frame, for whose blocks DRAM has been set aside.

        Args:
            session: whose frame it is.
            runs: the frame.
            whole: blocks that become whole are appended, also when this raises; they have left the assembler.

        Raises:
            FrameError: it does not belong to the session; the session must be closed.
            Overloaded: there is no memory; the same.
        """
        for run, data, hashes in runs:
            session.accept(run)
            parts = split_run(run, data, session.spec.format.layout)
            for (index, offset, part), value in zip(parts, hashes, strict=True):
                block = session.unfinished.get(index)
                if block is None:  # present, or finished by another session
                    continue
                block.put(run, offset, part, value, self._allocate)
                if not block.missing:
                    self._finish(block)
                    whole.append(block)

    def _finish(self, block: Assembly) -> None:
        del self._blocks[block.key]
        for session, index in block.writers.items():
            del session.unfinished[index]

    def arrived(self, key: BlockKey) -> Assembly | None:
        """A block came whole in another way; returns what was expected of it, now forgotten."""
        block = self._blocks.get(key)
        if block is not None:
            self._finish(block)
        return block

    def close(self, session: PutSession) -> collections.Counter[str]:
        """Ends a session and forgets blocks without another writer; returns the reserved bytes of those, by tenant."""
        session.closed = True
        self._sessions.remove(session)
        self.keys -= len(session.spec.keys)
        freed: collections.Counter[str] = collections.Counter()
        for block in session.unfinished.values():
            del block.writers[session]
            if not block.writers:
                del self._blocks[block.key]
                freed[block.tenant] += block.nbytes * block.reserved
        session.unfinished.clear()
        return freed

    def check_invariants(self) -> None:
        """Every block has a writer that knows it, and the reverse; none is whole."""
        for key, block in self._blocks.items():
            assert block.key == key
            assert block.writers
            assert block.missing
            assert block.reserved or not block.data
            for session, index in block.writers.items():
                assert session in self._sessions
                assert session.unfinished[index] is block
                assert session.spec.keys[index] == key
        assert self.keys == sum(len(session.spec.keys) for session in self._sessions)
        for session in self._sessions:
            assert not session.closed
            for index, block in session.unfinished.items():
                assert self._blocks[session.spec.keys[index]] is block
