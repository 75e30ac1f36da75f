"""Restoring a request's block tables after preemption: what is cached, what is missing, what sequences share."""

from collections.abc import Collection

from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.decode.core.chunks import is_recomputed
from moonpool.engine.decode.core.request import BlockSharing, DecodeRequest, RequestSequence, RequestStatus
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.scheduler.windows import pass_windows


def block_sharing_of(request: DecodeRequest, settings: DecodeSettings) -> BlockSharing:
    """Return how a request shares the blocks of its tokens that have KV, without blocks for further tokens."""
    numbers: dict[int, int] = {}
    tables = []
    for sequence in request.sequences:
        written = sequence.table.blocks[: settings.blocks_for(sequence.tokens - 1)]
        tables.append(tuple(numbers.setdefault(block, len(numbers)) for block in written))
    return BlockSharing(len(numbers), tuple(tables))


def block_sharing_behind_prompt(request: DecodeRequest, settings: DecodeSettings) -> BlockSharing:
    """Return how sequences share blocks if known tokens have no KV yet: they share the prompt's full blocks only."""
    shared = count = request.spec.prompt_tokens // settings.block_size
    tables = []
    for sequence in request.sequences:
        own = settings.blocks_for(sequence.tokens - 1) - shared
        tables.append((*range(shared), *range(count, count + own)))
        count += own
    return BlockSharing(count, tuple(tables))


def find_cached_blocks(request: DecodeRequest, manager: BlockManager) -> dict[int, int]:
    """Return a request's blocks that the pool still has, by index in the request's `BlockSharing`. Not acquired.

    A group's sequences may continue behind any block that they share: all must be whole.
    """
    found: dict[int, int] = {}
    if request.lacks_first_token and not request.asked.reuse:
        return found
    match = manager.match if len(request.sequences) == 1 else manager.match_whole
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        for number, block in zip(table, match(sequence.keys), strict=False):
            found.setdefault(number, block)
        if request.preemption.swapped_blocks:
            break  # swapped blocks are copied from one index on
    return found


def rebuild_tables(
    request: DecodeRequest, held: dict[int, int], settings: DecodeSettings, manager: BlockManager
) -> list[int]:
    """Give a request's sequences their tables again; cannot fail if the blocks are available.

    Args:
        request: preempted, without blocks.
        held: cached blocks, from `find_cached_blocks`.
        settings: the instance's settings.
        manager: the pool's block manager.

    Returns:
        The `BlockSharing`'s blocks, in order.
    """
    sharing = request.preemption.blocks
    leading = count_leading_blocks(request, held)
    for sequence, table in zip(request.sequences, sharing.tables, strict=True):
        if len(sharing.tables) == 1:  # a group may continue behind any block that is held
            sequence.table.past = settings.first_windowed_block(leading * settings.block_size)
        manager.acquire([held[number] for number in table if number in held], sequence.table.past)
    missing = [number for number in range(sharing.blocks) if number not in held]
    block_of = held | dict(zip(missing, manager.allocate(len(missing)), strict=True))
    fresh = set(missing)
    for sequence, table in zip(request.sequences, sharing.tables, strict=True):
        manager.acquire([block_of[number] for number in table if number not in held and number not in fresh])
        fresh.difference_update(table)
        sequence.table.blocks = [block_of[number] for number in table]
        sequence.table.blocks += manager.allocate(growth_blocks(sequence, table, settings))
    return [block_of[number] for number in range(sharing.blocks)]


def growth_blocks(sequence: RequestSequence, table: tuple[int, ...], settings: DecodeSettings) -> int:
    """Return blocks that a sequence needs for the last token, which has no KV yet."""
    return settings.blocks_for(sequence.tokens) - len(table)


def blocks_to_resume(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Return blocks that a preempted request is restored with."""
    sharing = request.preemption.blocks
    sequences = zip(request.sequences, sharing.tables, strict=True)
    return sharing.blocks + sum(growth_blocks(sequence, table, settings) for sequence, table in sequences)


def window_blocks_to_resume(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Return window blocks that a preempted request is restored with, at most."""
    if not settings.window_blocks:
        return 0
    numbers, growth = set[int](), 0
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        numbers.update(table[settings.first_windowed_block(sequence.tokens - 1) :])
        growth += growth_blocks(sequence, table, settings)
    return len(numbers) + growth


def count_leading_blocks(request: DecodeRequest, held: Collection[int]) -> int:
    """Return the first sequence's leading blocks that are held."""
    table = request.preemption.blocks.tables[0]
    return next((number for number in table if number not in held), len(table))


def resume_with_blocks(
    request: DecodeRequest, held: Collection[int], settings: DecodeSettings, manager: BlockManager
) -> None:
    """Restore a request that holds some blocks: WAITING if no KV is missing, else RECOMPUTING."""
    _skip_held(request, held, settings)
    for sequence in request.sequences:
        pass_windows(sequence.table, sequence.computed, settings, manager)
    waits = is_recomputed(request) and not request.lacks_first_token  # first tokens are sampled with a chunk
    request.set_status(RequestStatus.WAITING if waits else RequestStatus.RECOMPUTING)


def _skip_held(request: DecodeRequest, held: Collection[int], settings: DecodeSettings) -> None:
    """Each sequence begins to compute behind held blocks, and behind blocks that earlier sequences compute."""
    done = set(held)
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        blocks = next((index for index, number in enumerate(table) if number not in done), len(table))
        sequence.computed = settings.reused_tokens(sequence.tokens, blocks)
        sequence.shared = sequence.computed
        done.update(table)


def begin_prompt_here(request: DecodeRequest, held: int, settings: DecodeSettings, manager: BlockManager) -> None:
    """Let a request compute the prompt behind the first `held` blocks, as after preemption.

    If the request holds the whole prompt in full blocks, which may not be written again, the request computes the last
    token as a chunk.
    """
    [sequence] = request.sequences
    # A full last block gets a key on being computed, as an answer's block does.
    del sequence.keys[(sequence.tokens - 1) // settings.block_size :]
    most = min(held, len(sequence.keys))
    there = [most if blocks is None else min(blocks, most) for blocks in request.store_beliefs]
    sequence.stored, sequence.borders = there, list(there)
    request.prompt_here, request.preemption.sharing = True, block_sharing_of(request, settings)
    if held * settings.block_size >= sequence.tokens:
        _skip_held(request, range(held), settings)
        sequence.shared = sequence.tokens
        request.set_status(RequestStatus.RECOMPUTING)
    else:
        resume_with_blocks(request, range(held), settings, manager)


def tokens_to_recompute(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Return tokens computed again if no block of a preempted request is cached."""
    tokens, seen, size = 0, set[int](), settings.block_size
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        tokens += sequence.tokens - min(sequence.tokens, size * sum(number in seen for number in table))
        seen.update(table)
    return tokens
