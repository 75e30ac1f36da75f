"""One prompt's KV on the way to decode: which slices wait, which were sent."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.engine.prefill.core.settings import PrefillSettings

MERGE_BYTES = 128 << 10
"""Slices from several layers are sent in one batch up to this many bytes: a message costs about 150 us."""


class BlockSpan(NamedTuple):
    """Whole blocks [first, end) in one layer. `step`: the step that computed the blocks; None for a prefix."""

    layer: int
    first: int
    end: int
    step: int | None


@dataclass(slots=True, eq=False)
class OutgoingKV:
    """One prompt's KV on the way to decode. Queued slices are positions: the bytes stay in the pool until sent.

    Attributes:
        handed: for each layer a bitmap of the blocks queued or sent; blocks that decode holds or does not need count
            as sent.
        pending: queued spans.
        io: opening, sending or waiting for the verdict: one at a time.
        open: the transfer is open.
    """

    num_blocks: int
    handed: list[int]
    pending: deque[BlockSpan] = field(default_factory=deque)
    io: int | None = None
    open: bool = False
    sent_bytes: int = 0

    @classmethod
    def of(cls, settings: "PrefillSettings", tokens: int, held_blocks: int) -> "OutgoingKV":
        """Prepare a prompt for which decode holds the leading `held_blocks`. Slices behind the window are not sent."""
        windowed = max(held_blocks, tokens // settings.block_size - settings.window_blocks)
        first = [windowed if layer in settings.windowed_layers else held_blocks for layer in range(settings.layers)]
        return cls(settings.blocks_for(tokens), [(1 << begin) - 1 for begin in first])

    @property
    def whole(self) -> bool:
        """Whether every slice was queued or sent."""
        return all(handed == (1 << self.num_blocks) - 1 for handed in self.handed)

    def add(self, layer: int, first: int, end: int, step: int | None) -> None:
        """Queue blocks [first, end) of a layer, which must not change any more; skip blocks queued before."""
        todo = _block_bits(first, end) & ~self.handed[layer]
        self.handed[layer] |= todo
        while (
            todo
        ):  # a span for each run of ones: `begin` is the lowest one, `length` the ones from there to the next zero
            begin = (todo & -todo).bit_length() - 1
            run = todo >> begin
            length = (~run & run + 1).bit_length() - 1
            self.pending.append(BlockSpan(layer, begin, begin + length, step))
            todo = run >> length << begin + length

    def take_back(self, first: int) -> None:
        """Remove blocks from `first` on from the queue: they will be computed again and sent then."""
        kept = deque[BlockSpan]()
        for span in self.pending:
            if span.first < first:
                kept.append(BlockSpan(span.layer, span.first, min(span.end, first), span.step))
            if span.end > first:
                self.handed[span.layer] &= ~_block_bits(max(span.first, first), span.end)
        self.pending = kept

    def take(self, slice_bytes: int) -> list[BlockSpan]:
        """Return the next batch to send: one layer's spans, and further layers' spans up to `MERGE_BYTES`."""
        batch, size = [self.pending.popleft()], 0
        while self.pending:
            size += (batch[-1].end - batch[-1].first) * slice_bytes
            if self.pending[0].layer != batch[-1].layer and size >= MERGE_BYTES:
                break
            batch.append(self.pending.popleft())
        return batch


def _block_bits(first: int, end: int) -> int:
    return (1 << end) - (1 << first) if end > first else 0
