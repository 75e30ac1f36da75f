"""The ranks of a stage: processes that each compute some heads, and some inner states, of the same layers.

All ranks have the stage's hidden states. A sum adds what each rank has, so that all ranks have the same bits. What
depends on time the first rank decides, and tells the others by a page of memory (`moonpool.engine.parallel.page`).

On a plain CPU sums go by the page, too. On devices they are `torch.distributed`'s, and in graphs they are NCCL's
(`GroupRanks`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.engine.parallel.page import SLOT_FLOATS, RankPage


class Ranks:
    """One rank among a stage's. Sums are in float32, in the order of the ranks.

    Args:
        page: the stage's page, as this rank sees the page.
    """

    captured = False
    """Whether graphs may have sums in them."""

    def __init__(self, page: RankPage) -> None:
        self.rank, self.ranks, self.first = page.rank, page.ranks, page.rank == 0
        self._page, self._slots = page, torch.from_numpy(page.slots)
        self.meet, self.tell, self.hear, self.stored = page.meet, page.tell, page.hear, page.stored

    def all_say(self, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return bool(self._give(torch.tensor([float(yes)]))[:, 0].all())

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which have this shape, in the parts' type; `part` may be overwritten."""
        flat, total = part.reshape(-1), torch.empty(part.numel(), dtype=torch.float32)
        for begin in range(0, len(flat), SLOT_FLOATS):
            piece = flat[begin : begin + SLOT_FLOATS]
            slots = self._give(piece)
            into = total[begin : begin + len(piece)]
            torch.add(slots[0, : len(piece)], slots[1, : len(piece)], out=into)
            for other in range(2, self.ranks):
                into += slots[other, : len(piece)]
        return total.view(part.shape).to(part.dtype)

    def share(self, rows: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the first rank's rows, of this shape and type; other ranks give None."""
        count, found = torch.Size(shape).numel(), torch.empty(shape, dtype=dtype)
        flat = found.view(-1)
        for begin in range(0, count, SLOT_FLOATS):
            end = min(count, begin + SLOT_FLOATS)
            slots = self._give(None if rows is None else rows.reshape(-1)[begin:end])
            flat[begin:end] = slots[0, : end - begin]
        return found

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Return all ranks' columns side by side, float32 [rows, sum of widths]; on other ranks than the first, none.

        Args:
            part: this rank's columns [rows, width].
            widths: of each rank's columns.
        """
        found = torch.empty(len(part), sum(widths) if self.first else 0)
        rows = max(1, SLOT_FLOATS // max(widths))
        for begin in range(0, len(part), rows):
            piece = part[begin : begin + rows]
            slots, at = self._give(piece), 0
            for other, width in enumerate(widths if self.first else ()):
                columns = slots[other, : len(piece) * width].view(len(piece), width)
                found[begin : begin + rows, at : at + width] = columns
                at += width
        return found

    def _give(self, piece: Tensor | None) -> Tensor:
        """Give numbers to the others, and return what all give, [ranks, SLOT_FLOATS], until the meeting after next."""
        slots = self._slots[self._page.turn % 2]
        if piece is not None:
            slots[self.rank, : piece.numel()].view(piece.shape).copy_(piece)
        self._page.meet()
        return slots
