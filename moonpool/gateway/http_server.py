"""The HTTP server: uvicorn within a service process, limits on connections, timeouts, and reload of certificates.

llhttp, a native parser, reads the requests. A connection's data is read in bounded pieces, and no data is parsed after
a response that came before the request's end.

The process has separate signal handlers and logs. If the files of certificate and key change, new connections use the
new certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moonpool.base import world
from moonpool.base.config import is_loopback, parse_address
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.watched_files import WatchedFiles
from moonpool.base.telemetry.logs import get_logger
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.serving.envelope import MAX_HEAD_BYTES

log = get_logger(__name__)


class ReloadedCertificate:
    """A certificate that is read again after its files change.

    Attributes:
        context: TLS context for the server; each new connection uses the files as they are then.
    """

    def __init__(self, cert: Path, key: Path, watched: WatchedFiles | None = None) -> None:
        """Read certificate and key, both in PEM format. The file of the certificate may have a chain.

        `watched` says when the files change; None: the object watches the files itself.

        Raises:
            ConfigError: the files cannot be read, or do not belong together; names `ssl_certfile`.
        """
        self._cert, self._key = cert, key
        self._files = watched or WatchedFiles([cert, key])
        try:
            self._current = self._read()
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("ssl_certfile", f"{cert} with {key}: {_ssl_reason(error)}") from error
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Choose the certificate of a connection, after the client's hello."""
        self._renew()
        connection.context = self._current

    def _renew(self) -> None:
        """Read the files again if they have changed. If the new files cannot be used, keep the old certificate."""
        if not self._files.changed():
            return
        try:
            self._current = self._read()
        except (OSError, ssl.SSLError) as error:
            log.warning("certificate not read again", file=str(self._cert), reason=_ssl_reason(error))
            return
        log.info("certificate read again", file=str(self._cert))

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(
            self._cert, self._key, password=""
        )  # a key with a password is refused, not prompted for
        return context


def _ssl_reason(error: OSError) -> str:
    return error.strerror or str(error)


class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and what uvicorn does not have: a limit on connections, and turns of parsing.

    Attributes:
        max_connections: maximum number of open connections; 0 for no limit.
        turns: of all connections that have something to parse.
    """

    def __init__(self, app: ASGIApp, *, max_connections: int = 0, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.max_connections = max_connections
        self.turns = ParseTurns()


MAX_BODY_PIECES = 1 << 14
"""Chunks per body: a body with 8 MiB in chunks of 512 bytes. Reading a chunk takes as long as reading some KiB."""
MAX_PIPELINED = 64
"""Requests that a connection may send while a request is answered."""
PARSED_BYTES = 4 << 10
"""Bytes that a connection parses before others have their turn: in chunks of one byte they take about a millisecond."""
TURNS_S, TURNS_BYTES = 0.001, 256 << 10
"""For so long, and so much, all connections together parse or drop data before answers in progress go on."""
LINGER_S = 2.0
"""Seconds for which a closing connection takes what the client still sends, unread, so that the client sees the
response before the connection ends.
"""


class PacedFlow(FlowControl):
    """uvicorn's flow control, which reads no more before all that was read is parsed.

    Attributes:
        unparsed: what was read and is not parsed yet; at most two reads.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.unparsed = bytearray()

    def resume_reading(self) -> None:
        """Read again, unless something is not parsed yet."""
        if not self.unparsed:
            super().resume_reading()


