"""Bounds of connections that ask nothing, or too slowly: aiohttp waits for a first request for ever."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

REQUEST_S = 30.0
"""Seconds in which a connection must ask something, and a request must have come and be answered."""
MAX_CONNECTIONS = 1024
LOOKS = 4
"""Looks at connections in that time."""


class SlowClients:
    """Ends connections that ask nothing, and requests that do not come whole.

    Args:
        seconds: for a request, and between two.
        most: connections at once; those that have been quiet for longest are closed.
    """

    def __init__(self, seconds: float = REQUEST_S, most: int = MAX_CONNECTIONS) -> None:
        self._seconds, self._most = seconds, most
        self._asking: dict[asyncio.Protocol, None] = {}
        self._quiet_since: dict[asyncio.Protocol, float] = {}

    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        """Notes who asks, and gives each request its time."""

        @web.middleware
        async def in_time(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            client: asyncio.Protocol = request.protocol
            self._asking[client] = None
            try:
                async with asyncio.timeout(self._seconds):
                    return await handler(request)
            except TimeoutError:
                raise web.HTTPRequestTimeout from None
            finally:
                self._asking.pop(client, None)
                self._quiet_since.pop(client, None)

        return in_time

    async def watch(self, server: web.Server) -> None:
        """Close what is quiet for too long, until cancelled."""
        while True:
            self.look(server.connections, asyncio.get_running_loop().time())
            await asyncio.sleep(self._seconds / LOOKS)

    def look(self, connections: Sequence[web.RequestHandler], now: float) -> None:
        """Close those that are quiet for too long, and the quietest of too many."""
        quiet = [client for client in connections if client not in self._asking]
        self._quiet_since = {client: self._quiet_since.get(client, now) for client in quiet}
        quiet.sort(key=lambda client: self._quiet_since[client])
        for place, client in enumerate(quiet):
            if now - self._quiet_since[client] >= self._seconds or place < len(connections) - self._most:
                client.force_close()
