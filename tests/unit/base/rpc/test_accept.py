"""Connections that come while a listener ends: each is closed, whatever the turn of the loop in which the end comes."""

import asyncio
import socket
from contextlib import suppress

import pytest

from moonpool.base.rpc.accept import accept, close_if_cancelled
from tests.unit.base.transport.turns import turn

TURNS = 8
"""In these, a connection that is there has been accepted."""


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def ended(peer: socket.socket) -> bool:
    """Whether the other end has closed the connection; waits for that."""
    with suppress(ConnectionError):
        return peer.recv(1) == b""
    return True


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("turns", range(TURNS))
async def test_no_connection_is_lost_when_accepting_is_cancelled(
    listener: socket.socket, turns: int, before: bool
) -> None:
    """Python warns of a socket that nobody closes, and the warning fails the test."""
    listener.setblocking(False)
    with listener, socket.socket() as peer:
        peer.settimeout(60)
        if before:
            peer.connect(listener.getsockname())
        accepting = asyncio.create_task(accept(listener))
        await turn()
        if not before:
            peer.connect(listener.getsockname())
        for _ in range(turns):
            await asyncio.sleep(0)
        if accepting.done():
            accepting.result()[0].close()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        listener.close()
        await turn()
        assert ended(peer)


async def test_a_closed_listener_can_be_left() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    accepting = asyncio.create_task(accept(listener))
    await turn()
    listener.close()
    accepting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await accepting


@pytest.mark.parametrize("begun", [False, True])
async def test_a_task_that_is_cancelled_leaves_no_socket(begun: bool) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        task = asyncio.create_task(asyncio.sleep(3600))
        close_if_cancelled(task, ours)
        if begun:
            await turn()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await turn()
        assert ended(theirs)


async def test_a_task_that_ends_keeps_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        task = asyncio.create_task(asyncio.sleep(0))
        close_if_cancelled(task, ours)
        await task
        await turn()
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
