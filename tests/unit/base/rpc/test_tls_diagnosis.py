"""What is told of connections that certificates prevent, at once and in words."""

import asyncio
import time
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
