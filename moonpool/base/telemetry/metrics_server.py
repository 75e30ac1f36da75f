"""The metrics port: `/metrics` for scrapers, `/livez` and `/readyz` for probes, over plain HTTP.

The server has a thread and an event loop of its own. A scrape or a probe never competes with the service's calls for a
listener, and a client that sends nothing costs a socket, not a thread. Connections are bounded in number and in time,
so that nobody who reaches the port takes the process's descriptors; the oldest makes room for a new one, so that nobody
keeps probes out by connections that say nothing.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Self

from moonpool.base.config import format_address, parse_address

MAX_CONNECTIONS = 64
"""Connections at once: scrapers and probes of a large installation, and few of the process's descriptors."""
REQUEST_S = 5.0
"""Seconds in which a connection sends its request, and takes the answer."""
MAX_HEAD_BYTES = 16 << 10
"""Bytes of a request's line and headers."""
TEXT = "text/plain; charset=utf-8"
Answer = tuple[int, bytes, str]
"""Status, body and content type."""
Handler = Callable[[str], Awaitable[Answer]]
"""Answers a GET; called with the `Accept` header, "" without."""
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class MetricsServer:
    """A small HTTP server for GET requests, one to a connection.

    Args:
        listen: "host:port"; port 0 = any free port.
        handlers: answers, by path. Other paths are answered with 404.

    Raises:
        OSError: the address cannot be used.
        ValueError: the address is malformed.
    """

    def __init__(self, listen: str, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._loop = asyncio.new_event_loop()
        self._connections: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="metrics", daemon=True)
        host, port = parse_address(listen)
        starting = asyncio.start_server(self._connected, host, port, limit=MAX_HEAD_BYTES)
        try:
            self._server = self._loop.run_until_complete(starting)
        except BaseException:
            self._loop.close()
            raise
        self.address = format_address(host, self._server.sockets[0].getsockname()[1])
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        self._connections[task] = None
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(REQUEST_S) as limit:
                    method, answer = await self._answer(reader)
                    limit.reschedule(self._loop.time() + REQUEST_S)
                    writer.write(_encoded(method, *answer))
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            self._connections.pop(task, None)

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Answer]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return "GET", (400, b"not an HTTP request of at most 16 KiB\n", TEXT)
        line, *lines = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3:
            return "GET", (400, b"not an HTTP request\n", TEXT)
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return method, (405, b"only GET and HEAD are answered here\n", TEXT)
        handler = self._handlers.get(target.partition("?")[0])
        if handler is None:
            known = ", ".join(self._handlers)
            return method, (404, f"there is no such path here; there are {known}\n".encode(), TEXT)
        headers = (line.partition(":") for line in lines)
        accept = ", ".join(value.strip() for name, _, value in headers if name.strip().lower() == "accept")
        return method, await handler(accept)


def _encoded(method: str, status: int, body: bytes, content_type: str) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if method == "HEAD" else body)
