"""Copy on write: sequences of a request share part-filled blocks until a sequence writes to the block."""

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.decode.core.actions import SetBlockTable
from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.scheduler.block_table import BlockTable


@frozen
class BlockCopy:
    """A part-filled block's copy, made for one sequence because others refer to the block.

    Attributes:
        index: the block's index in the sequence's table.
        block: the copy.
    """

    request: DecodeRequest
    sequence: RequestSequence
    index: int
    source: int
    block: int


def copy_on_write(
    state: DecodeState, request: DecodeRequest, sequence: RequestSequence, index: int
) -> BlockCopy | None:
    """Give a sequence a separate block in place of a shared block; None if the block is not shared."""
    source = sequence.table.blocks[index]
    if state.blocks.ref_count(source) == 1:
        return None
    [block] = state.blocks.allocate(1)
    state.blocks.give_slots([block])
    _replace_block(state, sequence, index, block)
    return BlockCopy(request, sequence, index, source, block)


def undo_copy_on_write(state: DecodeState, copied: BlockCopy) -> None:
    """Undoe a copy that was not made.

    The source still exists: another sequence in the request refers to the source.
    """
    state.blocks.acquire([copied.source])
    _replace_block(state, copied.sequence, copied.index, copied.source)


def _replace_block(state: DecodeState, sequence: RequestSequence, index: int, block: int) -> None:
    state.blocks.release([sequence.table.blocks[index]])
    sequence.table.blocks[index] = block
    state.act(SetBlockTable(sequence.id, tuple(sequence.table.blocks)))


def count_lacking_blocks(writes: list[tuple[RequestSequence, int]], manager: BlockManager) -> int:
    """Return blocks missing for the last tokens' KV; `writes`: sequences with the index of the block written to."""
    count, shared = 0, set[int]()
    for sequence, index in writes:
        if index == len(sequence.table.blocks):
            count += 1
        elif manager.ref_count(sequence.table.blocks[index]) > 1:
            count += sequence.table.blocks[index] in shared
            shared.add(sequence.table.blocks[index])
    return count


def fork_sequences(request: DecodeRequest, manager: BlockManager) -> None:
    """Fork a request's one sequence into `width` sequences that refer to the same blocks."""
    [first] = request.sequences
    for number in range(first.id + 1, first.id + request.spec.width):
        manager.acquire(first.table.blocks, first.table.past)
        copy = RequestSequence(
            number,
            list(first.keys),
            first.tokens,
            BlockTable(list(first.table.blocks), first.table.past),
            stored=list(first.stored),
            borders=list(first.borders),
        )
        request.sequences.append(copy)


def check_block_writes(batch: RunningBatch, state: DecodeState, copies: list[BlockCopy]) -> None:
    """Assert that each sequence writes to an unshared block, and that copied blocks stay allocated."""
    for request in batch.requests:
        for sequence in request.sequences:
            written = state.settings.blocks_for(batch.tokens_of(sequence))
            assert len(sequence.table.blocks) >= written
            assert state.blocks.ref_count(sequence.table.blocks[written - 1]) == 1, "two sequences write to one block"
    sources, blocks = [copied.source for copied in copies], [copied.block for copied in copies]
    assert len(set(blocks)) == len(blocks), "two copies to one block"
    assert not set(blocks) & set(sources), "a copy of a copy"
    assert all(map(state.blocks.ref_count, [*sources, *blocks])), "a copy from or to a free block"
