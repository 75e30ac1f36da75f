"""The send_queue: order, bounds, and that nothing refers to the sender's memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonpool.base.errors import MoonpoolError, StreamBroken, TransferFailed, Unavailable
from moonpool.base.rpc.messages import END_OF_STREAM
from moonpool.base.transport.grpc import payload_stream
from moonpool.base.transport.send_queue import SendQueue
from moonpool.v1 import decode_pb2, kv_pb2, kvstore_pb2
from tests.unit.base.transport.fakes import STORE, served

CREDIT = decode_pb2.ReceiveKVResponse(credit=kv_pb2.Credit(bytes=1))
CLOSE = decode_pb2.ReceiveKVRequest(close=decode_pb2.TransferClose(transfer_id=3))
LONG_S = 60.0


def frame(transfer: int) -> decode_pb2.ReceiveKVRequest:
    return decode_pb2.ReceiveKVRequest(frame=kv_pb2.FrameHeader(transfer=transfer))


async def test_everything_is_written_in_order_and_encoded_where_there_is_a_payload() -> None:
    send_queue, written = SendQueue(), []

    async def write(message: Any) -> None:
        written.append(message)

    send_queue.post(CREDIT)
    await send_queue.put(frame(1), b"abc", timeout_s=LONG_S)
    send_queue.post(CLOSE)
    send_queue.finish()
    await send_queue.drain(write)
    assert written[0] == CREDIT
    expected = frame(1)
    expected.payload = b"abc"
    assert written[1:] == [expected.SerializeToString(), CLOSE.SerializeToString()]


async def test_the_payload_may_change_after_put() -> None:
    send_queue, data, written = SendQueue(), bytearray(b"abc"), []

    async def write(message: Any) -> None:
        written.append(message)

    await send_queue.put(frame(1), memoryview(data), timeout_s=LONG_S)
    data[:] = b"xyz"
    send_queue.finish()
    await send_queue.drain(write)
    assert decode_pb2.ReceiveKVRequest.FromString(written[0]).payload == b"abc"


async def test_room_is_bounded() -> None:
    send_queue = SendQueue(room_bytes=8)
    await send_queue.put(frame(1), b"x" * 8, timeout_s=LONG_S)
    with pytest.raises(TransferFailed):
        await send_queue.put(frame(2), b"x", timeout_s=0.001)
    waiting = asyncio.ensure_future(send_queue.put(frame(3), b"x", timeout_s=LONG_S))
    cancelled = asyncio.ensure_future(send_queue.put(frame(4), b"x", timeout_s=LONG_S))
    await asyncio.sleep(0)
    cancelled.cancel()
    written = []

    async def write(message: Any) -> None:
        written.append(decode_pb2.ReceiveKVRequest.FromString(message).frame.transfer)

    drain = asyncio.ensure_future(send_queue.drain(write))
    await waiting
    send_queue.finish()
    await drain
    assert written == [1, 3]
    assert cancelled.cancelled()


async def test_too_many_messages_break_it() -> None:
    send_queue = SendQueue(max_messages=2)
    send_queue.post(CREDIT)
    send_queue.post(CREDIT)
    with pytest.raises(StreamBroken, match="takes none"):
        send_queue.post(CREDIT)
    assert len(send_queue) == 2


async def test_close_fails_everyone() -> None:
    send_queue = SendQueue(room_bytes=4)
    await send_queue.put(frame(1), b"xxxx", timeout_s=LONG_S)
    waiting = asyncio.ensure_future(send_queue.put(frame(2), b"x", timeout_s=LONG_S))
    await asyncio.sleep(0)
    send_queue.close(StreamBroken("gone"))
    with pytest.raises(StreamBroken, match="gone"):
        await waiting
    with pytest.raises(StreamBroken, match="gone"):
        send_queue.post(CREDIT)

    async def write(_: Any) -> None:
        raise AssertionError("nothing is left")

    await send_queue.drain(write)


async def test_a_stalled_write_breaks_it() -> None:
    send_queue = SendQueue()
    send_queue.post(CREDIT)

    async def write(_: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StreamBroken, match="took nothing"):
        await send_queue.drain(write, stall_s=0.001)
    with pytest.raises(StreamBroken, match="took nothing"):
        send_queue.post(CREDIT)


async def test_a_failing_or_cancelled_writer_closes_it() -> None:
    async def failing(_: Any) -> None:
        raise RuntimeError("no more")

    send_queue = SendQueue()
    send_queue.post(CREDIT)
    with pytest.raises(RuntimeError):
        await send_queue.drain(failing)
    with pytest.raises(StreamBroken, match="no more"):
        send_queue.post(CREDIT)

    other = SendQueue()
    drain = asyncio.ensure_future(other.drain(failing))
    await asyncio.sleep(0)
    drain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drain
    with pytest.raises(StreamBroken):
        await other.put(frame(1), b"x", timeout_s=LONG_S)


async def test_cancelled_it_finishes_the_write_that_is_under_way() -> None:
    send_queue, started, release, written = SendQueue(), asyncio.Event(), asyncio.Event(), []

    async def write(message: Any) -> None:
        started.set()
        await release.wait()
        written.append(message)

    send_queue.post(CREDIT)
    send_queue.post(CREDIT)
    drain = asyncio.ensure_future(send_queue.drain(write))
    await started.wait()
    drain.cancel()
    await asyncio.sleep(0)
    assert not drain.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await drain
    assert written == [CREDIT]


async def test_a_server_can_end_a_call_in_the_middle_of_writing() -> None:
    """The status of a call must not get lost because a large message is on its way."""

    class Server:
        async def Get(self, requests: Any, context: Any) -> None:
            send_queue = SendQueue()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send_queue.drain(context.write))
                for _ in range(3):
                    message = kvstore_pb2.GetResponse(frame=kv_pb2.FrameHeader(transfer=1))
                    await send_queue.put(message, bytes(1 << 20), timeout_s=10)
                raise Unavailable("ended on purpose")

    async with served((STORE, Server())) as (channels, address):
        requests, responses = kvstore_pb2.GetRequest, kvstore_pb2.GetResponse
        open_stream = payload_stream(channels.get(address), "moonpool.v1.KVStoreService", "Get", requests, responses)
        call = open_stream()

        async def read_all() -> None:
            while await call.read() is not END_OF_STREAM:
                pass

        with pytest.raises(MoonpoolError, match="ended on purpose"):
            await asyncio.wait_for(read_all(), 60)
