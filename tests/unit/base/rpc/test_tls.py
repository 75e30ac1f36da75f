"""TLS between processes: who is refused, and certificates that change under a running server."""

import asyncio
import contextlib
import contextvars
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from moonpool.base.errors import ConfigError, Mismatch, MoonpoolError, PermissionDenied, Unauthenticated, Unavailable
from moonpool.base.rpc.api_keys import ApiKeys, hash_key
from moonpool.base.rpc.channels import Channels, probe
from moonpool.base.rpc.roles import (
    ALLOWED,
    CLIENTS,
    RoleGate,
    current_caller,
    fingerprint,
    parse_revoked,
    require_role,
    tenant_of,
)
from moonpool.base.rpc.server import RunningServer, Service, serving
from moonpool.base.rpc.tls import Security, Tls
from moonpool.base.rpc.watched_files import CHECK_INTERVAL_S, WatchedFiles
from moonpool.v1 import adapter_pb2, conductor_pb2, decode_pb2, decode_pb2_grpc, kv_pb2, kvstore_pb2, prefill_pb2
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub
from tests.unit.clocks import hurried

from .certificates import issue, tls

DEADLINE_S = 20.0
CONTRACTS: list[ServiceDescriptor] = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (conductor_pb2, "ConductorService"),
        (prefill_pb2, "PrefillService"),
        (decode_pb2, "DecodeService"),
        (kvstore_pb2, "KVStoreService"),
        (adapter_pb2, "AdapterService"),
    )
]


class Decode:
    """Answers with who called."""

    async def Reserve(self, request: object, context: object) -> decode_pb2.ReserveResponse:
        who = current_caller()
        assert who is not None
        decode = kv_pb2.Instance(id=f"{who.role} {who.name}")
        return decode_pb2.ReserveResponse(target=kv_pb2.TransferTarget(decode=decode))

    async def Steps(self, requests: AsyncIterator[object], context: object) -> AsyncIterator[decode_pb2.StepsResponse]:
        async for _ in requests:
            yield decode_pb2.StepsResponse()


class Conductor:
    """Answers with the tenant of the call."""

    async def Generate(
        self, request: conductor_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[conductor_pb2.GenerateResponse]:
        placed = conductor_pb2.Placed(request_id=tenant_of(request.tenant))
        yield conductor_pb2.GenerateResponse(placed=placed)


@asynccontextmanager
async def secured(folder: Path, **gate: object) -> AsyncIterator[RunningServer]:
    """A decode instance's server, and a port for clients without certificates."""
    security = Security(tls(folder, "decode"), RoleGate(**gate, clock=hurried()), "127.0.0.1:0")  # type: ignore[arg-type]
    services: list[Service] = [(CONTRACTS[2], Decode()), (CONTRACTS[0], Conductor())]
    async with serving("127.0.0.1:0", services, grace_s=0, security=security) as running:
        yield running


async def reserve(server: RunningServer, channels: Channels) -> str:
    stub = decode_pb2_grpc.DecodeServiceStub(channels.get(server.address))
    answer = await stub.Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S)
    return str(answer.target.decode.id)


async def tenant(channels: Channels, address: str, asked: str = "", key: str = "") -> str:
    """As whom the conductor at `address` takes a request that names the tenant `asked`."""
    stub = ConductorServiceStub(channels.get(address))
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    request = conductor_pb2.GenerateRequest(tenant=asked)
    found = [message async for message in stub.Generate(request, timeout=DEADLINE_S, metadata=metadata)]
    return str(found[0].placed.request_id)


async def test_a_role_calls_what_it_may_and_nothing_else(tmp_path: Path) -> None:
    async with secured(tmp_path) as server:
        async with Channels(tls(tmp_path, "conductor", "conductor-7")) as channels:
            assert await reserve(server, channels) == "conductor conductor-7"
        for role in ("prefill", "decode", "kvstore", "gateway", "client", "operator", "adapter"):
            async with Channels(tls(tmp_path, role)) as channels:
                with pytest.raises(PermissionDenied, match=f"role {role} may not call Reserve"):
                    await reserve(server, channels)
                await channels.probe(server.address, DEADLINE_S)


