"""The TCP transport ("tcp"): plain TCP at a separate port; payloads follow their messages. Within TLS: tls.py."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Self

from moonpool.base.config import format_address, is_loopback, parse_address
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.tls import Tls
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.base import ListenOptions
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.socket_connection import SocketTransport, connect_socket
from moonpool.v1 import kv_pb2

log = get_logger(__name__)


class TcpTransport(SocketTransport):
    """Plain TCP: no encryption, no authentication besides the offer's token."""

    name = "tcp"
    kind = kv_pb2.TRANSPORT_KIND_TCP
    encrypted_as = "tls"

    @classmethod
    def create(cls, config: TransportConfig, tls: Tls | None) -> Self:
        return cls()

    def listen(self, stack: contextlib.ExitStack, options: ListenOptions) -> tuple[socket.socket, str]:
        """Listen at a free port on the host where the service listens."""
        config = options.config
        host, _ = parse_address(config.listen)
        try:
            listener = stack.enter_context(socket.create_server((host, 0), family=_family(host)))
        except OSError as error:
            raise ConfigError("kv_transports", f"cannot listen at {host} for tcp: {error.strerror}") from error
        if not is_loopback(host):
            self.on_exposed(host)
        shown = host if is_loopback(host) else parse_address(config.advertised(1))[0]
        return listener, format_address(shown, listener.getsockname()[1])

    def on_exposed(self, host: str) -> None:
        """Other machines may reach the listener at `host`: says what they see."""
        log.warning(
            "KV over TCP is in plaintext to all on the way; see tls_cert and kv_transports_trusted", listen=host
        )

    async def connect(self, address: str) -> socket.socket:
        """Connect to "host:port"."""
        loop = asyncio.get_running_loop()
        host, port = parse_address(address)
        family, _, _, _, target = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        return await connect_socket(socket.socket(family, socket.SOCK_STREAM), target)

    def check_peer(self, sock: socket.socket) -> None:
        """Accept every peer, and set up the socket."""
        tune_tcp(sock)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def tune_tcp(sock: socket.socket) -> None:
    """Set up a connected TCP socket, as each end does for sending.

    No bytes wait for more bytes to be sent together. Between processes on one machine, the oldest congestion control is
    used, which every Linux has and allows for all users. A control that paces by the shortest round trip (BBR) would
    take the time until the other process reads for congestion, and hold bytes back. Between machines the system's
    choice stands.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform.startswith("linux") and sock.getpeername()[0] == sock.getsockname()[0]:
        with contextlib.suppress(OSError):  # may be forbidden here after all
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
