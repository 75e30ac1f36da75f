"""Leases on leading blocks of a chain, and blocks that come back from the SSD tier into DRAM.

A lease keeps its blocks from being evicted or reclaimed until it is closed. Blocks that a lease reads whole from the
SSD tier are read into DRAM that was reserved for them, and stay there. All leases together keep at most `lease_bytes`
of DRAM; a lease that would need more gets fewer leading blocks. Reading the device is done elsewhere.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from moonpool.errors import Overloaded
from moonpool.kv.blocks import BlockFormat, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout
from services.kvstore.core.tiered_store import TieredStore
from services.kvstore.core.writes import MAX_OPEN_KEYS, Writes
from services.kvstore.dram.arena import RETRY_AFTER_S
from services.kvstore.ssd.reader import SsdReader
from services.kvstore.tenancy.tenants import TenantBytes


@dataclasses.dataclass(slots=True)
class LeasedBlock:
    """Where one block of a lease comes from: `block` in DRAM, held, or `reader` on the SSD tier.

    Attributes:
        tenant: whose block `reader` reads.
        allocate: gives memory for the whole block, which may stay in DRAM then; None when no DRAM was reserved for it.
        fill: memory that `reader` reads to then, from the first slice on.
        filled: one bit per layer whose verified bytes are in `fill`.
    """

    block: DramBlock | None = None
    reader: SsdReader | None = None
    tenant: str = ""
    allocate: Callable[[int], memoryview] | None = None
    fill: memoryview | None = None
    filled: int = 0

    @property
    def reserved(self) -> bool:
        """Whether DRAM was reserved for the whole block."""
        return self.allocate is not None

    def hash_of(self, layer: int) -> int:
        """The hash of a layer that is in DRAM or was read, bound to the block."""
        if self.block is not None:
            return self.block.hashes[layer]
        assert self.reader is not None
        return self.reader.hashes[layer]

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

    def promoted(self, layout: KVLayout) -> DramBlock | None:
        """The block that was read from the SSD tier into reserved DRAM; None when not all of it was read."""
        info = None if self.reader is None else self.reader.info
        if info is None or self.fill is None or self.filled != (1 << layout.layers) - 1:
            return None
        hashes = list(map(self.hash_of, range(layout.layers)))
        return DramBlock(dataclasses.replace(info, tenant=self.tenant), self.fill, hashes)


@dataclasses.dataclass(slots=True)
class ReadLease:
    """Blocks that stay until the lease is closed, in the order of the reader's keys."""

    format: BlockFormat
    keys: Sequence[BlockKey]
    sources: list[LeasedBlock]
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
        writes: is told of blocks that came into DRAM.
        max_sessions: most open leases.
        lease_bytes: most DRAM that leases keep: blocks, and what is reserved for blocks being read in.

    Attributes:
        leases: number of open leases.
        leased_bytes: DRAM that leases keep.
    """

    def __init__(self, tiers: TieredStore, writes: Writes, *, max_sessions: int, lease_bytes: int) -> None:
        self.tiers = tiers
        self._writes = writes
        self._max_sessions = max_sessions
        self._lease_bytes = lease_bytes
        self._leased: collections.Counter[BlockKey] = collections.Counter()  # leases of each block in DRAM
        self._keys = 0
        self.leased_bytes = 0
        self.leases = 0
        self.dram_hits = 0
        self.ssd_hits = 0
        self.misses = 0
        self.promotions = 0
        self.bad_blocks = 0

    def open(
        self, keys: Sequence[BlockKey], block_format: BlockFormat, *, promote: bool, counted: bool = True
    ) -> ReadLease:
        """Leases the leading blocks of a chain that are here in `block_format`; `counted` among hits and misses.

        `promote`: the reader reads whole blocks, so that those of the SSD tier may stay in DRAM.

        Raises:
            Overloaded: too many leases are open, or they keep so much DRAM that not even the first block can be leased.
        """
        if self.leases >= self._max_sessions or self._keys + len(keys) > MAX_OPEN_KEYS:
            raise Overloaded("too many reading sessions", reason="kvstore_sessions", retry_after_s=RETRY_AFTER_S)
        lease = ReadLease(block_format, keys, [])
        for key in keys:
            source = self._source(key, block_format, promote)
            if source is None:
                break
            lease.sources.append(source)
        if not lease.sources and keys and self._in_dram(keys[0], block_format) is not None:
            raise Overloaded(
                f"leases keep {self.leased_bytes} bytes of DRAM", reason="kvstore_leases", retry_after_s=RETRY_AFTER_S
            )
        if counted:
            self._count(keys, lease)
        self._keys += lease.blocks
        self.leases += 1
        self.tiers.listener.sessions_changed()
        return lease

    def _count(self, keys: Sequence[BlockKey], lease: ReadLease) -> None:
        self.tiers.touch(keys[: lease.blocks])
        cold = sum(source.reader is not None for source in lease.sources)
        self.ssd_hits += cold
        self.dram_hits += lease.blocks - cold
        self.misses += len(keys) - lease.blocks
        self.tiers.listener.asked(keys)

    def _in_dram(self, key: BlockKey, block_format: BlockFormat) -> DramBlock | None:
        block = self.tiers.dram.get(key)
        if block is None or block.info.format != block_format or key in self.tiers.damaged:
            return None
        return block

    def _source(self, key: BlockKey, block_format: BlockFormat, promote: bool) -> LeasedBlock | None:
        dram, ssd, size = self.tiers.dram, self.tiers.ssd, block_format.layout.block_bytes
        fits = self.leased_bytes + size <= self._lease_bytes
        if key in dram:
            block = self._in_dram(key, block_format)
            if block is None or not (self._leased[key] or fits):
                return None
            dram.hold(block)
            self.leased_bytes += 0 if self._leased[key] else size
            self._leased[key] += 1
            return LeasedBlock(block=block)
        if ssd is None or ssd.catalogue.format_of(key) != block_format:
            return None
        source = LeasedBlock(reader=ssd.reader(key), tenant=ssd.catalogue.tenant_of(key) or "")
        if promote and fits and self.tiers.reserve(size, source.tenant):
            self.leased_bytes += size
            source.allocate = dram.arena.allocate
        return source

    def lost(self, source: LeasedBlock) -> None:
        """Forgets and announces a block that was found bad, unless it has been replaced meanwhile."""
        assert source.reader is not None
        assert self.tiers.ssd is not None
        if self.tiers.ssd.drop(source.reader):
            self.bad_blocks += 1
            self.tiers.removed([source.reader.key])
            self.tiers.listener.work()

    def close(self, lease: ReadLease) -> None:
        """Ends a lease; what it read whole stays in DRAM. No thread may still be reading for it. Idempotent."""
        if lease.closed:
            return
        lease.closed = True
        self.leases -= 1
        self._keys -= lease.blocks
        layout = lease.format.layout
        promoted: dict[BlockKey, DramBlock] = {}
        unused = TenantBytes()
        for source in lease.sources:
            if source.block is not None:
                key = source.block.info.key
                self._leased[key] -= 1
                if not self._leased[key]:
                    del self._leased[key]
                    self.leased_bytes -= layout.block_bytes
            elif source.reader is not None:
                source.reader.release()
            if not source.reserved:
                continue
            self.leased_bytes -= layout.block_bytes
            block = source.promoted(layout)
            if block is None or promoted.setdefault(block.info.key, block) is not block:
                unused.add(source.tenant, layout.block_bytes)
            source.fill = None
        taken = self.tiers.insert(list(promoted.values()))
        self.promotions += len(taken)
        self.tiers.dram.arrived(list(promoted))
        self.tiers.unreserve(unused)
        self._writes.arrived(taken)
        self.tiers.release([source.block for source in lease.sources if source.block is not None])
        self.tiers.listener.room()
        self.tiers.listener.sessions_changed()

    def check_invariants(self) -> None:
        """Checks that leases keep no more than they may, and nothing when none is open."""
        assert 0 <= self.leased_bytes <= self._lease_bytes
        assert all(count > 0 for count in self._leased.values())
        if not self.leases:
            assert (self.leased_bytes, self._leased, self._keys) == (0, {}, 0)