async def test_who_has_no_certificate_of_the_authority_gets_no_connection(tmp_path: Path) -> None:
    mine, foreign = tmp_path / "mine", tmp_path / "foreign"
    for folder in (mine, foreign):
        folder.mkdir()
    async with secured(mine) as server:
        stranger = tls(foreign, "conductor")
        trusting = Tls(mine / "ca.pem", foreign / "conductor.pem", foreign / "conductor.key")
        issue(mine, "conductor", "old", days=-1)
        expired = Tls(mine / "ca.pem", mine / "old.pem", mine / "old.key")
        for shown in (None, Tls(mine / "ca.pem"), stranger, trusting, expired):
            with pytest.raises(Unavailable):
                await probe(server.address, DEADLINE_S, shown)


async def test_a_callers_certificate_proves_no_server(tmp_path: Path) -> None:
    """A tenant who can redirect connections must not stand for a conductor."""
    for role in sorted(CLIENTS):
        security = Security(tls(tmp_path, role), RoleGate(clock=hurried()), "")
        async with serving("127.0.0.1:0", [], grace_s=0, security=security) as server:
            for caller in ("gateway", "conductor", "client"):
                with pytest.raises(Unavailable):
                    await probe(server.address, DEADLINE_S, tls(tmp_path, caller, f"{caller}-7"))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_tls_before_1_2_is_refused(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    versions, found = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2), []
    async with secured(tmp_path) as server:
        for newest in versions:
            context.maximum_version = newest
            address = "127.0.0.1", int(server.client_address.rpartition(":")[2])
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                _, writer = await asyncio.open_connection(*address, ssl=context)
                found.append(newest)
                writer.close()
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    await writer.wait_closed()
    assert found == [ssl.TLSVersion.TLSv1_2]


async def test_a_certificate_without_a_role_is_refused(tmp_path: Path) -> None:
    async with secured(tmp_path) as server, Channels(tls(tmp_path, "janitor")) as channels:
        with pytest.raises(Unauthenticated, match="names no role"):
            await reserve(server, channels)


