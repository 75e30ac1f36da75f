"""An open link: messages and payloads both ways, when memory is free again, and peers that do not keep to it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.base.errors import FrameError, StreamBroken
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.keys import slice_hash
from moonpool.base.transport.base import ConnectionEnd
from moonpool.base.transport.connection import ReceiveCallbacks
from moonpool.base.transport.framing import GET, LENGTH_PREFIX, OneShotMessage
from moonpool.base.transport.message_receiver import MESSAGE_COST, RECEIVE_TURN_BYTES
from moonpool.base.transport.payloads import PendingPayload
from moonpool.base.transport.tcp import TcpTransport
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.transport.pairs import LAYOUT, MAILBOX, REQUEST, RESPONSE, came, pair, pool_of, read

SLICE = LAYOUT.slice_bytes(0)
REGION = 4 * LAYOUT.layers * (SLICE + 16) + 8 * (LAYOUT.layers + 2)
"""Bytes of a pool of four blocks: slices, and two numbers of each."""


def frame(*extents: tuple[int, int, int], follow: int = 0, pulled: int = 0) -> bytes:
    """A message as a peer may send it, with extents of its choice; `follow` bytes must be sent behind it."""
    message = kv_pb2.TransportFrame(message=REQUEST.SerializeToString(), pulled=pulled)
    for region, offset, length in extents:
        message.extents.add(region=region, offset=offset, length=length)
    data = message.SerializeToString()
    return LENGTH_PREFIX.pack(len(data), follow) + data


async def test_messages_and_payloads_in_order_both_ways() -> None:
    large = memoryview(bytes(range(256)) * (3 << 12))
    async with pair() as link:
        writing = asyncio.ensure_future(link.client.write(PendingPayload(REQUEST, large)))
        assert await came(link.server) == (REQUEST, bytes(large))
        await writing
        many = kvstore_pb2.PutRequest(open=kvstore_pb2.PutOpen(keys=bytes(large[:200_000])))
        writing = asyncio.ensure_future(link.client.write(many))  # larger than what is received at once
        assert await came(link.server) == (many, b"")
        await writing
        await link.client.write(REQUEST.SerializeToString())
        await link.server.write(PendingPayload(RESPONSE, [large[:5], large[7:9]]))
        await link.server.write(RESPONSE)
        assert await came(link.server) == (REQUEST, b"")
        assert await came(link.client) == (RESPONSE, bytes(large[:5]) + bytes(large[7:9]))
        assert await came(link.client) == (RESPONSE, b"")


async def test_a_payload_is_held_until_it_was_pulled_and_what_is_no_region_s_follows() -> None:
    pool = pool_of()
    copy = memoryview(bytearray(b"x" * SLICE))
    async with pair(pool) as link:
        item = link.held([pool.slice(0, 2), copy, pool.slice(1, 0), pool.slice(1, 1)])
        message, payload = await came(link.server)
        assert message == REQUEST
        assert payload == b"\x03" * SLICE + b"x" * SLICE + b"\x11" * SLICE + b"\x12" * SLICE
        assert not item.done.done()
        await asyncio.gather(*link.tasks)
        link.tasks.clear()
        reading = asyncio.ensure_future(read(link.client))
        await item.done
        reading.cancel()
    pool.close()


async def test_a_sender_hears_of_several_pulled_payloads_at_once() -> None:
    pool = pool_of()
    async with pair(pool) as link:
        items = [link.held([pool.slice(0, block % 4)]) for block in range(5)]
        await asyncio.gather(*link.tasks)  # all lie in the socket
        link.tasks.clear()
        for _ in items:
            assert (await came(link.server))[0] == REQUEST
        assert len(link.tasks) == 3  # words of 2, 2 and 1
        reading = asyncio.ensure_future(read(link.client))
        await asyncio.gather(*(item.done for item in items))
        reading.cancel()
    pool.close()


async def test_what_is_overwritten_too_early_does_not_match_its_hash_and_never_changes_later() -> None:
    pool = pool_of()
    value = slice_hash(pool.slice(0, 0))
    async with pair(pool) as link:
        link.held([pool.slice(0, 0)])
        link.held([pool.slice(0, 0)])
        _, first = await came(link.server)
        pool.slice(0, 0)[:] = b"!" * SLICE
        _, second = await came(link.server)
        assert (slice_hash(first) == value, slice_hash(second) == value) == (True, False)
    pool.close()


async def test_a_pool_that_is_closed_stays_readable_for_the_peer() -> None:
    pool = pool_of()
    data = bytes(pool.slice(0, 1))
    async with pair(pool) as link:
        link.held([pool.slice(0, 1)])
        await asyncio.gather(*link.tasks)
        pool.close()
        assert (await came(link.server))[1] == data


async def test_a_server_writes_to_what_is_lent_and_beside_it_when_that_is_full() -> None:
    async with pair(mailbox=MAILBOX) as link:
        data = [memoryview(bytes([number]) * SLICE) for number in range(6)]
        for part in data:
            item = link.held([part], link.server)
            await link.tasks[-1]
            assert item.done.done(), "the store's memory is free as soon as the bytes are copied"
        for part in data:
            assert await came(link.client) == (RESPONSE, bytes(part))
        for _ in range(4):  # the client's acknowledgements free the mailbox
            await link.client.write(REQUEST)
        await asyncio.gather(*link.tasks)
        for _ in range(4):
            await read(link.server)
        await link.server.write(PendingPayload(RESPONSE, data[:4]))
        assert (await came(link.client))[1] == b"".join(data[:4])


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (frame((1, 0, 1 << 40)), "too large"),
        (frame((1, 1 << 62, 16)), "of a region"),
        (frame((1, REGION - 8, 16)), "of a region"),
        (frame((1, REGION, 1)), "of a region"),
        (frame((2, 0, 16)), "no region 2"),
        (frame((0, 0, 16)), "extents need"),
        (frame((1, 0, 16), follow=4) + b"abcd", "extents need"),
        (frame(*[(1, 0, 1)] * 1025), "too large"),
        (frame(pulled=1), "were read"),
        (LENGTH_PREFIX.pack(1 << 30, 0), "a message of"),
        (LENGTH_PREFIX.pack(4, 1 << 30), "a message of"),
        (LENGTH_PREFIX.pack(3, 0) + b"\xff\xff\xff", "malformed TransportFrame"),
        (LENGTH_PREFIX.pack(4, 0) + b"\x0a\x02\xff\xff", "malformed message"),
    ],
)
async def test_what_is_not_proper_ends_the_connection(sent: bytes, says: str) -> None:
    pool = pool_of()
    async with pair(pool) as link:
        await link.socks[0].send([sent])
        with pytest.raises(FrameError, match=says):
            await read(link.server)
    pool.close()


async def test_a_message_of_very_many_extents_is_refused_before_they_are_objects() -> None:
    pool = pool_of()
    async with pair(pool) as link:
        sending = asyncio.create_task(link.socks[0].send([LENGTH_PREFIX.pack(2 << 20, 0) + b"\x12\x00" * (1 << 20)]))
        with pytest.raises(FrameError, match="TransportFrame has too many fields"):
            await read(link.server)
        sending.cancel()
        await asyncio.wait([sending])
    pool.close()


async def test_a_server_s_own_memory_is_no_region_of_a_client_s_message() -> None:
    """The lent region is for writing: a client cannot have the server read it."""
    async with pair(mailbox=MAILBOX) as link:
        await link.socks[0].send([frame((1, 0, 16))])
        with pytest.raises(FrameError, match="no region 1"):
            await read(link.server)


@pytest.mark.parametrize("sent", [b"", LENGTH_PREFIX.pack(9, 0)[:3], frame()[:-1], frame(follow=9) + b"12345678"])
async def test_a_peer_that_leaves_anywhere(sent: bytes) -> None:
    async with pair() as link:
        await link.socks[0].send([sent])
        link.socks[0].close(StreamBroken("left"))
        with pytest.raises(StreamBroken, match="closed its end"):
            await read(link.server)


async def test_payloads_that_are_held_fail_with_the_connection() -> None:
    pool = pool_of()
    async with pair(pool) as link:
        shown = link.held([pool.slice(0, 0)])
        await asyncio.gather(*link.tasks)
        stuck = link.held([memoryview(bytes(32 << 20))])
        reading = asyncio.ensure_future(read(link.client))
        await asyncio.sleep(0)
        error = StreamBroken("over")
        link.client.close(error)
        link.client.close(StreamBroken("again"))
        assert (link.client.closed, shown.done.exception()) == (True, error)
        results: list[Any] = await asyncio.gather(*link.tasks, reading, return_exceptions=True)
        link.tasks.clear()
        assert (stuck.done.exception(), results[1:]) == (error, [error, error])
    pool.close()


async def test_regions_of_a_connection_that_ends_are_unmapped_beside_the_event_loop() -> None:
    """Who unmaps the last of a dead peer's pool gives all of its memory back to the system, which takes a while."""
    go, closed = threading.Event(), threading.Event()

    def close() -> None:
        assert go.wait(60.0)
        closed.set()

    async with pair() as link:
        region: Any = SimpleNamespace(close=close)
        end = ConnectionEnd(TcpTransport(), link.socks[0], readable={1: region})
        ended = end.open(kv_pb2.TransportFrame, lambda message: None)
        ended.close(StreamBroken("the peer was killed"))
        assert not closed.is_set()
        go.set()
        assert await asyncio.to_thread(closed.wait, 10.0)


