"""The shared-memory transport ("local").

Both processes map the other's regions. A unix socket passes the descriptors, and carries the messages.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from moonpool.base.errors import ConfigError, FrameError, PermissionDenied
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.base import AcceptedRegions, ListenOptions, OfferedRegions, TransportUnavailableError
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.regions import Mailbox, MappedRegion, SharedRegion
from moonpool.base.transport.socket_connection import SocketTransport, connect_socket
from moonpool.v1 import kv_pb2

MAX_PATH_BYTES = 107
"""Longest path for a unix socket, without the final zero byte."""
STALE_S = 60.0
"""An older socket without a listener was left by a process that ended."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CREDENTIALS = struct.Struct("3i")


class SharedMemoryTransport(SocketTransport):
    """Shared memory between one user's processes on one machine.

    Attributes:
        scope: names machine, user and socket folder.
        folder: holds the sockets.
    """

    name = "local"
    kind = kv_pb2.TRANSPORT_KIND_LOCAL
    encrypted_as = "local"  # never leaves the machine, and only the user can connect

    def __init__(self, folder: Path, uid: int | None = None) -> None:
        """Uses sockets in `folder`; peers must belong to the user `uid`, by default this process' own."""
        self.folder = folder
        self.scope = machine_id(folder)
        self._uid = os.getuid() if uid is None else uid

    @classmethod
    def create(cls, config: TransportConfig, tls: Tls | None) -> Self:
        """Make the socket folder if there is none."""
        try:
            return cls(_socket_folder(config.kv_transports_dir))
        except (OSError, ValueError) as error:
            if config.kv_transports_dir is not None:
                raise ConfigError("kv_transports_dir", f"{config.kv_transports_dir}: {error}") from error
            raise TransportUnavailableError(str(error)) from error

    def listen(self, stack: contextlib.ExitStack, options: ListenOptions) -> tuple[socket.socket, str]:
        """Listen at a socket in the folder, named after the process' epoch."""
        remove_stale(self.folder)
        path = socket_path(self.folder, options.epoch)
        try:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(os.fspath(path))
            stack.callback(path.unlink, missing_ok=True)
            listener.listen(options.backlog)
        except OSError as error:
            raise ConfigError("kv_transports_dir", f"cannot listen at {path}: {error.strerror}") from error
        return listener, os.fspath(path)

    async def connect(self, address: str) -> socket.socket:
        """Connect to a socket in the folder."""
        return await connect_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address)

    def check_peer(self, sock: socket.socket) -> None:
        """Accept processes that run as the same user."""
        if peer_uid(sock) != self._uid:
            raise PermissionDenied("the peer is another user's")

    def offer_regions(self, share: Sequence[SharedRegion], mailbox_bytes: int) -> OfferedRegions:
        """Show `share`, or a mailbox: payloads go one way on a stream."""
        return OfferedRegions(mailbox=Mailbox(mailbox_bytes)) if mailbox_bytes else OfferedRegions(share)

    def accept_regions(self, fds: Sequence[int], opening: kv_pb2.TransportOpen) -> AcceptedRegions:
        return AcceptedRegions(*map_regions(fds, opening.regions))


def map_regions(
    fds: Sequence[int], told: Sequence[kv_pb2.Region]
) -> tuple[dict[int, MappedRegion], tuple[int, MappedRegion] | None]:
    """A peer's regions: regions to be read, by number; number and memory of the lent region, if any.

    Raises:
        FrameError: They are not what was told.
        OSError: One cannot be mapped.
    """
    if len(fds) != len(told) or sum(region.lent for region in told) > 1:
        raise FrameError(f"{len(fds)} descriptors came for {len(told)} regions")
    readable: dict[int, MappedRegion] = {}
    lent = None
    for number, (fd, each) in enumerate(zip(fds, told, strict=True), 1):
        if each.lent:
            lent = number, MappedRegion(fd, each.bytes, writable=True)
        else:
            readable[number] = MappedRegion(fd, each.bytes)
    return readable, lent


def machine_id(folder: Path) -> str:
    """Name this machine (until the next boot), user and folder; processes with the same name share memory."""
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
    found = folder.lstat()  # not the target of a link that another user has put there
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError("must be a folder of this user, and others must not write there")
    if len(os.fsencode(socket_path(folder, (1 << 63) - 1))) > MAX_PATH_BYTES:
        raise ValueError("its path is too long for a unix socket")
    return folder


def socket_path(folder: Path, epoch: int) -> Path:
    """Where an epoch's instance listens."""
    return folder / f"{epoch:016x}.sock"


def remove_stale(folder: Path) -> None:
    """Blocking, but short. Removes sockets that processes left which were killed."""
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if time.time() - path.stat().st_mtime < STALE_S:
                continue
            probe.setblocking(False)
            if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                path.unlink()


def peer_uid(sock: socket.socket) -> int:
    """The user that owns the process at a unix socket's other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
