"""Brief messages: a small read or put, whole in one message each way, without a session and without protobuf.

They go over a lane beside its other messages, where the offer has said so (`Lane.brief`). What one of them asks for
is decided by the code that decides for sessions. Where it would take more than one answer (it must be waited for, it is
refused, it does not fit), the answer is `OTHERWISE`: a session is to be opened, as if nothing had been asked.

On a lane a brief message stands behind the same two lengths as others, with `BRIEF` set in the first. All its numbers
are little-endian; its last 8 bytes are xxh3-64 of all before them. Slices come layer after layer, in each block after
block; their hashes are bound to blocks and layers as everywhere on the way to a store.

| kind | keys | numbers | rest |
|---|---|---|---|
| GET | blocks wanted | | |
| PUT | blocks, then their parents | hash of each slice; none: they end the payload | PutOpen: `tenant`, `forgotten` |
| FOUND | | hash of each slice of this part, from slice `first` on | |
| STORED | | indices of blocks that were there before | |
| OTHERWISE | | | |
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from moonpool.errors import FrameError
from moonpool.kv.keys import KEY_BYTES
from moonpool.kv.scattered import Bytes
from moonpool.streams.lanes.sockets import LENGTHS
from moonpool.v1 import kvstore_pb2

BRIEF = 1 << 31
"""In the first length: a brief message."""
BRIEF_BYTES = 4 << 20
"""Payload of one exchange at most; its copies hold the store's event loop for a millisecond or two."""
ABOUT_BYTES = 16 << 10
"""Of what a put says of its blocks, at most: then all of it fits into the buffer that receives messages."""
PART_BYTES = 512 << 10
"""A larger read is answered in parts near this size: the reader takes one while the store copies the next."""

GET, PUT, FOUND, STORED, OTHERWISE = range(1, 6)
"""Kinds."""

_HEAD = struct.Struct("<BxHHHHHIQ")
_EXTENT = struct.Struct("<IIQ")
_SUM = struct.Struct("<Q")
HASH_BYTES = _SUM.size


class Place(NamedTuple):
    """A part of a payload: in a region, or among the bytes that follow the message (region 0)."""

    region: int
    length: int
    offset: int


class Brief(NamedTuple):
    """One message without its payload.

    Attributes:
        kind: what it says.
        number: of the exchange; chosen by who asks.
        blocks: blocks that are wanted, brought, or found.
        keys: concatenated keys.
        numbers: see above.
        extents: where the payload lies; none: all of it follows the message.
        first: number of the first slice of a part.
        pulled: so many payloads that lay in regions have been read since the last message.
        rest: see above.
    """

    kind: int
    number: int
    blocks: int = 0
    keys: bytes = b""
    numbers: Sequence[int] = ()
    extents: Sequence[Place] = ()
    first: int = 0
    pulled: int = 0
    rest: bytes = b""

    def encoded(self, follow: int = 0, place: Place | None = None) -> bytes:
        """As it is sent, with its lengths; so many bytes of payload follow, or all of it lies at a place."""
        kind, number, blocks, keys, numbers, extents, first, pulled, rest = self
        extents, count = extents if place is None else (place,), len(numbers)
        data = _HEAD.pack(kind, len(extents), blocks, len(keys) // KEY_BYTES, count, first, pulled, number) + keys
        if count:
            data += _numbers(count).pack(*numbers)
        for extent in extents:
            data += _EXTENT.pack(*extent)
        data += rest
        return LENGTHS.pack(BRIEF | (len(data) + _SUM.size), follow) + data + _SUM.pack(xxh3_64_intdigest(data))


def decoded(data: bytes) -> Brief:
    """A message as it came, without its lengths.

    Raises:
        FrameError: it is not one, or was damaged on its way.
    """
    end = len(data) - _SUM.size
    if end < _HEAD.size or _SUM.unpack_from(data, end)[0] != xxh3_64_intdigest(data[:end]):
        raise FrameError("a brief message has a wrong checksum")
    kind, extents, blocks, keys, count, first, pulled, number = _HEAD.unpack_from(data)
    keys_end = _HEAD.size + keys * KEY_BYTES
    numbers_end = keys_end + count * _SUM.size
    rest = numbers_end + extents * _EXTENT.size
    if not GET <= kind <= OTHERWISE or rest > end:
        raise FrameError(f"a brief message of kind {kind} has {end} bytes, needs {rest}")
    numbers = _numbers(count).unpack_from(data, keys_end)
    found = tuple(Place(*one) for one in _EXTENT.iter_unpack(data[numbers_end:rest])) if extents else ()
    return Brief(kind, number, blocks, data[_HEAD.size : keys_end], numbers, found, first, pulled, data[rest:end])


def hashes_behind(hashes: Sequence[int]) -> memoryview:
    """Hashes of a put as they follow its payload, so that who sends it hashes while the other side receives."""
    return memoryview(_numbers(len(hashes)).pack(*hashes))


def hashes_of(message: Brief, payload: Bytes, slices: int) -> tuple[Bytes, Sequence[int]]:
    """A put's payload and the hashes of its slices, wherever they came; nothing is known of either yet."""
    end = payload.nbytes - slices * _SUM.size
    if message.numbers or end <= 0 or not isinstance(payload, memoryview):
        return payload, message.numbers
    return payload[:end], _numbers(slices).unpack(payload[end:])


@functools.lru_cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


@functools.lru_cache(16)
def about(rest: bytes) -> kvstore_pb2.PutOpen:
    """What a put says of its blocks; nearly always the same, and not to be changed.

    Raises:
        FrameError: it is no such message.
    """
    try:
        return kvstore_pb2.PutOpen.FromString(rest)
    except DecodeError as error:
        raise FrameError(f"malformed PutOpen: {error}") from error


class Answer(NamedTuple):
    """A brief message on its way out, and its payload where it lies: memory that stays as it is while it is seen."""

    message: Brief
    pieces: Sequence[memoryview]


def found(number: int, blocks: int, pieces: Sequence[memoryview], hashes: Sequence[int]) -> Iterator[Answer]:
    """The answer to a read, in parts: all slices of so many blocks, in order, and their bound hashes."""
    step = max(1, PART_BYTES // pieces[0].nbytes) if pieces else 1
    if len(pieces) <= step:
        yield Answer(Brief(FOUND, number, blocks, b"", hashes), pieces)
        return
    for first in range(0, len(pieces), step):
        message = Brief(FOUND, number, blocks, numbers=hashes[first : first + step], first=first)
        yield Answer(message, pieces[first : first + step])


def otherwise(number: int) -> Answer:
    """The answer to what takes a session."""
    return Answer(Brief(OTHERWISE, number), [])
