"""Which connections a process offers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.base import Transport
from moonpool.base.transport.config import TRANSPORTS, TransportConfig
from moonpool.base.transport.registry import open_transports, transport_class, transport_kinds, transport_name
from moonpool.base.transport.shared_memory import SharedMemoryTransport, machine_id, remove_stale, socket_path
from moonpool.v1 import kv_pb2
from tests.unit.base.rpc.certificates import issue
from tests.unit.base.transport.pairs import certificates, transport_settings

LOCAL, TCP, TLS = kv_pb2.TRANSPORT_KIND_LOCAL, kv_pb2.TRANSPORT_KIND_TCP, kv_pb2.TRANSPORT_KIND_TLS
NIXL = kv_pb2.TRANSPORT_KIND_NIXL


def opened(folder: Path, *flags: str) -> tuple[Transport, ...]:
    return open_transports(TransportConfig.load(["--set", f"kv_transports_dir={folder}", *flags]))


def names(transports: tuple[Transport, ...]) -> list[str]:
    return [transport.name for transport in transports]


def shared_memory(transports: tuple[Transport, ...]) -> SharedMemoryTransport:
    [found] = transports
    assert isinstance(found, SharedMemoryTransport)
    return found


def test_local_is_the_default_and_tcp_is_only_there_when_asked_for(tmp_path: Path) -> None:
    local = shared_memory(opened(tmp_path))
    assert (local.folder, local.scope) == (tmp_path, machine_id(tmp_path))
    assert [transport.kind for transport in opened(tmp_path, "--kv-transports", "tcp,local")] == [TCP, LOCAL]
    assert opened(tmp_path, "--kv-transports", "grpc") == ()
    assert names(opened(tmp_path, "--kv-transports", "grpc,tcp")) == ["tcp"]
    kinds = LOCAL, TCP, TLS, kv_pb2.TRANSPORT_KIND_UNSPECIFIED
    assert [transport_name(kind) for kind in kinds] == ["local", "tcp", "tls", "grpc"]
    assert transport_kinds() == {"local": LOCAL, "tcp": TCP, "tls": TLS, "nixl": NIXL}


def test_an_unknown_transport_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="there is no transport 'rdma'; known are local, tcp, tls, nixl"):
        transport_class("rdma")


@pytest.mark.parametrize("connections", ["rdma", "local,,tcp", "local,local", "Local"])
def test_unknown_transports_are_refused_by_name(connections: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_transports: must be some of grpc, local, tcp, tls, nixl"):
        TransportConfig.load(["--kv-transports", connections])


def test_with_certificates_tcp_is_within_tls_unless_the_network_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [f"{name}={value}" for name, value in transport_settings("tls", tmp_path).items() if "tls_" in name]
    tls = [part for setting in settings for part in ("--set", setting)]
    assert names(opened(tmp_path, "--kv-transports", "local,tcp", *tls)) == ["local", "tls"]
    assert names(opened(tmp_path, "--kv-transports", "tcp,tls", *tls)) == ["tls"]
    trusted = ["--kv-transports", "local,tcp", "--set", "kv_transports_trusted=true"]
    assert names(opened(tmp_path, *trusted, *tls)) == ["local", "tcp"]
    monkeypatch.setitem(TRANSPORTS, "toy", "tests.unit.base.transport.toy:ToyTransport")
    assert opened(tmp_path, "--kv-transports", "toy", *tls) == ()
    assert "no toy transport" in caplog.text
    assert names(opened(tmp_path, "--kv-transports", "toy", "--set", "kv_transports_trusted=true", *tls)) == ["toy"]


def test_tls_needs_a_certificate_of_this_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert: must be given, with tls_key and tls_ca, for the transport tls"):
        opened(tmp_path, "--kv-transports", "tls")
    config = TransportConfig(kv_transports="local,tcp", kv_transports_dir=tmp_path)
    assert names(open_transports(config, Tls(certificates() / "ca.pem"))) == ["local"]
    assert "give tls_cert and tls_key" in caplog.text


def test_a_key_of_another_certificate_is_refused_by_name(tmp_path: Path) -> None:
    issue(tmp_path, "kvstore")
    files = certificates() / "ca.pem", certificates() / "kvstore.pem", tmp_path / "kvstore.key"
    config = TransportConfig(kv_transports="tcp", kv_transports_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"tls_cert: .*mismatch"):
        open_transports(config, Tls(*files))


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert shared_memory(opened(folder)).folder == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    other = tmp_path / "other"
    assert shared_memory(opened(other)).scope != shared_memory(opened(folder)).scope


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_a_folder_in_which_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"kv_transports_dir: .*others must not write"):
        opened(tmp_path)


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"kv_transports_dir: .*must be a folder of this user"):
        opened(tmp_path / "link")


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_transports_dir: .*too long"):
        opened(tmp_path / ("x" * 100))


def test_without_a_folder_of_its_own_choice_a_process_does_without_local_transport(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = TransportConfig.load(["--kv-transports", "local,tcp"])
    assert shared_memory(open_transports(config)[:1]).folder == tmp_path / f"moonpool-{os.getuid()}"
    (tmp_path / f"moonpool-{os.getuid()}").chmod(0o777)
    assert names(open_transports(config)) == ["tcp"]


def test_sockets_without_a_listener_are_removed_when_they_are_old(tmp_path: Path) -> None:
    paths = [socket_path(tmp_path, number) for number in range(3)]
    living = socket.socket(socket.AF_UNIX)
    living.bind(str(paths[0]))
    living.listen()
    for path in paths[1:]:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    for path in paths[:2]:
        os.utime(path, (0, 0))
    remove_stale(tmp_path)
    assert [path.exists() for path in paths] == [True, False, True]
    living.close()
