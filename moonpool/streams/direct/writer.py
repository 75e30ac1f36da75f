"""Puts whole blocks over a direct lane, from where they lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
"""In one exchange; a store takes more in a session only."""


@functools.lru_cache(16)
def _about(tenant: str, forgotten: tuple[str, ...]) -> bytes:
    """What a put says of its blocks; nearly always the same."""
    return kvstore_pb2.PutOpen(tenant=tenant, forgotten=forgotten).SerializeToString()


class DirectWriter:
    """Whole blocks of one layout to one store.

    Attributes:
        lane: whose end is this one's.
        most: blocks that are put in one exchange; 0 where not even one can be.
    """

    def __init__(self, lane: DirectLane, layout: KVLayout, staging: SharedMemory | None) -> None:
        """`staging`: `BRIEF_BYTES` among the lane's regions for what lies in none; None where there are no regions."""
        self.lane = lane
        self._layout = layout
        self._staging = None if staging is None else staging.shared.data
        self.most = min(MAX_BLOCKS, MAX_FRAME_SLICES // layout.layers, BRIEF_BYTES // layout.block_bytes)

    def put(self, blocks: PutBlocks, timeout_s: float) -> PutOutcome | None:
        """Stores blocks, `most` at most; returns once all are VISIBLE.

        None, and nothing has happened, where it takes a session, which then says why: no room, or it is refused; more
        deletions are named than fit; another thread uses the lane, or it has ended.

        Raises:
            TransferFailed: It took longer than `timeout_s`; blocks may be stored all the same.
            StreamBroken: The lane has ended meanwhile; the same.
        """
        keys, parents, tenant, read, forgotten = blocks
        about = _about(tenant, tuple(forgotten))
        if len(about) > ABOUT_BYTES:
            return None
        layout = self._layout
        shape = frame_shape(range(layout.layers), len(keys), range(layout.kv_heads), layout.block_tokens)
        slices = [read(layer, index) for layer, index in shape.cells]
        hashes = bound([value for _, value in slices], shape.bindings(keys))
        if not self.lane.begin(timeout_s):
            return None
        try:
            with self.lane:
                places, follow = self._placed([data for data, _ in slices])
                packed = pack_keys((*keys, *parents))
                number = self.lane.ask(PUT, len(keys), packed, hashes, places, about, follow)
                return self._answer(number, len(keys))
        except FrameError as error:
            raise StreamBroken(f"the store's answer is not proper: {error}") from error

    def _answer(self, number: int, blocks: int) -> PutOutcome | None:
        message, follow = self.lane.answer(number)
        if message.kind == OTHERWISE:
            return None
        present = len(message.numbers)
        if message.kind != STORED or follow or present > blocks:
            raise FrameError(f"a put is answered by a message of kind {message.kind}")
        return PutOutcome(present, blocks - present)

    def _placed(self, pieces: Sequence[memoryview]) -> tuple[list[Place], Sequence[memoryview]]:
        """Where the store finds the pieces, and what follows the message: all of it where it shares no memory."""
        staging, at = self._staging, 0
        if staging is None:
            return [], pieces
        places: list[Place] = []
        for piece in pieces:
            nbytes = piece.nbytes
            region, offset = self.lane.own.find(piece)
            if not region:
                room = staging[at : at + nbytes]
                room[:] = piece
                at += nbytes
                region, offset = self.lane.own.find(room)
            last = places[-1] if places else None
            if last is not None and last.region == region and last.offset + last.length == offset:
                places[-1] = Place(region, last.length + nbytes, last.offset)
            else:
                places.append(Place(region, nbytes, offset))
        return places, ()
