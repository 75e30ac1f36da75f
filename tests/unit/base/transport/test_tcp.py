"""How a link's TCP sockets are set up."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from moonpool.base.transport.base import ListenOptions
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.tcp import tune_tcp
from tests.unit.base.transport.pairs import transport_settings

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


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_plain_tcp_that_others_can_reach_says_so(host: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    files = {
        name: value for name, value in transport_settings("tls", Path("/unused")).items() if name.startswith("tls_")
    }
    for trusted in (True, False):
        caplog.clear()
        config = TransportConfig(
            kv_transports="tcp", kv_transports_trusted=trusted, listen=f"{host}:0", advertise="127.0.0.1", **files
        )
        [transport] = open_transports(config)
        with ExitStack() as stack:
            _, address = transport.listen(stack, ListenOptions(config, 1, 1))
        assert address.startswith("127.0.0.1:")
        assert ("in plaintext to all on the way" in caplog.text) == (warned and trusted)
