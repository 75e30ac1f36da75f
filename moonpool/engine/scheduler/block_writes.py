"""Blocks being written to kvstores: each write references its blocks until the write ends."""

from collections.abc import Sequence

from moonpool.base.scheduling.block_lending import WRITTEN_PART
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.scheduler.block_table import BlockTable


class BlockWrites:
    """References blocks for writes, and counts the window blocks that writes hold.

    Attributes:
        windows: window blocks that writes in flight hold.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.windows = 0

    def hold(self, blocks: Sequence[int], past: int) -> BlockTable:
        """Return a table over blocks that others own; the write's I/O is the only pin.

        The first `past` blocks are written without the slices of layers with a window.
        """
        past = past if self._manager.num_slots else 0
        self._manager.acquire(blocks, past)
        table = BlockTable(list(blocks), past, pins=0)
        self.windows += self._windows_of(table)
        return table

    def ended(self, table: BlockTable) -> None:
        """Note that the write of a table from `hold` has ended."""
        self.windows -= self._windows_of(table)

    def _windows_of(self, table: BlockTable) -> int:
        return len(table.blocks) - table.past if self._manager.num_slots else 0

    def check_invariants(self, written: list[BlockTable]) -> None:
        """Assert that the window blocks of writes in flight are counted."""
        assert self.windows == sum(map(self._windows_of, written))

    def hold_too_many_windows(self) -> bool:
        """Return whether blocks are written without windows for now: slow stores must not hold all window blocks."""
        return self.windows * WRITTEN_PART > self._manager.num_slots
