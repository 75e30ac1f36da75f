"""Puts whole blocks over a direct lane, from where they lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.errors import FrameError, StreamBroken
from moonpool.kv.frames import MAX_FRAME_SLICES
from moonpool.kv.keys import pack_keys
from moonpool.kv.layout import KVLayout
from moonpool.kv.shapes import bound, frame_shape
from moonpool.streams.direct.lane import DirectLane
from moonpool.streams.lanes.brief import ABOUT_BYTES, BRIEF_BYTES, OTHERWISE, PUT, STORED, Place
from moonpool.streams.lanes.regions import SharedMemory
from moonpool.streams.store_writer import PutBlocks, PutOutcome
from moonpool.v1 import kvstore_pb2

MAX_BLOCKS = 128
"""In one put; a store takes more in a session only."""
PART_BYTES = 512 << 10
"""More goes in messages near this size: the store takes one while the next is hashed and sent."""


class Brought(NamedTuple):
    """What became of a put: of those blocks that are settled, and the indices of those left, which take a session."""

    settled: PutOutcome
    left: Sequence[int]


@functools.lru_cache(16)
def _about(tenant: str, forgotten: tuple[str, ...]) -> bytes:
    """What a put says of its blocks; nearly always the same."""
    return kvstore_pb2.PutOpen(tenant=tenant, forgotten=forgotten).SerializeToString()


class DirectWriter:
    """Whole blocks of one layout to one store.

    Attributes:
        lane: whose end is this one's.
        most: blocks that are put at once; 0 where not even one can be.
    """

    def __init__(self, lane: DirectLane, layout: KVLayout, staging: SharedMemory | None) -> None:
        """`staging`: `BRIEF_BYTES` among the lane's regions for what lies in none; None where there are no regions."""
        self.lane = lane
        self._layout = layout
        self._staging = None if staging is None else staging.shared.data
        self._staged = 0  # bytes of this put that lie there
        self._at_once = max(1, PART_BYTES // layout.block_bytes)
        self.most = min(MAX_BLOCKS, MAX_FRAME_SLICES // layout.layers, BRIEF_BYTES // layout.block_bytes)

    def put(self, blocks: PutBlocks, timeout_s: float) -> Brought:
        """Stores blocks, `most` at most; returns once they are VISIBLE, but for those that take a session.

        These are all of them where another thread uses the lane, it has ended, or more deletions are named than fit.

        Raises:
            TransferFailed: It took longer than `timeout_s`; blocks may be stored all the same.
            StreamBroken: The lane has ended meanwhile; the same.
        """
        about, count, step = _about(blocks.tenant, tuple(blocks.forgotten)), len(blocks.keys), self._at_once
        if len(about) > ABOUT_BYTES or not self.lane.begin(timeout_s):
            return Brought(PutOutcome(0, 0), range(count))
        self._staged = 0
        try:
            with self.lane:
                parts = [range(at, min(at + step, count)) for at in range(0, count, step)]
                return self._answers([(self._ask(blocks, part, about), part) for part in parts])
        except FrameError as error:
            raise StreamBroken(f"the store's answer is not proper: {error}") from error

    def _ask(self, blocks: PutBlocks, part: range, about: bytes) -> int:
        """Sends some of the blocks; returns the number that the answer will have."""
        layout, some = self._layout, slice(part.start, part.stop)
        shape = frame_shape(range(layout.layers), len(part), range(layout.kv_heads), layout.block_tokens)
        slices = [blocks.read(layer, part[index]) for layer, index in shape.cells]
        keys = blocks.keys[some]
        hashes = bound([value for _, value in slices], shape.bindings(keys))
        places, follow = self._placed([data for data, _ in slices])
        return self.lane.ask(PUT, len(part), pack_keys((*keys, *blocks.parents[some])), hashes, places, about, follow)

    def _answers(self, asked: Sequence[tuple[int, range]]) -> Brought:
        present, stored, left = 0, 0, list[int]()
        for number, part in asked:
            message, follow = self.lane.answer(number)
            if message.kind == OTHERWISE:
                left += part
                continue
            if message.kind != STORED or follow or len(message.numbers) > len(part):
                raise FrameError(f"a put is answered by a message of kind {message.kind}")
            present += len(message.numbers)
            stored += len(part) - len(message.numbers)
        return Brought(PutOutcome(present, stored), left)

    def _placed(self, pieces: Sequence[memoryview]) -> tuple[list[Place], Sequence[memoryview]]:
        """Where the store finds the pieces, and what follows the message: all of it where it shares no memory."""
        staging = self._staging
        if staging is None:
            return [], pieces
        places: list[Place] = []
        for piece in pieces:
            nbytes = piece.nbytes
            region, offset = self.lane.own.find(piece)
            if not region:
                room = staging[self._staged : self._staged + nbytes]
                room[:] = piece
                self._staged += nbytes
                region, offset = self.lane.own.find(room)
            last = places[-1] if places else None
            if last is not None and last.region == region and last.offset + last.length == offset:
                places[-1] = Place(region, last.length + nbytes, last.offset)
            else:
                places.append(Place(region, nbytes, offset))
        return places, ()
