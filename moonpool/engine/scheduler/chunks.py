"""Chunks: which tokens of a sequence are computed next."""


def chunk_end(start: int, goal: int, budget: int, block_size: int = 1) -> int:
    """Return the end of the chunk that begins at token `start`.

    Args:
        start: leading tokens that have KV, or are in flight.
        goal: tokens to compute in all.
        budget: most tokens in the chunk.
        block_size: a chunk that does not reach `goal` ends at a block's border, as a full block does not change any
            more and is sent or stored; 1 = anywhere.

    Returns:
        `start`, or less, if no token fits.
    """
    end = min(goal, start + budget)
    return end if end == goal else end - end % block_size
