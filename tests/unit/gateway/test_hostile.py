"""Clients that mean harm, over real sockets: each is answered or closed, nothing of theirs comes back as a header, and
others are served meanwhile. What is only malformed, too large or never read: `test_http_server`, `test_body`."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.rpc.api_keys import hash_key
from moonpool.gateway.http_connection import MAX_BODY_PIECES, MAX_PIPELINED, PARSED_BYTES, TURNS_BYTES, ParseTurns
from tests.unit.gateway.test_http_server import BODY, CHAT, CLOSING, HEAD, ask, serving

IDLE_BYTES = 16 << 10
"""Memory that an idle connection may take."""
FIXED_BYTES = 8 << 20
"""Memory that a process may take besides, for whatever reason."""


async def drip(port: int, at_once: bytes, data: bytes) -> bytes:
    """Send byte by byte until the server answers or closes; returns what it says first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = asyncio.create_task(reader.read(1 << 16))
    writer.write(at_once)
    try:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            if (await asyncio.wait({answered}, timeout=0.01))[0]:
                break
    except ConnectionError:
        pass
    said = await asyncio.gather(answered, return_exceptions=True)
    writer.close()
    return said[0] if isinstance(said[0], bytes) else b""


async def test_heads_and_bodies_byte_by_byte() -> None:
    """Each byte comes in time, the whole does not (slowloris): the time is that of a head, and of a body."""
    async with serving(read_timeout_s=0.2) as (server, port):
        head, body = await asyncio.gather(
            drip(port, b"", HEAD + b"x-more: " + b"y" * 4000),
            drip(port, HEAD + b"content-length: 4000\r\n\r\n", b" " * 4000),
        )
        assert head == b""
        assert body.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in body.lower()
        assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 OK")
        assert server.open_connections == 0


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
        b"POST /v1/chat\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET " + b"/" * 1_000_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 200_000 + b"\r\n",
    ],
    ids=["lengths", "coding", "hosts", "no host", "path", "null", "space", "long path", "many headers"],
)
async def test_heads_that_are_none(head: bytes) -> None:
    """Also those by which a proxy and a server can be made to see different requests."""
    async with serving() as (_, port):
        said = await drip(port, head, b"")
        unread = len(head) > 100_000  # closing then resets the connection, and the answer may be lost
        assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ")) or (unread and not said)
        assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 OK")


async def test_nothing_of_a_client_becomes_a_header() -> None:
    """Neither field names, nor a trace, an id or a path with line ends in them, however they are written."""
    evil = b"a\\r\\nset-cookie: evil=1"
    body = BODY[:-1] + b',"%b":1,"\\u000d\\u000aset-cookie: evil":2}' % evil
    heads = b"connection: close\r\nx-request-id: %0d%0aset-cookie: evil=1\r\ntraceparent: 00-\tset-cookie: evil\r\n"
    async with serving() as (_, port):
        sent = HEAD + heads + b"content-length: %d\r\n\r\n" % len(body) + body
        answered = (await ask(port, sent)).partition(b"\r\n\r\n")[0]
        assert answered.startswith(b"HTTP/1.1 200 OK")
        assert b'warning: 299 moonpool "ignored fields: ?"' in answered
        assert b"evil" not in answered
        path = b"GET /v1/%0d%0aset-cookie:%20evil=1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answered = (await ask(port, path)).partition(b"\r\n\r\n")[0]
        assert answered.startswith(b"HTTP/1.1 404 ")
        assert b"evil" not in answered


@pytest.mark.parametrize("key", [b"wrong", b"ann-ke", b"ann-keyy", b"\xff\xfe", b"ann", b"sha256:%b", b"x" * 8000])
async def test_wrong_keys(key: bytes, tmp_path: Path) -> None:
    """The body is not waited for, and neither the hash nor the tenant is a key."""
    (tmp_path / "keys").write_text(f"sha256:{hash_key('ann-key')} ann\n")
    key = key.replace(b"%b", hash_key("ann-key").encode())
    async with serving(api_keys=tmp_path / "keys") as (_, port):
        head = HEAD + b"connection: close\r\nauthorization: Bearer " + key + b"\r\ncontent-length: 100\r\n\r\n"
        answered = await ask(port, head)
        assert answered.startswith(b"HTTP/1.1 401 ")
        assert b"ann" not in answered.replace(b"application", b"")


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"


async def test_nothing_more_is_parsed_behind_a_refusal(tmp_path: Path) -> None:
    """However many chunks one read brings: the key is looked at after the first of them."""
    (tmp_path / "keys").write_text(f"sha256:{hash_key('ann-key')} ann\n")
    async with serving(api_keys=tmp_path / "keys") as (_, port):
        said = await ask(port, CHUNKED + b"\r\n" + b"1\r\n \r\n" * (2 * MAX_BODY_PIECES))
        assert said.startswith(b"HTTP/1.1 401 ")


