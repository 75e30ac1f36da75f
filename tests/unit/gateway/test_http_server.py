"""Over real sockets: what is no HTTP, too slow, too much or never read is answered or closed; and the drain."""

import asyncio
import contextlib
import gc
import itertools
import socket
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.errors import ConfigError
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway import http_connection
from moonpool.gateway.http_connection import HttpConnection
from moonpool.gateway.http_server import HttpServer, http_serving
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.gateway.test_client_disconnect import HeldCall, Holding

from .fakes import make_gateway, ready, settings, tokenizer

BODY = b'{"messages":[{"role":"user","content":"hi"}]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHAT = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CLOSING = CHAT.replace(b"host: x", b"host: x\r\nconnection: close")
STREAMED = BODY[:-1] + b',"stream":true}'
STREAM = HEAD + b"content-length: %d\r\n\r\n" % len(STREAMED) + STREAMED


class HeldUntil(Holding):
    """The one answer begins when it is told to."""

    def __init__(self, messages: Iterable[pb.GenerateResponse]) -> None:
        super().__init__(())
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.call = _Later(messages, self.begun, self.go)


class _Later(HeldCall):
    def __init__(self, messages: Iterable[pb.GenerateResponse], begun: asyncio.Event, go: asyncio.Event) -> None:
        super().__init__(())
        self._answer, self._begun, self._go = iter(messages), begun, go

    async def __anext__(self) -> pb.GenerateResponse:
        self._begun.set()
        await self._go.wait()
        message = next(self._answer, None)
        if message is None:
            raise StopAsyncIteration
        return message


