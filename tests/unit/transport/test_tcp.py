"""How a lane's TCP sockets are set up."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from moonpool.transport.tcp import tune_tcp

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux' choice of congestion control")


@contextmanager
def ends(near: str, far: str) -> Iterator[list[socket.socket]]:
    """Both ends of a connection between two addresses of this machine."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((far, 0)))
        dialled = stack.enter_context(socket.create_connection(listener.getsockname(), source_address=(near, 0)))
        yield [dialled, stack.enter_context(listener.accept()[0])]


def control(sock: socket.socket) -> bytes:
    """The socket's congestion control."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@linux
def test_inside_one_machine_nothing_is_paced() -> None:
    with ends("127.0.0.1", "127.0.0.1") as both:
        for sock in both:
            tune_tcp(sock)
            assert control(sock) == b"reno"
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@linux
def test_to_another_address_the_systems_choice_stands() -> None:
    with ends("127.0.0.1", "127.0.0.2") as both, socket.socket() as fresh:
        for sock in both:
            tune_tcp(sock)
            assert control(sock) == control(fresh)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
