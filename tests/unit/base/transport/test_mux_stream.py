"""The multiplexed stream against peers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from moonpool.base.errors import StreamBroken
from moonpool.base.transport.grpc import payload_stream
from moonpool.base.transport.mux_stream import MuxStream
from moonpool.base.transport.stream_spec import DEFAULT_OPTIONS, StreamSettings, StreamSpec
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.transport.fakes import HELLO, SERVER, STORE, served

Stream = MuxStream[kvstore_pb2.GetRequest, kvstore_pb2.GetResponse]
WELCOME = kvstore_pb2.GetResponse(welcome=kv_pb2.StreamWelcome(receiver=SERVER, credit_bytes=5))


def opened(transfer: int, blocks: int = 0) -> kvstore_pb2.GetResponse:
    return kvstore_pb2.GetResponse(opened=kv_pb2.ReadOpened(transfer=transfer, blocks=blocks))


def plain(message: kvstore_pb2.GetResponse) -> bytes:
    return message.SerializeToString()


class Store:
    """Runs a test's script for every call."""

    def __init__(self, script: Callable[[Any, Any], Awaitable[None]]) -> None:
        self.script = script
        self.calls = 0

    async def Get(self, requests: Any, context: Any) -> None:
        self.calls += 1
        await self.script(requests, context)


