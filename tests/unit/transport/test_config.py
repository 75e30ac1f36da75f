"""Which lanes a process offers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import ConfigError
from moonpool.transport.config import (
    TransportConfig,
    TransportSettings,
    machine_id,
    remove_stale,
    socket_path,
    transport_name,
)
from moonpool.v1 import kv_pb2

LOCAL, TCP = kv_pb2.LANE_KIND_LOCAL, kv_pb2.LANE_KIND_TCP


def settings(folder: Path, *flags: str) -> TransportSettings:
    return TransportSettings.of(TransportConfig.load(["--set", f"kv_lanes_dir={folder}", *flags]))


def test_local_is_the_default_and_tcp_is_only_there_when_asked_for(tmp_path: Path) -> None:
    assert settings(tmp_path) == TransportSettings(("local",), tmp_path, machine_id(tmp_path))
    assert settings(tmp_path, "--kv-lanes", "tcp,local").kinds == [TCP, LOCAL]
    assert settings(tmp_path, "--kv-lanes", "grpc") == TransportSettings()
    assert settings(tmp_path, "--kv-lanes", "grpc,tcp") == TransportSettings(("tcp",))
    assert [transport_name(kind) for kind in (LOCAL, TCP, kv_pb2.LANE_KIND_UNSPECIFIED)] == ["local", "tcp", "grpc"]


@pytest.mark.parametrize("lanes", ["rdma", "local,,tcp", "local,local", "Local"])
def test_unknown_lanes_are_refused_by_name(lanes: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_lanes: must be some of grpc, local, tcp"):
        TransportConfig.load(["--kv-lanes", lanes])


def test_with_tls_there_is_only_grpc_unless_the_lanes_are_trusted(tmp_path: Path) -> None:
    tls = ["--set", "tls_cert=a", "--set", "tls_key=b", "--set", "tls_ca=c"]
    assert settings(tmp_path, "--kv-lanes", "local,tcp", *tls) == TransportSettings()
    assert settings(tmp_path, "--kv-lanes", "local,tcp", "--set", "kv_lanes_trusted=true", *tls).names == (
        "local",
        "tcp",
    )


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert settings(folder).folder == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    other = tmp_path / "other"
    assert settings(other).place != settings(folder).place


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_a_folder_in_which_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"kv_lanes_dir: .*others must not write"):
        settings(tmp_path)


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"kv_lanes_dir: .*must be a folder of this user"):
        settings(tmp_path / "link")


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_lanes_dir: .*too long"):
        settings(tmp_path / ("x" * 100))


def test_without_a_folder_of_its_own_choice_a_process_does_without_local_lanes(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = TransportConfig.load(["--kv-lanes", "local,tcp"])
    assert TransportSettings.of(config).folder == tmp_path / f"moonpool-{os.getuid()}"
    (tmp_path / f"moonpool-{os.getuid()}").chmod(0o777)
    assert TransportSettings.of(config) == TransportSettings(("tcp",))


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
