"""What is told of connections that certificates prevent, at once and in words."""

import asyncio
import gc
import socket
import ssl
import threading
import time
import warnings
from pathlib import Path

import pytest

from moonpool.base.errors import PermissionDenied
from moonpool.base.rpc.roles import RoleGate
from moonpool.base.rpc.server import Service, serving
from moonpool.base.rpc.tls import Security, Tls
from moonpool.base.rpc.tls_diagnosis import tls_trouble
from moonpool.cli.certs import Authority
from moonpool.client import AsyncClient
from moonpool.client.transport import NotTrusted
from moonpool.v1 import conductor_pb2

from .certificates import tls

SERVICE: Service = (conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"], object())


def expired(folder: Path, role: str) -> Tls:
    """A certificate whose time is over."""
    Authority.at(folder).issue(folder, role, f"old-{role}", [], -1)
    return Tls(folder / "ca.pem", folder / f"old-{role}.pem", folder / f"old-{role}.key")


def told(server: Tls | None, client: Tls | None) -> str:
    """What a client hears from a server."""

    async def story() -> str:
        security = None if server is None else Security(server, RoleGate(None, None))
        async with serving("127.0.0.1:0", [SERVICE], security=security) as running:
            said = await tls_trouble(running.address, client)
            began = time.monotonic()
            async with AsyncClient(running.address, tls=client, connect_timeout_s=30.0) as asking:
                with pytest.raises(NotTrusted if said else PermissionDenied) as caught:
                    await asking.cluster_state()
            if said:
                assert time.monotonic() - began < 15.0, "not tried again until the time is over"
                assert str(caught.value) == said
            return said.replace(running.address, "HERE")

    return asyncio.run(story())


def test_who_is_not_trusted_hears_why(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    good, client = tls(ours, "conductor"), tls(ours, "client")
    assert told(good, client) == ""
    assert told(None, client).startswith("HERE speaks plaintext and this side TLS: give")
    assert told(expired(ours, "conductor"), client) == (
        "HERE shows a certificate that is not accepted: certificate has expired"
    )
    assert told(good, expired(ours, "client")).startswith(
        f"HERE does not accept {ours}/old-client.pem: the certificate has expired 1.0 days ago"
    )
    assert told(tls(theirs, "conductor"), client).startswith("HERE shows a certificate that is not accepted: ")
    assert told(good, Tls(ours / "ca.pem")).startswith("HERE does not accept connections without a certificate: ")


def test_a_plaintext_client_of_a_server_with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_TLS_CA", raising=False)
    assert told(tls(tmp_path, "conductor"), None) == (
        "HERE speaks TLS and this side does not: set MOONPOOL_TLS_CA, or tls_ca of a service"
    )


def test_nobody_there_is_no_trouble_of_certificates(tmp_path: Path) -> None:
    assert asyncio.run(tls_trouble("127.0.0.1:1", tls(tmp_path, "client"))) == ""
    assert asyncio.run(tls_trouble("127.0.0.1:1", None)) == ""


def test_a_server_that_ends_no_connection_leaves_none_open(tmp_path: Path) -> None:
    """Within TLS, a client that closes waits for its peer's word, which does not come."""
    tls(tmp_path, "conductor")
    client = tls(tmp_path, "client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "conductor.pem", tmp_path / "conductor.key")
    asked = threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as accepted, context.wrap_socket(accepted, server_side=True) as connection:
            connection.sendall(bytes(9))
            asked.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving_one = threading.Thread(target=serve, args=(listener,))
        serving_one.start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert asyncio.run(tls_trouble(f"127.0.0.1:{listener.getsockname()[1]}", client)) == ""
            gc.collect()
        asked.set()
        serving_one.join()
    assert [str(each.message) for each in caught] == []
