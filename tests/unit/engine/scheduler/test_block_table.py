"""Pins: blocks of a table are given back by the last user, whoever that is."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import NO_OWNER, BlockManager
from moonpool.engine.scheduler.block_table import BlockTable, PinnedIo, check_pins
from moonpool.engine.scheduler.block_writes import BlockWrites


@dataclass(eq=False)
class Copy:
    tables: tuple[BlockTable, ...]


def rig() -> tuple[BlockManager, BlockTable, PinnedIo[Copy]]:
    manager = BlockManager(8)
    return manager, BlockTable(manager.allocate(3)), PinnedIo(manager)


@pytest.mark.parametrize("owner_first", [False, True])
def test_the_last_pin_gives_the_blocks_back(owner_first: bool) -> None:
    manager, table, ios = rig()
    io = ios.begin(Copy((table,)))
    ends: list[Callable[[], object]] = [lambda: ios.end(io), lambda: table.unpin(manager)]
    for end in reversed(ends) if owner_first else ends:
        assert manager.num_used == 3
        end()
    assert manager.num_used == 0


def test_io_pins_each_table_and_ends_once() -> None:
    manager, table, ios = rig()
    other = BlockTable(manager.allocate(2))
    io = ios.begin(Copy((table, other)))
    table.unpin(manager)
    other.unpin(manager)
    assert manager.num_used == 5
    ios.end(io)
    assert manager.num_used == 0
    with pytest.raises(KeyError):
        ios.end(io)


def test_a_write_holds_its_blocks_beyond_their_owner() -> None:
    manager = BlockManager(8, 1, 8)
    table, ios, writes = BlockTable(manager.allocate(3)), PinnedIo[Copy](manager), BlockWrites(manager)
    manager.give_slots(table.blocks)
    written = writes.hold(table.blocks[:2], past=1)
    io = ios.begin(Copy((written,)))
    assert writes.windows == 1
    table.unpin(manager)
    assert manager.num_used == 2
    ios.end(io)
    writes.ended(written)
    assert (manager.num_used, writes.windows) == (0, 0)


def test_writes_hold_a_quarter_of_the_window_blocks_at_most() -> None:
    manager = BlockManager(8, 1, 8)
    writes, blocks = BlockWrites(manager), manager.allocate(3)
    manager.give_slots(blocks)
    held = [writes.hold([block], past=0) for block in blocks[:2]]
    assert not writes.hold_too_many_windows()
    held.append(writes.hold(blocks[2:], past=0))
    assert writes.hold_too_many_windows()
    writes.ended(held[0])
    assert not writes.hold_too_many_windows()


def test_writes_count_no_windows_where_no_layer_has_one() -> None:
    manager = BlockManager(8)
    writes = BlockWrites(manager)
    table = writes.hold(manager.allocate(2), past=1)
    assert (table.past, writes.windows) == (0, 0)


def test_only_full_blocks_of_the_range_get_their_keys() -> None:
    manager = BlockManager(8)
    table, keys = BlockTable(manager.allocate(4)), [BlockKey(bytes([index]) * 16) for index in range(3)]
    table.register(keys, range(1, 4), manager, NO_OWNER)
    assert [manager.key_of(block) for block in table.blocks] == [None, *keys[1:], None]
    table.register(keys, range(4, 4), manager, NO_OWNER)


@pytest.mark.parametrize("fault", ["forgotten owner", "forgotten pin", "leak", "twice"])
def test_the_check_finds_what_is_lost(fault: str) -> None:
    manager, table, ios = rig()
    ios.begin(Copy((table,)))
    check_pins(manager, [table], ios, [])
    owned = [] if fault == "forgotten owner" else [table]
    if fault == "forgotten pin":
        table.pins -= 1
    elif fault == "leak":
        manager.allocate(1)
    elif fault == "twice":
        table.blocks.append(table.blocks[0])
        manager.acquire(table.blocks[:1])
    with pytest.raises(AssertionError):
        check_pins(manager, owned, ios, [])
