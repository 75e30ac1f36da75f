"""A stack whose connections are all TLS: it serves whom it should, and a plaintext client gets nowhere.

Compute is emulated: such engines check each block of KV that comes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from moonpool.base.errors import PermissionDenied, Unauthenticated, Unavailable
from moonpool.base.rpc.api_keys import hash_key
from moonpool.base.rpc.tls import Tls
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.certs import Authority
from moonpool.cli.health import run_health
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, Client
from moonpool.client.kv import KVClient
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import BLOCK, SEED
from tests.integration.stack import CheckedStack

KINDS = ("conductor", "kvstore", "prefill", "decode")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def flags(folder: Path, kind: str) -> list[str]:
    """A service's certificate, key and authority."""
    files = {"tls_cert": folder / f"{kind}.pem", "tls_key": folder / f"{kind}.key", "tls_ca": folder / "ca.pem"}
    return [part for name, file in files.items() for part in ("--set", f"{name}={file}")]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority.at(folder)
    for role in (*KINDS, "operator"):
        authority.issue(folder, role, role, [], 1)
    authority.issue(folder, "client", "ann", [], 1)
    return folder


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[CheckedStack]:
    """The stack, asked by an operator."""
    folder = tmp_path_factory.mktemp("secured")
    create("tiny-llama", folder / "model", seed=SEED, dtype="float32")
    keys = folder / "keys"
    keys.write_text(f"sha256:{hash_key('ann-key')} ann\n")
    extra: dict[str, Sequence[str]] = {kind: flags(certificates, kind) for kind in KINDS}
    for kind in ("kvstore", "prefill", "decode"):
        extra[kind] = [*extra[kind], "--kv-transports", "tcp"]  # with certificates this is tls
    for kind in ("conductor", "kvstore"):
        extra[kind] = [*extra[kind], "--set", "client_listen=127.0.0.1:0", "--set", f"api_keys={keys}"]
    operator = Tls(certificates / "ca.pem", certificates / "operator.pem", certificates / "operator.key")
    plan = StackPlan(
        model=str(folder / "model"), data_dir=folder, engine="emulated:llama-70b-a800", time_scale=20, block_size=BLOCK,
        dram_bytes=16 << 20, tls=operator, extra=extra,
    )  # fmt: skip
    with CheckedStack(plan) as stack:
        yield stack


def client_address(stack: CheckedStack, service: str = "conductor") -> str:
    """Where a service takes clients without certificates, by its log."""
    log = stack.services[service].log_path.read_text()
    [line] = [line for line in log.splitlines() if "clients with API keys" in line]
    return line.rpartition("address=")[2].split()[0]


def test_requests_are_served_and_kv_is_stored(secured: CheckedStack, certificates: Path) -> None:
    prompt = list(range(20, 20 + 5 * BLOCK + 3))
    ann = Tls(certificates / "ca.pem", certificates / "ann.pem", certificates / "ann.key")
    with Client(secured.address, tls=ann) as client:
        results = [client.generate(token_ids=prompt, sampling=GREEDY, tenant="ann") for _ in range(2)]
    with Client(client_address(secured), tls=Tls(certificates / "ca.pem"), api_key="ann-key") as client:
        results.append(client.generate(token_ids=prompt, sampling=GREEDY))
    assert [result.token_ids for result in results] == [results[0].token_ids] * 3
    assert len(results[0].token_ids) == 12
    assert [result.usage.cached_tokens >= 5 * BLOCK for result in results] == [False, True, True]
    assert secured.gauge("kvstore", "blocks_put_total") > 0
    for kind in ("kvstore", "decode"):
        assert secured.gauge(kind, "transports_tls_opened_total") > 0
        assert secured.gauge(kind, "transports_refused_total") == 0


def test_others_are_refused(secured: CheckedStack, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = Tls(certificates / "ca.pem")
    decode = Tls(certificates / "ca.pem", certificates / "decode.pem", certificates / "decode.key")
    prompt = [20, 21, 22]
    with Client(secured.address, tls=decode) as client, pytest.raises(PermissionDenied, match="role decode"):
        client.generate(token_ids=prompt, sampling=GREEDY)
    with Client(client_address(secured), tls=trusting, api_key="bob-key") as client, pytest.raises(Unauthenticated):
        client.generate(token_ids=prompt, sampling=GREEDY)
    with Client(client_address(secured), tls=trusting, api_key="ann-key") as client:
        with pytest.raises(PermissionDenied, match="not the caller's"):
            client.generate(token_ids=prompt, sampling=GREEDY, tenant="bob")
        with pytest.raises(PermissionDenied, match="ClusterState"):
            client.cluster_state()
    with Client(secured.address, connect_timeout_s=0.0) as client, pytest.raises(Unavailable):
        client.generate(token_ids=prompt, sampling=GREEDY)
    store = secured.services["kvstore-0"].address
    assert run_health(store, timeout_s=10, wait_s=0, joined=0) == 1
    for name, file in (("CA", "ca.pem"), ("CERT", "operator.pem"), ("KEY", "operator.key")):
        monkeypatch.setenv(f"MOONPOOL_TLS_{name}", str(certificates / file))
    assert run_health(store, timeout_s=10, wait_s=0, joined=0) == 0


def test_a_kvstore_takes_values_of_clients_with_keys(secured: CheckedStack, certificates: Path) -> None:
    address, trusting = client_address(secured, "kvstore-0"), Tls(certificates / "ca.pem")
    with KVClient(address, namespace="test", tls=trusting, api_key="ann-key") as client:
        assert client.put(b"k", b"of ann")
        assert client.get(b"k") == bytearray(b"of ann")
        assert client.delete(b"k")
    with KVClient(address, namespace="test", tls=trusting, api_key="bob-key") as client, pytest.raises(Unauthenticated):
        client.get(b"k")


def test_a_client_deletes_its_own_kv_however_it_names_the_tenant(secured: CheckedStack, certificates: Path) -> None:
    with Client(client_address(secured), tls=Tls(certificates / "ca.pem"), api_key="ann-key") as client:
        client.generate(token_ids=list(range(40, 40 + 2 * BLOCK + 1)), sampling=GREEDY)
        with pytest.raises(PermissionDenied, match="not the caller's"):
            client.delete_kv(tenants=["bob"])
        deleted = client.delete_kv(tenants=[""])
    assert deleted.blocks > 0


async def test_no_log_has_a_key(secured: CheckedStack, certificates: Path) -> None:
    async with AsyncClient(client_address(secured), tls=Tls(certificates / "ca.pem"), api_key="ann-key") as client:
        await client.generate(token_ids=[30, 31], sampling=GREEDY)
    for service in secured.services.values():
        assert "ann-key" not in service.log_path.read_text()
