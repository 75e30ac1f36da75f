"""Filling free DRAM from the durable tier, after a restart: the most recently written blocks first.

Owns which blocks are read and in which portions; reading them is `LayerReader`'s business, and that what was read whole
stays in DRAM is that of `Reads`. Evicts nothing: warming ends when free DRAM does.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from moonpool.kv.blocks import BlockFormat
from moonpool.kv.keys import BlockKey
from moonpool.streams.credits import ByteCredits
from services.kvstore.core.store import BlockStore
from services.kvstore.streams.layers import LayerReader

PORTION_BLOCKS = 64
"""Most blocks that are read together."""

STEP_BLOCKS = 1024
"""Blocks of the durable tier that are looked at before others have their turn: there may be millions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """What came into DRAM."""

    blocks: int
    nbytes: int


class Warmer:
    """Brings blocks of one store from its durable tier into DRAM.

    Args:
        store: the store.
        pool: threads that read.
        ahead: bytes that may be read and not taken yet.
    """

    def __init__(self, store: BlockStore, pool: ThreadPoolExecutor, ahead: ByteCredits) -> None:
        self._store = store
        self._pool = pool
        self._ahead = ahead
        self._turn = asyncio.Lock()

    async def warm(self, max_bytes: int) -> Warmed:
        """Reads blocks until `max_bytes` (0 = no bound) or free DRAM are used up; one call at a time does so.

        Raises:
            Overloaded: too many reading sessions are open.
        """
        async with self._turn:
            blocks = nbytes = 0
            async with contextlib.aclosing(self._portions()) as portions:
                async for block_format, keys in portions:
                    size = block_format.layout.block_bytes
                    room = self._store.tiers.dram.free_bytes
                    if max_bytes:
                        room = min(room, max_bytes - nbytes)
                    keys = keys[: room // size]
                    if not keys:
                        break
                    await self._read(block_format, keys)
                    came = sum(key in self._store.tiers.dram for key in keys)
                    blocks += came
                    nbytes += came * size
            return Warmed(blocks, nbytes)

    async def _portions(self) -> AsyncGenerator[tuple[BlockFormat, list[BlockKey]], None]:
        """Blocks of the durable tier that are not in DRAM, newest first, those of one format together."""
        tiers = self._store.tiers
        if tiers.ssd is None:
            return
        for step in tiers.ssd.newest_first(STEP_BLOCKS):
            cold = [key for key in step if key not in tiers.dram]
            for block_format, keys in itertools.groupby(cold, tiers.format_of):
                while block_format is not None and (portion := list(itertools.islice(keys, PORTION_BLOCKS))):
                    yield block_format, portion
            await asyncio.sleep(0)

    async def _read(self, block_format: BlockFormat, keys: list[BlockKey]) -> None:
        lease = self._store.reads.open(keys, block_format, promote=True, counted=False)
        layers = range(block_format.layout.layers)
        reader = LayerReader(self._store.reads, lease, layers, self._pool, self._ahead)
        try:
            async for _ in reader.groups():
                pass
        finally:
            reader.close()
