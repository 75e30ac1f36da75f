"""Blocks while they are being written: which of their bytes have come, from whom, and when a block is whole.

Owns unfinished blocks and writing sessions. Nothing in here is visible to readers. Several sessions may write one
block, each its own layers and heads or the same ones; a slice that came twice is the same by the meaning of a key, and
the first is kept. A block lives here as long as a session that may still bring something of it. Must not know of tiers,
budgets, streams or clocks.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from moonpool.errors import FrameError, InvalidRequest
from moonpool.kv.blocks import MAX_TENANT_BYTES, NO_PARENT, BlockFormat, BlockInfo
from moonpool.kv.frames import FrameOpener, OpenRun, Run, split_run
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout
from moonpool.streams.ledger import SliceLedger

MAX_SESSION_BLOCKS = 16384
"""Most keys in one session."""


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
            raise InvalidRequest("keys", "a key stands there twice")
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
    """One unfinished block.

    `data` is memory of the DRAM tier from its first bytes on; its room is reserved before. `covered` has one bit per
    (layer, head), bit `layer * kv_heads + head`, set when its bytes are in `data`.
    `hashes`: by layer, of layers that came whole. `writers`: session -> index of the block in that session.
    """

    __slots__ = ("covered", "data", "hashes", "info", "writers")

    def __init__(self, info: BlockInfo) -> None:
        self.info = info
        self.data = memoryview(b"")
        self.covered = 0
        self.hashes: dict[int, int] = {}
        self.writers: dict[PutSession, int] = {}

    @property
    def whole(self) -> bool:
        """Everything has come."""
        layout = self.info.format.layout
        return self.covered == (1 << layout.layers * layout.kv_heads) - 1

    def put(self, run: Run, offset: int, data: memoryview, value: int, allocate: Callable[[int], memoryview]) -> None:
        """Takes the bytes of one layer's heads and their hash, unless they have come already."""
        layout = self.info.format.layout
        mask = ((1 << run.head_end - run.head_begin) - 1) << run.layer * layout.kv_heads + run.head_begin
        if self.covered & mask == mask:
            return
        if not self.covered:
            self.data = allocate(self.info.nbytes)
        begin = run.layer * layout.slice_bytes + offset
        self.data[begin : begin + len(data)] = data
        if run.head_end - run.head_begin == layout.kv_heads:
            self.hashes[run.layer] = value
        self.covered |= mask

    def all_hashes(self) -> list[int]:
        """One per layer. Of a layer that several writers brought in parts nobody had the whole: it is made here."""
        size = self.info.format.layout.slice_bytes
        for layer in range(self.info.format.layout.layers):
            if layer not in self.hashes:
                data = self.data[layer * size : (layer + 1) * size]
                self.hashes[layer] = bind(slice_hash(data), self.info.key, layer)
        return [self.hashes[layer] for layer in range(self.info.format.layout.layers)]


class PutSession:
    """One writing session.

    Attributes:
        spec: what it declared.
        present: indices of blocks that existed when it was opened.
        unfinished: index -> block that is not whole yet.
        on_visible: told indices of blocks that became readable.
        on_durable: told indices of blocks that became durable.
    """

    def __init__(
        self,
        spec: PutSpec,
        present: Sequence[int],
        on_visible: Callable[[Sequence[int]], None],
        on_durable: Callable[[Sequence[int]], None],
    ) -> None:
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
        layout = self.spec.format.layout
        if run.valid_tokens != layout.block_tokens:
            raise FrameError(f"{run}: only full blocks are stored")
        self._ledger.accept(run)


class Assembler:
    """All unfinished blocks, and the sessions that write them.

    Args:
        allocate: memory for a whole block.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._blocks: dict[BlockKey, Assembly] = {}
        self._sessions: set[PutSession] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Bytes of all unfinished blocks."""
        return sum(block.info.nbytes for block in self._blocks.values())

    def new_keys(self, spec: PutSpec, present: Sequence[int]) -> int:
        """How many blocks of a session, beside the present ones, are not being written yet.

        Raises:
            InvalidRequest: one is being written in another format.
        """
        there = set(present)
        count = 0
        for index, key in enumerate(spec.keys):
            if index in there:
                continue
            block = self._blocks.get(key)
            if block is None:
                count += 1
            elif block.info.format != spec.format:
                raise InvalidRequest("keys", "a key is being written in another format")
        return count

    def open(self, session: PutSession) -> None:
        """Takes a session; its blocks that are not present are expected from now on."""
        present = set(session.present)
        for index, key in enumerate(session.spec.keys):
            if index in present:
                continue
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = Assembly(session.spec.info(index))
            block.writers[session] = index
            session.unfinished[index] = block
        self._sessions.add(session)

    def write(self, session: PutSession, runs: Sequence[OpenRun]) -> list[Assembly]:
        """Takes an opened frame; returns the blocks that became whole, which have left the assembler.

        Raises:
            FrameError: it does not belong to the session; the session must be closed.
            Overloaded: there is no memory; the same.
        """
        whole: list[Assembly] = []
        layout: KVLayout = session.spec.format.layout
        for run, data, hashes in runs:
            session.accept(run)
            for (index, offset, part), value in zip(split_run(run, data, layout), hashes, strict=True):
                block = session.unfinished.get(index)
                if block is None:  # present, or finished by another session
                    continue
                block.put(run, offset, part, value, self._allocate)
                if block.whole:
                    self._finish(block)
                    whole.append(block)
        return whole

    def _finish(self, block: Assembly) -> None:
        del self._blocks[block.info.key]
        for session, index in block.writers.items():
            del session.unfinished[index]

    def arrived(self, key: BlockKey) -> Assembly | None:
        """A block that is being written came whole in another way; returns what was expected of it, now forgotten."""
        block = self._blocks.get(key)
        if block is not None:
            self._finish(block)
        return block

    def close(self, session: PutSession) -> collections.Counter[str]:
        """Ends a session; returns the bytes by tenant of the blocks that nobody writes any more; they are forgotten."""
        session.closed = True
        self._sessions.discard(session)
        freed: collections.Counter[str] = collections.Counter()
        for block in session.unfinished.values():
            del block.writers[session]
            if not block.writers:
                del self._blocks[block.info.key]
                freed[block.info.tenant] += block.info.nbytes
        session.unfinished.clear()
        return freed

    def check_invariants(self) -> None:
        """Every block has a writer that knows it, and the reverse; none is whole."""
        for key, block in self._blocks.items():
            assert block.info.key == key
            assert block.writers
            assert not block.whole
            for session, index in block.writers.items():
                assert session in self._sessions
                assert session.unfinished[index] is block
                assert session.spec.keys[index] == key
        for session in self._sessions:
            assert not session.closed
            for index, block in session.unfinished.items():
                assert self._blocks[session.spec.keys[index]] is block
