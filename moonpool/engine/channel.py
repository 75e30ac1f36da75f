"""The local channel between an I/O process and one engine process: length-prefixed pickles over a socket pair.

Pickle is safe here and only here: both ends are this program, and no other process can reach the pair.
"""

import asyncio
import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30


class ChannelClosed(Exception):  # noqa: N818 - an ending, not a fault
    """The other end has closed."""


def encode(message: object) -> bytes:
    """Return a message with the message's length before."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(body) <= MAX_MESSAGE_BYTES
    return _LENGTH.pack(len(body)) + body


class BlockingChannel:
    """The engine process's end. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message; block while the other end does not read.

        Raises:
            ChannelClosed: The other end has closed.
        """
        data = encode(message)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> Any:
        """Return the next message; blocks until there is one.

        Raises:
            ChannelClosed: The other end has closed.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))  # noqa: S301 - see the module's docstring

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                got = self._socket.recv(size - len(data))
            except OSError as error:
                raise ChannelClosed from error
            if not got:
                raise ChannelClosed
            data += got
        return bytes(data)


class AsyncChannel:
    """The I/O process's end, for one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "AsyncChannel":
        """Take over a connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, message: object) -> None:
        """Send a message without waiting; dropped when the other end has closed (`receive` raises).

        The protocol bounds the messages under way: `max_steps_in_flight` and their gates.
        """
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Any:
        """Return the next message.

        Raises:
            ChannelClosed: The other end has closed.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed from error
        return pickle.loads(body)  # noqa: S301 - see the module's docstring

    def close(self) -> None:
        """Close this end at once."""
        self._writer.close()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
