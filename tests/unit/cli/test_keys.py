"""`moonpool keys`: a file of hashes, which the gateway's own reader takes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.errors import ConfigError, InvalidRequest, NotFound
from moonpool.base.rpc.api_keys import ApiKeys, hash_key, parse_keys
from moonpool.cli.main import app


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "moonpool" / "keys"


def keys(*words: str) -> str:
    """What `moonpool keys` prints; an error is raised."""
    return CliRunner().invoke(app, ["keys", *words], catch_exceptions=False).stdout


def test_a_key_is_shown_once_and_the_gateway_knows_it(file: Path) -> None:
    key = keys("create", "Ann Lee", "--rpm", "60").strip()
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert ApiKeys(file).tenant(key) == "Ann Lee"
    (limits,) = parse_keys(file.read_text()).limits.values()
    assert (limits.requests, limits.tokens) == (60, None)
    (listed,) = json.loads(keys("list", "--json"))
    assert (listed["id"], listed["tenant"], listed["rpm"]) == (hash_key(key)[:12], "Ann Lee", 60)
    assert len(listed["made"]) == len("2025-01-31")
    assert listed["id"] in keys("list")


def test_keys_are_revoked_by_id_key_and_tenant(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("# ours\ntenant rpm=9 ann\n")
    first, second, third, fourth = (keys("create", name).strip() for name in ("ann", "ann", "bob", "ann"))
    keys("revoke", hash_key(first)[:12])
    keys("revoke", second)
    with pytest.raises(NotFound, match="no such key"):
        keys("revoke", second)
    assert set(ApiKeys(file).owners(third)) == set()
    keys("revoke", "ann")
    assert set(parse_keys(file.read_text()).tenants.values()) == {"bob"}
    assert file.read_text().startswith("# ours\ntenant rpm=9 ann\n"), "other lines stay"
    assert fourth not in file.read_text()


@pytest.mark.parametrize("tenant", ["", " ", "a#b", "rpm=5", "x" * 300])
def test_a_tenant_that_no_line_can_hold(file: Path, tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant: "):
        keys("create", tenant)
    assert not file.exists()


def test_a_file_that_is_wrong_is_left_alone(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("nonsense\n")
    for words in (["create", "ann"], ["list"], ["revoke", "ann"]):
        with pytest.raises(ConfigError, match=r"file: .*line 1 is not of the form"):
            keys(*words)
    assert file.read_text() == "nonsense\n"


def test_no_keys_yet(file: Path) -> None:
    done = CliRunner().invoke(app, ["keys", "list"])
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"no keys in {file}" in done.stderr
