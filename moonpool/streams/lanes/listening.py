"""The server's end of lanes: offers them, and hands a connection that shows an offer's token to its stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from moonpool.config import ServiceConfig, format_address, is_loopback, parse_address
from moonpool.errors import ConfigError, MoonpoolError, PermissionDenied, StreamBroken
from moonpool.streams.lanes.regions import Mapped, map_regions
from moonpool.streams.lanes.settings import LaneSettings, lane_name, remove_stale, socket_path
from moonpool.streams.lanes.sockets import LaneSocket, NothingSaid, tune_tcp
from moonpool.telemetry.gauges import Entry
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

OFFER_S = 10.0
"""How long an offer stands."""
HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 64
PAUSE_S = 0.1
TOKEN_BYTES = 32
_CREDENTIALS = struct.Struct("3i")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection that showed an offer's token.

    Attributes:
        name: of the lane's kind.
        readable: the client's regions, by number.
        lent: number and memory of the region that the client lends.
    """

    name: str
    sock: LaneSocket
    readable: dict[int, Mapped]
    lent: tuple[int, Mapped] | None


@dataclass(frozen=True, slots=True)
class _Offer:
    name: str
    attach: Callable[[Opened], None]
    timer: asyncio.TimerHandle


def peer_uid(sock: socket.socket) -> int:
    """The user whose process is at the other end of a unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


class LaneServer:
    """Where a service's lanes begin; use `running`.

    Attributes:
        addresses: where each kind of lane is reached, by name.
        opened: lanes that were opened so far, by name.
        refused: connections that were not taken.
    """

    def __init__(
        self, settings: LaneSettings, incarnation: int, *, uid: int | None = None, handshake_s: float = HANDSHAKE_S
    ) -> None:
        """Listens nowhere yet. `uid`: of those who may use local lanes; this process' own unless given."""
        self._settings = settings
        self._incarnation = incarnation
        self._uid = os.getuid() if uid is None else uid
        self._handshake_s = handshake_s
        self.addresses: dict[str, str] = {}
        self._offers: dict[bytes, _Offer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.opened: Counter[str] = Counter()
        self.refused = 0

    def gauges(self) -> list[Entry]:
        """For a service's gauges."""
        return [
            ("lanes_local_opened", lambda: self.opened["local"], None),
            ("lanes_tcp_opened", lambda: self.opened["tcp"], None),
            ("lanes_refused", lambda: self.refused, None),
            ("lane_offers", lambda: len(self._offers), 0),
        ]

    @asynccontextmanager
    async def running(self, config: ServiceConfig) -> AsyncIterator[None]:
        """Listens while the body runs.

        Raises:
            ConfigError: it cannot.
        """
        try:
            with contextlib.ExitStack() as stack:
                for name in self._settings.names:
                    listener = self._listen_locally(stack) if name == "local" else self._listen_tcp(stack, config)
                    self._spawn(self._accept(listener, name))
                yield
        finally:
            self.addresses.clear()
            for token in list(self._offers):
                self.withdraw(token)
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen_locally(self, stack: contextlib.ExitStack) -> socket.socket:
        folder = self._settings.folder
        assert folder is not None, "local lanes have a folder"
        remove_stale(folder)
        path = socket_path(folder, self._incarnation)
        try:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(os.fspath(path))
            stack.callback(path.unlink, missing_ok=True)
            listener.listen(MAX_HANDSHAKES)
        except OSError as error:
            raise ConfigError("kv_lanes_dir", f"cannot listen at {path}: {error.strerror}") from error
        self.addresses["local"] = os.fspath(path)
        return listener

    def _listen_tcp(self, stack: contextlib.ExitStack, config: ServiceConfig) -> socket.socket:
        """At a free port of where the service listens."""
        host, _ = parse_address(config.listen)
        try:
            listener = stack.enter_context(socket.create_server((host, 0), family=_family(host)))
        except OSError as error:
            raise ConfigError("kv_lanes", f"cannot listen at {host} for tcp: {error.strerror}") from error
        told = host if is_loopback(host) else parse_address(config.advertised(1))[0]
        self.addresses["tcp"] = format_address(told, listener.getsockname()[1])
        return listener

    async def _accept(self, listener: socket.socket, name: str) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection for a lane could not be accepted", lane=name, error=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._tasks) > MAX_HANDSHAKES:
                sock.close()
            else:
                self._spawn(self._handshake(sock, name))

    async def _handshake(self, raw: socket.socket, name: str) -> None:
        """Hands a connection to the stream whose token it shows, or closes it."""
        sock = LaneSocket(raw)
        error: Exception = StreamBroken("refused")
        taken = False
        try:
            async with asyncio.timeout(self._handshake_s):
                offer, opened = await self._opening(raw, sock, name)
            sock.send_message(kv_pb2.LaneOpened())
            offer.attach(opened)
            taken = True
            self.opened[name] += 1
        except NothingSaid:
            pass  # a neighbour that looked whether somebody listens here (`remove_stale`)
        except (MoonpoolError, OSError, TimeoutError) as failure:
            error = failure
            self.refused += 1
            # at level debug: whoever can connect must not fill the log; the client tells of it, and a gauge
            log.debug("lane refused", lane=name, reason=str(failure) or "nothing came")
            with contextlib.suppress(StreamBroken):
                sock.send_message(kv_pb2.LaneOpened(refused=str(failure) or "nothing came"))
        finally:
            if not taken:
                sock.close(error)

    async def _opening(self, raw: socket.socket, sock: LaneSocket, name: str) -> tuple[_Offer, Opened]:
        if name == "local":
            if peer_uid(raw) != self._uid:
                raise PermissionDenied("it is another user's")
        else:
            tune_tcp(raw)
        fds: list[int] = []
        try:
            opening = await sock.receive_opening(fds)
            offer = self._offers.get(opening.token)
            if offer is None or offer.name != name or opening.incarnation != self._incarnation:
                raise PermissionDenied("there is no such offer")
            self.withdraw(opening.token)
            readable, lent = map_regions(fds, opening.regions)
            return offer, Opened(name, sock, readable, lent)
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def offer(self, hello: kv_pb2.StreamHello, attach: Callable[[Opened], None]) -> kv_pb2.Lane | None:
        """Offers the first lane of a hello that can be; `attach` gets its connection. None when there is none."""
        for kind in hello.lanes:
            name = lane_name(kind)
            if name not in self.addresses or (name == "local" and hello.lane_place != self._settings.place):
                continue
            token = secrets.token_bytes(TOKEN_BYTES)
            timer = asyncio.get_running_loop().call_later(OFFER_S, self.withdraw, token)
            self._offers[token] = _Offer(name, attach, timer)
            return kv_pb2.Lane(kind=kind, address=self.addresses[name], token=token)
        return None

    def withdraw(self, token: bytes) -> None:
        """An offer does not stand any more. Idempotent."""
        offer = self._offers.pop(token, None)
        if offer is not None:
            offer.timer.cancel()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
