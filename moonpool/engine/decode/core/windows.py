"""Window blocks that sequences of the batch lack, and that requests are expected to need."""

from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.decode.core.settings import DecodeSettings


def count_lacking_window_blocks(writes: list[tuple[RequestSequence, int]], manager: BlockManager) -> int:
    """Return window blocks missing for the last tokens' KV, besides those of missing blocks; `writes` as below."""
    if not manager.num_slots:
        return 0
    return sum(
        index < len(sequence.table.blocks) and manager.is_partial(sequence.table.blocks[index])
        for sequence, index in writes
    )


def expected_window_blocks(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Return window blocks that a request is expected to need beyond those held and promised."""
    if not settings.window_blocks:
        return 0
    have = (
        sum(len(sequence.table.blocks) - sequence.table.past for sequence in request.sequences)
        + request.promised_window_blocks
    )
    return max(0, min(request.expected_growth, request.num_seqs * (settings.window_blocks + 1) - have))
