"""A transport of its own, as docs/extend/kv_transport.md describes: abstract unix sockets, payloads over the socket."""

from __future__ import annotations

import contextlib
import socket
from typing import Self

from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.base import ListenOptions
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.socket_connection import SocketTransport, connect_socket


class ToyTransport(SocketTransport):
    """Abstract unix sockets, named after the process' epoch."""

    name = "toy"
    kind = 100

    @classmethod
    def create(cls, config: TransportConfig, tls: Tls | None) -> Self:
        return cls()

    def listen(self, stack: contextlib.ExitStack, options: ListenOptions) -> tuple[socket.socket, str]:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        address = f"moonpool-toy-{options.epoch:x}"
        listener.bind(f"\0{address}")
        listener.listen(options.backlog)
        return listener, address

    async def connect(self, address: str) -> socket.socket:
        return await connect_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0{address}")

    def check_peer(self, sock: socket.socket) -> None:
        """Accepts every process of this machine."""
