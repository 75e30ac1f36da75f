"""What of a prompt has been handed to its transfer, and what waits to be sent: each slice leaves once."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

MERGE_BYTES = 128 << 10
"""Slices of several layers leave in one batch until they make so many bytes: a message costs about 150 us."""


class Span(NamedTuple):
    """Blocks [first, end) of one layer that are whole. `step`: the step that made them, None for a prefix."""

    layer: int
    first: int
    end: int
    step: int | None


@dataclass(slots=True, eq=False)
class Outgoing:
    """One prompt's way to decode. Waiting slices are positions only: the bytes stay in the pool until they are sent."""

    num_blocks: int
    handed: list[int]
    """Per layer one bit for each block handed over; blocks that decode holds count as handed over."""
    pending: deque[Span] = field(default_factory=deque)
    io: int | None = None
    """Opening, sending or waiting for the verdict: one at a time."""
    open: bool = False
    sent_bytes: int = 0

    @classmethod
    def of(cls, layers: int, num_blocks: int, held_blocks: int) -> "Outgoing":
        """For a prompt of which decode holds the leading blocks."""
        return cls(num_blocks, [(1 << held_blocks) - 1] * layers)

    @property
    def whole(self) -> bool:
        """Whether every slice was handed over."""
        return all(handed == (1 << self.num_blocks) - 1 for handed in self.handed)

    def add(self, layer: int, first: int, end: int, step: int | None) -> None:
        """Queues blocks [first, end) of a layer, which must not change any more; those queued before are skipped."""
        todo = _bits(first, end) & ~self.handed[layer]
        self.handed[layer] |= todo
        while todo:
            begin = (todo & -todo).bit_length() - 1
            run = todo >> begin
            length = (~run & run + 1).bit_length() - 1
            self.pending.append(Span(layer, begin, begin + length, step))
            todo = run >> length << begin + length

    def take_back(self, first: int) -> None:
        """Blocks from `first` on will be computed anew: what of them waits is not sent now, but then."""
        kept = deque[Span]()
        for span in self.pending:
            if span.first < first:
                kept.append(Span(span.layer, span.first, min(span.end, first), span.step))
            if span.end > first:
                self.handed[span.layer] &= ~_bits(max(span.first, first), span.end)
        self.pending = kept

    def take(self, slice_bytes: int) -> list[Span]:
        """The next batch to send: one layer's spans, and more layers while they are small."""
        batch, size = [self.pending.popleft()], 0
        while self.pending:
            size += (batch[-1].end - batch[-1].first) * slice_bytes
            if self.pending[0].layer != batch[-1].layer and size >= MERGE_BYTES:
                break
            batch.append(self.pending.popleft())
        return batch


def _bits(first: int, end: int) -> int:
    return (1 << end) - (1 << first) if end > first else 0
