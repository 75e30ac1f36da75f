"""Lending free blocks to the operating process beside the core: the events, and how many may be lent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.scheduling.state_machine import digest_of

WRITTEN_PART = 4
"""Writes to kvstores may hold 1 / this number of all window slots; further blocks are written without windows."""
LENDABLE_PART = 4
"""At most 1 / this number of the blocks are lent at once: readers take no more from requests computed here."""


class BlockLending:
    """Lends one pool's blocks to other instances for reading.

    A block with a key is full and does not change, so lending adds a reference. A lent block is not available, even if
    only cached, so the number of lent blocks is limited.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._lent: dict[int, tuple[int, ...]] = {}
        self._past: dict[int, int] = {}  # leading blocks of a loan whose windowed slices are not read
        self._loans: dict[int, int] = {}  # by block
        self._most = max(1, manager.num_blocks // LENDABLE_PART)

    def __iter__(self) -> Iterator[int]:
        """All lent blocks; a block lent twice appears twice."""
        return (block for blocks in self._lent.values() for block in blocks)

    def handle(self, event: LendBlocks | ReturnBlocks, spare: int, promised_slots: int = 0) -> list[BlocksLent]:
        """Lend blocks or take them back. `spare`: free and cached blocks that may be lent.

        `promised_slots`: available window slots that loans leave.
        """
        if isinstance(event, LendBlocks):
            return [self._lend(event, spare, self._manager.num_slots_available - promised_slots)]
        self._take_back(self._lent.pop(event.number, ()), self._past.pop(event.number, 0))
        self._manager.forget(event.damaged)
        return []

    def _take_back(self, blocks: Sequence[int], past: int) -> None:
        self._manager.release(blocks, past)
        for block in blocks:
            self._loans[block] -= 1
            if not self._loans[block]:
                del self._loans[block]

    def _lend(self, event: LendBlocks, spare: int, spare_slots: int) -> BlocksLent:
        blocks = []
        left = self._most - len(self._loans)
        for block in self._manager.find(event.keys):
            left -= block not in self._loans
            spare -= self._manager.is_cached(block)
            spare_slots -= self._manager.is_spare(block)
            if min(left, spare, spare_slots) < 0:
                break
            blocks.append(block)
        lacking = event.windows_from if len(blocks) == len(event.keys) else 0
        if self._manager.is_lacking(blocks, lacking):
            del blocks[next(index for index, block in enumerate(blocks) if self._manager.is_partial(block)) :]
            lacking = 0
        if blocks:
            self._manager.acquire(blocks, lacking)
            self._past[event.number] = lacking
            for block in blocks:
                self._loans[block] = self._loans.get(block, 0) + 1
            self._lent[event.number] = tuple(blocks)
        return BlocksLent(event.number, tuple(blocks))

    def digest(self) -> bytes:
        return digest_of(self._lent)


@frozen
class LendBlocks:
    """Another instance reads blocks. Answered by `BlocksLent`; the blocks stay referenced until `ReturnBlocks`.

    Attributes:
        number: names the answer.
        keys: the blocks' keys.
        windows_from: if all blocks are lent, blocks before this index may lack the slices of layers with a window.
    """

    number: int
    keys: tuple[BlockKey, ...]
    windows_from: int = 0


@frozen
class ReturnBlocks:
    """A reader has finished; ignored if no block was lent.

    Attributes:
        number: the `LendBlocks` number.
        damaged: keys whose blocks do not match their hashes; the pool does not find these keys any more.
    """

    number: int
    damaged: tuple[BlockKey, ...] = ()


@frozen
class BlocksLent:
    """Blocks for the leading keys that may be read; fewer than asked for if blocks are missing or needed here."""

    number: int
    blocks: tuple[int, ...]
