"""`moonpool certs`: an authority that is kept, certificates that others' tools accept, and new ones in time."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from moonpool.base.rpc.roles import CLIENTS, ROLES, fingerprint
from moonpool.cli.certs import Authority, app


def create(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["create", str(folder), *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_one_of_each_role_and_one_more_of_the_same_authority(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert len(create(folder).splitlines()) == len(ROLES)
    authority = (folder / "ca.pem").read_bytes()
    told = create(folder, "--role", "prefill", "--name", "prefill-7", "--host", "a.example", "--host", "10.0.0.7")
    assert told == f"{folder}/prefill-7.pem  prefill  sha256:{fingerprint((folder / 'prefill-7.pem').read_bytes())}\n"
    assert (folder / "ca.pem").read_bytes() == authority
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}
    assert not list(folder.glob("*.new"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_accepts_it(tmp_path: Path) -> None:
    create(tmp_path, "--role", "decode", "--host", "a.example")
    authority, mine = str(tmp_path / "ca.pem"), str(tmp_path / "decode.pem")
    command = ["openssl", "verify", "-CAfile", authority, "-verify_hostname", "a.example", mine]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("role", ROLES)
def test_only_roles_that_serve_prove_a_server(role: str, tmp_path: Path) -> None:
    """A tenant's certificate must not stand for a conductor. A gateway serves HTTPS where hosts are given."""
    for hosts in ([], ["gateway.example"]):
        create(tmp_path, "--role", role, *(word for host in hosts for word in ("--host", host)))
        made = x509.load_pem_x509_certificate((tmp_path / f"{role}.pem").read_bytes())
        names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usages = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        serves = role not in CLIENTS
        assert names.get_values_for_type(x509.DNSName) == [*hosts, *(["moonpool"] if serves else [])]
        assert (ExtendedKeyUsageOID.SERVER_AUTH in usages) == (serves or bool(hosts))
        assert ExtendedKeyUsageOID.CLIENT_AUTH in usages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "janitor"], "role: is one of conductor"),
        (["--name", "one"], "name: is for one role at a time"),
        (["--role", "client", "--name", "ca"], "name: must be a file's name"),
        (["--role", "client", "--name", "../x"], "name: must be a file's name"),
        (["--role", "client", "--name", "x" * 65], "name: must be a file's name of at most 64 characters"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        create(tmp_path, *arguments)


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    create(tmp_path, "--role", "client")
    (tmp_path / "ca.key").unlink()
    with pytest.raises(Exception, match="cannot be used"):
        create(tmp_path, "--role", "client")


def test_those_that_end_soon_are_renewed(tmp_path: Path) -> None:
    create(tmp_path, "--role", "prefill", "--name", "p-7", "--host", "a.example", "--host", "10.0.0.7", "--days", "20")
    create(tmp_path, "--role", "client", "--days", "300")
    other = tmp_path / "other"
    create(other, "--role", "decode", "--days", "1")
    foreign = (other / "decode.pem").read_bytes()
    (tmp_path / "decode.pem").write_bytes(foreign)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    result = CliRunner().invoke(app, ["renew", str(tmp_path)])
    assert result.exit_code == 0, result.output
    changed = {path.name for path in tmp_path.glob("*.*") if path.read_bytes() != before[path.name]}
    assert changed == {"p-7.pem", "p-7.key"}, "not another authority's, and not one that holds longer"
    assert result.output == f"{tmp_path}/p-7.pem  prefill  sha256:{fingerprint((tmp_path / 'p-7.pem').read_bytes())}\n"
    issued = Authority.existing(tmp_path).issued(tmp_path / "p-7.pem")
    assert issued is not None
    assert (issued.role, issued.hosts) == ("prefill", ["a.example", "10.0.0.7"])
    again = CliRunner().invoke(app, ["renew", str(tmp_path)])
    assert again.output == f"no certificate in {tmp_path} ends within 30 days\n"
    nowhere = CliRunner().invoke(app, ["renew", str(tmp_path / "none")])
    assert "has no authority" in str(nowhere.exception)