class ParseTurns:
    """The turns of connections with unparsed data: hundreds of bodies hold the event loop no longer than a few."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], int]] = deque()
        self._scheduled = False

    def add(self, take_piece: Callable[[], int]) -> None:
        """Call `take_piece` once, after all that wait already; the function returns the bytes that it has taken."""
        self._waiting.append(take_piece)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._scheduled = False
        until, taken = world.monotonic() + TURNS_S, 0
        try:
            while self._waiting and taken < TURNS_BYTES and world.monotonic() < until:
                taken += self._waiting.popleft()()
        finally:
            self._schedule()


class HttpConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over llhttp, with bounds and timeouts.

    `sweep` closes a connection that has waited too long.
    """

    config: HttpConfig
    flow: PacedFlow
    _waits_since: float | None = None
    _blocked_since: float | None = None
    _closing_since: float | None = None
    _half_closed = False
    _asked_to_close = False
    _lingers = False
    _in_head = False
    _in_message = False
    _head_bytes = 0
    _unparsed_bytes = 0
    _body_pieces = 0
    _more_than_head = False

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and waits for the head of a request."""
        return self._waits_since is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PacedFlow(transport)
        self._waits_since = self.loop.time()
        limit = self.config.max_connections
        if limit and len(self.connections) > limit:
            self._least_useful().transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, piece by piece. Meanwhile nothing more is read. A closing connection drops the data."""
        unparsed = self.flow.unparsed
        if not unparsed and len(data) <= PARSED_BYTES:
            self._parse(data)
            return
        if not unparsed:
            self.config.turns.add(self._take_piece)
        unparsed += data
        self.flow.pause_reading()

    def _take_piece(self) -> int:
        """Parse a piece, or drop all if the connection closes. Returns the number of bytes."""
        unparsed = self.flow.unparsed
        if self._lingers or self.transport.is_closing():
            taken = len(unparsed)
            unparsed.clear()
        else:
            piece = bytes(memoryview(unparsed)[:PARSED_BYTES])
            taken = len(piece)
            del unparsed[:taken]
            self._parse(piece)
        if unparsed:
            self.config.turns.add(self._take_piece)
        else:
            self.flow.resume_reading()
        return taken

    def _parse(self, data: bytes) -> None:
        if self._lingers:
            return
        self._unset_keepalive_if_required()
        self._more_than_head = False
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:  # HTTP/1.1 is answered; what follows is of another protocol
            self.cycle.keep_alive = False
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._in_head and not self._more_than_head:
            self._unparsed_bytes += len(data)  # the parser keeps a value until the value's end
            if self._unparsed_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")
        if not self._between_requests():
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self.loop.time()

    # What follows is called by the parser. An exception there becomes an `HttpParserError`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._head_bytes = self._unparsed_bytes = self._body_pieces = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > 2 * MAX_HEAD_BYTES:  # `RequestEnvelope` refuses smaller heads with a JSON body
            raise ValueError("the head is too large")

    def on_headers_complete(self) -> None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise ValueError("a request has one Host")
        self._in_head = False
        super().on_headers_complete()
        cycle = self.cycle
        self._asked_to_close = not cycle.keep_alive
        cycle.transport = ResponseTransport(self)  # type: ignore[assignment]
        self.scope["moonpool.unread"] = lambda: self._in_message and self.cycle is cycle  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        self._more_than_head = True
        self._body_pieces += 1
        if self._body_pieces > MAX_BODY_PIECES:
            raise ValueError("too many chunks")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._more_than_head = False, True
        super().on_message_complete()

    # --- the response and the end -----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        if self._lingers:
            return
        super().on_response_complete()
        if self._between_requests():
            self._waits_since = self.loop.time()

    def close_after_response(self) -> None:
        """Close the connection. A client that still sends first gets a while to see the response; no data is parsed."""
        if not self._in_message:
            self.transport.close()
            return
        self._lingers = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Go on answering a client that has only finished sending. True keeps the connection open for the response.

        A client that has closed the connection looks the same. If the request has no response yet, an interim response
        tells both apart: the closed connection answers with a reset. A client that asked for the connection's end or
        sent a GET gets none, because some clients of this kind cannot read interim responses.
        """
        if self._lingers or self._between_requests() or self._in_message or self.scheme == "https":
            return None
        if not self._asked_to_close and self.scope["method"] != "GET":
            if self.cycle.response_started:
                return None
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            for delay_s in PROBE_S:
                self.loop.call_later(delay_s, self._end_if_gone)
        self._half_closed = True
        self.cycle.keep_alive = False
        return True

    def _end_if_gone(self) -> None:
        """Abort a half-closed connection that the client has reset."""
        found: socket.socket | None = self.transport.get_extra_info("socket")
        if found is None or self.transport.is_closing():
            return
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._blocked_since = None

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, and close. If a response has started, close the connection only."""
        self._lingers = True
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or self.pipeline or (answering and self.cycle.response_started):
            self.transport.close()
        elif self.cycle is not None and not answering and self._in_message and not self._in_head:
            self.transport.close()  # the rest of a request that has a response
        else:
            super().send_400_response(msg)

    def sweep(self, now: float, read_timeout_s: float, write_timeout_s: float) -> None:
        """Close this connection if it has waited too long for a request, or for the client to read."""
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > write_timeout_s:
                self.transport.abort()
        elif self._blocked_since is not None and now - self._blocked_since > write_timeout_s:
            self.transport.abort()
        elif self._waits_since is not None and now - self._waits_since > read_timeout_s:
            self.transport.close()
        elif self._half_closed:
            self._end_if_gone()

    def _least_useful(self) -> HttpConnection:
        """An idle connection, so that idle clients cannot lock out others; this connection if none is idle."""
        others = (other for other in self.connections if isinstance(other, HttpConnection) and other is not self)
        return next((other for other in others if other.is_idle), self)

    def _between_requests(self) -> bool:
        """Whether no request is being answered. The client may still send the rest of a body."""
        return self.cycle is None or self.cycle.response_complete