async def test_a_message_for_another_stream_s_class_is_read_as_protobuf_reads_it() -> None:
    async with pair() as link:
        await link.client.write(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=8, aborted=True)))
        assert (await read(link.server))[0].close.aborted


async def test_what_a_taker_raises_is_raised_and_nothing_more_is_taken() -> None:
    taken: list[Any] = []

    def refuse(message: Any, payload: Any) -> None:
        taken.append(message)
        raise KeyError("refused")

    def nowhere(message: Any, nbytes: int) -> None:
        raise LookupError("no place")

    async with pair() as link:
        for _ in range(2):
            await link.client.write(REQUEST)
        with pytest.raises(KeyError, match="refused"):
            await link.server.run(ReceiveCallbacks(refuse))
        assert taken == [REQUEST]
        assert await came(link.server) == (REQUEST, b"")
        link.held([memoryview(b"x")])
        link.server.resume()  # after `came`
        with pytest.raises(LookupError, match="no place"):
            await link.server.run(ReceiveCallbacks(refuse, nowhere))
        assert taken == [REQUEST]


@pytest.mark.parametrize(
    ("many", "message", "most"),
    [(6000, frame(), RECEIVE_TURN_BYTES // MESSAGE_COST), (600, OneShotMessage(GET, 1).encoded(), 2)],
    ids=["small", "with large answers"],
)
async def test_many_messages_leave_others_their_turns(many: int, message: bytes, most: int) -> None:
    """However many come, and from wherever: what was received already, or lies with the system."""
    taken, turns = list[Any](), list[int]()

    def take(message: Any, payload: Any) -> None:
        taken.append(message)

    def on_one_shot(message: OneShotMessage, payload: BytesLike) -> int:
        taken.append(message)
        return RECEIVE_TURN_BYTES // 2

    async with pair() as link:
        sending = asyncio.ensure_future(link.socks[0].send([message * many]))
        serving = asyncio.ensure_future(link.server.run(ReceiveCallbacks(take, on_one_shot=on_one_shot)))
        while len(taken) < many:
            turns.append(len(taken))
            await asyncio.sleep(0)
        await sending
        assert max(after - before for before, after in itertools.pairwise([*turns, many])) <= 2 * most
        link.server.close(StreamBroken("over"))
        assert str(await serving) == "over"


async def test_a_socket_that_is_closed_ends_the_reading() -> None:
    async with pair() as link:
        reading = asyncio.ensure_future(came(link.server))
        await link.client.write(REQUEST)
        assert await reading == (REQUEST, b"")
        reading = asyncio.ensure_future(came(link.server))
        await asyncio.sleep(0)
        link.socks[1].close(StreamBroken("cut"))
        with pytest.raises(StreamBroken, match="cut"):
            await reading
