"""The HTTP server: uvicorn within a service process, which has separate signal handlers and logs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from moonpool.base.config import is_loopback, parse_address
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.accept import accept, close_if_cancelled
from moonpool.base.telemetry.logs import get_logger
from moonpool.gateway.certificates import ReloadedCertificate
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.http_connection import HttpConfig, HttpConnection

log = get_logger(__name__)
HANDSHAKE_S, ACCEPT_PAUSE_S = 20.0, 0.1
"""In which a TLS handshake must be over; after which accepting is tried again where that failed."""
BACKLOG = 2048
KEEP_ALIVE_S = 15
"""Maximum time between two requests of a connection, in seconds."""
SWEEP_S = 1.0
"""Seconds between two sweeps over the connections; less if a timeout is shorter."""
DRAIN_MARGIN = 0.8
"""Share of `drain_s` after which responses in progress are cancelled."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers, which the process has."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @property
    def open_connections(self) -> int:
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
    server = HttpServer(_http_config(app, config))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([listening] if https is None else []))
        await server.up.wait()
        others = [group.create_task(_sweep_connections(server, config))]
        if https is not None:
            accepting = _accept_https(server, listening, https.context, config.max_connections)
            others.append(group.create_task(accepting))
            close_if_cancelled(others[-1], listening)
        try:
            yield server, port
        finally:
            if https is not None:
                others.pop().cancel()
            server.should_exit = True
            await serving
            for other in others:
                other.cancel()


async def _accept_https(server: HttpServer, listening: socket.socket, https: ssl.SSLContext, limit: int) -> None:
    """Accept connections and begin TLS, until cancelled.

    An event loop's own server tells nobody of a connection before the handshake is over, so silent connections would
    not be counted. Here a connection counts at once; if there are too many, the oldest in a handshake is closed.
    """
    loop, shaking = asyncio.get_running_loop(), dict[asyncio.Task[None], None]()

    def connection() -> HttpConnection:
        return HttpConnection(server.config, server.server_state, server.lifespan.state, loop)

    async def shake(accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # no TLS, too slow, or gone
            await loop.connect_accepted_socket(
                connection, accepted, ssl=https, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=HANDSHAKE_S
            )

    try:
        while True:
            try:
                accepted, _ = await accept(listening)
            except OSError as error:  # gone already, or no descriptor is left
                log.warning("a connection cannot be accepted", reason=error.strerror or str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if shaking and len(shaking) + server.open_connections >= limit:
                oldest = next(iter(shaking))
                del shaking[oldest]
                oldest.cancel()
            task = loop.create_task(shake(accepted))
            close_if_cancelled(task, accepted)
            shaking[task] = None
            task.add_done_callback(lambda ended: shaking.pop(ended, None))
    finally:
        for task in list(shaking):
            task.cancel()


def _http_config(app: ASGIApp, config: GatewayConfig) -> HttpConfig:
    return HttpConfig(
        app, http=HttpConnection, ws="none", lifespan="off", log_config=None, log_level="error",
        access_log=False, proxy_headers=False,
        server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_s * DRAIN_MARGIN),
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
        bound.setblocking(False)
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
