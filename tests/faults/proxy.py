"""TCP proxies in front of services that reset connections and hold traffic back.

Bytes are forwarded as they are. Every proxy of a `FaultProxies` runs on one event loop in a thread of its own, so that
faults can be started from any thread.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

CHUNK_BYTES = 256 << 10
CONNECT_TIMEOUT_S = 5.0
ORDER_TIMEOUT_S = 10.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Way = Literal["to", "from"]
"""Of bytes: to the service behind a proxy, or from it."""
WAYS: tuple[Way, ...] = ("to", "from")

T = TypeVar("T")


@dataclass(eq=False)
class _Link:
    """One forwarded connection."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]

    def reset(self) -> None:
        """Both ends get a TCP reset, whatever was under way is lost."""
        for writer in self.writers:
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                with contextlib.suppress(OSError):
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()


@dataclass(eq=False)
class _Proxy:
    """One listening port and where it leads to."""

    target: tuple[str, int]
    server: asyncio.Server | None = None
    flowing: dict[Way, asyncio.Event] = field(default_factory=lambda: {way: asyncio.Event() for way in WAYS})
    links: set[_Link] = field(default_factory=set)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    held: int = 0
    """Reads that were held back since the last partition began."""

    async def open(self) -> str:
        self.join()
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        host, port = self.server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.reset()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def reset(self) -> int:
        links = list(self.links)
        for link in links:
            link.reset()
        return len(links)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        with contextlib.suppress(OSError, TimeoutError):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    far_reader, far_writer = await asyncio.open_connection(*self.target, limit=CHUNK_BYTES)
            except (OSError, TimeoutError):
                _Link((writer, writer)).reset()  # no service listens: refused, as without a proxy
                return
            link = _Link((writer, far_writer))
            self.links.add(link)
            try:
                await asyncio.gather(self._pump("to", reader, far_writer), self._pump("from", far_reader, writer))
            finally:
                self.links.discard(link)
                link.reset()

    def part(self, ways: Collection[Way]) -> None:
        self.held = 0
        for way in ways:
            self.flowing[way].clear()

    def join(self) -> int:
        for flowing in self.flowing.values():
            flowing.set()
        return self.held

    async def _pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if not self.flowing[way].is_set():
                self.held += 1
                await self.flowing[way].wait()
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class FaultProxies:
    """Proxies by name; a context manager that owns their thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxies", daemon=True)
        self._proxies: dict[str, _Proxy] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for proxy in self._proxies.values():
            self._call(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def open(self, name: str, host: str, port: int) -> str:
        """Puts a proxy in front of an address; returns the proxy's own, "host:port"."""
        proxy = self._proxies[name] = _Proxy((host, port))
        return self._call(proxy.open())

    def reset(self, name: str) -> int:
        """Resets every connection of a proxy; returns how many there were."""

        async def act() -> int:
            return self._proxies[name].reset()

        return self._call(act())

    def part(self, name: str, *, ways: Collection[Way] = WAYS) -> None:
        """From now on connections stay open and nothing comes through on these ways."""

        async def act() -> None:
            self._proxies[name].part(ways)

        self._call(act())

    def join(self, name: str) -> int:
        """Everything comes through again, in order; returns how many reads were held back."""

        async def act() -> int:
            return self._proxies[name].join()

        return self._call(act())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ORDER_TIMEOUT_S)
