"""The server half of long-lived streams: hello first, answers in order, limits, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moonpool.base.errors import DeadlineExceeded, InvalidRequest, MoonpoolError, StreamBroken, Unavailable
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.base.transport.server_stream import ServerStream
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.transport.fakes import HELLO
from tests.unit.base.transport.turns import turn

GREETING = kvstore_pb2.PutRequest(hello=HELLO)
WAIT_S = 60.0


def close(transfer: int) -> kvstore_pb2.PutRequest:
    return kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=transfer))


class Peer:
    """The other end: messages up as they are given, answers down while it reads."""

    def __init__(self, *messages: Any) -> None:
        self.up: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.answers: list[Any] = []
        for message in messages:
            self.up.put_nowait(message)

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self.up.get()) is not None:
            yield message

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        self.answers.append(message)


class Echo(ServerStream[kvstore_pb2.PutRequest]):
    """Answers each close with the same channel's number."""

    def __init__(self, **options: Any) -> None:
        self.closing = asyncio.Event()
        super().__init__(self.closing, **options)
        self.taken: list[int] = []
        self.payloads: list[bytes] = []
        self.ends = 0

    async def on_hello(self, message: kvstore_pb2.PutRequest) -> None:
        if message.hello.namespace != HELLO.namespace:
            raise InvalidRequest("namespace", "wrong")
        self.post(kvstore_pb2.PutResponse(credit_bytes=1))

    def on_message(self, message: kvstore_pb2.PutRequest, payload: memoryview) -> None:
        if not message.close.transfer:
            raise InvalidRequest("transfer", "none")
        self.taken.append(message.close.transfer)
        self.payloads.append(bytes(payload))
        self.post(kvstore_pb2.PutResponse(credit_bytes=message.close.transfer))

    def end(self) -> None:
        self.ends += 1


async def run(stream: Echo, peer: Peer) -> None:
    async with asyncio.timeout(WAIT_S):
        await stream.run(peer.requests(), peer.write)


async def failure(stream: Echo, peer: Peer) -> MoonpoolError:
    """What ends a stream, on its own or as the one member of a group."""
    with pytest.raises((MoonpoolError, ExceptionGroup)) as caught:
        await run(stream, peer)
    error = caught.value
    if isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, MoonpoolError)
    return error


async def test_messages_are_taken_in_order_and_what_was_answered_goes_out_at_the_end() -> None:
    stream, peer = Echo(), Peer(GREETING, close(5), PayloadMessage(close(6), memoryview(b"abc")), None)
    peer.reads.clear()
    running = asyncio.ensure_future(run(stream, peer))
    await turn()
    assert stream.taken == [5, 6]
    assert not running.done()
    peer.reads.set()
    await running
    assert [answer.credit_bytes for answer in peer.answers] == [1, 5, 6]
    assert stream.payloads == [b"", b"abc"]
    assert stream.ends >= 1


async def test_a_stream_that_says_nothing_ends_in_order() -> None:
    stream = Echo()
    await run(stream, Peer(None))
    assert stream.ends == 0


@pytest.mark.parametrize("first", [close(1), kvstore_pb2.PutRequest()])
async def test_the_first_message_must_be_a_hello(first: kvstore_pb2.PutRequest) -> None:
    stream = Echo()
    assert "must be the first" in str(await failure(stream, Peer(first)))
    assert (stream.taken, stream.ends) == ([], 0)


async def test_a_refused_hello_ends_the_stream_before_anything_is_answered() -> None:
    stream, peer = Echo(), Peer(kvstore_pb2.PutRequest(hello=kv_pb2.StreamHello()))
    assert "wrong" in str(await failure(stream, peer))
    assert (peer.answers, stream.ends) == ([], 0)


async def test_a_hello_that_does_not_come_ends_the_stream() -> None:
    error = await failure(Echo(hello_timeout_s=0.0), Peer())
    assert isinstance(error, DeadlineExceeded)
    assert "no hello" in str(error)


async def test_a_silent_peer_ends_its_stream() -> None:
    stream = Echo(silence_s=0.001)
    error = await failure(stream, Peer(GREETING, close(1)))
    assert isinstance(error, DeadlineExceeded)
    assert "nothing was heard" in str(error)
    assert (stream.silent, stream.taken, stream.ends > 0) == (True, [1], True)


async def test_a_wrong_message_ends_the_stream_and_everything_on_it() -> None:
    stream = Echo()
    assert isinstance(await failure(stream, Peer(GREETING, close(0))), InvalidRequest)
    assert stream.ends >= 1
    with pytest.raises(StreamBroken):
        stream.send_queue.post(kvstore_pb2.PutResponse())


async def test_a_closing_service_ends_its_streams() -> None:
    stream, peer = Echo(), Peer(GREETING)
    running = asyncio.ensure_future(failure(stream, peer))
    await turn()
    stream.closing.set()
    assert isinstance(await running, Unavailable)
    assert stream.ends >= 1


async def test_from_a_peer_that_reads_no_answers_nothing_more_is_taken() -> None:
    stream, peer = Echo(max_unsent=4), Peer(GREETING, *(close(number) for number in range(1, 40)))
    peer.reads.clear()
    running = asyncio.ensure_future(run(stream, peer))
    await turn(100)
    assert 0 < len(stream.taken) <= 5
    assert len(stream.send_queue) <= 5
    peer.reads.set()
    peer.up.put_nowait(None)
    await running
    assert [answer.credit_bytes for answer in peer.answers] == [1, *range(1, 40)]


async def test_tasks_of_channels_are_bounded_and_end_with_the_stream() -> None:
    stream, peer = Echo(), Peer(GREETING)
    running = asyncio.ensure_future(run(stream, peer))
    await turn()
    ended: list[bool] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    for _ in range(1024):
        stream.spawn(forever())
    with pytest.raises(Unavailable, match="1024 channels"):
        stream.spawn(forever())
    await turn()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (len(ended), stream.tasks) == (1024, 0)
