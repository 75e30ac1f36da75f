"""Reads whole blocks over a direct lane, straight to where the caller wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.errors import FrameError, MoonpoolError, TransferFailed
from moonpool.kv.frames import MAX_FRAME_SLICES
from moonpool.kv.hashes import slice_hash
from moonpool.kv.keys import pack_keys
from moonpool.kv.landing import land
from moonpool.kv.layout import KVLayout
from moonpool.kv.scattered import new_bytes
from moonpool.kv.shapes import MAX_SHAPES, FrameShape, bound, frame_shape
from moonpool.streams.direct.lane import DirectLane
from moonpool.streams.lanes.brief import BRIEF_BYTES, FOUND, GET, OTHERWISE, Brief

Into = Callable[[int, int], memoryview | None]
OnSlice = Callable[[int, int, memoryview, int], None]


class _DamagedError(MoonpoolError):
    """A slice has not the hash that it should have."""


class DirectReader:
    """Whole blocks of one layout from one store.

    Attributes:
        lane: whose end is this one's.
        most: blocks that are read in one exchange; 0 where not even one can be.
    """

    def __init__(self, lane: DirectLane, layout: KVLayout) -> None:
        self.lane = lane
        self._layout = layout
        self._shapes: dict[int, FrameShape] = {}
        self._copy = land.prepare().land
        self.most = min(MAX_FRAME_SLICES // layout.layers, BRIEF_BYTES // layout.block_bytes)

    def read(self, keys: Sequence[bytes], *, into: Into, on_slice: OnSlice, timeout_s: float) -> int | None:
        """Reads the leading blocks of `keys`, `most` at most; returns how many there are.

        None where it takes a session, which then says why: blocks are not in memory, or damaged; another thread uses
        the lane; it has ended, or ends now. Arguments as for `BlockReader.read`; slices are handed out in order when
        all have come.

        Raises:
            TransferFailed: It took longer than `timeout_s`.
        """
        if not self.lane.begin(timeout_s):
            return None
        try:
            with self.lane:
                return self._read(keys, into, on_slice)
        except TransferFailed:
            raise
        except MoonpoolError:
            return None

    def _read(self, keys: Sequence[bytes], into: Into, on_slice: OnSlice) -> int | None:
        lane = self.lane
        number = lane.ask(GET, len(keys), pack_keys(keys))
        shape = self._shape(len(keys))
        targets, bindings = self._targets(shape, into), shape.bindings(keys)
        message, follow = lane.answer(number)
        if message.kind == OTHERWISE:
            return None
        if message.blocks != len(keys):
            if message.blocks > len(keys):
                raise FrameError(f"{message.blocks} blocks of {len(keys)} are brought")
            shape = self._shape(message.blocks)
            targets, bindings = self._targets(shape, into), shape.bindings(keys[: message.blocks])
        hashes = self._land(message, follow, targets, bindings, 0)
        while len(hashes) < len(targets):
            message, follow = lane.answer(number)
            hashes += self._land(message, follow, targets, bindings, len(hashes))
        for cell, target, value in zip(shape.cells, targets, hashes, strict=True):
            on_slice(*cell, target, value)
        return message.blocks

    def _shape(self, blocks: int) -> FrameShape:
        found = self._shapes.get(blocks)
        if found is None:
            layout = self._layout
            found = frame_shape(range(layout.layers), blocks, range(layout.kv_heads), layout.block_tokens)
            self._shapes = {**self._shapes, blocks: found} if len(self._shapes) < MAX_SHAPES else {blocks: found}
        return found

    def _targets(self, shape: FrameShape, into: Into) -> list[memoryview]:
        """Where slices go: memory of their own where there is not room for them."""
        targets = [into(*cell) for cell in shape.cells]
        return [new_bytes(self._layout.slice_bytes) if target is None else target for target in targets]

    def _land(
        self, message: Brief, follow: int, all_targets: list[memoryview], bindings: Sequence[int], first: int
    ) -> list[int]:
        """Takes one part, from slice `first` on; returns its slices' own hashes."""
        end = first + len(message.numbers)
        targets = all_targets[first:end]
        nbytes = len(targets) * self._layout.slice_bytes
        is_some = len(targets) == end - first and bool(targets) == bool(all_targets)
        if message.kind != FOUND or message.first != first or not is_some:
            raise FrameError(f"a part of {len(message.numbers)} slices from {message.first} is not the next one")
        hashes = bound(message.numbers, bindings[first:end])
        if message.extents:
            data = self.lane.shown(message)
            if data.nbytes != nbytes or follow:
                raise FrameError(f"{data.nbytes} bytes are shown for {nbytes}")
            intact = self._copy(targets, data, hashes)
            self.lane.pulled()
        else:
            if follow != nbytes:
                raise FrameError(f"{follow} bytes follow for {nbytes}")
            intact = self._filled(targets, hashes)
        if intact < len(targets):
            raise _DamagedError("a slice has another hash")
        return hashes

    def _filled(self, targets: Sequence[memoryview], hashes: Sequence[int]) -> int:
        intact = 0
        for target, value in zip(targets, hashes, strict=True):
            self.lane.fill(target)
            intact += slice_hash(target) == value
        return intact
