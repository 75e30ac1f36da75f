"""Which slices of a transfer have arrived."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.base.errors import FrameError
from moonpool.base.kv.frames import SliceRun


class SliceBitmap:
    """Exact record over (layer, block, head); each expected part comes once, and no unexpected part is taken.

    Per layer one integer is the set of blocks with all heads arrived; head ranges of unfinished blocks lie apart.
    """

    def __init__(
        self, layers: range, blocks: int, heads: range, held_blocks: int = 0, unsent: Mapping[int, int] | None = None
    ) -> None:
        """Expect `heads` for `blocks` blocks in `layers`.

        Args:
            layers: layers in the model.
            blocks: blocks in the sequence.
            heads: head range, in shares.
            held_blocks: leading blocks that are there already.
            unsent: layer -> leading blocks that the layer does not need and does not get; 0 for layers that are left
                out.
        """
        ranges = all(len(numbers) > 0 and numbers.step == 1 and numbers.start >= 0 for numbers in (layers, heads))
        if not (ranges and 0 <= held_blocks <= blocks):
            raise ValueError(f"impossible bitmap: {layers}, {blocks} blocks, {held_blocks} held, heads {heads}")
        self._layers = layers
        self._blocks = blocks
        self._heads = heads
        self._held = held_blocks
        self._all = (1 << blocks) - 1
        first = {layer: max(held_blocks, (unsent or {}).get(layer, 0)) for layer in layers}
        self._have = {layer: (1 << begin) - 1 for layer, begin in first.items()}
        self._parts: dict[tuple[int, int], int] = {}
        self._missing = sum(blocks - begin for begin in first.values())

    @property
    def blocks(self) -> int:
        return self._blocks

    @property
    def complete(self) -> bool:
        """Everything has come."""
        return self._missing == 0

    def missing(self) -> int:
        """Number of (layer, block) slices with a missing part."""
        return self._missing

    @property
    def leading(self) -> int:
        """Leading blocks whose parts have all come, are held or are not needed."""
        whole = self._all
        for have in self._have.values():
            whole &= have
        return (~whole & whole + 1).bit_length() - 1

    def accept(self, run: SliceRun) -> None:
        """Record a run; if the call raises, the record is unchanged.

        Raises:
            FrameError: A part has come before, is held, or is not expected.
        """
        mask = self._expected(run)
        whole = run.head_end - run.head_begin == len(self._heads)
        if whole and not self._parts:
            self._have[run.layer] |= mask
            self._missing -= run.block_count
            return
        self._accept_heads(run, run.first_block + run.block_count)

    def check(self, run: SliceRun) -> None:
        """As `accept` for a run with all heads, but without recording."""
        self._expected(run)
        if any((run.layer, run.first_block + at) in self._parts for at in range(run.block_count)):
            raise FrameError(f"{run}: a part of it has come before")

    def _expected(self, run: SliceRun) -> int:
        """The run's blocks as a bit mask; raises FrameError unless none of them has come whole."""
        end = run.first_block + run.block_count
        if (
            run.layer not in self._have
            or run.block_count < 1
            or not self._held <= run.first_block < end <= self._blocks
        ):
            raise FrameError(f"{run}: not expected (layers {self._layers}, blocks {self._held} to {self._blocks})")
        if not self._heads.start <= run.head_begin < run.head_end <= self._heads.stop:
            raise FrameError(f"{run}: not expected (heads {self._heads})")
        mask = ((1 << run.block_count) - 1) << run.first_block
        if self._have[run.layer] & mask:
            raise FrameError(f"{run}: has come before")
        return mask

    def layer_complete(self, layer: int) -> bool:
        """All blocks of the layer have come or are held."""
        return self._have[layer] == self._all

    def truncate(self, blocks: int) -> None:
        """Expect only the first `blocks` blocks from now on (not fewer than are held)."""
        if not self._held <= blocks <= self._blocks:
            raise ValueError(f"cannot truncate {self._blocks} blocks to {blocks}, {self._held} are held")
        self._blocks = blocks
        self._all = (1 << blocks) - 1
        self._have = {layer: have & self._all for layer, have in self._have.items()}
        self._parts = {key: heads for key, heads in self._parts.items() if key[1] < blocks}
        self._missing = sum(blocks - have.bit_count() for have in self._have.values())

    def check_invariants(self) -> None:
        """Assert that the counts agree with the record."""
        assert self._missing == sum(self._blocks - have.bit_count() for have in self._have.values())
        assert all(have & ~self._all == 0 for have in self._have.values())
        full = (1 << len(self._heads)) - 1
        for (layer, block), heads in self._parts.items():
            assert 0 < heads < full
            assert not self._have[layer] >> block & 1

    def _accept_heads(self, run: SliceRun, end: int) -> None:
        heads = ((1 << (run.head_end - run.head_begin)) - 1) << run.head_begin - self._heads.start
        cells = [(run.layer, block) for block in range(run.first_block, end)]
        if any(self._parts.get(cell, 0) & heads for cell in cells):
            raise FrameError(f"{run}: has come before")
        for cell in cells:
            now = self._parts.pop(cell, 0) | heads
            if now.bit_count() == len(self._heads):
                self._have[run.layer] |= 1 << cell[1]
                self._missing -= 1
            else:
                self._parts[cell] = now
