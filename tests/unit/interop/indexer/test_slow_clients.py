"""Connections to an indexer that ask nothing or too slowly are closed, and others are answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest
from aiohttp import web

from moonpool.interop.indexer.slow_clients import SlowClients

WAIT_S = 30.0
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def serving(slow: SlowClients) -> AsyncIterator[int]:
    """A server that answers with a body's length; yields the port."""

    async def length(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    app = web.Application(middlewares=[slow.middleware()])
    app.router.add_post("/", length)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    assert runner.server is not None
    watching = asyncio.create_task(slow.watch(runner.server))
    try:
        yield runner.addresses[0][1]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await runner.cleanup()


async def said(port: int, text: bytes) -> bytes:
    """What comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    found = b""
    try:
        async with asyncio.timeout(WAIT_S):
            with suppress(ConnectionError):
                while piece := await reader.read(1 << 12):
                    found += piece
    finally:
        writer.close()
    return found


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD + b"content-length: 9\r\n\r\nabc", b"HTTP/1.1 408"),
        (HEAD + b"content-length: 3\r\n\r\nabc", b"HTTP/1.1 200"),
        (HEAD + b"content-length: 3\r\n\r\nabc" + HEAD, b"HTTP/1.1 200"),
    ],
    ids=["silent", "head", "body", "idle", "second head"],
)
async def test_what_asks_nothing_or_too_slowly_is_closed(text: bytes, status: bytes) -> None:
    async with serving(SlowClients(seconds=0.1)) as port:
        assert (await said(port, text))[: len(b"HTTP/1.1 200")] == status


class Client:
    """A connection that tells whether it was closed."""

    closed = False

    def force_close(self) -> None:
        self.closed = True


def test_those_that_have_been_quiet_for_longest_are_closed() -> None:
    """Whatever the order in which the server names its connections."""
    slow, clients = SlowClients(seconds=60.0, most=3), [Client() for _ in range(4)]
    for now, known in enumerate((clients[3:], clients[2:], clients[1:], clients)):
        slow.look(cast("list[web.RequestHandler]", known), float(now))
    assert [client.closed for client in clients] == [False, False, False, True]


async def test_the_quietest_of_too_many_make_room() -> None:
    async with serving(SlowClients(seconds=0.8, most=3)) as port:
        quiet = [asyncio.create_task(said(port, b"")) for _ in range(6)]
        done, _ = await asyncio.wait(quiet, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert done
        close = HEAD + b"connection: close\r\ncontent-length: 3\r\n\r\nabc"
        assert (await said(port, close)).startswith(b"HTTP/1.1 200")
        await asyncio.gather(*quiet)
