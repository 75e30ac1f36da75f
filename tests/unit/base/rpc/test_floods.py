"""Peers of a gRPC port that begin more than they let end, or never begin."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from moonpool.base.config import parse_address
from moonpool.base.errors import Unavailable
from moonpool.base.rpc import server
from moonpool.base.rpc.channels import probe
from moonpool.base.rpc.peer_calls import CallLimits
from moonpool.base.rpc.roles import RoleGate
from moonpool.base.rpc.server import serving
from moonpool.base.rpc.tls import Security
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from tests.unit.base.rpc.certificates import tls

DEADLINE_S = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK, END_HEADERS = 1, 4
CANCEL = 8
RESETS = 4000


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def literal(name: str, value: str) -> bytes:
    """A header without compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


CHECK = b"".join(
    literal(*header)
    for header in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/grpc.health.v1.Health/Check"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)


def resets(first: int, calls: int) -> bytes:
    """So many calls, each begun and reset."""
    return b"".join(
        frame(HEADERS, END_HEADERS, stream, CHECK) + frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
        for stream in range(first, first + 2 * calls, 2)
    )


@asynccontextmanager
async def resetting(port: int) -> AsyncIterator[None]:
    """A peer that begins and resets some thousand calls, and answers pings."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0) + resets(1, RESETS))

    async def answer_pings() -> None:
        while True:
            head = await reader.readexactly(9)
            content = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == PING and not head[4] & ACK:
                writer.write(frame(PING, ACK, 0, content))

    answering = asyncio.create_task(answer_pings())
    try:
        yield
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("peers", [1, 8])
async def test_rapid_resets_leave_other_connections_their_calls(peers: int) -> None:
    """HTTP/2 rapid reset: gRPC's queue of all connections was full of calls that nobody waits for."""
    limits = CallLimits(connection_calls=256)
    async with serving("127.0.0.1:0", [], grace_s=0, limits=limits) as running, AsyncExitStack() as stack:
        for _ in range(peers):
            await stack.enter_async_context(resetting(running.port))
        for _ in range(5):
            await probe(running.address, DEADLINE_S)


async def test_probes_over_http_are_answered_beside_rapid_resets() -> None:
    """`/livez` and `/readyz` have a thread and a loop of their own."""
    metrics = PrometheusMetrics("decode")
    metrics.ready = lambda: ""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving("127.0.0.1:0", [], grace_s=0))
        address = await stack.enter_async_context(metrics.served("127.0.0.1:0"))
        for _ in range(4):
            await stack.enter_async_context(resetting(running.port))
        for path in ("/livez", "/readyz") * 5:
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()


async def test_connections_beyond_the_bound_are_closed_and_make_room_when_others_end() -> None:
    """Else a peer's silent connections take all descriptors, also those for the service's files."""
    async with serving("127.0.0.1:0", [], grace_s=0, limits=CallLimits(connections=3)) as running:
        begun = []
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
                writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
                assert await reader.read(1), "closed"
                begun.append(writer)
            with pytest.raises(Unavailable):
                await probe(running.address, DEADLINE_S)
            for writer in begun:
                writer.close()
                await writer.wait_closed()
            while True:
                with suppress(Unavailable):
                    await probe(running.address, DEADLINE_S)
                    break


async def test_two_ports_share_half_of_the_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections at both leave the other half, also while nobody has shown a certificate."""
    monkeypatch.setattr(server, "open_files_limit", lambda: 8)
    security = Security(tls(tmp_path, "kvstore"), RoleGate(), "127.0.0.1:0")
    limits = CallLimits(handshake_s=600)
    async with serving("127.0.0.1:0", [], grace_s=0, limits=limits, security=security) as running:
        clients_port = parse_address(running.client_address)[1]
        for port in (running.port, clients_port):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            async with asyncio.timeout(DEADLINE_S):
                with suppress(ConnectionError):
                    assert await opened[2][0].read(1) == b""
            assert not any(reader.at_eof() for reader, _ in opened[:2])
            for _, writer in opened:
                writer.close()


@pytest.mark.parametrize(
    ("said", "within_s"),
    [
        (b"", DEADLINE_S),
        (PREFACE[:10], DEADLINE_S),
        (b"GET / HTTP/1.1\r\n\r\n", DEADLINE_S),
        pytest.param(PREFACE + frame(SETTINGS, 0, 0), 30.0, marks=pytest.mark.slow),  # pings end it after 40 s
    ],
    ids=["silent", "a part", "another protocol", "settings unconfirmed"],
)
async def test_a_connection_that_never_begins_is_closed(said: bytes, within_s: float) -> None:
    """Also one that leaves the server's settings unconfirmed: gRPC bounds a call's metadata only once they are."""
    async with serving("127.0.0.1:0", [], grace_s=0, limits=CallLimits(handshake_s=0.2)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(said)
        async with asyncio.timeout(within_s):
            with suppress(ConnectionError):
                while await reader.read(1 << 10):
                    pass
        writer.close()
        await probe(running.address, DEADLINE_S)
