"""Leases of readers. A lease keeps the leased blocks from being evicted or reclaimed until closed."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from moonpool.base.errors import Overloaded
from moonpool.base.kv.blocks import BlockFormat, DramBlock
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.core.put_transfers import MAX_OPEN_KEYS, PutTransfers
from moonpool.kvstore.core.tiered_store import TieredStore
from moonpool.kvstore.dram.arena import RETRY_AFTER_S
from moonpool.kvstore.eviction.tenants import TenantBytes
from moonpool.kvstore.ssd.reader import SsdReader

PORTION_KEYS = 2048  # leased without letting others have the event loop


@dataclasses.dataclass(slots=True)
class LeasedBlock:
    """Where a leased block comes from: `block` in DRAM, held, or `reader` on the SSD tier."""

    block: DramBlock | None = None
    reader: SsdReader | None = None
    tenant: str = ""  # tenant of the block that `reader` reads
    allocate: Callable[[int], memoryview] | None = None  # gives memory for the block, if DRAM was reserved
    fill: memoryview | None = None  # that memory, from the first slice on
    filled: int = 0  # one bit per layer with verified bytes

    def memory(self, layers: range, layout: KVLayout) -> memoryview:
        """Memory to read layers to: in `fill`, else new; raises Overloaded when the operating system gives none."""
        if self.allocate is None:
            return memoryview(bytearray(layout.layers_bytes(layers)))
        if self.fill is None:
            self.fill = self.allocate(layout.block_bytes)
        begin = layout.place(layers.start).start
        return self.fill[begin : begin + layout.layers_bytes(layers)]

    def promoted(self, layout: KVLayout) -> DramBlock | None:
        """The block that was read from the SSD tier into reserved DRAM; None if some layers were not read."""
        reader, whole = self.reader, self.filled == (1 << layout.layers) - 1
        if reader is None or reader.info is None or self.fill is None or not whole:
            return None
        hashes = [reader.hashes[layer] for layer in range(layout.layers)]
        return DramBlock(dataclasses.replace(reader.info, tenant=self.tenant), self.fill, hashes)


@dataclasses.dataclass(slots=True)
class ReadLease:
    """Blocks that stay until the lease is closed, in the order of the reader's keys."""

    format: BlockFormat
    keys: Sequence[BlockKey]
    sources: list[LeasedBlock] = dataclasses.field(default_factory=list)
    promote: bool = False  # whole blocks are read, so that those of the SSD tier may stay in DRAM
    counted: bool = True  # among hits and misses
    closed: bool = False

    @property
    def blocks(self) -> int:
        return len(self.sources)

    @property
    def cold(self) -> bool:
        return any(source.reader is not None for source in self.sources)


