"""The reading side: leases on leading blocks of a chain, and blocks coming back from the durable tier into DRAM.

Owns what readers hold. Must not know of streams, threads or clocks: whoever reads the device reports what it found.
A lease keeps its blocks from being evicted or reclaimed until it is closed. Blocks that a lease reads whole from the
durable tier are read into DRAM that was reserved for them, and stay there (hits promote).
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from moonpool.errors import Overloaded
from moonpool.kv.blocks import BlockFormat, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout
from services.kvstore.core.holdings import Holdings
from services.kvstore.ssd.backend import BlockReader

RETRY_AFTER_S = 1.0


@dataclasses.dataclass(slots=True)
class Source:
    """Where one block of a lease comes from: `block` in DRAM, or `reader` on the durable tier.

    Attributes:
        block: the block, held.
        reader: reads the block.
        tenant: whose block `reader` reads.
        allocate: set when DRAM for the whole block was set aside, so that it may stay there once it was read; gives it.
        fill: where `reader` reads to then, from the first slice on.
        filled: one bit per layer whose verified bytes are in `fill`.
    """

    block: DramBlock | None = None
    reader: BlockReader | None = None
    tenant: str = ""
    allocate: Callable[[int], memoryview] | None = None
    fill: memoryview | None = None
    filled: int = 0

    @property
    def reserved(self) -> bool:
        """Whether DRAM was set aside for the whole block."""
        return self.allocate is not None

    def hash_of(self, layer: int) -> int:
        """The hash of a layer that is in DRAM or was read, bound to the block."""
        if self.block is not None:
            return self.block.hashes[layer]
        assert self.reader is not None
        return self.reader.hash_of(layer)

    def take(self, layer: int, layout: KVLayout) -> memoryview:
        """Memory for one layer's bytes: the block's own or `fill`, else new.

        Raises:
            Overloaded: the operating system gives none.
        """
        if self.block is not None:
            return self.block.slice(layer)
        size = layout.slice_bytes
        if self.allocate is None:
            return memoryview(bytearray(size))
        if self.fill is None:
            self.fill = self.allocate(layout.block_bytes)
        return self.fill[layer * size : (layer + 1) * size]


@dataclasses.dataclass(slots=True)
class ReadLease:
    """Blocks that stay until the lease is closed, in the order of the reader's keys."""

    format: BlockFormat
    keys: Sequence[BlockKey]
    sources: list[Source]
    closed: bool = False

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        return len(self.sources)

    @property
    def cold(self) -> bool:
        """Whether some of them are not in DRAM."""
        return any(source.reader is not None for source in self.sources)


class Reads:
    """All leases.

    Args:
        holdings: both tiers.
        max_sessions: open leases at most.

    Attributes:
        on_lost: called when the durable tier has something to forget.
        on_asked: told the chain that a reader asks for.
        on_promoted: told blocks that came into DRAM.
    """

    def __init__(self, holdings: Holdings, *, max_sessions: int) -> None:
        self._holdings = holdings
        self._max_sessions = max_sessions
        self.on_lost: Callable[[], None] = lambda: None
        self.on_asked: Callable[[Sequence[BlockKey]], None] = lambda keys: None
        self.on_promoted: Callable[[Sequence[DramBlock]], None] = lambda blocks: None
        self.leases = 0
        self.dram_hits = 0
        self.ssd_hits = 0
        self.misses = 0
        self.promotions = 0
        self.bad_blocks = 0

    def open(
        self, keys: Sequence[BlockKey], block_format: BlockFormat, *, promote: bool, counted: bool = True
    ) -> ReadLease:
        """Takes hold of the leading blocks that are here in `block_format`.

        Args:
            keys: a chain.
            block_format: what the reader can use; a block of another one is a miss.
            promote: blocks will be read whole, so that those of the durable tier may stay in DRAM.
            counted: whether these are hits and misses: somebody asked for the blocks.

        Raises:
            Overloaded: too many leases are open.
        """
        if self.leases >= self._max_sessions:
            raise Overloaded("too many reading sessions", reason="kvstore_sessions", retry_after_s=RETRY_AFTER_S)
        sources: list[Source] = []
        for key in keys:
            source = self._source(key, block_format)
            if source is None:
                break
            sources.append(source)
        if counted:
            self._count(keys, sources)
        cold = [source for source in sources if source.reader is not None]
        if promote:
            for source in cold:
                if not self._holdings.reserve(block_format.layout.block_bytes, source.tenant):
                    break
                source.allocate = self._holdings.dram.allocate
        self.leases += 1
        return ReadLease(block_format, keys[: len(sources)], sources)

    def _count(self, keys: Sequence[BlockKey], sources: Sequence[Source]) -> None:
        self._holdings.touch(keys[: len(sources)])
        cold = sum(source.reader is not None for source in sources)
        self.ssd_hits += cold
        self.dram_hits += len(sources) - cold
        self.misses += len(keys) - len(sources)
        self.on_asked(keys)

    def _source(self, key: BlockKey, block_format: BlockFormat) -> Source | None:
        dram, backend = self._holdings.dram, self._holdings.backend
        block = dram.get(key)
        if block is not None:
            if block.info.format != block_format or self._holdings.is_damaged(key):
                return None
            dram.hold(block)
            return Source(block=block)
        if backend is None or backend.format_of(key) != block_format:
            return None
        return Source(reader=backend.reader(key), tenant=backend.tenant_of(key) or "")

    def lost(self, source: Source) -> None:
        """A block could not be read: it is forgotten and announced, unless it has been replaced meanwhile."""
        assert source.reader is not None
        assert self._holdings.backend is not None
        if self._holdings.backend.drop(source.reader):
            self.bad_blocks += 1
            self._holdings.gone([source.reader.key])
            self.on_lost()

    def suspect(self, key: BlockKey) -> None:
        """A reader found that a block's bytes do not match their hashes."""
        self._holdings.suspect(key)

    def close(self, lease: ReadLease) -> None:
        """Ends a lease; what it read whole stays in DRAM. Nothing may still be reading for it. Twice does no harm."""
        if lease.closed:
            return
        lease.closed = True
        self.leases -= 1
        layout = lease.format.layout
        promoted: dict[BlockKey, DramBlock] = {}
        unused: collections.Counter[str] = collections.Counter()
        for source in lease.sources:
            if source.reader is None:
                continue
            source.reader.release()
            if not source.reserved:
                continue
            info = source.reader.info
            whole = source.filled == (1 << layout.layers) - 1
            if whole and info is not None and source.fill is not None and info.key not in promoted:
                info = dataclasses.replace(info, tenant=source.tenant)
                promoted[info.key] = DramBlock(info, source.fill, list(map(source.hash_of, range(layout.layers))))
            else:
                unused[source.tenant] += layout.block_bytes
            source.fill = None
        taken = self._holdings.insert(list(promoted.values()))
        self.promotions += len(taken)
        self._holdings.dram.arrived(list(promoted))
        for tenant, nbytes in unused.items():
            self._holdings.unreserve(nbytes, tenant)
        self.on_promoted(taken)
        self._holdings.let_go([source.block for source in lease.sources if source.block is not None])
        self._holdings.room()
