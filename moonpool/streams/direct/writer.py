"""Puts whole blocks over a direct lane, from where they lie."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from moonpool.errors import FrameError, StreamBroken
from moonpool.kv.frames import MAX_FRAME_SLICES
from moonpool.kv.keys import pack_keys
from moonpool.kv.layout import KVLayout
from moonpool.kv.shapes import bound, frame_shape
from moonpool.streams.direct.lane import DirectLane
from moonpool.streams.lanes.brief import (
    ABOUT_BYTES,
    BRIEF_BYTES,
    HASH_BYTES,
    OTHERWISE,
    PUT,
    STORED,
    Place,
    hashes_behind,
)
from moonpool.streams.lanes.regions import SharedMemory
from moonpool.streams.store_writer import PutBlocks, PutOutcome
from moonpool.v1 import kvstore_pb2

MAX_BLOCKS = 128
"""In one exchange; a store takes more in a session only."""
SEND_BYTES = 512 << 10
"""Of slices that follow a message so many are sent at once, about; then the next are hashed."""


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
        about = _about(blocks.tenant, tuple(blocks.forgotten))
        if len(about) > ABOUT_BYTES:
            return None
        if not self.lane.begin(timeout_s):
            return None
        try:
            with self.lane:
                return self._answer(self._ask(blocks, about), len(blocks.keys))
        except FrameError as error:
            raise StreamBroken(f"the store's answer is not proper: {error}") from error

    def _ask(self, blocks: PutBlocks, about: bytes) -> int:
        """Sends blocks; returns the number of the answer."""
        layout, keys, count = self._layout, blocks.keys, len(blocks.keys)
        shape = frame_shape(range(layout.layers), count, range(layout.kv_heads), layout.block_tokens)
        bindings, packed = shape.bindings(keys), pack_keys((*keys, *blocks.parents))
        if self._staging is None:
            slices = itertools.starmap(blocks.read, shape.cells)
            follow = len(bindings) * (layout.slice_bytes + HASH_BYTES)
            return self.lane.ask(
                PUT, count, packed, rest=about, payload=_hashed_meanwhile(slices, bindings), follow=follow
            )
        found = list(itertools.starmap(blocks.read, shape.cells))
        hashes = bound([value for _, value in found], bindings)
        return self.lane.ask(
            PUT, count, packed, hashes, self._placed(self._staging, [data for data, _ in found]), about
        )

    def _answer(self, number: int, blocks: int) -> PutOutcome | None:
        message, follow = self.lane.answer(number)
        if message.kind == OTHERWISE:
            return None
        present = len(message.numbers)
        if message.kind != STORED or follow or present > blocks:
            raise FrameError(f"a put is answered by a message of kind {message.kind}")
        return PutOutcome(present, blocks - present)

    def _placed(self, staging: memoryview, pieces: Sequence[memoryview]) -> list[Place]:
        """Where the store finds the pieces; those that lie in no region are copied to one."""
        at = 0
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
        return places


def _hashed_meanwhile(
    slices: Iterable[tuple[memoryview, int]], bindings: Sequence[int]
) -> Iterator[Sequence[memoryview]]:
    """Slices, some at a time, each hashed when those before are on their way; their bound hashes come last."""
    hashes: list[int] = []
    some: list[memoryview] = []
    nbytes = 0
    for data, value in slices:
        hashes.append(value)
        some.append(data)
        nbytes += data.nbytes
        if nbytes >= SEND_BYTES:
            yield some
            some, nbytes = [], 0
    yield [*some, hashes_behind(bound(hashes, bindings))]
