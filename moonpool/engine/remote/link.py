"""One end of the connection between a leader and a stage on another host.

Messages are in order. What is urgent is sent at once; KV, and what must not come before the KV, waits for `room`, so
that little lies before an urgent message. Whoever is silent for `silence_s` is lost.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import deque
from typing import Any, Final

from moonpool.base import world
from moonpool.base.config import format_address
from moonpool.engine.channel import ChannelClosed
from moonpool.engine.remote.messages import Ping, Pong
from moonpool.engine.remote.schema import Schema, SchemaError

SILENCE_S: Final = 2.0
"""Seconds after which a silent peer is lost."""
_TICKS: Final = 8
"""Looks within that time. A look that comes late counts once: a host that had no time is not taken for a silent one."""
MAX_MESSAGE_BYTES: Final = 256 << 20
"""A step's hidden states are the largest messages."""
_BULK_BYTES: Final = 1 << 20
"""Bytes that wait in this process for the system, at most, before bulk waits."""
_UNSENT_BYTES: Final = 256 << 10
"""The same in the system."""
_READ_BYTES: Final = 1 << 20
_TRIPS: Final = 32
"""Round trips of which the shortest tells the difference of the clocks."""
_LENGTH: Final = struct.Struct("<I")
_TLS_BEGIN: Final = 0x0316
"""First two bytes of TLS, read as a length."""
_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


