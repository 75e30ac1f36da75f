"""The TLS transport ("tls"): the TCP transport within TLS 1.3, for processes with certificates.

Both ends show a certificate from the authority in `tls_ca`. The offer's token, which travels within the stream's own
TLS, then tells which stream a connection belongs to.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any, Self, cast

from moonpool.base.errors import ConfigError, PermissionDenied, StreamBroken
from moonpool.base.rpc.tls import NAME, Tls
from moonpool.base.transport.base import TransportUnavailableError
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.framed_socket import FramedSocket, PeerLeftSilently
from moonpool.base.transport.tcp import TcpTransport
from moonpool.v1 import kv_pb2

RECORD_BYTES = 16 << 10
"""Most payload bytes in a TLS record. Shorter pieces go into one record together."""
TURN_BYTES = 1 << 20
"""Most bytes that a call decrypts: the event loop has other work."""
HANDSHAKE_RECORD = b"\x16"
"""First byte of TLS. No plain client's message begins so: the byte would be the message's length."""
NEEDS_TLS = "this transport takes TLS only: set tls_cert, tls_key and tls_ca"
_BLOCKED = ssl.SSLWantReadError, ssl.SSLWantWriteError


class TlsSocket(ssl.SSLSocket):
    """A non-blocking TLS socket that behaves as a plain one: raises BlockingIOError, and takes several buffers."""

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as much as the system takes. After BlockingIOError, the same bytes must come again first."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:  # type: ignore[override]  # no ancillary data
        """As `send`, for several buffers one after the other."""
        sent = 0
        for piece in _in_records(buffers):
            at = 0
            while at < piece.nbytes:
                try:
                    at += super().send(piece[at:])
                except _BLOCKED:
                    if sent + at:
                        return sent + at
                    raise BlockingIOError from None
            sent += at
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fill a buffer as far as bytes are there; less than full means that no more are."""
        view, count = memoryview(buffer), 0
        while count < view.nbytes:
            try:
                got = super().recv_into(view[count:])
            except _BLOCKED:
                if count:
                    break
                raise BlockingIOError from None
            if not got:
                break
            count += got
        return count

    def recvmsg_into(self, buffers: Iterable[Any], *rest: Any) -> Any:  # type: ignore[override]
        """Fill buffers, one after the other, up to `TURN_BYTES`; return the number of bytes first."""
        count = 0
        for buffer in buffers:
            room = memoryview(buffer)[: TURN_BYTES - count]
            try:
                got = self.recv_into(room)
            except BlockingIOError:
                if not count:
                    raise
                break
            count += got
            if got < room.nbytes or count == TURN_BYTES:
                break
        return count, [], 0, None

    def recvmsg(self, bufsize: int, *rest: Any) -> Any:  # type: ignore[override]
        """Up to so many bytes; no descriptors come over TLS."""
        try:
            return super().recv(bufsize), [], 0, None
        except _BLOCKED:
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """End the connection. The base class would let another thread send in plaintext meanwhile."""
        socket.socket.shutdown(self, how)


def _in_records(buffers: Iterable[Any]) -> Iterable[memoryview]:
    """The same bytes, with short buffers joined: each record costs a system call on both sides."""
    short: list[memoryview] = []
    nbytes = 0
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes >= RECORD_BYTES and not short:
            yield view
            continue
        short.append(view)
        nbytes += view.nbytes
        if nbytes >= RECORD_BYTES:
            yield memoryview(b"".join(short))
            short, nbytes = [], 0
    if short:
        yield short[0] if len(short) == 1 else memoryview(b"".join(short))


class TlsFramedSocket(FramedSocket):
    """Framed messages within TLS; `secure` comes first."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        sock.setblocking(False)
        context.sslsocket_class = TlsSocket
        name = None if server else NAME
        wrapped = context.wrap_socket(sock, server, do_handshake_on_connect=False, server_hostname=name)
        super().__init__(wrapped)
        self._tls = cast("TlsSocket", wrapped)
        self._server = server
        self._plain_peer = False

    @property
    def has_more(self) -> bool:
        return super().has_more or self._tls.pending() > 0

    async def secure(self) -> None:
        if self._server:
            await self._expect_tls()
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLCertVerificationError as error:
                reason = f"the peer's certificate is not accepted (tls_ca): {error.verify_message}"
                raise PermissionDenied(reason) from error
            except ssl.SSLError as error:
                raise PermissionDenied(f"no TLS with the peer: {error.reason or error}") from error

    async def _expect_tls(self) -> None:
        """Peek at the first byte, so that a plain client gets an answer in plaintext."""
        await self._wait(self._loop.add_reader, self._loop.remove_reader)
        try:
            first = socket.socket.recv(self._tls, 1, socket.MSG_PEEK)
        except OSError as error:
            raise StreamBroken(error.strerror or repr(error)) from error
        if not first:
            raise PeerLeftSilently("the peer has closed its end")
        if first != HANDSHAKE_RECORD:
            self._plain_peer = True
            raise PermissionDenied(NEEDS_TLS)

    def _send_first(self, data: bytes, fds: Sequence[int]) -> int:
        return socket.socket.send(self._tls, data) if self._plain_peer else self._tls.send(data)


class TlsTransport(TcpTransport):
    """TCP within TLS, at a separate port."""

    name = "tls"
    kind = kv_pb2.TRANSPORT_KIND_TLS
    encrypted_as = "tls"

    def __init__(self, tls: Tls) -> None:
        """Uses a process's certificates; raises ConfigError if they do not fit each other."""
        self._tls = tls
        for server in (False, True):
            tls.socket_context(server=server)

    @classmethod
    def create(cls, config: TransportConfig, tls: Tls | None) -> Self:
        """Needs a certificate for this process."""
        if tls is None:
            raise ConfigError("tls_cert", "must be given, with tls_key and tls_ca, for the transport tls")
        if not tls.has_certificate:
            raise TransportUnavailableError("both ends show certificates: give tls_cert and tls_key")
        return cls(tls)

    def on_exposed(self, host: str) -> None:
        """Return no address for plain clients: only peers with certificates get in."""

    def frame(self, sock: socket.socket, *, server: bool) -> FramedSocket:
        return TlsFramedSocket(sock, self._tls.socket_context(server=server), server=server)
