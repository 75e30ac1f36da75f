"""Windows: what a sequence passes, and which blocks of a chunk get window blocks."""

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.chunks import chunk_end
from moonpool.engine.scheduler.settings import PoolSettings
from moonpool.engine.scheduler.windows import give_chunk_slots, pass_windows

BT = 4


def settings(window: int = 1, *, states: bool = False) -> PoolSettings:
    """Eight blocks of 100 bytes, 60 of them windowed."""
    windows = {"window_blocks": window, "window_slots": 8 if window else 0, "window_bytes": 60 if window else 0}
    return PoolSettings(num_blocks=8, block_size=BT, block_bytes=100, recurrent=states, states_alone=states, **windows)


def table_of(pool: PoolSettings, blocks: int) -> tuple[BlockManager, BlockTable]:
    manager = BlockManager(pool.num_blocks, pool.window_blocks, pool.window_slots)
    return manager, BlockTable(manager.allocate(blocks))


def whole(manager: BlockManager, table: BlockTable) -> list[int]:
    """Indices of the blocks with a window block."""
    return [index for index, block in enumerate(table.blocks) if not manager.is_partial(block)]


@pytest.mark.parametrize(("tokens", "first"), [(0, 0), (2 * BT - 1, 0), (2 * BT, 1), (5 * BT + 1, 4)])
def test_the_first_block_that_a_token_reads(tokens: int, first: int) -> None:
    assert settings().first_windowed_block(tokens) == first
    assert settings(0).first_windowed_block(tokens) == 0


def test_bytes_before_the_window_are_not_moved() -> None:
    assert [settings(2).moved_bytes(blocks) for blocks in (1, 2, 5)] == [100, 200, 500 - 3 * 60]
    assert settings(2).moved_bytes(5, part_filled=1) == 500 - 2 * 60
    assert settings(0).moved_bytes(5) == 500


def test_reused_tokens_leave_the_last_token_to_compute() -> None:
    assert settings().reused_tokens(3 * BT, 3) == 3 * BT - 1
    assert settings().reused_tokens(3 * BT, 2) == 2 * BT
    assert [settings(states=states).reusable_blocks(3 * BT) for states in (False, True)] == [3, 2]


def test_passing_goes_on_from_where_the_sequence_was_and_keeps_what_others_read() -> None:
    pool = settings()
    manager = BlockManager(pool.num_blocks, pool.window_blocks, num_slots=5)
    table = BlockTable(manager.allocate(5))
    manager.give_slots(table.blocks)
    for index, block in enumerate(table.blocks):
        manager.register(block, BlockKey(bytes([index]) * 16))
    pass_windows(table, 2 * BT, pool, manager)
    assert (table.past, manager.num_slots_idle) == (1, 1)
    pass_windows(table, BT, pool, manager)
    assert table.past == 1
    pass_windows(table, 5 * BT, pool, manager, borders=(3,))
    assert (table.past, manager.num_slots_idle, manager.num_slots_available) == (4, 3, 4)
    manager.give_slots(manager.allocate(3))
    assert whole(manager, table) == [2, 4], "the block behind which others continue is taken last"


def test_a_chunk_ends_where_window_blocks_do() -> None:
    pool = settings()
    manager, table = table_of(pool, 5)
    end = give_chunk_slots(table.blocks, range(2, 4 * BT + 1), ((), ()), pool, manager, available=3)
    assert end == 3 * BT
    assert whole(manager, table) == [0, 1, 2]
    assert give_chunk_slots(table.blocks, range(end, 4 * BT), ((), ()), pool, manager, available=-1) <= end


def test_states_are_written_behind_the_chunk_and_at_borders() -> None:
    pool = settings(states=True)
    manager, table = table_of(pool, 5)
    tokens = range(BT, 5 * BT)
    assert give_chunk_slots(table.blocks, tokens, ((1, 2), (1, 4)), pool, manager, available=2) == 5 * BT
    assert whole(manager, table) == [1, 4], "needed ones come first; a border where the chunk begins is not its own"
    manager, table = table_of(pool, 5)
    give_chunk_slots(table.blocks, tokens, ((1, 2), (1, 4)), pool, manager, available=3)
    assert whole(manager, table) == [1, 3, 4]


def test_a_chunk_without_its_states_is_not_computed() -> None:
    pool = settings(states=True)
    manager, table = table_of(pool, 5)
    assert give_chunk_slots(table.blocks, range(BT, 5 * BT), ((2,), ()), pool, manager, available=1) == BT
    assert whole(manager, table) == []


@pytest.mark.parametrize(
    ("start", "goal", "budget", "size", "end"),
    [(0, 10, 10, BT, 10), (0, 10, 9, BT, 8), (3, 10, 2, BT, 4), (1, 10, 2, BT, 0), (1, 10, 2, 1, 3), (5, 5, 9, 1, 5)],
)
def test_a_chunk_within_the_budget(start: int, goal: int, budget: int, size: int, end: int) -> None:
    assert chunk_end(start, goal, budget, size) == end
