"""Brief messages as bytes."""

from __future__ import annotations

import random

import pytest

from moonpool.errors import FrameError
from moonpool.streams.lanes.brief import BRIEF, FOUND, GET, PART_BYTES, PUT, Brief, Place, about, decoded, found
from moonpool.streams.lanes.sockets import LENGTHS
from moonpool.v1 import kvstore_pb2

MESSAGES = [
    Brief(GET, 1, 2, keys=b"k" * 64, pulled=3),
    Brief(
        PUT, 1 << 60, 1, b"k" * 32 + b"p" * 32, (5, (1 << 64) - 1), (Place(1, 7, 1 << 40), Place(0, 9, 0)), rest=b"r"
    ),
    Brief(FOUND, 3, 4, numbers=tuple(range(1024)), extents=(Place(2, 4 << 20, 8),), first=1023),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_comes_as_it_was_sent(message: Brief) -> None:
    data = message.encoded(follow=77)
    size, follow = LENGTHS.unpack_from(data)
    assert (size, follow) == (BRIEF | (len(data) - LENGTHS.size), 77)
    assert decoded(data[LENGTHS.size :]) == message


@pytest.mark.parametrize("message", MESSAGES[:2])
def test_a_message_that_changed_on_its_way_is_noticed(message: Brief) -> None:
    data = message.encoded()[LENGTHS.size :]
    rng = random.Random(7)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        for bad in (bytes(changed), data[:at], data[:at] + data[at + 1 :]):
            with pytest.raises(FrameError, match="checksum"):
                decoded(bad)


@pytest.mark.parametrize("kind", [0, 6])
def test_a_message_of_no_known_kind_is_refused(kind: int) -> None:
    with pytest.raises(FrameError, match="kind"):
        decoded(Brief(kind, 1).encoded()[LENGTHS.size :])


def test_what_a_put_says_of_its_blocks_is_parsed_once() -> None:
    rest = kvstore_pb2.PutOpen(tenant="ann", forgotten=["d"]).SerializeToString()
    assert (about(rest).tenant, list(about(rest).forgotten)) == ("ann", ["d"])
    assert about(rest) is about(bytes(bytearray(rest)))
    with pytest.raises(FrameError, match="malformed PutOpen"):
        about(b"\xff")


def test_a_large_read_is_answered_in_parts() -> None:
    pieces, hashes = [memoryview(bytes(PART_BYTES // 2 + 1)) for _ in range(3)], [1, 2, 3]
    answers = list(found(9, 3, pieces, hashes))
    assert [(each.message.first, list(each.message.numbers)) for each in answers] == [(0, [1]), (1, [2]), (2, [3])]
    assert all((each.message.kind, each.message.number, each.message.blocks) == (FOUND, 9, 3) for each in answers)
    assert [len(each.pieces) for each in found(9, 3, [piece[:64] for piece in pieces], hashes)] == [3]
    [miss] = found(9, 0, [], [])
    assert miss == (Brief(FOUND, 9, numbers=[]), [])