class Handler:
    """Remembers what came."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.payloads: list[bytes] = []
        self.error: Exception | None = None
        self.event = asyncio.Event()

    def on_message(self, message: kvstore_pb2.GetResponse, payload: memoryview) -> None:
        if message.opened.blocks == 99:
            raise ValueError("99 blocks")
        self.messages.append(message.opened.blocks)
        self.payloads.append(bytes(payload))
        self.event.set()

    def on_broken(self, error: Exception) -> None:
        assert self.error is None, "told once"
        self.error = error
        self.event.set()

    async def wait(self) -> None:
        async with asyncio.timeout(60):
            await self.event.wait()
        self.event.clear()


def channel_of(message: kvstore_pb2.GetResponse) -> Hashable:
    return message.opened.transfer or None


@asynccontextmanager
async def streaming(store: Store, options: StreamSettings = DEFAULT_OPTIONS) -> AsyncIterator[Stream]:
    async with served((STORE, store)) as (channels, address):
        spec: StreamSpec[kvstore_pb2.GetRequest, kvstore_pb2.GetResponse] = StreamSpec(
            "test",
            lambda: payload_stream(
                channels.get(address),
                "moonpool.v1.KVStoreService",
                "Get",
                kvstore_pb2.GetRequest,
                kvstore_pb2.GetResponse,
            )(),
            kvstore_pb2.GetRequest(hello=HELLO),
            channel_of,
            kvstore_pb2.GetResponse,
            window_bytes=8,
            credit=lambda credit: kvstore_pb2.GetRequest(credit=credit),
            options=options,
        )
        stream: Stream = MuxStream(spec)
        try:
            yield stream
        finally:
            await stream.aclose()
            assert not stream.tasks
            assert stream.channels == 0


async def test_handshake_credits_and_dispatch() -> None:
    got: list[kvstore_pb2.GetRequest] = []
    returned = asyncio.Event()

    async def script(requests: Any, context: Any) -> None:
        async for request in requests:
            got.append(request)
            if sum(request.credit.bytes for request in got) == 8 + 6:
                returned.set()
            match request.WhichOneof("message"):
                case "hello":
                    await context.write(plain(WELCOME))
                case "open":
                    await context.write(plain(opened(77)))  # nobody's
                    message = opened(request.open.transfer, 3)
                    message.payload = b"xy"
                    await context.write(plain(message))

    async with streaming(Store(script)) as stream:
        handler = Handler()
        channel = await stream.open(1, handler)
        assert channel.welcome.receiver == SERVER
        assert stream.credits is not None
        assert stream.credits.available == 5
        channel.post(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(transfer=1)))
        await handler.wait()
        assert (handler.messages, handler.payloads) == ([3], [b"xy"])
        channel.close()
        channel.close()
        assert handler.error is None
        with pytest.raises(StreamBroken, match="closed"):
            channel.check()
        # What comes for a closed channel is dropped, but its credits are returned.
        other = await stream.open(2, Handler())
        channel.post(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(transfer=1)))
        other.post(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(transfer=2)))
        await asyncio.wait_for(returned.wait(), 60)
        assert handler.messages == [3]
        assert [request.WhichOneof("message") for request in got[:3]] == ["hello", "credit", "open"]
        other.close()


async def test_a_handler_that_fails_ends_its_channel_only() -> None:
    async def script(requests: Any, context: Any) -> None:
        await context.write(plain(WELCOME))
        async for request in requests:
            if request.WhichOneof("message") == "open":
                await context.write(plain(opened(1, 99)))
                await context.write(plain(opened(2, 1)))

    async with streaming(Store(script)) as stream:
        bad, good = Handler(), Handler()
        channel = await stream.open(1, bad)
        other = await stream.open(2, good)
        other.post(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(transfer=2)))
        await good.wait()
        assert isinstance(bad.error, ValueError)
        with pytest.raises(ValueError, match="99"):
            await channel.send([(kvstore_pb2.GetRequest(), b"")], timeout_s=1)
        assert (stream.channels, good.error) == (1, None)
        other.close()


async def leave(requests: Any, context: Any) -> None:
    await context.write(plain(WELCOME))
    await anext(requests)
    await anext(requests)


async def garbage(requests: Any, context: Any) -> None:
    await context.write(plain(WELCOME))
    await context.write(b"\xff\xff\xff")
    await asyncio.Event().wait()


async def cancel(requests: Any, context: Any) -> None:
    await context.write(plain(WELCOME))
    await context.abort(grpc.StatusCode.CANCELLED, "not now")


async def crash(requests: Any, context: Any) -> None:
    await context.write(plain(WELCOME))
    raise RuntimeError("a defect")


@pytest.mark.parametrize("script", [leave, garbage, cancel, crash])
async def test_however_the_peer_ends_the_stream_its_channels_learn_of_it(
    script: Callable[[Any, Any], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(script)
    async with streaming(store) as stream:
        for _ in range(2):
            handler = Handler()
            try:
                channel = await stream.open(1, handler)
            except StreamBroken:
                continue  # it ended before the channel was open
            await handler.wait()
            assert isinstance(handler.error, StreamBroken)
            with pytest.raises(StreamBroken):
                channel.post(kvstore_pb2.GetRequest())
            assert not stream.connected
            assert stream.channels == 0
        assert store.calls == 2


async def welcome_and_silence(requests: Any, context: Any) -> None:
    await context.write(plain(WELCOME))
    await asyncio.Event().wait()


async def test_a_stream_is_given_up_after_a_long_silence_only() -> None:
    store = Store(welcome_and_silence)
    async with streaming(store) as stream:
        handler = Handler()
        channel = await stream.open(1, handler)
        now = asyncio.get_running_loop().time()
        channel.suspect(now - 100)  # it was heard of less than silence_s ago
        assert (handler.error, stream.connected) == (None, True)
    async with streaming(store, StreamSettings(silence_s=0.0)) as stream:
        handler = Handler()
        await stream.open(1, handler)
        now = asyncio.get_running_loop().time()
        stream.suspect(now + 100)  # the wait has not lasted long
        assert stream.connected
        stream.suspect(now)
        assert isinstance(handler.error, StreamBroken)
        assert not stream.connected
        await stream.open(1, Handler())
        assert store.calls == 3


async def silent_end(requests: Any, context: Any) -> None:
    return


async def wrong_first(requests: Any, context: Any) -> None:
    await context.write(plain(opened(1)))
    await asyncio.Event().wait()


@pytest.mark.parametrize("script", [silent_end, wrong_first])
async def test_no_channel_without_a_welcome(script: Callable[[Any, Any], Awaitable[None]]) -> None:
    store = Store(script)
    async with streaming(store) as stream:
        for _ in range(2):
            with pytest.raises(StreamBroken):
                await stream.open(1, Handler())
        assert store.calls == 2
