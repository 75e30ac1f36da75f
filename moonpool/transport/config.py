"""The names of the transports, the flags that choose them, and which of them this machine can use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, field_validator

from moonpool.config import ServiceConfig
from moonpool.errors import ConfigError
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

TRANSPORT_KINDS = {"local": kv_pb2.LANE_KIND_LOCAL, "tcp": kv_pb2.LANE_KIND_TCP}
"""Lanes by name. gRPC stands beside all of them."""


GRPC_NAME = "grpc"


MAX_PATH_BYTES = 107
"""Longest path of a unix socket, less its end."""


STALE_S = 60.0
"""A socket without a listener that is older was left by a process that ended."""


_BOOT = Path("/proc/sys/kernel/random/boot_id")


log = get_logger(__name__)


def transport_name(kind: kv_pb2.LaneKind.ValueType) -> str:
    """The name of a kind; that of gRPC for none."""
    return next((name for name, number in TRANSPORT_KINDS.items() if number == kind), GRPC_NAME)


def _check_names(text: str) -> str:
    names = text.split(",")
    if not set(names) <= {GRPC_NAME, *TRANSPORT_KINDS} or len(set(names)) < len(names):
        raise ValueError(f"must be some of grpc, {', '.join(TRANSPORT_KINDS)}, with commas between them")
    return text


class TransportConfig(ServiceConfig):
    """Flags of services that exchange KV."""

    flag_groups: ClassVar = {"KV cache": ("kv_lanes",)}
    kv_lanes: Annotated[str, AfterValidator(_check_names)] = Field(
        "local",
        description="ways to move KV, best first, separated by commas: local (shared memory, between processes of one "
        "user on one machine), tcp (plain TCP at a port of its own); grpc is always the last resort, and alone when "
        "only it is named",
    )
    kv_lanes_dir: Path | None = Field(
        None,
        description="folder for the sockets of local lanes; all processes that use them need the same one (in "
        "containers a volume); default: moonpool-UID in XDG_RUNTIME_DIR or the temporary folder",
    )
    kv_lanes_trusted: bool = Field(
        False,
        description="use lanes beside gRPC even with `tls_cert`, although what they carry is neither encrypted nor "
        "authenticated",
    )

    @field_validator("kv_lanes_dir", mode="before")
    @classmethod
    def _no_dir(cls, value: Any) -> Any:
        return None if value == "" else value


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What a process can use.

    Attributes:
        names: of lanes, best first; gRPC not among them.
        folder: for sockets; None without local lanes.
        place: names machine, user and folder; "" without local lanes.
    """

    names: tuple[str, ...] = ()
    folder: Path | None = None
    place: str = ""

    @classmethod
    def of(cls, config: TransportConfig) -> TransportSettings:
        """As the flags say.

        Raises:
            ConfigError: the socket folder that they name cannot be used.
        """
        names = tuple(name for name in config.kv_lanes.split(",") if name in TRANSPORT_KINDS)
        if config.tls_cert is not None and not config.kv_lanes_trusted:
            return cls()
        if "local" not in names:
            return cls(names)
        try:
            folder = _socket_folder(config.kv_lanes_dir)
            return cls(names, folder, machine_id(folder))
        except (OSError, ValueError) as error:
            if config.kv_lanes_dir is not None:
                raise ConfigError("kv_lanes_dir", f"{config.kv_lanes_dir}: {error}") from error
            log.warning("no local lanes", reason=str(error))
            return cls(tuple(name for name in names if name != "local"))

    @property
    def kinds(self) -> list[kv_pb2.LaneKind.ValueType]:
        """The lanes, best first."""
        return [TRANSPORT_KINDS[name] for name in self.names]


def machine_id(folder: Path) -> str:
    """Names this machine (until it is started anew), user and folder; processes with the same one share memory."""
    found = folder.stat()
    text = f"{_BOOT.read_text().strip()}:{os.getuid()}:{found.st_dev}:{found.st_ino}"
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


def _socket_folder(folder: Path | None) -> Path:
    """The folder, made if need be, and only this user's; raises OSError or ValueError where there is none."""
    if not sys.platform.startswith("linux"):
        raise ValueError("only Linux has what they need")
    if folder is None:
        folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"moonpool-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()  # not where a link leads that somebody else has put there
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError("must be a folder of this user, and others must not write there")
    if len(os.fsencode(socket_path(folder, (1 << 63) - 1))) > MAX_PATH_BYTES:
        raise ValueError("its path is too long for a unix socket")
    return folder


def socket_path(folder: Path, incarnation: int) -> Path:
    """Where the instance of an incarnation listens."""
    return folder / f"{incarnation:016x}.sock"


def remove_stale(folder: Path) -> None:
    """Blocking, but short. Removes sockets that processes left which were killed."""
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if time.time() - path.stat().st_mtime < STALE_S:
                continue
            probe.setblocking(False)
            if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                path.unlink()
