"""TCP in memory: sockets that `VirtualLoop` connects, and transports over them, as asyncio has them.

A connection holds so many bytes; then its writer waits. Links are those of `tests/world/network.py`, with their faults.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal

from tests.world.loop import Node

if TYPE_CHECKING:
    from tests.world.network import Network

Address = tuple[str, int]
CAPACITY_BYTES = 512 << 10
"""What a connection holds on its way and unread, one way."""
SEGMENT_BYTES = 64 << 10
SEGMENT_S = 0.0005
"""Time between two segments: 125 MB/s."""
HIGH_BYTES = 64 << 10
"""What a transport holds before its writer waits, by default."""
End = Literal["", "over", "reset"]


def _refused(address: Address) -> OSError:
    return ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {address}")


class MemorySocket:
    """A socket of the node that made it, and the kernel's half of its connection.

    Attributes:
        node: whose socket it is.
        address: its own.
        other: the other end of its connection.
        closed: the process has closed it, or has died.
    """

    def __init__(self, network: Network, node: Node) -> None:
        self.network, self.node = network, node
        self.address: Address = ("", 0)
        self.other: MemorySocket | None = None
        self.closed = False
        self._accepts: deque[MemorySocket] | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._transport: MemoryTransport | None = None
        self._received = bytearray()
        self._ended: End = ""
        self._due = 0.0
        self.held = 0
        """Bytes that the other end has sent, and this process has not read."""

    # --- as `socket.socket` has it ---------------------------------------------------------------------------------

    def __enter__(self) -> MemorySocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def setsockopt(self, *option: Any) -> None:
        """Options change nothing here."""

    def bind(self, address: Address) -> None:
        host, port = address
        self.address = host, port or self.network.port()
        if self.address in self.network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.network.listeners[self.address] = self

    def listen(self, backlog: int = 0) -> None:
        self._accepts = deque()

    def getsockname(self) -> Address:
        return self.address

    def close(self) -> None:
        """Close. What was sent arrives; what was not read resets the connection, as TCP has it."""
        if self.closed:
            return
        self.closed = True
        self.network.sockets.pop(self, None)
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]
        for accepted in self._accepts or ():
            accepted.close()
        if self.other is not None and not self._ended:
            self._carry(self.other.end, b"", "reset" if self._received else "over")

    # --- what the loop does with it --------------------------------------------------------------------------------

    async def accept(self) -> tuple[MemorySocket, Address]:
        """Return the next connection, and where it comes from."""
        assert self._accepts is not None, "accepts before it listens"
        while not self._accepts:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        accepted = self._accepts.popleft()
        return accepted, accepted.peername

    async def connect(self, address: Address) -> None:
        """Connect.

        Raises:
            OSError: nobody listens there.
        """
        self.address = f"host of {self.node.name}", self.network.port()
        listener = self.network.listeners.get(address)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        here = self.node if listener is None else listener.node

        def done(error: OSError | None) -> None:
            if not answered.done():
                answered.set_exception(error) if error is not None else answered.set_result(None)

        def arrive(data: bytes) -> None:
            found = self.network.listeners.get(address)
            taken = found is not None and found.take_in(self, address)
            self.network.carry(
                (str(address), str(self.address)), (here.name, self.node.name), "connected", b"",
                lambda _: done(None if taken else _refused(address)),
            )  # fmt: skip

        self.network.carry((str(self.address), str(address)), (self.node.name, here.name), "connect", b"", arrive)
        await answered

    def attach(self, factory: Callable[[], Any]) -> tuple[MemoryTransport, Any]:
        """Return a transport over the connection, and its protocol."""
        protocol = factory()
        self._transport = MemoryTransport(self, protocol)
        protocol.connection_made(self._transport)
        self.wake()
        return self._transport, protocol

    @property
    def peername(self) -> Address:
        assert self.other is not None, "connected"
        return self.other.address

    def take_in(self, caller: MemorySocket, address: Address) -> bool:
        """Connect a caller; return False if this socket does not listen."""
        if self._accepts is None:
            return False
        if caller.closed:  # it has given up
            return True
        other = MemorySocket(self.network, self.node)
        self.network.sockets[other] = None
        other.address, other.other, caller.other = address, caller, other
        self._accepts.append(other)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        return True

    # --- the connection --------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send a segment."""
        assert self.other is not None
        self.other.held += len(data)
        self._carry(self.other.arrive, data)

    def arrive(self, data: bytes) -> None:
        """A segment has come."""
        if self.closed:  # the kernel says so
            assert self.other is not None
            self._carry(self.other.end, b"", "reset")
        elif not self._ended:
            self._received += data
            self.wake()

    def end(self, data: bytes, how: End) -> None:
        """The other end has closed, or the connection is reset: then what was not read is lost."""
        if self._ended:
            return
        self._ended = how
        if how == "reset":
            self._received.clear()
        self.wake()

    def take(self) -> tuple[bytes, End]:
        """Return what has come, for the process; and the end, once there is nothing before it."""
        data = bytes(self._received)
        self._received.clear()
        self.held -= len(data)
        if self.other is not None:
            self.other.has_room()
        return data, self._ended

    def has_room(self) -> None:
        """The other end has read something."""
        if self._transport is not None:
            self._transport.has_room()

    def wake(self) -> None:
        """Let the process read what has come, if something has."""
        if self._transport is not None and (self._received or self._ended):
            self._transport.wake()

    def _carry(self, deliver: Callable[..., object], data: bytes, *rest: Any) -> None:
        other = self.other
        assert other is not None
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now) + SEGMENT_S * len(data) / SEGMENT_BYTES
        between = (str(self.address), str(other.address))
        link = (self.node.name, other.node.name)
        self.network.carry(between, link, "tcp", data, lambda data: deliver(data, *rest), after_s=self._due - now)


class MemoryTransport(asyncio.Transport):
    """What a process has of a connection; its callbacks run as the process's."""

    def __init__(self, sock: MemorySocket, protocol: Any) -> None:
        super().__init__({"peername": sock.peername, "ssl_object": None})
        self._sock, self._protocol, self._context = sock, protocol, copy_context()
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._high, self._low = HIGH_BYTES, HIGH_BYTES // 4
        self._reading, self._woken, self._paused, self._closing = True, False, False, False

    def wake(self) -> None:
        """There is something to read."""
        if self._reading and not self._woken and not self._closing:
            self._woken = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._woken = False
        if not self._reading or self._closing:
            return
        data, ended = self._sock.take()
        if data:
            self._protocol.data_received(data)
        if ended == "reset":
            self._lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        elif ended:
            self._reading = False
            self._protocol.eof_received()

    def has_room(self) -> None:
        """The other end has read something."""
        if self._unsent or self._paused:
            self._loop.call_soon(self._push, context=self._context)

    def _push(self) -> None:
        other = self._sock.other
        while self._unsent and other is not None and other.held < CAPACITY_BYTES:
            self._sock.send(bytes(self._unsent[:SEGMENT_BYTES]))
            del self._unsent[:SEGMENT_BYTES]
        if self._paused and len(self._unsent) <= self._low and not self._closing:
            self._paused = False
            self._protocol.resume_writing()

    def _lose(self, error: OSError | None) -> None:
        if not self._closing:
            self._closing = True
            self._unsent.clear()
            self._sock.close()
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    # --- as `asyncio.Transport` has it -----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        self._unsent += data
        self._push()
        if not self._paused and len(self._unsent) > self._high:
            self._paused = True
            self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low
        if not self._paused and len(self._unsent) > self._high:
            self._paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._sock.wake()

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._lose(None)

    def close(self) -> None:
        self.abort()
