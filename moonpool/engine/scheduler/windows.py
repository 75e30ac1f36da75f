"""Layers with a window: which blocks a sequence still reads there, and which blocks get window blocks.

A window block has the slices of these layers, other blocks lack them (ADR 65).
"""

from collections.abc import Collection

from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.settings import PoolSettings


def pass_windows(
    table: BlockTable, tokens: int, settings: PoolSettings, manager: BlockManager, borders: Collection[int] = ()
) -> None:
    """Note that a sequence reads no windowed slices before the window of the token behind `tokens` tokens.

    `borders`: counts of leading blocks behind which others may continue the sequence; the slices that this takes are
    kept as those of cached blocks.
    """
    first = min(settings.first_windowed_block(tokens), len(table.blocks))
    if first <= table.past:
        return
    window = settings.window_blocks
    at = {index for border in borders for index in range(max(0, border - window), border)}
    kept = [table.blocks[index] for index in range(table.past, first) if index in at]
    manager.pass_windows(table.blocks[table.past : first], kept)
    table.past = first


def give_chunk_slots(
    blocks: list[int],
    tokens: range,
    borders: tuple[Collection[int], Collection[int]],
    settings: PoolSettings,
    manager: BlockManager,
    available: int,
) -> int:
    """Give window blocks to a chunk's blocks; return the token before which all blocks have what they need.

    Layers with a window write KV in each block. Recurrent states are written behind the chunk, and where the sequence
    may be continued.

    Args:
        blocks: the sequence's blocks.
        tokens: the chunk's tokens.
        borders: counts of leading blocks behind which states must be written, and those behind which states are written
            if window blocks are left.
        settings: the instance's settings.
        manager: the pool's block manager.
        available: window blocks that may be taken.

    Returns:
        The chunk's end; earlier if window blocks are missing; the chunk's start, or less, if no token can be computed.
    """
    if not settings.window_blocks:
        return tokens.stop
    end, begun, full = tokens.stop, tokens.start // settings.block_size, tokens.stop // settings.block_size
    needed, further = set(range(begun, settings.blocks_for(end))), set[int]()
    if settings.states_alone:
        must, may = ({border - 1 for border in found if begun < border <= full} for found in borders)
        needed, further = {max(needed), *must}, may
    lacking = [index for index in sorted(needed) if manager.is_partial(blocks[index])]
    short = len(lacking) - max(0, available)
    if short > 0:
        if settings.states_alone:
            return tokens.start
        end = lacking[-short] * settings.block_size
        del lacking[-short:]
    manager.give_slots(blocks[index] for index in lacking)
    left = max(0, available - len(lacking))
    more = [block for index in sorted(further) if manager.is_partial(block := blocks[index])]
    manager.give_slots(more[:left])
    return end
