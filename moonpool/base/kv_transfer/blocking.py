"""Reads and puts whole blocks on the caller's thread, straight from and to the caller's memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from moonpool.base.errors import FrameError, MoonpoolError, StreamBroken, TransferFailed
from moonpool.base.kv.frames import MAX_FRAME_SLICES, MAX_SHAPES, FrameShape, bind_all, frame_shape
from moonpool.base.kv.iovec import new_bytes
from moonpool.base.kv.keys import pack_keys, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.native_copy import copy_verified
from moonpool.base.kv_transfer.store_writer import BlocksToPut, PutOutcome
from moonpool.base.transport.blocking import BlockingConnection
from moonpool.base.transport.framing import (
    FOUND,
    GET,
    HASH_BYTES,
    ONE_SHOT_BYTES,
    OTHERWISE,
    PUT,
    PUT_OPEN_BYTES,
    STORED,
    OneShotMessage,
    PayloadExtent,
    trailing_hashes,
)
from moonpool.base.transport.regions import SharedMemory
from moonpool.v1 import kvstore_pb2

Into = Callable[[int, int], memoryview | None]
OnSlice = Callable[[int, int, memoryview, int], None]
MAX_PUT_BLOCKS = 128
"""Most blocks in one exchange; a store takes more blocks over a channel only."""
SEND_BYTES = 512 << 10
"""Bytes of slices that are sent together, about, while the next slices are hashed."""


class _DamagedSliceError(MoonpoolError):
    """A slice does not match the expected hash."""


class BlockingReader:
    """Whole blocks with one layout from one store.

    Attributes:
        connection: this side's end of a direct connection.
        most: most blocks in one exchange; 0: a block is too large.
    """

    def __init__(self, connection: BlockingConnection, layout: KVLayout) -> None:
        self.connection = connection
        self._layout = layout
        self._shapes: dict[int, FrameShape] = {}
        self._copy = copy_verified.prepare().land
        self.most = min(MAX_FRAME_SLICES // layout.layers, ONE_SHOT_BYTES // layout.block_bytes)

    def read(self, keys: Sequence[bytes], *, into: Into, on_slice: OnSlice, timeout_s: float) -> int | None:
        """Read the leading blocks of `keys`, at most `most`; return the number that the store has.

        Returns None if the read needs a channel, where the store says why: blocks are not in memory, or damaged. A read
        also needs a channel if another thread uses the connection, or the connection has ended or ends now. Arguments
        as for `BlockReader.read`. Slices are handed out in order when all have arrived.

        Raises:
            TransferFailed: the read took longer than `timeout_s`.
        """
        if not self.connection.begin(timeout_s):
            return None
        try:
            with self.connection:
                return self._read(keys, into, on_slice)
        except TransferFailed:
            raise
        except MoonpoolError:
            return None

    def _read(self, keys: Sequence[bytes], into: Into, on_slice: OnSlice) -> int | None:
        connection = self.connection
        number = connection.ask(GET, len(keys), pack_keys(keys))
        shape = self._shape(len(keys))
        targets, bindings = self._targets(shape, into), shape.bindings(keys)
        message, follow = connection.answer(number)
        if message.kind == OTHERWISE:
            return None
        if message.blocks != len(keys):
            if message.blocks > len(keys):
                raise FrameError(f"{message.blocks} blocks of {len(keys)} are brought")
            shape = self._shape(message.blocks)
            targets, bindings = self._targets(shape, into), shape.bindings(keys[: message.blocks])
        hashes = self._land(message, follow, targets, bindings, 0)
        while len(hashes) < len(targets):
            message, follow = connection.answer(number)
            hashes += self._land(message, follow, targets, bindings, len(hashes))
        for cell, target, value in zip(shape.cells, targets, hashes, strict=True):
            on_slice(*cell, target, value)
        return message.blocks

    def _shape(self, blocks: int) -> FrameShape:
        found = self._shapes.get(blocks)
        if found is None:
            layout = self._layout
            found = frame_shape(range(layout.layers), blocks, range(layout.head_shares), layout.block_size)
            self._shapes = {**self._shapes, blocks: found} if len(self._shapes) < MAX_SHAPES else {blocks: found}
        return found

    def _targets(self, shape: FrameShape, into: Into) -> list[memoryview]:
        """Memory for the slices: that of `into`, or new memory."""
        return [
            new_bytes(self._layout.slice_bytes(layer)) if (target := into(layer, block)) is None else target
            for layer, block in shape.cells
        ]

    def _land(
        self, message: OneShotMessage, follow: int, all_targets: list[memoryview], bindings: Sequence[int], first: int
    ) -> list[int]:
        """Take one part of the answer, from slice `first` on; return the slices' hashes."""
        end = first + len(message.numbers)
        targets = all_targets[first:end]
        nbytes = sum([target.nbytes for target in targets])
        is_some = len(targets) == end - first and bool(targets) == bool(all_targets)
        if message.kind != FOUND or message.first != first or not is_some:
            raise FrameError(f"a part of {len(message.numbers)} slices from {message.first} is not the next one")
        hashes = bind_all(message.numbers, bindings[first:end])
        if message.extents:
            data = self.connection.shown(message)
            if data.nbytes != nbytes or follow:
                raise FrameError(f"{data.nbytes} bytes are shown for {nbytes}")
            intact = self._copy(targets, data, hashes)
            self.connection.pulled()
        else:
            if follow != nbytes:
                raise FrameError(f"{follow} bytes follow for {nbytes}")
            intact = self._filled(targets, hashes)
        if intact < len(targets):
            raise _DamagedSliceError("a slice has another hash")
        return hashes

    def _filled(self, targets: Sequence[memoryview], hashes: Sequence[int]) -> int:
        intact = 0
        for target, value in zip(targets, hashes, strict=True):
            self.connection.fill(target)
            intact += slice_hash(target) == value
        return intact


