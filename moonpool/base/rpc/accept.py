"""Accepted sockets, of which none is left open when whoever accepts is cancelled."""

import asyncio
import contextlib
import socket
from typing import Any


async def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    """As the loop's `sock_accept`; a connection that has come when the caller is cancelled is closed.

    `sock_accept` would leave it open, and nobody would have it.
    """
    loop = asyncio.get_running_loop()
    accepting = loop.create_task(loop.sock_accept(listener))
    try:
        return await asyncio.shield(accepting)
    except asyncio.CancelledError:
        with contextlib.suppress(ValueError):  # the listener is closed
            loop.remove_reader(listener)
        loop.call_soon(accepting.cancel)  # behind the turn in which the task gets what has come
        accepting.add_done_callback(_close_accepted)
        raise


def _close_accepted(accepting: asyncio.Task[tuple[socket.socket, Any]]) -> None:
    if not accepting.cancelled() and accepting.exception() is None:
        accepting.result()[0].close()


def close_if_cancelled(task: asyncio.Task[None], sock: socket.socket) -> None:
    """Close the socket of a task that is cancelled; the task itself cannot, if it has not begun."""
    task.add_done_callback(lambda ended: sock.close() if ended.cancelled() else None)
