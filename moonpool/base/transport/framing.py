"""A fast transport's wire format: the length prefix, and one-shot messages.

A one-shot message is a small read or put, whole in one message each way, without a channel and without protobuf. A
server accepts them if the server's offer says so (`TransportOffer.brief`). The code that decides for channels also
decides for one-shot messages. If one answer does not suffice (the request must wait, is refused or does not fit), the
answer is `OTHERWISE`: the client opens a channel, as if the exchange had not happened.

A one-shot message has the same two lengths in front as other messages, with `ONE_SHOT_FLAG` set in the first length.
All numbers are little-endian; the last 8 bytes are xxh3-64 of all bytes before them. Slices come layer after layer, and
in each layer block after block; their hashes are bound to blocks and layers as everywhere on the way to a store.

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

from moonpool.base.errors import FrameError
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.keys import KEY_BYTES
from moonpool.v1 import kvstore_pb2

ONE_SHOT_FLAG = 1 << 31
"""In the first length: a one-shot message."""
ONE_SHOT_BYTES = 4 << 20
"""Most payload bytes in one exchange; copying so much holds the store's event loop for a millisecond or two."""
PUT_OPEN_BYTES = 16 << 10
"""Most bytes for a put's description of blocks, so that the description fits into the buffer that receives messages."""
PART_BYTES = 512 << 10
"""A larger read is answered in parts near this size: the reader takes a part while the store copies the next part."""
GET, PUT, FOUND, STORED, OTHERWISE = range(1, 6)
"""Kinds."""
_HEAD = struct.Struct("<BxHHHHHIQ")
_EXTENT = struct.Struct("<IIQ")
_SUM = struct.Struct("<Q")
HASH_BYTES = _SUM.size
LENGTH_PREFIX = struct.Struct("<II")
"""Before each message: the number of bytes, and of payload bytes after the message."""


class PayloadExtent(NamedTuple):
    """A part of a payload: in a region, or among the bytes that follow the message (region 0)."""

    region: int
    length: int
    offset: int


class OneShotMessage(NamedTuple):
    """One message without the payload.

    Attributes:
        kind: the message's kind.
        number: the exchange's number; chosen by the client.
        blocks: blocks that are wanted, brought, or found.
        keys: concatenated keys.
        numbers: see above.
        extents: where the payload lies; none: the payload follows the message.
        first: number of the part's first slice.
        pulled: number of payloads in regions that have been read since the last message.
        rest: see above.
    """

    kind: int
    number: int
    blocks: int = 0
    keys: bytes = b""
    numbers: Sequence[int] = ()
    extents: Sequence[PayloadExtent] = ()
    first: int = 0
    pulled: int = 0
    rest: bytes = b""

    def encoded(self, follow: int = 0, place: PayloadExtent | None = None) -> bytes:
        """The message as sent, with the lengths; so many bytes of payload follow, or the payload lies at a place."""
        kind, number, blocks, keys, numbers, extents, first, pulled, rest = self
        extents, count = extents if place is None else (place,), len(numbers)
        data = _HEAD.pack(kind, len(extents), blocks, len(keys) // KEY_BYTES, count, first, pulled, number) + keys
        if count:
            data += _numbers(count).pack(*numbers)
        for extent in extents:
            data += _EXTENT.pack(*extent)
        data += rest
        return (
            LENGTH_PREFIX.pack(ONE_SHOT_FLAG | (len(data) + _SUM.size), follow)
            + data
            + _SUM.pack(xxh3_64_intdigest(data))
        )


def decode_one_shot(data: bytes) -> OneShotMessage:
    """A message as received, without the lengths.

    Raises:
        FrameError: the bytes are no message, or were damaged on the way.
    """
    end = len(data) - _SUM.size
    if end < _HEAD.size or _SUM.unpack_from(data, end)[0] != xxh3_64_intdigest(data[:end]):
        raise FrameError("a one-shot message has a wrong checksum")
    kind, extents, blocks, keys, count, first, pulled, number = _HEAD.unpack_from(data)
    keys_end = _HEAD.size + keys * KEY_BYTES
    numbers_end = keys_end + count * _SUM.size
    rest = numbers_end + extents * _EXTENT.size
    if not GET <= kind <= OTHERWISE or rest > end:
        raise FrameError(f"a one-shot message of kind {kind} has {end} bytes, needs {rest}")
    numbers = _numbers(count).unpack_from(data, keys_end)
    found = tuple(PayloadExtent(*extent) for extent in _EXTENT.iter_unpack(data[numbers_end:rest])) if extents else ()
    return OneShotMessage(
        kind, number, blocks, data[_HEAD.size : keys_end], numbers, found, first, pulled, data[rest:end]
    )


def trailing_hashes(hashes: Sequence[int]) -> memoryview:
    """Hashes of a put, which follow the payload: the sender hashes while the other side receives."""
    return memoryview(_numbers(len(hashes)).pack(*hashes))


def split_trailing_hashes(message: OneShotMessage, payload: BytesLike, slices: int) -> tuple[BytesLike, Sequence[int]]:
    """A put's payload and the slices' hashes, from wherever they came; neither is verified yet."""
    end = payload.nbytes - slices * _SUM.size
    if message.numbers or end <= 0 or not isinstance(payload, memoryview):
        return payload, message.numbers
    return payload[:end], _numbers(slices).unpack(payload[end:])


@functools.lru_cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


@functools.lru_cache(16)
def parse_put_open(rest: bytes) -> kvstore_pb2.PutOpen:
    """A put's description of the blocks; nearly always the same, and not to be changed.

    Raises:
        FrameError: the bytes are not such a message.
    """
    try:
        return kvstore_pb2.PutOpen.FromString(rest)
    except DecodeError as error:
        raise FrameError(f"malformed PutOpen: {error}") from error


class OneShotAnswer(NamedTuple):
    """A one-shot message on the way out, and the payload in place: memory that does not change while being read."""

    message: OneShotMessage
    pieces: Sequence[memoryview]


def found_answers(
    number: int, blocks: int, pieces: Sequence[memoryview], hashes: Sequence[int]
) -> Iterator[OneShotAnswer]:
    """The answer to a read, in parts: all slices of so many blocks, in order, and their bound hashes."""
    step = max(1, PART_BYTES // pieces[0].nbytes) if pieces else 1
    if len(pieces) <= step:
        yield OneShotAnswer(OneShotMessage(FOUND, number, blocks, b"", hashes), pieces)
        return
    for first in range(0, len(pieces), step):
        message = OneShotMessage(FOUND, number, blocks, numbers=hashes[first : first + step], first=first)
        yield OneShotAnswer(message, pieces[first : first + step])


def otherwise_answer(number: int) -> OneShotAnswer:
    """The answer to what takes a channel."""
    return OneShotAnswer(OneShotMessage(OTHERWISE, number), [])
