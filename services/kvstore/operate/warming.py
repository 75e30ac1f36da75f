"""Fills free DRAM from the SSD tier after a restart, the most recently written blocks first; evicts nothing."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from moonpool.errors import Unsupported
from moonpool.kv.blocks import BlockFormat
from moonpool.kv.keys import BlockKey
from moonpool.streams.credits import ByteCredits
from services.kvstore.core.store import BlockStore
from services.kvstore.streams.layers import LayerReader

PORTION_BLOCKS = 64
"""Blocks read together at most."""
STEP_BLOCKS = 1024
"""Blocks of the SSD tier looked at before other tasks run; there may be millions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """Blocks and bytes that were read into DRAM."""

    blocks: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Warmer:
    """Reads blocks of one store from its SSD tier into DRAM.

    Attributes:
        pool: threads that read.
        ahead: bounds the bytes read and not taken yet.
        step_blocks: see `STEP_BLOCKS`.
    """

    store: BlockStore
    pool: ThreadPoolExecutor
    ahead: ByteCredits
    step_blocks: int = STEP_BLOCKS
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)

    async def warm(self, max_bytes: int) -> Warmed:
        """Reads blocks until `max_bytes` (0 = no bound) or free DRAM is used up; calls run one after the other.

        Raises:
            Overloaded: too many reading sessions are open.
            Unsupported: there is no SSD tier.
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
            return Warmed(blocks, nbytes)

    async def _portions(self) -> AsyncGenerator[tuple[BlockFormat, list[BlockKey]], None]:
        """Blocks of the SSD tier that are not in DRAM, newest first, in portions of one format."""
        tiers = self.store.tiers
        if tiers.ssd is None:
            raise Unsupported("this kvstore has no SSD tier")
        for step in tiers.ssd.newest_first(self.step_blocks):
            cold = [key for key in step if key not in tiers.dram]
            for block_format, keys in itertools.groupby(cold, tiers.format_of):
                while block_format is not None and (portion := list(itertools.islice(keys, PORTION_BLOCKS))):
                    yield block_format, portion
            await asyncio.sleep(0)

    async def _read(self, block_format: BlockFormat, keys: list[BlockKey]) -> None:
        lease = self.store.reads.open(keys, block_format, promote=True, counted=False)
        layers = range(block_format.layout.layers)
        reader = LayerReader(self.store.reads, lease, layers, self.pool, self.ahead)
        try:
            async for _ in reader.groups():
                pass
        finally:
            reader.close()