async def test_a_large_body_comes_whole() -> None:
    """In pieces, also of which the end is that of a read, and with the next request right behind."""
    async with serving() as (_, port):
        for length in (PARSED_BYTES - 1, PARSED_BYTES, PARSED_BYTES + 1, 3 * PARSED_BYTES, 1 << 20):
            body = BODY + b" " * length
            sent = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
            last = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            assert (await ask(port, sent + last)).count(b"HTTP/1.1 200 OK") == 2


async def test_connections_with_data_take_turns_with_everything_else() -> None:
    """Answers in progress go on between the turns; a turn that fails is the last of its connection alone."""
    turns, order, loop = ParseTurns(), list[str](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: order.append("failed"))

    def take(name: str) -> int:
        order.append(name)
        if name == "b":
            raise ValueError(name)
        return TURNS_BYTES

    for name in "abc":
        turns.add(partial(take, name))
    for _ in range(3):
        await asyncio.sleep(0)
        order.append("answer")
    assert order == ["a", "answer", "b", "failed", "answer", "c", "answer"]
    turns.add(partial(take, "d"))
    await asyncio.sleep(0)
    assert order[-1] == "d"


async def test_a_body_in_tiny_chunks_is_refused() -> None:
    """Each chunk costs more than its bytes: as many as a body in sensible chunks has, and no more."""
    async with serving() as (server, port):
        said = await ask(port, CHUNKED + b"\r\n" + b"1\r\n \r\n" * (MAX_BODY_PIECES + 1))
        assert said.startswith(b"HTTP/1.1 400 ")
        few = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
        said = await ask(port, CHUNKED + b"connection: close\r\n\r\n" + few + b"0\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200 OK")
        assert server.open_connections == 0


async def test_two_lengths_of_one_body_are_refused() -> None:
    """Content-Length beside chunks: a proxy before this server may see another request in what follows."""
    async with serving() as (_, port):
        sent = CHUNKED + b"content-length: 4\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        said = await ask(port, sent + CLOSING)
        assert said.startswith(b"HTTP/1.1 400 ")
        assert said.count(b"HTTP/1.1") == 1


async def test_nothing_is_read_after_a_refused_key(tmp_path: Path) -> None:
    """The client gets the response while it still sends; what it sends is no request any more."""
    (tmp_path / "keys").write_text(f"sha256:{hash_key('ann-key')} ann\n")
    async with serving(api_keys=tmp_path / "keys") as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + b"\r\n1\r\n \r\n")
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 401 Unauthorized\r\n"
        assert b"connection: close\r\n" in (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.write(b"0\r\n\r\n" + CLOSING)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            assert b"HTTP/1.1" not in await reader.read()
        writer.close()
        assert server.open_connections == 0


async def test_more_requests_at_once_than_are_answered() -> None:
    async with serving() as (server, port):
        few = await ask(port, *[CHAT] * 8, CLOSING)
        assert few.count(b"HTTP/1.1 200 OK") == 9
        short = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_PIPELINED + 2)
        assert len(short) <= PARSED_BYTES, "parsed before the first is answered"
        assert (await ask(port, short)).count(b"HTTP/1.1 200 OK") <= MAX_PIPELINED + 1
        assert server.open_connections == 0


@asynccontextmanager
async def process(connections: int) -> AsyncIterator[tuple[int, int]]:
    """A gateway in a process of its own; yields its id and its port."""
    flags = ["--listen", "127.0.0.1:0", "--conductor", "127.0.0.1:9", "--model", str(model_dir())]
    flags += ["--set", f"max_connections={connections}", "--set", "read_timeout_s=600"]
    command = [sys.executable, "-m", "moonpool.gateway", *flags]
    running = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=Path.cwd())
    try:
        assert running.stdout is not None
        ready = (await running.stdout.readline()).decode()
        yield running.pid, int(ready.strip().rpartition(":")[2])
    finally:
        running.terminate()
        await running.wait()


def resident_bytes(pid: int) -> int:
    """Memory that a process has now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def hold(pid: int, port: int, count: int, each_bytes: int) -> None:
    """Open so many connections, half of them with a part of a head, and look at the process while they are there."""

    async def answers() -> bool:
        got = await ask(port, b"GET /v1/nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return got.startswith(b"HTTP/1.1 404 ")

    assert await answers()
    before, held = resident_bytes(pid), []
    try:
        for number in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            held.append(writer)
            if number % 2:
                writer.write(HEAD)
        assert await answers()
        assert resident_bytes(pid) - before < FIXED_BYTES + count * each_bytes
    finally:
        for writer in held:
            writer.close()


async def test_idle_connections_take_little() -> None:
    """The clients are in the same process here, and take as much again."""
    async with serving(read_timeout_s=600.0) as (_, port):
        await hold(os.getpid(), port, 300, 2 * IDLE_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("connections", [4096, 12_000], ids=["beyond the limit", "within"])
async def test_ten_thousand_idle_connections(connections: int) -> None:
    """Held, or closed for new ones where fewer are allowed: the process answers, and its memory stays bounded."""
    async with process(connections) as (pid, port):
        await hold(pid, port, 10_000, IDLE_BYTES)
