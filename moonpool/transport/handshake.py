"""Opens connections of a transport that a server offers and a client takes.

The server accepts a connection that shows the token of its offer. If dialing fails, the client stays on gRPC for a
while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from moonpool import world
from moonpool.config import ServiceConfig, format_address, is_loopback, parse_address
from moonpool.errors import ConfigError, FrameError, MoonpoolError, PermissionDenied, StreamBroken
from moonpool.telemetry.gauges import Entry
from moonpool.telemetry.logs import get_logger
from moonpool.transport.config import TransportSettings, remove_stale, socket_path, transport_name
from moonpool.transport.connection import TransportConnection
from moonpool.transport.shared_memory import ExportedRegions, Mailbox, MappedRegion, SharedRegion, map_regions, peer_uid
from moonpool.transport.tcp import FramedSocket, PeerLeftSilently, tune_tcp
from moonpool.v1 import kv_pb2

OFFER_S = 10.0
"""How long an offer stands."""


HANDSHAKE_S = 5.0


MAX_HANDSHAKES = 64


PAUSE_S = 0.1


TOKEN_BYTES = 32


log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AcceptedConnection:
    """A connection that showed an offer's token.

    Attributes:
        name: of the lane's kind.
        readable: the client's regions, by number.
        lent: number and memory of the region that the client lends.
    """

    name: str
    sock: FramedSocket
    readable: dict[int, MappedRegion]
    lent: tuple[int, MappedRegion] | None


@dataclass(frozen=True, slots=True)
class _Offer:
    name: str
    attach: Callable[[AcceptedConnection], None]
    timer: asyncio.TimerHandle


class TransportListener:
    """Where a service's lanes begin; use `running`.

    Attributes:
        addresses: where each kind of lane is reached, by name.
        opened: lanes that were opened so far, by name.
        refused: connections that were not taken.
    """

    def __init__(
        self, settings: TransportSettings, incarnation: int, *, uid: int | None = None, handshake_s: float = HANDSHAKE_S
    ) -> None:
        """Listens nowhere yet. `uid`: of those who may use local lanes; this process' own unless given."""
        self._settings = settings
        self._incarnation = incarnation
        self._uid = os.getuid() if uid is None else uid
        self._handshake_s = handshake_s
        self.addresses: dict[str, str] = {}
        self._offers: dict[bytes, _Offer] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
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
        sock = FramedSocket(raw)
        error: Exception = StreamBroken("refused")
        taken = False
        try:
            async with asyncio.timeout(self._handshake_s):
                offer, opened = await self._opening(raw, sock, name)
            sock.send_message(kv_pb2.LaneOpened())
            offer.attach(opened)
            taken = True
            self.opened[name] += 1
        except PeerLeftSilently:
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

    async def _opening(self, raw: socket.socket, sock: FramedSocket, name: str) -> tuple[_Offer, AcceptedConnection]:
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
            return offer, AcceptedConnection(name, sock, readable, lent)
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def offer(self, hello: kv_pb2.StreamHello, attach: Callable[[AcceptedConnection], None]) -> kv_pb2.Lane | None:
        """Offers the first lane of a hello that can be; `attach` gets its connection. None when there is none."""
        for kind in hello.lanes:
            name = transport_name(kind)
            if name not in self.addresses or (name == "local" and hello.lane_place != self._settings.place):
                continue
            token = world.random_bytes(TOKEN_BYTES)
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


DIAL_S = 2.0


RETRY_S = 10.0
"""How long a process leaves the lanes of a peer alone after one of them failed."""


MAX_FAILURES = 1024


M = TypeVar("M", bound=Message)


class DialedConnection(NamedTuple):
    """A lane that is open at the client: its name, its socket, regions of both ways, and the number of the mailbox."""

    name: str
    sock: FramedSocket
    own: ExportedRegions
    readable: dict[int, MappedRegion]
    mailbox: int | None