class StageLink:
    """This end of a connection; see `open`.

    Attributes:
        peer: the other end's "host:port".
        sent_bytes: so far.
        received_bytes: so far.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        host, port = (writer.get_extra_info("peername") or ("?", 0))[:2]  # none if the other end is gone already
        self.peer = format_address(host, port)
        self.sent_bytes = self.received_bytes = 0
        self._reason = self._last = ""  # why the connection has ended, or ends once all is sent
        self._heard = True
        self._watch: asyncio.Task[None] | None = None
        self._incoming = self._outgoing = Schema(())
        self._trips: deque[tuple[int, int]] = deque(maxlen=_TRIPS)

    @classmethod
    async def open(
        cls, sock: socket.socket, tls: ssl.SSLContext | None, *, server: bool, name: str, limit_s: float
    ) -> "StageLink":
        """Take over a connected socket.

        Args:
            sock: closed with the link, or by an error.
            tls: makes the connection secure; None = plaintext.
            server: whether the other end has connected to this one.
            name: which a server's certificate must have.
            limit_s: for the handshake of TLS.

        Raises:
            OSError: the connection broke, or there is no TLS (`ssl.SSLError`).
        """
        loop = asyncio.get_running_loop()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)
        reader = asyncio.StreamReader(_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        secure: dict[str, Any] = {} if tls is None else {
            "ssl": tls, "ssl_handshake_timeout": limit_s, "ssl_shutdown_timeout": SILENCE_S,
        }  # fmt: skip
        if server:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, **secure)
        else:
            if tls is not None:
                secure["server_hostname"] = name
            transport, _ = await loop.create_connection(lambda: protocol, sock=sock, **secure)
        transport.set_write_buffer_limits(high=_BULK_BYTES)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    @property
    def tls(self) -> ssl.SSLObject | None:
        """The connection's TLS; None in plaintext."""
        found: ssl.SSLObject | None = self._writer.get_extra_info("ssl_object")
        return found

    @property
    def reason(self) -> str:
        """Why the connection has ended; "" while open."""
        return self._reason

    @property
    def ahead_ns(self) -> int:
        """What the other end's clock is ahead of this one's, as the shortest of the last round trips tells."""
        return min(self._trips)[1] if self._trips else 0

    def begin(self, incoming: Schema, outgoing: Schema, *, pings: bool, silence_s: float = SILENCE_S) -> None:
        """From now on other messages are sent and received, and the other end is watched; `pings`: by pings."""
        self._incoming, self._outgoing = incoming, outgoing
        self._watch = asyncio.create_task(self._look(silence_s, pings=pings), name=f"link {self.peer}")

    def send(self, message: object) -> None:
        """Send at once; dropped when the connection has ended."""
        if not self._reason and not self._last:
            self._write(self._outgoing.encode(message))

    async def room(self) -> None:
        """Wait until the next bulk may be sent.

        Raises:
            ChannelClosed: the connection has ended.
        """
        try:
            await self._writer.drain()
        except OSError as error:
            self.close(str(error))
        if self._reason:
            raise ChannelClosed

    async def receive(self) -> Any:
        """Return the next message that is not about the connection.

        Raises:
            ChannelClosed: the connection has ended; `reason` says why.
        """
        while True:
            data = await self._frame(MAX_MESSAGE_BYTES)
            try:
                message = self._incoming.decode(data)
            except SchemaError as error:
                self.close(f"sent no message: {error}")
                raise ChannelClosed from error
            if isinstance(message, Ping):
                self.send(Pong(message.sent_ns, world.monotonic_ns()))
            elif isinstance(message, Pong):
                now = world.monotonic_ns()
                self._trips.append((now - message.sent_ns, message.at_ns - (message.sent_ns + now) // 2))
            else:
                return message

    async def ask(self, schema: Schema, most: int) -> Any:
        """Return a message of another schema, in at most so many bytes: while both ends introduce themselves.

        Raises:
            ChannelClosed: the connection has ended.
            SchemaError: the other end sent no such message.
        """
        return schema.decode(await self._frame(most))

    def tell(self, schema: Schema, message: object) -> None:
        """Send a message of another schema."""
        self._write(schema.encode(message))

    def close(self, reason: str) -> None:
        """End the connection. Idempotent."""
        if self._reason:
            return
        self._reason = self._last or reason
        if self._watch is not None:
            self._watch.cancel()
        self._writer.transport.abort()
        self._reader.feed_eof()

    async def wait_closed(self) -> None:
        """Wait until the socket of an ended connection is closed."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def finish(self, reason: str) -> None:
        """End the connection once all that was sent is with the system; at once if cancelled.

        With TLS: once the other end has taken all, or after `SILENCE_S`.
        """
        self._last = reason
        try:
            with contextlib.suppress(OSError):
                if self.tls is None:
                    self._writer.transport.set_write_buffer_limits(high=0)
                    await self._writer.drain()
                else:  # draining asyncio's TLS leaves up to 64 KiB below, which ending at once would drop
                    self._writer.close()
                    await self._writer.wait_closed()
        finally:
            self.close(reason)
        await self.wait_closed()

    def _write(self, data: bytes) -> None:
        self.sent_bytes += _LENGTH.size + len(data)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def _frame(self, most: int) -> bytes:
        (size,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
        if size > most:
            tls = size & 0xFFFF == _TLS_BEGIN
            what = (
                "speaks TLS, which this end does not" if tls else f"sent a message of {size} bytes, of {most} at most"
            )
            self.close(what)
            raise ChannelClosed
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if self._reason:
                raise ChannelClosed
            try:
                got = await self._reader.read(min(size - len(data), _READ_BYTES))
            except ConnectionError:  # the other end closed before it had read all
                got = b""
            except OSError as error:
                self.close(error.strerror or type(error).__name__)
                got = b""
            if not got:
                self.close("closed the connection")
                raise ChannelClosed
            self._heard = True
            self.received_bytes += len(got)
            data += got
        return bytes(data)

    async def _look(self, silence_s: float, *, pings: bool) -> None:
        """End the connection if nothing comes."""
        silent = 0
        while silent < _TICKS:
            if pings:
                self.send(Ping(world.monotonic_ns()))
            await asyncio.sleep(silence_s / _TICKS)
            silent = 0 if self._heard else silent + 1
            self._heard = False
        self._watch = None
        self.close(f"was not heard for {silence_s:g} s")