BACKLOG = 2048
KEEP_ALIVE_S = 15
"""Maximum time between two requests of a connection, in seconds."""
PROBE_S = (0.02, 0.1, 0.4)
"""Times at which a connection that sends no more is checked, in seconds after the end; later, each sweep checks the
connection.
"""
SWEEP_S = 1.0
"""Seconds between two sweeps over the connections; less if a timeout is shorter."""
DRAIN_MARGIN = 0.8
"""Share of `drain_s` after which responses in progress are cancelled."""


class ResponseTransport:
    """A connection's transport, for a response."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send a part of the response."""
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """Close the connection after the response."""
        self._connection.close_after_response()


class HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers, which the process has."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return len(self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@asynccontextmanager
async def http_serving(app: ASGIApp, config: GatewayConfig) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serve `app` at `config.listen` while the body of the `async with` runs. Yields the server and the port.

    At the end, the server accepts no new connections, and responses in progress get a share of `drain_s` to finish.

    Raises:
        ConfigError: `listen` cannot be bound, or the certificate cannot be used.
    """
    https = (
        ReloadedCertificate(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_certfile and config.ssl_keyfile
        else None
    )
    listening = _bind(config.listen)
    if https is None and not is_loopback(parse_address(config.listen)[0]):
        told = {"listen": config.listen, "needs_key": config.api_keys is not None}
        log.warning("HTTP is in plaintext and open to all who reach it; see ssl_certfile and api_keys", **told)
    port: int = listening.getsockname()[1]
    server = HttpServer(_http_config(app, config, https))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([listening]))
        await server.up.wait()
        sweeping = group.create_task(_sweep_connections(server, config))
        try:
            yield server, port
        finally:
            server.should_exit = True
            await serving
            sweeping.cancel()


def _http_config(app: ASGIApp, config: GatewayConfig, https: ReloadedCertificate | None) -> HttpConfig:
    return HttpConfig(
        app, http=HttpConnection, ws="none", lifespan="off", log_config=None, log_level="error",
        access_log=False, proxy_headers=False,
        server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_s * DRAIN_MARGIN),
        ssl_context_factory=None if https is None else lambda *_: https.context,
        max_connections=config.max_connections,
    )  # fmt: skip


def _bind(listen: str) -> socket.socket:
    host, port = parse_address(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("listen", f"cannot listen at {listen}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError("listen", f"cannot listen at {listen}: {error.strerror or error}") from error
    return bound


async def _sweep_connections(server: HttpServer, config: GatewayConfig) -> None:
    """Sweep over the connections until cancelled."""
    loop = asyncio.get_running_loop()
    pause_s = min(SWEEP_S, config.read_timeout_s / 4, config.write_timeout_s / 4)
    while True:
        await asyncio.sleep(pause_s)
        for connection in list(server.server_state.connections):
            if isinstance(connection, HttpConnection):
                connection.sweep(loop.time(), config.read_timeout_s, config.write_timeout_s)