class TransportDialer:
    """One per process: everything that its streams to others need to use lanes.

    Attributes:
        failures: lanes that could not be opened, or broke, so far.
    """

    def __init__(
        self,
        settings: TransportSettings,
        share: Callable[[], Sequence[SharedRegion]] = tuple,
        *,
        retry_s: float = RETRY_S,
        dial_s: float = DIAL_S,
    ) -> None:
        """Opens nothing yet.

        Args:
            settings: What this process can use.
            share: Gives the memory that peers may read: this process' KV pool. Asked when a local lane is opened.
            retry_s: How long a peer's lanes are left alone after a failure.
            dial_s: Longest time to open a lane.
        """
        self._settings = settings
        self._share = share
        self._retry_s = retry_s
        self._dial_s = dial_s
        self._failed: dict[int, float] = {}  # when, by the peer's incarnation
        self._lanes: list[TransportConnection[Any]] = []
        self.failures = 0

    def gauges(self) -> list[Entry]:
        """For a service's gauges."""
        return [
            ("lanes_local", lambda: self._open("local"), None),
            ("lanes_tcp", lambda: self._open("tcp"), None),
            ("lane_failures", lambda: self.failures, None),
        ]

    def fill(self, hello: kv_pb2.StreamHello) -> None:
        """Says in a hello what this side can use."""
        hello.lanes.extend(self._settings.kinds)
        hello.lane_place = self._settings.place

    def retry_at(self, incarnation: int) -> float:
        """From when on the lanes of an incarnation may be tried, on the event loop's clock."""
        failed_at = self._failed.get(incarnation)
        return 0.0 if failed_at is None else failed_at + self._retry_s

    def failed(self, name: str, lane: str, incarnation: int, error: Exception) -> None:
        """A lane of a peer could not be opened, or broke: what comes next goes over gRPC for a while."""
        self.failures += 1
        self._failed[incarnation] = asyncio.get_running_loop().time()
        if len(self._failed) > MAX_FAILURES:
            del self._failed[min(self._failed, key=self._failed.__getitem__)]
        log.warning("lane failed; gRPC takes its place", stream=name, lane=lane, error=str(error))

    async def dial(
        self,
        offer: kv_pb2.Lane,
        incarnation: int,
        cls: type[M],
        lend_bytes: int,
        acknowledge: Callable[[Message], None],
    ) -> TransportConnection[M]:
        """Opens the lane that a peer offers.

        Args:
            offer: Of its welcome.
            incarnation: Of the peer.
            cls: Messages that come.
            lend_bytes: Payloads that the peer may be ahead in sending; 0 when this side sends them.
            acknowledge: Sends a message to the peer, in its turn.

        Raises:
            MoonpoolError: it is refused, or the answer is not proper.
            OSError: nobody is there.
            TimeoutError: it took too long.
        """
        end = await self.join(offer, incarnation, lend_bytes)
        own, readable, mailbox = end.own, end.readable, end.mailbox
        lane = TransportConnection(
            end.name, end.sock, cls, own=own, readable=readable, mailbox=mailbox, acknowledge=acknowledge
        )
        self._lanes = [each for each in self._lanes if not each.closed]
        self._lanes.append(lane)
        return lane

    async def join(
        self, offer: kv_pb2.Lane, incarnation: int, lend_bytes: int, share: Sequence[SharedRegion] = ()
    ) -> DialedConnection:
        """As `dial`, but nobody uses it yet; `share` is more memory that the peer may read, where it may read any."""
        name = transport_name(offer.kind)
        if name not in self._settings.names:
            raise FrameError(f"{name} was not asked for")
        async with asyncio.timeout(self._dial_s):
            sock = FramedSocket(await _connected(name, offer.address))
            try:
                return await self._open_with(sock, offer, incarnation, lend_bytes, share)
            except BaseException as error:
                sock.close(error if isinstance(error, Exception) else StreamBroken("given up"))
                raise

    async def _open_with(
        self, sock: FramedSocket, offer: kv_pb2.Lane, incarnation: int, lend_bytes: int, share: Sequence[SharedRegion]
    ) -> DialedConnection:
        """Shows the token and the regions, and waits for the answer."""
        local = offer.kind == kv_pb2.LANE_KIND_LOCAL
        shared = [*self._share(), *share] if local and not lend_bytes else []  # payloads go one way on a stream
        mailbox = Mailbox(lend_bytes) if local and lend_bytes else None
        opening = kv_pb2.LaneOpen(token=offer.token, incarnation=incarnation)
        opening.regions.extend(kv_pb2.Region(bytes=os.fstat(each.fd).st_size) for each in shared)
        fds = [each.fd for each in shared]
        readable = {}
        try:
            if mailbox is not None:
                opening.regions.add(bytes=lend_bytes, lent=True)
                fds.append(mailbox.fd)
                readable[len(fds)] = mailbox.region
            sock.send_message(opening, fds)
        finally:
            if mailbox is not None:
                mailbox.close()
        answer = await sock.receive_message(kv_pb2.LaneOpened)
        if answer.refused:
            raise MoonpoolError(f"refused: {answer.refused}")
        return DialedConnection(
            transport_name(offer.kind), sock, ExportedRegions(shared), readable, next(iter(readable), None)
        )

    def _open(self, name: str) -> int:
        return sum(lane.name == name and not lane.closed for lane in self._lanes)


async def _connected(name: str, address: str) -> socket.socket:
    """A connection to where a lane is offered."""
    loop = asyncio.get_running_loop()
    family = socket.AF_UNIX
    where: Any = address
    if name != "local":
        host, port = parse_address(address)
        family, _, _, _, where = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, where)
        if name != "local":
            tune_tcp(sock)
        elif peer_uid(sock) != os.getuid():
            raise PermissionDenied("another user listens there")
    except BaseException:
        sock.close()
        raise
    return sock
