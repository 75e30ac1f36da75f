"""Which lanes a process offers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import ConfigError
from moonpool.transport.base import Transport
from moonpool.transport.config import TransportConfig
from moonpool.transport.registry import open_transports, transport_class, transport_kinds, transport_name
from moonpool.transport.shared_memory import SharedMemoryTransport, machine_id, remove_stale, socket_path
from moonpool.v1 import kv_pb2

LOCAL, TCP = kv_pb2.LANE_KIND_LOCAL, kv_pb2.LANE_KIND_TCP


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
    assert [transport_name(kind) for kind in (LOCAL, TCP, kv_pb2.LANE_KIND_UNSPECIFIED)] == ["local", "tcp", "grpc"]
    assert transport_kinds() == {"local": LOCAL, "tcp": TCP}


def test_an_unknown_transport_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="there is no transport 'rdma'; known are local, tcp"):
        transport_class("rdma")


@pytest.mark.parametrize("lanes", ["rdma", "local,,tcp", "local,local", "Local"])
def test_unknown_lanes_are_refused_by_name(lanes: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_transports: must be some of grpc, local, tcp"):
        TransportConfig.load(["--kv-transports", lanes])


def test_with_tls_there_is_only_grpc_unless_the_lanes_are_trusted(tmp_path: Path) -> None:
    tls = ["--set", "tls_cert=a", "--set", "tls_key=b", "--set", "tls_ca=c"]
    assert opened(tmp_path, "--kv-transports", "local,tcp", *tls) == ()
    assert names(opened(tmp_path, "--kv-transports", "local,tcp", "--set", "kv_transports_trusted=true", *tls)) == [
        "local",
        "tcp",
    ]


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


def test_without_a_folder_of_its_own_choice_a_process_does_without_local_lanes(
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
