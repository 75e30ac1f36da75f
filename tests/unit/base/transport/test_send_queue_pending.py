"""Payloads that an send_queue holds for a connection: when their sender's memory is free, and how a sender leaves."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from moonpool.base.errors import StreamBroken, TransferFailed
from moonpool.base.transport.connection import UnsentRest
from moonpool.base.transport.payloads import PendingPayload
from moonpool.base.transport.send_queue import TURN_BYTES, SendQueue
from moonpool.v1 import decode_pb2, kv_pb2

LONG_S = 60.0
SIZE = 8


def frame(transfer: int) -> decode_pb2.ReceiveKVRequest:
    return decode_pb2.ReceiveKVRequest(frame=kv_pb2.FrameHeader(transfer=transfer))


class Writer:
    """Takes what an send_queue writes; `finish` says when the connection is done with it."""

    def __init__(self) -> None:
        self.send_queue = SendQueue()
        self.send_queue.hold(self.stuck, self.start)
        self.left: list[memoryview] = []  # of what was written last
        self.items: list[Any] = []
        self.errors: list[Exception] = []
        self.came = asyncio.Event()
        self.unsent: list[int] = []
        self.task = asyncio.ensure_future(self.send_queue.drain(self.write))

    def start(self, item: Any) -> UnsentRest:
        """Nothing can be sent at once."""
        return UnsentRest(item.parts, item)

    async def write(self, item: Any) -> None:
        if isinstance(item, UnsentRest):
            self.left, item = item.parts, item.held
        self.items.append(item)
        self.came.set()
        await asyncio.wait((item.done,))  # one at a time, as over a socket

    def stuck(self, error: Exception) -> None:
        self.errors.append(error)
        for item in self.items:
            item.fail(error)

    def put(self, transfer: int, data: Any = b"x" * SIZE, timeout_s: float = LONG_S) -> asyncio.Task[None]:
        return asyncio.ensure_future(
            self.send_queue.put(frame(transfer), data, timeout_s=timeout_s, unsent=lambda: self.unsent.append(transfer))
        )

    async def item(self) -> PendingPayload:
        """The next thing that is written."""
        async with asyncio.timeout(60):
            await self.came.wait()
        self.came.clear()
        item: PendingPayload = self.items[-1]
        return item

    async def end(self) -> None:
        self.send_queue.finish()
        await self.task


async def test_a_sender_waits_until_the_connection_is_done_with_its_memory() -> None:
    writer, data = Writer(), memoryview(bytearray(b"abcd"))
    putting = writer.put(1, [data, data[:2]])
    item = await writer.item()
    assert (item.message, [bytes(part) for part in item.parts], item.nbytes) == (frame(1), [b"abcd", b"ab"], 6)
    assert not putting.done()
    item.finish()
    item.fail(StreamBroken("too late"))
    await putting
    assert writer.unsent == []
    await writer.end()


async def test_what_is_offered_is_copied_since_nobody_waits() -> None:
    writer, data = Writer(), memoryview(bytearray(b"abcd"))
    assert writer.send_queue.offer(frame(1), [data[:2], data[2:]])
    data[:] = b"wxyz"
    assert writer.send_queue.offer(frame(2), [data])
    data[:] = b"...."
    for expected in (b"abcd", b"wxyz"):
        item = await writer.item()
        assert bytes(b"".join(writer.left or item.parts)) == expected
        writer.left = []
        item.finish()
    await writer.end()


async def test_a_sender_that_leaves_before_its_turn_takes_its_payload_along() -> None:
    writer = Writer()
    first = writer.put(0)
    busy = await writer.item()
    leaving, late, staying = writer.put(1), writer.put(2, timeout_s=0.001), writer.put(3)
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(TransferFailed, match="not taken within"):
        await late
    assert (leaving.cancelled(), writer.unsent) == (True, [1, 2])
    busy.finish()
    await first
    item = await writer.item()
    assert (item.message, len(writer.items)) == (frame(3), 2)
    item.finish()
    await staying
    await writer.end()


async def test_a_sender_that_leaves_later_waits_until_its_memory_is_free() -> None:
    writer = Writer()
    leaving = writer.put(1)
    item = await writer.item()
    leaving.cancel()
    await asyncio.sleep(0)
    assert not leaving.done()
    item.finish()
    await asyncio.gather(leaving, return_exceptions=True)
    assert (leaving.cancelled(), writer.unsent, writer.errors) == (True, [], [])
    await writer.end()


async def test_a_connection_that_is_not_done_in_time_is_ended() -> None:
    writer = Writer()
    putting = writer.put(1, timeout_s=0.001)
    await writer.item()
    putting.cancel()
    await asyncio.sleep(0)
    putting.cancel()  # it would wait for a while; the second time it does not
    with pytest.raises((asyncio.CancelledError, TransferFailed)):
        await putting
    assert [str(error) for error in writer.errors] == ["the peer does not take what it was sent"]
    assert writer.unsent == []
    await writer.end()


async def test_of_several_that_are_given_up_the_connection_ends_what_it_began_and_the_others_do_not_go() -> None:
    writer = Writer()
    begin = [
        await writer.send_queue.begin(
            frame(number), b"x" * SIZE, timeout_s=LONG_S, unsent=functools.partial(writer.unsent.append, number)
        )
        for number in range(3)
    ]
    items = [item for item in begin if item is not None]
    begun = await writer.item()
    leaving = asyncio.ensure_future(writer.send_queue.abandon(items))
    await asyncio.sleep(0)
    assert (len(items), begun is items[0], writer.unsent, leaving.done()) == (3, True, [1, 2], False)
    begun.finish()
    await leaving
    await writer.send_queue.abandon(items)  # nothing is left of them
    await writer.end()
    assert (writer.items, writer.unsent, writer.errors) == ([begun], [1, 2], [])


async def test_payloads_that_wait_fail_when_the_outbox_is_closed() -> None:
    writer = Writer()
    waiting = writer.put(1)
    await asyncio.sleep(0)
    writer.send_queue.close(StreamBroken("over"))
    with pytest.raises(StreamBroken, match="over"):
        await waiting
    with pytest.raises(StreamBroken, match="over"):
        await writer.put(2)
    assert (writer.items, writer.unsent) == ([], [2])
    await writer.task


async def test_what_nothing_waits_before_is_sent_at_once_and_the_rest_in_its_turn() -> None:
    sent: list[Any] = []
    takes = True

    def start(item: Any) -> UnsentRest | None:
        sent.append(item)
        if isinstance(item, PendingPayload) and takes:
            item.finish()
        return None if takes else UnsentRest([memoryview(b"rest")], item if isinstance(item, PendingPayload) else None)

    writer = Writer()
    await asyncio.sleep(0)
    writer.send_queue.hold(writer.stuck, start)
    close = decode_pb2.ReceiveKVRequest(close=decode_pb2.TransferClose(transfer_id=3)).SerializeToString()
    writer.send_queue.post(decode_pb2.ReceiveKVRequest.FromString(close))
    await writer.put(1)
    assert ([getattr(item, "message", item) for item in sent], len(writer.send_queue)) == ([close, frame(1)], 0)
    takes = False
    second, third = writer.put(2), writer.put(3)
    held = await writer.item()
    assert (held.message, bytes(writer.left[0]), len(sent)) == (frame(2), b"rest", 3), "the third waits for the second"
    takes = True
    held.finish()
    await second
    last = await writer.item()
    assert last.message == frame(3)
    last.finish()
    await third
    await writer.end()


async def test_who_sends_much_at_once_leaves_others_their_turns() -> None:
    """A connection may take all of it without making anybody wait."""
    writer, turns = Writer(), [0]

    def start(item: Any) -> None:
        item.finish()

    writer.send_queue.hold(writer.stuck, start)

    async def send() -> None:
        for transfer in range(64):
            await writer.send_queue.put(frame(transfer), bytes(TURN_BYTES // 8), timeout_s=LONG_S)
            turns[-1] += 1

    sending = asyncio.ensure_future(send())
    while not sending.done():
        turns.append(0)
        await asyncio.sleep(0)
    assert max(turns) <= 8
    await writer.end()
