"""HTTPS: the gateway's own certificate, read again when it changes; a pair that is wrong changes nothing."""

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.errors import ConfigError
from moonpool.base.rpc.watched_files import CHECK_INTERVAL_S, WatchedFiles
from moonpool.cli.certs import app
from moonpool.gateway.certificates import ReloadedCertificate
from tests.unit.base.transport.turns import turn
from tests.unit.gateway.test_http_server import CLOSING, serving

from .fakes import settings


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    result = CliRunner().invoke(
        app, ["create", str(folder), "--role", "gateway", "--name", name, "--host", "localhost"]
    )
    assert result.exception is None
    return folder / f"{name}.pem", folder / f"{name}.key"


def put(source: tuple[Path, Path], target: tuple[Path, Path], at: int) -> None:
    """Replace a pair of files, as at a time of its own."""
    for given, taken in zip(source, target, strict=True):
        taken.write_bytes(given.read_bytes())
        os.utime(taken, ns=(at, at))


async def ask(port: int, authority: Path, pieces: bytes) -> tuple[bytes, str]:
    """What is answered over TLS, and the common name of the certificate that was shown."""
    context = ssl.create_default_context(cafile=str(authority))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    shown = writer.get_extra_info("peercert")
    writer.write(pieces)
    answered = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answered, dict(pair[0] for pair in shown["subject"])["commonName"]


async def test_https(tmp_path: Path) -> None:
    """Requests are served; a client that speaks plain HTTP gets none."""
    cert, key = make(tmp_path, "one")
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as (_, port):
        answered, name = await ask(port, tmp_path / "ca.pem", CLOSING)
        assert answered.startswith(b"HTTP/1.1 200 OK")
        assert name == "one"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CLOSING)
        assert b"200 OK" not in await reader.read()
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(
                "127.0.0.1", port, ssl=ssl.create_default_context(), server_hostname="localhost"
            )


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_tls_before_1_2_is_refused(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "one")
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    found = []
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as (_, port):
        for newest in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2):
            context.maximum_version = newest
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
                found.append(newest)
                writer.close()
    assert found == [ssl.TLSVersion.TLSv1_2]


async def test_silent_connections_lock_nobody_out(tmp_path: Path) -> None:
    """A connection counts before its handshake; of those that say nothing the oldest is closed first."""
    cert, key = make(tmp_path, "one")
    async with serving(ssl_certfile=cert, ssl_keyfile=key, max_connections=10) as (server, port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        answered, _ = await ask(port, tmp_path / "ca.pem", CLOSING)
        assert answered.startswith(b"HTTP/1.1 200 OK")
        assert server.open_connections <= 10
        closed = [reader for reader, _ in silent[:30] if await reader.read() == b""]
        assert len(closed) == 30
        assert not any(reader.at_eof() for reader, _ in silent[-9:])
        for _, writer in silent:
            writer.close()
        [(_, part)] = [await asyncio.open_connection("127.0.0.1", port)]
        part.write(b"\x16\x03\x01\x02")  # the first bytes of a hello
    # the server ends although a handshake is under way
    part.close()


@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_that_comes_as_the_server_ends_is_closed(tmp_path: Path, turns: int) -> None:
    """In whatever turn of the loop: before it is accepted, before its handshake begins, within that."""
    cert, key = make(tmp_path, "one")
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as (_, port):
        peer = socket.create_connection(("127.0.0.1", port))
        peer.settimeout(60)
        await turn(turns)
    with peer, contextlib.suppress(ConnectionError):
        assert await asyncio.to_thread(peer.recv, 1) == b""


def shown(https: ReloadedCertificate, authority: Path) -> str:
    """The common name of the certificate that a new connection is shown."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(authority))
    client = context.wrap_bio(to_client, to_server, server_hostname="localhost")
    server = https.context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    certificate = client.getpeercert()
    assert certificate is not None
    return dict(pair[0] for pair in certificate["subject"])["commonName"]  # type: ignore[misc]


def test_certificates_are_read_again(tmp_path: Path) -> None:
    first, two = make(tmp_path, "one"), make(tmp_path, "two")
    served, now = (tmp_path / "served.pem", tmp_path / "served.key"), [0.0]
    put(first, served, 1)
    https = ReloadedCertificate(*served, WatchedFiles(served, lambda: now[0]))
    names = [shown(https, tmp_path / "ca.pem")]
    put((two[0], first[1]), served, 2)  # the key is another one's
    now[0] += CHECK_INTERVAL_S
    names.append(shown(https, tmp_path / "ca.pem"))
    put(two, served, 3)
    names.append(shown(https, tmp_path / "ca.pem"))  # they were looked at just now
    now[0] += CHECK_INTERVAL_S
    names.append(shown(https, tmp_path / "ca.pem"))
    served[0].unlink()
    now[0] += CHECK_INTERVAL_S
    names.append(shown(https, tmp_path / "ca.pem"))
    assert names == ["one", "one", "one", "two", "two"]


async def test_wrong_settings(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "one")
    with pytest.raises(ConfigError, match=r"ssl_keyfile.*go together"):
        settings(ssl_certfile=cert)
    with pytest.raises(ConfigError, match=r"ssl_certfile.*go together"):
        settings(ssl_keyfile=key)
    for wrong in (tmp_path / "nothing.pem", key):
        with pytest.raises(ConfigError, match="ssl_certfile"):
            async with serving(ssl_certfile=wrong, ssl_keyfile=key):
                pytest.fail("served")