class ReadLeases:
    """All leases, `max_transfers` at most, which keep `lease_bytes` of DRAM: blocks, and room for those being read in.

    `writes` is told of blocks that were found damaged.
    """

    def __init__(self, tiers: TieredStore, writes: PutTransfers, *, max_transfers: int, lease_bytes: int) -> None:
        self.tiers = tiers
        self._writes = writes
        self._max_transfers = max_transfers
        self.lease_bytes = lease_bytes
        self.leased: dict[DramBlock, int] = {}  # leases per block in DRAM, or leaving DRAM with the last hold
        self.open_keys = 0
        self.leased_bytes = self.leases = 0
        self.dram_hits = self.ssd_hits = self.misses = self.promotions = 0
        self.picture_hits = self.picture_misses = 0  # of pictures among them
        self.bad_blocks = 0  # on SSD, that did not match their hashes
        self.damaged_blocks = 0  # the same, in DRAM

    def open(
        self, keys: Sequence[BlockKey], block_format: BlockFormat, *, promote: bool, counted: bool = True
    ) -> ReadLease:
        """`begin`, and all of `extend`."""
        lease = self.begin(ReadLease(block_format, keys, promote=promote, counted=counted))
        while self.extend(lease):
            pass
        return lease

    def begin(self, lease: ReadLease) -> ReadLease:
        """Open an empty lease.

        Raises:
            Overloaded: too many leases are open.
        """
        if self.leases >= self._max_transfers or self.open_keys + len(lease.keys) > MAX_OPEN_KEYS:
            raise Overloaded("too many reading transfers", reason="kvstore_transfers", retry_after_s=RETRY_AFTER_S)
        self.open_keys += len(lease.keys)
        self.leases += 1
        self.tiers.listener.transfers_changed()
        return lease

    def extend(self, lease: ReadLease) -> bool:
        """Leases a portion of the chain's leading blocks; returns whether there may be more.

        Raises:
            Overloaded: leases keep so much DRAM that not even the first block fits; the lease is closed.
        """
        end = min(lease.blocks + PORTION_KEYS, len(lease.keys))
        dram, keys = self.tiers.dram, lease.keys[lease.blocks : end]
        held = [block for block in map(dram.get, keys) if block is not None]
        held = held if lease.promote and len(held) < len(keys) else []  # blocks from SSD must not evict their chain
        for block in held:
            dram.hold(block)
        try:
            for key in keys:
                if (source := self._source(key, lease)) is None:
                    break
                lease.sources.append(source)
        finally:
            self.tiers.release(held)
        if lease.blocks == end < len(lease.keys):
            return True
        first = self.tiers.dram.get(lease.keys[0]) if lease.keys and not lease.sources else None
        if first is not None and first.is_of(lease.format):
            self.close(lease)
            message = f"leases keep {self.leased_bytes} bytes of DRAM"
            raise Overloaded(message, reason="kvstore_leases", retry_after_s=RETRY_AFTER_S)
        if lease.counted:
            warm = [source.block for source in lease.sources if source.block is not None]
            self.used(lease.format, lease.keys, warm, lease.blocks - len(warm))
        return False

    def resident(self, keys: Sequence[BlockKey], block_format: BlockFormat, most: int) -> list[DramBlock] | None:
        """The leading blocks of a chain, for use at once: no lease. None if they are more, or not all in DRAM."""
        blocks: list[DramBlock] = []
        for key in keys:
            block = self.tiers.dram.get(key)
            if block is None:
                return None if self.tiers.durable(key) else blocks
            if not block.is_of(block_format):
                break
            if len(blocks) == most:
                return None
            blocks.append(block)
        return blocks

    def used(
        self, block_format: BlockFormat, keys: Sequence[BlockKey], warm: Sequence[DramBlock], cold: int = 0
    ) -> None:
        """Count a read of a chain whose leading blocks were here: `warm` in DRAM, `cold` on the SSD tier only."""
        found = len(warm) + cold
        self.tiers.touch(keys[:found])
        self._writes.queue.used(warm)
        self.ssd_hits += cold
        self.dram_hits += len(warm)
        self.misses += len(keys) - found
        if block_format.of_pictures:
            self.picture_hits += found
            self.picture_misses += len(keys) - found
        self.tiers.listener.asked(keys)

    def _source(self, key: BlockKey, lease: ReadLease) -> LeasedBlock | None:
        """Leases one block; None if the block is not here, or leases keep as much DRAM as they may."""
        dram, ssd, size = self.tiers.dram, self.tiers.ssd, lease.format.layout.block_bytes
        fits = self.leased_bytes + size <= self.lease_bytes
        block = dram.get(key)
        if block is not None:
            leases = self.leased.get(block, 0)
            if not (leases or fits) or not block.is_of(lease.format):
                return None
            dram.hold(block)
            self.leased_bytes += 0 if leases else size
            self.leased[block] = leases + 1
            return LeasedBlock(block)
        kind = self.tiers.catalogue.kind_of(key)
        if ssd is None or kind is None or kind.format != lease.format:
            return None
        source = LeasedBlock(reader=ssd.reader(key), tenant=kind.tenant)
        if lease.promote and fits and self.tiers.reserve({kind.account: size}):
            self.leased_bytes += size
            source.allocate = functools.partial(dram.arena.allocate, ahead=False)
        return source

    def suspect(self, key: BlockKey) -> None:
        """Check a block that a reader reports as damaged. A damaged block leaves DRAM and is not written to SSD."""
        block = self.tiers.dram.get(key)
        if block is not None and not block.is_intact:
            self.damaged_blocks += 1
            self.tiers.dram.drop(block)
            self._writes.on_removed([block])
            self.tiers.removed([key])

    def lost(self, source: LeasedBlock) -> None:
        """Forget and announce a bad block, unless replaced meanwhile."""
        assert source.reader is not None
        assert self.tiers.ssd is not None
        if self.tiers.ssd.drop(source.reader):
            self.bad_blocks += 1
            self.tiers.removed([source.reader.key])
            self.tiers.listener.work()

    def close(self, lease: ReadLease) -> None:
        """End a lease. Idempotent. No thread may still read for the lease.

        Blocks that were read whole stay in DRAM if they are still at the same place on SSD.
        """
        if lease.closed:
            return
        lease.closed = True
        self.leases -= 1
        self.open_keys -= len(lease.keys)
        layout = lease.format.layout
        held = [source.block for source in lease.sources if source.block is not None]
        for block in held:
            left = self.leased.pop(block) - 1
            if left:
                self.leased[block] = left
            else:
                self.leased_bytes -= layout.block_bytes
        promoted: dict[BlockKey, DramBlock] = {}
        unused = TenantBytes()
        for source in lease.sources if len(held) < lease.blocks else ():
            reader = source.reader
            if reader is not None:
                reader.release()
            if reader is None or source.allocate is None:
                continue
            self.leased_bytes -= layout.block_bytes
            # Another value may be elsewhere under the key: the block may have been deleted, and put again.
            stays = self.tiers.catalogue.is_live(reader.segment, reader.row)
            read = source.promoted(layout) if stays else None
            if read is None or promoted.setdefault(read.info.key, read) is not read:
                unused.add(lease.format.account(source.tenant), layout.block_bytes)
            source.fill = None
        taken = self.tiers.insert(list(promoted.values()))
        self.promotions += len(taken)
        self.tiers.dram.arrived(list(promoted))
        self.tiers.unreserve(unused)
        self.tiers.release(held)
        self.tiers.listener.room()
        self.tiers.listener.transfers_changed()