async def test_a_revoked_certificate_is_refused_from_the_next_call_on(tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("# none\n")
    async with secured(tmp_path, revoked=revoked) as server, Channels(tls(tmp_path, "conductor")) as channels:
        assert await reserve(server, channels) == "conductor conductor"
        shown = fingerprint((tmp_path / "conductor.pem").read_bytes())
        revoked.write_text(f"sha256:{shown.upper()}  # stolen\n")
        with pytest.raises(Unauthenticated, match="revoked"):
            await reserve(server, channels)
        revoked.write_text("not a line\n")  # what was revoked stays
        with pytest.raises(Unauthenticated, match="revoked"):
            await reserve(server, channels)


async def test_certificates_change_without_a_restart(tmp_path: Path) -> None:
    """A new authority takes over: the server shows its certificate to new connections, the client trusts it."""
    async with secured(tmp_path) as server:
        mine = tls(tmp_path, "conductor")
        async with Channels(mine) as channels:
            assert await reserve(server, channels) == "conductor conductor"
            (tmp_path / "ca.pem").unlink()
            (tmp_path / "ca.key").unlink()
            issue(tmp_path, "decode")
            issue(tmp_path, "conductor", "conductor")
            assert await reserve(server, channels) == "conductor conductor"
            assert mine.generation == 1
            (tmp_path / "conductor.pem").write_text("damaged")
            assert await reserve(server, channels) == "conductor conductor"
            assert mine.generation == 1


async def test_streams_outlive_every_change_of_certificates(tmp_path: Path) -> None:
    async with secured(tmp_path) as server, Channels(tls(tmp_path, "conductor")) as channels:
        stub = decode_pb2_grpc.DecodeServiceStub(channels.get(server.address))
        steps: grpc.aio.StreamStreamCall[decode_pb2.StepsRequest, decode_pb2.StepsResponse] = stub.Steps(
            timeout=DEADLINE_S
        )
        for _ in range(3):
            await steps.write(decode_pb2.StepsRequest())
            assert await steps.read() == decode_pb2.StepsResponse()
            before = channels.get(server.address)
            issue(tmp_path, "conductor")
            assert await reserve(server, channels) == "conductor conductor"
            assert channels.get(server.address) is not before
        await steps.write(decode_pb2.StepsRequest())
        assert await steps.read() == decode_pb2.StepsResponse()


def test_files_are_looked_at_now_and_then_only(tmp_path: Path) -> None:
    path, now = tmp_path / "file", [0.0]
    watched = WatchedFiles([path], lambda: now[0])
    path.write_text("here")
    assert not watched.changed()
    now[0] += CHECK_INTERVAL_S
    assert [watched.changed(), watched.changed()] == [True, False]
    now[0] += CHECK_INTERVAL_S
    assert not watched.changed()
    path.unlink()
    now[0] += CHECK_INTERVAL_S
    assert watched.changed()


async def test_a_key_is_a_tenant_and_calls_nothing_internal(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{hash_key('ann-key')} ann\n")
    async with secured(tmp_path, keys=ApiKeys(keys)) as server, Channels(Tls(tmp_path / "ca.pem")) as channels:
        assert await tenant(channels, server.client_address, key="ann-key") == "ann"
        with pytest.raises(PermissionDenied, match="not the caller's"):
            await tenant(channels, server.client_address, asked="bob", key="ann-key")
        for wrong in ("", "bob-key"):
            with pytest.raises(Unauthenticated):
                await tenant(channels, server.client_address, key=wrong)
        stub = decode_pb2_grpc.DecodeServiceStub(channels.get(server.client_address))
        metadata = (("authorization", "Bearer ann-key"),)
        with pytest.raises(MoonpoolError) as caught:
            await stub.Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S, metadata=metadata)
        assert isinstance(caught.value, PermissionDenied)


async def test_a_clients_certificate_names_its_tenant_and_a_gateway_speaks_for_all(tmp_path: Path) -> None:
    async with secured(tmp_path) as server:
        async with Channels(tls(tmp_path, "client", "ann")) as channels:
            assert await tenant(channels, server.address) == "ann"
            with pytest.raises(PermissionDenied, match="not the caller's"):
                await tenant(channels, server.address, asked="bob")
        async with Channels(tls(tmp_path, "gateway")) as channels:
            assert await tenant(channels, server.address, asked="bob") == "bob"


def test_every_method_of_the_contracts_has_its_roles() -> None:
    methods = {f"/{contract.full_name}/{method.name}" for contract in CONTRACTS for method in contract.methods}
    assert ALLOWED.keys() == methods


class Shown:
    """A call's context that shows a certificate for a role."""

    def __init__(self, role: str) -> None:
        self._role = role

    def auth_context(self) -> dict[str, list[bytes]]:
        uri = f"moonpool:role:{self._role}".encode()
        return {"x509_pem_cert": [b"pem"], "x509_subject_alternative_name": [uri], "x509_common_name": [b"x-0"]}


@pytest.mark.parametrize(
    ("role", "joins_as"),
    [
        ("prefill", {"prefill"}),
        ("decode", {"decode"}),
        ("kvstore", {"kvstore"}),
        ("engine", {"prefill", "decode"}),
        ("adapter", {"prefill", "decode"}),
    ],
)
def test_an_instance_joins_as_what_its_certificate_says(role: str, joins_as: set[str]) -> None:
    """One of role `engine` as either kind: it changes roles without another certificate."""
    joined = set()

    def join(kind: str) -> None:
        RoleGate().admit("/moonpool.v1.ConductorService/Join", Shown(role))
        require_role(kind)
        joined.add(kind)

    for kind in ("prefill", "decode", "kvstore"):
        with contextlib.suppress(Mismatch):
            contextvars.copy_context().run(join, kind)
    assert joined == joins_as


def test_without_security_requests_say_their_tenant() -> None:
    assert tenant_of("ann") == "ann"
    require_role("prefill")


@pytest.mark.parametrize("text", ["abc", "sha256:12", "sha256:" + "g" * 64])
def test_a_wrong_line_of_revoked_certificates_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="line 2 is not of the form sha256:HEX"):
        parse_revoked("# comment\n" + text)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    issue(tmp_path, "decode")
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "decode.pem", tmp_path / "decode.key"
    wrong: list[tuple[tuple[Path, Path | None, Path | None], str]] = [
        ((tmp_path / "none", cert, key), "tls_ca"),
        ((ca, cert, None), "tls_key"),
        ((ca, None, key), "tls_cert"),
        ((ca, tmp_path, key), "tls_cert"),
    ]
    for files, field in wrong:
        with pytest.raises(ConfigError) as caught:
            Tls(*files)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="tls_revoked"):
        RoleGate(tmp_path / "none")
    assert isinstance(caught.value, MoonpoolError)


def test_the_environment_names_what_a_client_has(tmp_path: Path) -> None:
    issue(tmp_path, "client")
    assert Tls.from_environment({}) is None
    found = Tls.from_environment({"MOONPOOL_TLS_CA": str(tmp_path / "ca.pem")})
    assert found is not None
    with pytest.raises(ConfigError, match="go together"):
        Tls.from_environment({"MOONPOOL_TLS_CA": "x", "MOONPOOL_TLS_CERT": "y"})
