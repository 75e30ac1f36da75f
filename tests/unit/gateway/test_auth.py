"""API keys: the file, its changes, and whose request a key makes it."""

import os
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError, Unauthenticated
from moonpool.base.rpc.api_keys import ApiKeys, KeyFile, KeyLimits, hash_key, parse_keys
from moonpool.client.testing import FakeConductor
from tests.unit.clocks import hurried

from .fakes import answering

ANN = f"sha256:{hash_key('ann-key')} ann\n"
BOB = f"sha256:{hash_key('bob-key')} bob & co\n"


def write(path: Path, text: str, at: int) -> Path:
    """Write the file as at a time of its own: changes are told apart however fast they come."""
    path.write_text(text)
    os.utime(path, ns=(at, at))
    return path


def test_file() -> None:
    assert hash_key("ann-key") == "21fdbeecb49c56644f6cc4444328f5da14132c8a38fd86aad19b4da9e521a79c"
    text = f"# keys\n\n{ANN}{BOB.upper().replace('BOB & CO', 'bob & co')}  # Bob's\n"
    assert parse_keys(text) == KeyFile({hash_key("ann-key"): "ann", hash_key("bob-key"): "bob & co"}, {}, {})


def test_budgets_in_the_file() -> None:
    """Of keys, and of tenants over all their keys."""
    x, y = hash_key("x"), hash_key("y")
    file = parse_keys(f"sha256:{x} rpm=60 TPM=1000 ann\nsha256:{y}\ttpm=5\tann & bob\ntenant rpm=7 ann\n{BOB}")
    assert file.tenants == {x: "ann", y: "ann & bob", hash_key("bob-key"): "bob & co"}
    assert [(owner.told, owner.limits) for owner in file.owners(x)] == [
        ("this key", KeyLimits(60, 1000)),
        ("this key's tenant", KeyLimits(7, None)),
    ]
    assert [owner.limits for owner in file.owners(y)] == [KeyLimits(None, 5)]
    assert file.owners(hash_key("bob-key")) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ann-key ann", "line 1 is not of the form"),
        ("sha256:abc ann", "line 1 is not of the form"),
        (f"{ANN}sha256:{hash_key('x')}", "line 2 is not of the form"),
        (ANN + ANN, "line 2: this key stands here twice"),
        (f"sha256:{hash_key('x')} {'t' * 257}", "line 1: a tenant has at most 256"),
        (f"sha256:{hash_key('x')} rpm=0 ann", "line 1 is not of the form"),
        (f"sha256:{hash_key('x')} tpm=many ann", "line 1 is not of the form"),
        (f"sha256:{hash_key('x')} rpm=5", "line 1 is not of the form"),
        (f"sha256:{hash_key('x')} rpm=5 rpm=6 ann", "line 1: rpm and tpm stand there once"),
        ("tenant ann", "line 1: a tenant has one line"),
        ("tenant rpm=5 ann\ntenant rpm=5 ann", "line 2: a tenant has one line"),
    ],
)
def test_wrong_file(text: str, says: str, tmp_path: Path) -> None:
    """Names the line, and never says what stands there: it may be a key."""
    with pytest.raises(ConfigError, match=says) as caught:
        ApiKeys(write(tmp_path / "keys", text, 1))
    assert caught.value.field == "api_keys"
    assert "ann-key" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys(tmp_path / "keys")


def test_changes_are_read(tmp_path: Path) -> None:
    """A new file counts at once; one that is wrong or gone leaves the keys as they were."""
    path = write(tmp_path / "keys", ANN, 1)
    keys = ApiKeys(path, hurried())
    assert keys.tenant("ann-key") == "ann"
    write(path, BOB, 2)
    assert keys.tenant("bob-key") == "bob & co"
    with pytest.raises(Unauthenticated):
        keys.tenant("ann-key")
    write(path, "nonsense", 3)
    assert keys.tenant("bob-key") == "bob & co"
    path.unlink()
    assert keys.tenant("bob-key") == "bob & co"
    write(path, ANN + BOB, 4)
    assert keys.tenant("ann-key") == "ann"


async def test_keys_make_tenants(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", ANN + BOB, 1)
    async with answering(FakeConductor(), api_keys=path) as gateway:
        gateway.http.headers["authorization"] = "Bearer bob-key"
        assert (await gateway.chat()).status_code == 200
        assert gateway.asked.tenant == "bob & co"
        del gateway.http.headers["authorization"]
        gateway.http.headers["x-api-key"] = "ann-key"  # as Anthropic's clients send it
        assert (await gateway.chat()).status_code == 200
        assert gateway.fake.requests[-1].tenant == "ann"


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic ann-key", "ann-key", "Bearer ännn"])
async def test_wrong_keys(given: str | None, tmp_path: Path) -> None:
    """Refused before the body is looked at; health and metrics ask for none."""
    path = write(tmp_path / "keys", ANN, 1)
    async with answering(FakeConductor(), api_keys=path) as gateway:
        if given is not None:
            gateway.http.headers["authorization"] = given
        for answered in (
            await gateway.chat(),
            await gateway.plain(nonsense=1),
            await gateway.http.get("/v1/models"),
            await gateway.http.get("/v1/models/tiny"),
            await gateway.http.post("/tokenize", json={"prompt": "x"}),
            await gateway.http.post("/detokenize", json={"tokens": []}),
        ):
            assert answered.status_code == 401
            assert answered.headers["www-authenticate"] == "Bearer"
            assert answered.json()["error"]["code"] == "invalid_api_key"
        assert (await gateway.http.get("/health")).status_code == 200
        assert (await gateway.http.get("/metrics")).status_code == 200
        assert gateway.fake.requests == []