@functools.lru_cache(16)
def _encode_put_open(tenant: str, forgotten: tuple[str, ...]) -> bytes:
    """The tenant and deletions of a put, encoded; nearly always the same."""
    return kvstore_pb2.PutOpen(tenant=tenant, forgotten=forgotten).SerializeToString()


class BlockingWriter:
    """Whole blocks with one layout to one store.

    Attributes:
        connection: this side's end of a direct connection.
        most: most blocks in one exchange; 0: a block is too large.
    """

    def __init__(self, connection: BlockingConnection, layout: KVLayout, staging: SharedMemory | None) -> None:
        """`staging`: `ONE_SHOT_BYTES` in a region of the connection, for slices in no region; None: no regions."""
        self.connection = connection
        self._layout = layout
        self._staging = None if staging is None else staging.shared.data
        self.most = min(MAX_PUT_BLOCKS, MAX_FRAME_SLICES // layout.layers, ONE_SHOT_BYTES // layout.block_bytes)

    def put(self, blocks: BlocksToPut, timeout_s: float) -> PutOutcome | None:
        """Store blocks, at most `most`; return when all are VISIBLE.

        Returns None, without storing a block, if the put needs a channel. There the store gives the reason: no room, a
        refusal, or too many deletions to name. A put also needs a channel if another thread uses the connection, or the
        connection has ended.

        Raises:
            TransferFailed: the put took longer than `timeout_s`; blocks may be stored all the same.
            StreamBroken: the connection ended meanwhile; blocks may be stored all the same.
        """
        about = _encode_put_open(blocks.tenant, tuple(blocks.forgotten))
        if len(about) > PUT_OPEN_BYTES:
            return None
        if not self.connection.begin(timeout_s):
            return None
        try:
            with self.connection:
                return self._answer(self._ask(blocks, about), len(blocks.keys))
        except FrameError as error:
            raise StreamBroken(f"the store's answer is not proper: {error}") from error

    def _ask(self, blocks: BlocksToPut, about: bytes) -> int:
        """Send blocks; return the number of the answer."""
        layout, keys, count = self._layout, blocks.keys, len(blocks.keys)
        shape = frame_shape(range(layout.layers), count, range(layout.head_shares), layout.block_size)
        bindings, packed = shape.bindings(keys), pack_keys((*keys, *blocks.parents))
        if self._staging is None:
            slices = itertools.starmap(blocks.read, shape.cells)
            follow = count * layout.block_bytes + len(bindings) * HASH_BYTES
            return self.connection.ask(
                PUT, count, packed, rest=about, payload=_hashed_meanwhile(slices, bindings), follow=follow
            )
        found = list(itertools.starmap(blocks.read, shape.cells))
        hashes = bind_all([value for _, value in found], bindings)
        return self.connection.ask(
            PUT, count, packed, hashes, self._placed(self._staging, [data for data, _ in found]), about
        )

    def _answer(self, number: int, blocks: int) -> PutOutcome | None:
        message, follow = self.connection.answer(number)
        if message.kind == OTHERWISE:
            return None
        present = len(message.numbers)
        if message.kind != STORED or follow or present > blocks:
            raise FrameError(f"a put is answered by a message of kind {message.kind}")
        return PutOutcome(present, blocks - present)

    def _placed(self, staging: memoryview, pieces: Sequence[memoryview]) -> list[PayloadExtent]:
        """Places of the pieces in regions. Pieces in no region are copied to `staging`."""
        at = 0
        places: list[PayloadExtent] = []
        for piece in pieces:
            nbytes = piece.nbytes
            region, offset = self.connection.own.find(piece)
            if not region:
                room = staging[at : at + nbytes]
                room[:] = piece
                at += nbytes
                region, offset = self.connection.own.find(room)
            last = places[-1] if places else None
            if last is not None and last.region == region and last.offset + last.length == offset:
                places[-1] = PayloadExtent(region, last.length + nbytes, last.offset)
            else:
                places.append(PayloadExtent(region, nbytes, offset))
        return places


def _hashed_meanwhile(
    slices: Iterable[tuple[memoryview, int]], bindings: Sequence[int]
) -> Iterator[Sequence[memoryview]]:
    """Slices in portions, hashed while the portion before is on the way; the bound hashes come last."""
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
    yield [*some, trailing_hashes(bind_all(hashes, bindings))]
