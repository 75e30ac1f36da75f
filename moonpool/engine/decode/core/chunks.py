"""Chunks: tokens of preempted sequences and of prompts that decode computes beside its batch."""

from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.decode.core.actions import Chunk
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.scheduler.chunks import chunk_end
from moonpool.engine.scheduler.windows import give_chunk_slots, pass_windows


def plan_chunks(recomputing: list[DecodeRequest], tokens: int, state: DecodeState) -> tuple[Chunk, ...]:
    """Return chunks with up to `tokens` tokens in all, first request first.

    Blocks that a sequence shares are computed first. The chunks' blocks get window blocks; if these are missing, chunks
    are shorter. If a chunk's KV is held, the chunk is a full hit, even if the pool does not find the block by key.
    """
    found = list[Chunk]()
    for request in recomputing:
        for sequence in request.sequences:
            start, full_hit = sequence.computed, sequence.computed < sequence.shared
            cost = request.spec.token_cost if request.lacks_first_token else 1
            most = tokens // cost or (0 if found else min(tokens, state.settings.block_size))
            count = chunk_end(start, recompute_goal(request, sequence), most) - start
            if count > 0 and may_recompute(request, sequence):
                count = count if full_hit else _give_chunk_window_blocks(state, request, sequence, count)
            if count > 0 and may_recompute(request, sequence):
                tokens = max(0, tokens - count * cost)
                sample = sequence.computed + count == sequence.tokens
                found.append(Chunk(sequence.id, sequence.computed, count, sample, full_hit))
    return tuple(found)


def _give_chunk_window_blocks(state: DecodeState, request: DecodeRequest, sequence: RequestSequence, count: int) -> int:
    """Give window blocks to the blocks of a sequence's next `count` tokens; return how many tokens have them.

    Recurrent states are written behind the chunk and where the request's other sequences begin; also behind the
    sequence's last full block if a window block is left.
    """
    settings, manager, size = state.settings, state.blocks, state.settings.block_size
    begins = [other.shared // size for other in request.sequences]
    borders, available = (begins, (sequence.tokens // size,)), state.budget.window_blocks_available
    tokens = range(sequence.computed, sequence.computed + count)
    return max(0, give_chunk_slots(sequence.table.blocks, tokens, borders, settings, manager, available) - tokens.start)


def may_recompute(request: DecodeRequest, sequence: RequestSequence) -> bool:
    """Return whether the tokens shared with earlier sequences have been computed."""
    before = request.sequences[: request.sequences.index(sequence)]
    return all(other.computed >= min(recompute_goal(request, other), sequence.shared) for other in before)


def recompute_goal(request: DecodeRequest, sequence: RequestSequence) -> int:
    """Return how many tokens a sequence computes before running again.

    A lone sequence then samples the next token, and a group's prompt the first tokens.
    """
    return sequence.tokens - (request.is_group and not request.lacks_first_token)


def is_recomputed(request: DecodeRequest) -> bool:
    """Return whether only the sequences' last tokens lack KV."""
    return all(sequence.computed >= sequence.tokens - 1 for sequence in request.sequences)


def take_computed_chunk(
    request: DecodeRequest, chunk: Chunk, settings: DecodeSettings, manager: BlockManager
) -> RequestSequence:
    """Count a computed chunk and register keys for blocks that are full now; return the chunk's sequence."""
    sequence = request.find(chunk.id)
    assert sequence is not None, "sequences end in the batch only"
    sequence.computed = chunk.start + chunk.count
    blocks = range(chunk.start // settings.block_size, sequence.computed // settings.block_size)
    sequence.table.register(sequence.keys, blocks, manager, request.owner)
    pass_windows(sequence.table, sequence.computed, settings, manager)
    return sequence
