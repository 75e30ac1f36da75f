"""The memory of an engine's KV pool, before and after the pool's size is known."""

import os
from collections.abc import Sequence

from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.memory import shared_memory
from moonpool.base.kv.pool import KVPool


class PoolMemory:
    """The memory that an engine's processes inherit, and the pool inside once the size is known."""

    def __init__(self, layer_ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = layer_ranges
        self.files = [shared_memory() for _ in layer_ranges]
        self.pool: KVPool | None = None

    def make(self, layout: KVLayout, blocks: int, slots: int) -> None:
        """Make the pool; raises as `KVPool.create`."""
        files, self.files = self.files, []
        self.pool = KVPool.create(layout, blocks, self._ranges, files=files, slots=slots)
        self.files = [part.fd for part in self.pool.parts]

    def close(self) -> None:
        """Give the memory back."""
        if self.pool is not None:
            self.pool.close()
        else:
            for file in self.files:
                os.close(file)
