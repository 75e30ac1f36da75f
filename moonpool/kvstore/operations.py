"""A store's operations: pins, warming, compaction, and deletions on behalf of conductors."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Container, Sequence
from concurrent.futures import Executor

from moonpool.base.errors import InvalidRequest, Unsupported
from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.keys import BlockKey, window_key
from moonpool.base.kv.reuse_stats import HitCurve, ReuseSample
from moonpool.base.transport.async_utils import wait_within
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.kvstore.core.store import BlockStore
from moonpool.kvstore.eviction.retention import PinOutcome
from moonpool.kvstore.layer_reader import LayerReader
from moonpool.kvstore.ssd.tier import SsdTier

WARM_PORTION_BLOCKS = 64  # read together at most
WARM_STEP_BLOCKS = 1024  # of the SSD tier looked at before other tasks run; there may be millions
MIN_LIVE_SHARE = 0.5  # of a segment that must be live, for `compact`, unless told otherwise


@dataclasses.dataclass(frozen=True, slots=True)
class StoreOperations:
    """One store's operations; `run` ends each pin in time."""

    store: BlockStore
    pool: Executor  # reads
    ahead: ByteCredits  # bounds the bytes read and not taken yet
    reuse: ReuseSample
    capacity_bytes: int  # of both tiers
    clock: Callable[[], float]  # seconds, by which pins end
    step_blocks: int = WARM_STEP_BLOCKS
    pinned: asyncio.Event = dataclasses.field(default_factory=asyncio.Event, init=False)
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)  # for `warm` calls

    @property
    def ssd(self) -> SsdTier:
        ssd = self.store.tiers.ssd
        if ssd is None:
            raise Unsupported("this kvstore has no SSD tier")
        return ssd

    async def run(self) -> None:
        while True:
            self.expire()
            await wait_within(self.store.tiers.dram.pins.next_expiry - self.clock(), self.pinned)
            self.pinned.clear()

    def pin(self, tenant: str, name: str, keys: Sequence[BlockKey], ttl_s: float) -> PinOutcome:
        """Keep the leading blocks of a chain in either tier, and their windowed slices; see `Pins.pin`."""
        self.expire()
        tiers = self.store.tiers

        def size_of(key: BlockKey) -> int | None:
            block_format = tiers.format_of(key)
            return None if block_format is None else block_format.layout.block_bytes

        windows = [key for key in map(window_key, keys) if tiers.format_of(key) is not None]
        every = [*keys, *windows]
        outcome, changed = tiers.dram.pins.pin(tenant, name, every, size_of, now=self.clock(), ttl_s=ttl_s)
        self._pins_changed(changed)
        self.pinned.set()
        return outcome._replace(blocks=min(outcome.blocks, len(keys)))

    def unpin(self, tenant: str, name: str) -> bool:
        return self._pins_changed(self.store.tiers.dram.pins.unpin(tenant, name))

    def unpin_all(self, tenants: Container[str]) -> None:
        self._pins_changed(self.store.tiers.dram.pins.end_all(tenants))

    def expire(self) -> None:
        self._pins_changed(self.store.tiers.dram.pins.expire(self.clock()))

    def _pins_changed(self, keys: Collection[BlockKey]) -> bool:
        if keys:
            self.store.tiers.dram.pins_changed(keys)
            here = map(self.store.tiers.dram.get, keys)
            self.store.writes.queue.used(block for block in here if block is not None and block.pinned)
            self.store.tiers.listener.room()
        return bool(keys)

    async def warm(self, max_bytes: int) -> tuple[int, int]:
        """Fill free DRAM from the SSD tier, the most recently written blocks first; evict no block.

        Returns blocks and bytes read into DRAM until `max_bytes` (0 = no bound) or free DRAM was used up. Raises
        Overloaded when too many reading transfers are open.
        """
        async with self.turn:
            dram = self.store.tiers.dram
            blocks = nbytes = 0
            async with contextlib.aclosing(self._portions()) as portions:
                async for block_format, keys in portions:
                    size = block_format.layout.block_bytes
                    room = min(dram.free_bytes, max_bytes - nbytes) if max_bytes else dram.free_bytes
                    keys = keys[: room // size]
                    if not keys:
                        break
                    await self._read(block_format, keys)
                    came = sum(key in dram for key in keys)
                    blocks += came
                    nbytes += came * size
            return blocks, nbytes

    async def _portions(self) -> AsyncGenerator[tuple[BlockFormat, list[BlockKey]], None]:
        """Blocks that are not in DRAM, newest first, in portions with one format."""
        tiers = self.store.tiers
        for step in self.ssd.catalogue.newest_first(self.step_blocks):
            cold = [key for key in step if key not in tiers.dram]
            for block_format, keys in itertools.groupby(cold, tiers.format_of):
                while block_format is not None and (portion := list(itertools.islice(keys, WARM_PORTION_BLOCKS))):
                    yield block_format, portion
            await asyncio.sleep(0)

    async def promote(self, keys: Sequence[BlockKey]) -> int:
        """Bring the leading blocks of one chain from the SSD tier into DRAM, evicting others if need be.

        Returns the bytes read. Raises Overloaded when too many reading transfers are open, or leases keep all DRAM.
        """
        block_format = self.store.tiers.format_of(keys[0])
        if block_format is None:
            return 0
        cold = sum(key not in self.store.tiers.dram for key in keys)
        await self._read(block_format, list(keys))
        return cold * block_format.layout.block_bytes

    async def _read(self, block_format: BlockFormat, keys: list[BlockKey]) -> None:
        lease = self.store.reads.open(keys, block_format, promote=True, counted=False)
        layers = range(block_format.layout.layers)
        reader = LayerReader(self.store.reads, lease, layers, self.pool, self.ahead)
        try:
            async for _ in reader.groups():
                pass
        finally:
            reader.close()

    def compact(self, min_live_share: float) -> int:
        """Begin to rewrite segments with a smaller share of live bytes (0 = the default); return how many."""
        if not 0.0 <= min_live_share <= 1.0:
            raise InvalidRequest("min_live_share", f"must be between 0 and 1, is {min_live_share}")
        segments = self.ssd.compact(min_live_share or MIN_LIVE_SHARE)
        self.store.tiers.listener.work()
        return segments

    def sizes(self) -> HitCurve:
        """(bytes, hit share) for stores with other sizes, with blocks as large as the average held block."""
        dram, catalogue = self.store.tiers.dram, self.store.tiers.catalogue
        blocks, nbytes = len(dram) + len(catalogue), dram.block_bytes + catalogue.live.total_bytes
        return [(size * (nbytes // blocks), share) for size, share in self.reuse.curve()] if blocks else []
