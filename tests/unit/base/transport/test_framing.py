"""Brief messages as bytes."""

from __future__ import annotations

import random

import pytest

from moonpool.base.errors import FrameError
from moonpool.base.transport.framing import (
    FOUND,
    GET,
    LENGTH_PREFIX,
    ONE_SHOT_FLAG,
    PART_BYTES,
    PUT,
    OneShotMessage,
    PayloadExtent,
    decode_one_shot,
    found_answers,
    parse_put_open,
)
from moonpool.v1 import kvstore_pb2

MESSAGES = [
    OneShotMessage(GET, 1, 2, keys=b"k" * 64, pulled=3),
    OneShotMessage(
        PUT,
        1 << 60,
        1,
        b"k" * 32 + b"p" * 32,
        (5, (1 << 64) - 1),
        (PayloadExtent(1, 7, 1 << 40), PayloadExtent(0, 9, 0)),
        rest=b"r",
    ),
    OneShotMessage(FOUND, 3, 4, numbers=tuple(range(1024)), extents=(PayloadExtent(2, 4 << 20, 8),), first=1023),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_comes_as_it_was_sent(message: OneShotMessage) -> None:
    data = message.encoded(follow=77)
    size, follow = LENGTH_PREFIX.unpack_from(data)
    assert (size, follow) == (ONE_SHOT_FLAG | (len(data) - LENGTH_PREFIX.size), 77)
    assert decode_one_shot(data[LENGTH_PREFIX.size :]) == message


@pytest.mark.parametrize("message", MESSAGES[:2])
def test_a_message_that_changed_on_its_way_is_noticed(message: OneShotMessage) -> None:
    data = message.encoded()[LENGTH_PREFIX.size :]
    rng = random.Random(7)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        for bad in (bytes(changed), data[:at], data[:at] + data[at + 1 :]):
            with pytest.raises(FrameError, match="checksum"):
                decode_one_shot(bad)


@pytest.mark.parametrize("kind", [0, 6])
def test_a_message_of_no_known_kind_is_refused(kind: int) -> None:
    with pytest.raises(FrameError, match="kind"):
        decode_one_shot(OneShotMessage(kind, 1).encoded()[LENGTH_PREFIX.size :])


def test_what_a_put_says_of_its_blocks_is_parsed_once() -> None:
    rest = kvstore_pb2.PutOpen(tenant="ann", forgotten=["d"]).SerializeToString()
    assert (parse_put_open(rest).tenant, list(parse_put_open(rest).forgotten)) == ("ann", ["d"])
    assert parse_put_open(rest) is parse_put_open(bytes(bytearray(rest)))
    with pytest.raises(FrameError, match="malformed PutOpen"):
        parse_put_open(b"\xff")


def test_a_large_read_is_answered_in_parts() -> None:
    pieces, hashes = [memoryview(bytes(PART_BYTES // 2 + 1)) for _ in range(3)], [1, 2, 3]
    answers = list(found_answers(9, 3, pieces, hashes))
    assert [(each.message.first, list(each.message.numbers)) for each in answers] == [(0, [1]), (1, [2]), (2, [3])]
    assert all((each.message.kind, each.message.number, each.message.blocks) == (FOUND, 9, 3) for each in answers)
    assert [len(each.pieces) for each in found_answers(9, 3, [piece[:64] for piece in pieces], hashes)] == [3]
    [miss] = found_answers(9, 0, [], [])
    assert miss == (OneShotMessage(FOUND, 9, numbers=[]), [])