@asynccontextmanager
async def serving(
    client: AsyncClient | None = None, texts: Tokenizer | None = None, **changes: Any
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A gateway at a free port, of a model with this tokenizer; yields its server and port."""
    config = settings(**changes)
    with ThreadPoolExecutor(1) as threads:
        app = make_gateway(client or ready(FakeConductor()).async_client(), config, threads, texts or tokenizer())
        with contextlib.closing(app.state.pictures):
            async with http_serving(app, config) as running:
                yield running


async def ask(port: int, *pieces: bytes) -> bytes:
    """Send, and return everything until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    answered = await reader.read()
    writer.close()
    return answered


async def test_requests_and_hostile_bytes() -> None:
    """One after the other at one server, which serves on."""
    async with serving(max_body_bytes=2048) as (_, port):
        assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 OK")
        assert (await ask(port, b"\x16\x03\x01\x02\x00 hello TLS")).startswith(b"HTTP/1.1 400 ")
        assert (await ask(port, b"GET /health HTTP/1.1\r\nbad header\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await ask(port, HEAD + b"x: " + b"y" * 100_000)).startswith(b"HTTP/1.1 400 ")
        assert (await ask(port, HEAD + b"content-length: -5\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await ask(port, HEAD + b"content-length: 9999999999\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        chunks = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n"
        assert (await ask(port, chunks, b"800\r\n" + b" " * 2048)).startswith(b"HTTP/1.1 413 ")
        assert (await ask(port, chunks, b"what\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 OK")


async def test_the_rest_of_a_refused_body_is_dropped_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a client that sends first, and reads then, sees the answer."""
    monkeypatch.setattr(http_connection, "LINGER_S", 3600.0)
    async with serving(max_body_bytes=2048) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 9999999999\r\n\r\n")
        for _ in range(6):
            writer.write(bytes(1 << 20))
            await asyncio.wait_for(writer.drain(), 60.0)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_trailers_are_bounded_and_left_out() -> None:
    """Fields behind a body: many, or one without end, take no memory; a few change nothing."""
    chunked = CLOSING[: -len(BODY)].replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked")
    ended = chunked + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n"
    many = b"".join(b"x%d: %s\r\n" % (number, b"y" * 500) for number in range(48))
    async with serving() as (_, port):
        assert (await ask(port, ended + b"host: y\r\nx: y\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        for trailer in (many, b"x: " + b"y" * 24_000):
            answered = await ask(port, ended + trailer)
            assert answered.startswith(b"HTTP/1.1 400 ")
            assert b"trailer" in answered


async def test_nonsense_after_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The rest of a body that nobody wanted is no HTTP: the connection is closed, and nothing fails."""
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 404 Not Found\r\n"
        writer.write(b"what\r\n")
        assert b"HTTP/1.1" not in await reader.read()
        writer.close()
    assert caplog.records == []


async def test_nonsense_within_an_answer_ends_the_connection() -> None:
    holding = Holding(answer()[:2])
    async with serving(AsyncClient(transport=holding)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM)
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        writer.write(b"what\r\n\r\n")
        assert b"HTTP/1.1" not in await reader.read()
        await holding.call.ended.wait()
        writer.close()


async def test_what_comes_too_slowly_is_closed() -> None:
    """Nothing, half a head, half a head after a whole request, half a body."""
    async with serving(read_timeout_s=0.5) as (server, port):
        asked = (ask(port), ask(port, HEAD), ask(port, CHAT, HEAD), ask(port, CHAT[:-5]))
        nothing, half, once, cut = await asyncio.gather(*asked)
        assert (nothing, half) == (b"", b"")
        assert once.startswith(b"HTTP/1.1 200 OK")
        assert once.count(b"HTTP/1.1") == 1
        assert cut.startswith(b"HTTP/1.1 408 ")
        assert server.open_connections == 0


async def test_idle_connections_keep_nobody_out() -> None:
    """One too many takes the place of one without a request."""
    async with serving(max_connections=2) as (server, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 OK")
        assert server.open_connections == 1
        for _, writer in held:
            writer.close()


async def test_a_connection_whose_request_is_answered_is_idle_again() -> None:
    async with serving(max_connections=1) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM)
        await reader.readuntil(b"\r\n0\r\n\r\n")
        assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 OK")
        assert await reader.read() == b""
        writer.close()


async def test_no_connection_is_closed_as_idle_within_an_answer() -> None:
    """The time of an idle connection ends with the next request."""
    holding = HeldUntil(answer())
    async with serving(AsyncClient(transport=holding)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 ")
        (connection,) = server.server_state.connections
        assert isinstance(connection, HttpConnection)
        while connection.timeout_keep_alive_task is None:  # noqa: ASYNC110  # turns of the event loop
            await asyncio.sleep(0)
        writer.write(CHAT)
        await holding.begun.wait()
        assert connection.timeout_keep_alive_task is None
        holding.go.set()
        await reader.readuntil(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_requests_keep_their_connections() -> None:
    """When all have a request, one too many is closed."""
    holding = Holding(answer()[:2])
    async with serving(AsyncClient(transport=holding), max_connections=1) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM)
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        assert await ask(port) == b""
        assert not holding.call.cancelled
        writer.close()


async def test_bodies_that_never_end_lock_nobody_out() -> None:
    """The one that has been coming for longest makes room."""
    async with serving(max_connections=3) as (_, port):
        slow = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 99\r\n\r\n{")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            slow.append((reader, writer))
        assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 OK")
        assert await slow[0][0].read() == b""
        assert not slow[2][0].at_eof()
        for _, writer in slow:
            writer.close()


@asynccontextmanager
async def unread(write_timeout_s: float) -> AsyncIterator[tuple[HttpServer, socket.socket, Holding]]:
    """A server, a client that has asked for an endless answer and reads nothing, and the conductor's side."""
    placed, *_ = answer()
    pieces = (pb.TokenDelta(position=number, token_ids=[7], text="x" * 100_000) for number in itertools.count())
    holding = Holding(itertools.chain([placed], (pb.GenerateResponse(delta=piece) for piece in pieces)))
    loop = asyncio.get_running_loop()
    async with serving(AsyncClient(transport=holding), write_timeout_s=write_timeout_s) as (server, port):
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, STREAM)
            yield server, client, holding


async def test_answer_that_is_not_read_is_given_up() -> None:
    """The client reads nothing: its connection ends after `write_timeout_s`, and its request with it."""
    async with unread(0.05) as (_, _, holding):
        await holding.call.ended.wait()


async def test_a_closed_connection_whose_client_reads_nothing_ends() -> None:
    loop = asyncio.get_running_loop()
    async with unread(1000.0) as (server, client, holding):
        assert (await loop.sock_recv(client, 15)) == b"HTTP/1.1 200 OK"
        (connection,) = server.server_state.connections
        assert isinstance(connection, HttpConnection)
        while not connection.flow.write_paused:  # noqa: ASYNC110  # turns of the event loop
            await asyncio.sleep(0)
        connection.sweep(loop.time() + 500.0, 1000.0, 1000.0)
        await asyncio.sleep(0)
        assert server.open_connections == 1, "the client has 1000 s to read"
        connection.transport.close()
        now = loop.time()
        for later_s in (0.0, 900.0):
            connection.sweep(now + later_s, 1000.0, 1000.0)
            await asyncio.sleep(0)
            assert server.open_connections == 1
        connection.sweep(now + 1001.0, 1000.0, 1000.0)
        await holding.call.ended.wait()
        assert server.open_connections == 0


async def test_drain_lets_answers_end() -> None:
    """A request that runs when the server is told to stop ends, here by its client; new connections are refused."""
    holding = Holding(answer()[:2])
    async with serving(AsyncClient(transport=holding)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM)
        await holding.call.held.wait()
        asyncio.get_running_loop().call_later(0.15, writer.close)
    assert holding.call.cancelled
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_the_first_request_of_a_connection_is_answered_though_the_server_ends() -> None:
    async with serving() as (server, port):
        (asks, answered), (silent, never) = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await ask(port, CLOSING)  # accepted after both
        for connection in list(server.server_state.connections):
            connection.shutdown()
        answered.write(CHAT)
        head = await asks.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in head
        assert await asks.read()
        assert await silent.read() == b""
        answered.close()
        never.close()


async def test_a_request_that_runs_is_its_connections_last_when_the_server_ends() -> None:
    holding = HeldUntil(answer())
    async with serving(AsyncClient(transport=holding)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHAT)
        await holding.begun.wait()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        holding.go.set()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in head
        writer.close()


@pytest.mark.parametrize(("listen", "warned"), [("127.0.0.1:0", 0), ("0.0.0.0:0", 1)])
async def test_plaintext_that_others_reach_is_told(listen: str, warned: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(listen=listen, advertise="localhost"):
        assert sum("in plaintext and open to all" in record.getMessage() for record in caplog.records) == warned


async def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen at"):
        async with serving(listen=f"127.0.0.1:{taken.getsockname()[1]}"):
            pytest.fail("served")


async def test_a_request_that_has_ended_is_freed_at_once() -> None:
    """Reference cycles hold what they tie until the collector looks at old objects, which is rarely."""
    kept = {"GenerationResponse", "GenerationJob", "AsyncTokenStream", "RequestResponseCycle", "HttpConnection"}
    closing = STREAM.replace(b"host: x", b"host: x\r\nconnection: close")
    async with serving() as (_, port):
        for _ in range(2):  # what is made once is made in the first round
            gc.collect()
            gc.disable()
            try:
                for request in (CLOSING, closing, CHAT + STREAM + CLOSING):
                    assert b" 200 " in await ask(port, request)
                await asyncio.sleep(0)  # connections are lost in a later pass of the loop
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                found = {type(left).__name__ for left in gc.garbage}
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
    assert not kept & found, found
