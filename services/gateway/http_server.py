"""The HTTP server: uvicorn inside a service process, connection limits and timeouts, certificate reload.

The process has its own signal handlers and logs. Certificate and key are read again when their files change; open
connections keep the certificate they began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from moonpool.config import parse_address
from moonpool.errors import ConfigError
from moonpool.rpc.auth import WatchedFiles
from moonpool.telemetry.logs import get_logger
from services.gateway.config import GatewayConfig

log = get_logger(__name__)


class ReloadedCertificate:
    """The certificate of a gateway.

    Attributes:
        context: for the server; it takes the files as they are now for each new connection.
    """

    def __init__(self, cert: Path, key: Path, watched: WatchedFiles | None = None) -> None:
        """Read the files, both PEM; those between the certificate and its authority stand behind it.

        `watched` tells when they change; None = they are watched here.

        Raises:
            ConfigError: naming `https_cert`: they cannot be read, or do not belong together.
        """
        self._cert, self._key = cert, key
        self._files = watched or WatchedFiles([cert, key])
        try:
            self._current = self._read()
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("https_cert", f"{cert} with {key}: {_ssl_reason(error)}") from error
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Called when a client has said hello, whether it names a server or not."""
        self._renew()
        connection.context = self._current

    def _renew(self) -> None:
        """Read the files again when they have changed; a pair that cannot be used leaves all as it was."""
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
        context.load_cert_chain(self._cert, self._key, password="")  # one that needs any is refused, not asked for
        return context


def _ssl_reason(error: OSError) -> str:
    return error.strerror or str(error)


class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and the bound that it lacks."""

    max_connections: int = 0
    """Connections open at once; 0 = any number."""


class HttpConnection(H11Protocol):
    """uvicorn's HTTP/1.1 over h11, which notes since when it waits for what; `sweep` ends what waits too long."""

    _waits_since: float | None = None
    _blocked_since: float | None = None
    _closing_since: float | None = None

    @property
    def waits(self) -> bool:
        """Whether it is open and waits for the head of a request."""
        return self._waits_since is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        limit = self.config.max_connections if isinstance(self.config, HttpConfig) else 0
        if limit and len(self.connections) > limit:
            self._least_missed().transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._between_requests():
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._between_requests():
            self._waits_since = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._blocked_since = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def sweep(self, now: float, read_timeout_s: float, write_timeout_s: float) -> None:
        """End this connection if it has waited too long for the head of a request or for its client to read."""
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > write_timeout_s:
                self.transport.abort()
        elif self._blocked_since is not None and now - self._blocked_since > write_timeout_s:
            self.transport.abort()
        elif self._waits_since is not None and now - self._waits_since > read_timeout_s:
            self.transport.close()

    def _least_missed(self) -> HttpConnection:
        """A connection without a request, so that idle ones cannot keep others out; this one when all have some."""
        others = (one for one in self.connections if isinstance(one, HttpConnection) and one is not self)
        return next((one for one in others if one.waits), self)

    def _between_requests(self) -> bool:
        """No request is being answered: the next one's head, or the rest of an answered one's body, is coming."""
        return self.cycle is None or self.cycle.response_complete


BACKLOG = 2048


KEEP_ALIVE_S = 15
"""Seconds that a connection may be idle between two requests."""


SWEEP_S = 1.0
"""Seconds between two looks at what waits; shorter where a timeout is."""


DRAIN_MARGIN = 0.8
"""Share of `drain_s` that answers get to end by themselves; then they are cancelled."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: the process has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return len(self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@asynccontextmanager
async def http_serving(app: ASGIApp, config: GatewayConfig) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serve `app` at `config.listen` while the body runs; yields the server and its port.

    On leaving, no new connections are taken, and answers in progress get a share of `drain_s` to end.

    Raises:
        ConfigError: `listen` cannot be bound, or the certificate cannot be used.
    """
    https = ReloadedCertificate(config.https_cert, config.https_key) if config.https_cert and config.https_key else None
    listening = _bind(config.listen)
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
    settings = HttpConfig(
        app, http=HttpConnection, ws="none", lifespan="off", log_config=None, log_level="error",
        access_log=False, proxy_headers=False,
        server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_s * DRAIN_MARGIN),
        ssl_context_factory=None if https is None else lambda *_: https.context,
    )  # fmt: skip
    settings.max_connections = config.max_connections
    return settings


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
    """End connections that wait too long, again and again."""
    loop = asyncio.get_running_loop()
    pause_s = min(SWEEP_S, config.read_timeout_s / 4, config.write_timeout_s / 4)
    while True:
        await asyncio.sleep(pause_s)
        for connection in list(server.server_state.connections):
            if isinstance(connection, HttpConnection):
                connection.sweep(loop.time(), config.read_timeout_s, config.write_timeout_s)
