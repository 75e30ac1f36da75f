"""uvicorn inside a service process: our sockets, signals and logs, its HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from moonpool.config import parse_address
from moonpool.errors import ConfigError
from services.gateway.config import GatewayConfig
from services.gateway.connections import Connection, HttpConfig
from services.gateway.https import Https

BACKLOG = 2048
KEEP_ALIVE_S = 15
"""Seconds that a connection may be idle between two requests."""
SWEEP_S = 1.0
"""Seconds between two looks at what waits; shorter where a timeout is."""
DRAIN_MARGIN = 0.8
"""Share of `drain_s` that answers get to end by themselves; then they are cancelled."""


class Server(uvicorn.Server):
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
async def http_serving(app: ASGIApp, config: GatewayConfig) -> AsyncIterator[tuple[Server, int]]:
    """Serve `app` at `config.listen` while the body runs; yields the server and its port.

    On leaving, no new connections are taken, and answers in progress get a share of `drain_s` to end.

    Raises:
        ConfigError: `listen` cannot be bound, or the certificate cannot be used.
    """
    https = Https(config.https_cert, config.https_key) if config.https_cert and config.https_key else None
    listening = _bind(config.listen)
    port: int = listening.getsockname()[1]
    server = Server(_http_config(app, config, https))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([listening]))
        await server.up.wait()
        sweeping = group.create_task(_sweep(server, config))
        try:
            yield server, port
        finally:
            server.should_exit = True
            await serving
            sweeping.cancel()


def _http_config(app: ASGIApp, config: GatewayConfig, https: Https | None) -> HttpConfig:
    settings = HttpConfig(
        app, http=Connection, ws="none", lifespan="off", log_config=None, log_level="error",
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


async def _sweep(server: Server, config: GatewayConfig) -> None:
    """End connections that wait too long, again and again."""
    loop = asyncio.get_running_loop()
    pause_s = min(SWEEP_S, config.read_timeout_s / 4, config.write_timeout_s / 4)
    while True:
        await asyncio.sleep(pause_s)
        for connection in list(server.server_state.connections):
            if isinstance(connection, Connection):
                connection.sweep(loop.time(), config.read_timeout_s, config.write_timeout_s)
