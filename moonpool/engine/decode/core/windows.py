"""Layers with a window: which blocks a sequence still reads there, and the window blocks that sequences need.

A window block has the slices of these layers, other blocks lack them (ADR 65).
"""

from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.decode.core.settings import DecodeSettings


def pass_windows(sequence: RequestSequence, tokens: int, settings: DecodeSettings, manager: BlockManager) -> None:
    """Note that a sequence reads no windowed slices before the window of the token behind `tokens` tokens."""
    first = min(settings.first_windowed_block(tokens), len(sequence.table))
    if first > sequence.past:
        manager.pass_windows(sequence.table[sequence.past : first])
        sequence.past = first


def count_lacking_window_blocks(writes: list[tuple[RequestSequence, int]], manager: BlockManager) -> int:
    """Return window blocks missing for the last tokens' KV, besides those of missing blocks; `writes` as below."""
    if not manager.num_slots:
        return 0
    return sum(index < len(sequence.table) and manager.is_partial(sequence.table[index]) for sequence, index in writes)


def expected_window_blocks(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Return window blocks that a request is expected to need beyond those held and promised."""
    if not settings.window_blocks:
        return 0
    have = sum(len(sequence.table) - sequence.past for sequence in request.sequences) + request.promised_window_blocks
    return max(0, min(request.expected_growth, request.num_seqs * (settings.window_blocks + 1) - have))
