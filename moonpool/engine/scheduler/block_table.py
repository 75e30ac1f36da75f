"""A sequence's blocks, and I/O that pins these."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import BlockManager, KVOwner
from moonpool.base.scheduling.state_machine import PendingIo


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks in the order of their tokens; the table holds one reference to each block.

    The references are given back with the last pin: the owner's, and one for each step, load, copy or transfer that
    reads or writes the blocks. So nobody else gets a block that is still read or written.

    Attributes:
        past: leading blocks whose windowed slices the owner does not read any more.
    """

    blocks: list[int] = field(default_factory=list)
    past: int = 0
    pins: int = 1

    def unpin(self, manager: BlockManager) -> None:
        """Drop a pin; with the last pin, release the blocks."""
        self.pins -= 1
        if not self.pins:
            manager.release(self.blocks, self.past)

    def register(self, keys: Sequence[BlockKey], blocks: range, manager: BlockManager, owner: KVOwner) -> None:
        """Register keys of blocks, whose KV is whole now.

        Args:
            keys: keys of the sequence's full blocks; a part-filled block has none.
            blocks: indices of the blocks.
            manager: the pool's block manager.
            owner: the KV's tenant, and whether blocks may be kept.
        """
        for index in blocks[: max(0, len(keys) - blocks.start)]:
            manager.register(self.blocks[index], keys[index], owner)


class PinningIo(Protocol):
    """I/O in flight."""

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """Tables that the I/O pins."""


F = TypeVar("F", bound=PinningIo)


class PinnedIo(PendingIo[F]):
    """I/O in flight, each with the tables that it pins."""

    def __init__(self, manager: BlockManager) -> None:
        super().__init__()
        self._manager = manager

    def begin(self, pinned: F) -> int:
        """Add I/O and pin the tables; return the I/O's number."""
        for table in pinned.tables:
            table.pins += 1
        return super().begin(pinned)

    def end(self, io: int) -> F:
        """Remove I/O that has ended and unpin the tables; return the value.

        Raises:
            KeyError: the I/O has ended before, or never began: a defect of the driver.
        """
        pinned = super().end(io)
        for table in pinned.tables:
            table.unpin(self._manager)
        return pinned


def check_pins(manager: BlockManager, owned: list[BlockTable], ios: PinnedIo[F], lent: list[int]) -> None:
    """Assert that exactly the owners and I/O in flight pin tables, and that nobody else references a block.

    Args:
        manager: the pool's block manager.
        owned: tables that requests own, each once for each owner.
        ios: I/O in flight.
        lent: blocks lent to readers, each once for each loan.
    """
    pins: dict[int, int] = {}
    tables: dict[int, BlockTable] = {}
    for table in [*owned, *(table for _, flight in ios for table in flight.tables)]:
        pins[id(table)] = pins.get(id(table), 0) + 1
        tables[id(table)] = table
    refs = [0] * manager.num_blocks
    for name, table in tables.items():
        assert table.pins == pins[name], "a pin is lost or forgotten"
        assert len(set(table.blocks)) == len(table.blocks), "a block is twice in a table"
        assert table.past <= len(table.blocks)
        for block in table.blocks:
            refs[block] += 1
    for block in lent:
        refs[block] += 1
    held = list(map(manager.ref_count, range(manager.num_blocks)))
    assert held == refs, "a block is held by something else, or lost"
