"""The client's end of lanes: what a hello says of them, and how an offer is taken. What fails is gRPC's for a while."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from moonpool.config import parse_address
from moonpool.errors import FrameError, MoonpoolError, PermissionDenied, StreamBroken
from moonpool.streams.lanes.lane import Lane
from moonpool.streams.lanes.listening import peer_uid
from moonpool.streams.lanes.regions import Mailbox, Mapped, OwnRegions, Shared
from moonpool.streams.lanes.settings import LaneSettings, lane_name
from moonpool.streams.lanes.sockets import LaneSocket, tune_tcp
from moonpool.telemetry.gauges import Entry
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

DIAL_S = 2.0
RETRY_S = 10.0
"""How long a process leaves the lanes of a peer alone after one of them failed."""
MAX_FAILURES = 1024

log = get_logger(__name__)

M = TypeVar("M", bound=Message)


class LaneEnd(NamedTuple):
    """A lane that is open at the client: its name, its socket, regions of both ways, and the number of the mailbox."""

    name: str
    sock: LaneSocket
    own: OwnRegions
    readable: dict[int, Mapped]
    mailbox: int | None


class LaneDialer:
    """One per process: everything that its streams to others need to use lanes.

    Attributes:
        failures: lanes that could not be opened, or broke, so far.
    """

    def __init__(
        self,
        settings: LaneSettings,
        share: Callable[[], Sequence[Shared]] = tuple,
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
        self._lanes: list[Lane[Any]] = []
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
    ) -> Lane[M]:
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
        lane = Lane(end.name, end.sock, cls, own=own, readable=readable, mailbox=mailbox, acknowledge=acknowledge)
        self._lanes = [each for each in self._lanes if not each.closed]
        self._lanes.append(lane)
        return lane

    async def join(
        self, offer: kv_pb2.Lane, incarnation: int, lend_bytes: int, share: Sequence[Shared] = ()
    ) -> LaneEnd:
        """As `dial`, but nobody uses it yet; `share` is more memory that the peer may read, where it may read any."""
        name = lane_name(offer.kind)
        if name not in self._settings.names:
            raise FrameError(f"{name} was not asked for")
        async with asyncio.timeout(self._dial_s):
            sock = LaneSocket(await _connected(name, offer.address))
            try:
                return await self._open_with(sock, offer, incarnation, lend_bytes, share)
            except BaseException as error:
                sock.close(error if isinstance(error, Exception) else StreamBroken("given up"))
                raise

    async def _open_with(
        self, sock: LaneSocket, offer: kv_pb2.Lane, incarnation: int, lend_bytes: int, share: Sequence[Shared]
    ) -> LaneEnd:
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
        return LaneEnd(lane_name(offer.kind), sock, OwnRegions(shared), readable, next(iter(readable), None))

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
