"""Opens connections of a transport that a server offers and a client takes.

The server accepts a connection that shows the offer's token. If dialing fails, the client stays on gRPC for a while.
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
from typing import Any, cast

from google.protobuf.message import Message

from moonpool.base import world
from moonpool.base.config import ServiceConfig
from moonpool.base.errors import FrameError, MoonpoolError, PermissionDenied, StreamBroken
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.base.transport.base import (
    Connection,
    ConnectionEnd,
    ListenOptions,
    M,
    OfferedRegions,
    Transport,
    ZeroCopyConnection,
)
from moonpool.base.transport.config import TRANSPORTS
from moonpool.base.transport.framed_socket import FramedSocket, PeerLeftSilently
from moonpool.base.transport.regions import ExportedRegions, MappedRegion, SharedRegion, address_of
from moonpool.base.transport.registry import transport_name
from moonpool.v1 import kv_pb2

OFFER_S = 10.0
"""How long an offer stands."""
HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 64
PAUSE_S = 0.1
TOKEN_BYTES = 32
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    transport: Transport
    attach: Callable[[ConnectionEnd], None]
    timer: asyncio.TimerHandle


class TransportListener:
    """Accepts the connections of a service's transports; use `running`.

    Attributes:
        addresses: where each transport is reached, by name.
        opened: connections that were opened so far, by name of the transport.
        refused: connections that were not accepted.
    """

    def __init__(self, transports: Sequence[Transport], epoch: int, *, handshake_s: float = HANDSHAKE_S) -> None:
        """Listens nowhere yet."""
        self._transports = {transport.kind: transport for transport in transports}
        self._epoch = epoch
        self._handshake_s = handshake_s
        self.addresses: dict[str, str] = {}
        self._offers: dict[bytes, _Offer] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.opened: Counter[str] = Counter()
        self.refused = 0

    @property
    def offers(self) -> int:
        """Number of streams that may move to another transport and have not done so yet."""
        return len(self._offers)

    @asynccontextmanager
    async def running(self, config: ServiceConfig) -> AsyncIterator[None]:
        """Listens while the body runs.

        Raises:
            ConfigError: listening failed.
        """
        try:
            with contextlib.ExitStack() as stack:
                for transport in self._transports.values():
                    options = ListenOptions(config, self._epoch, MAX_HANDSHAKES)
                    listener, self.addresses[transport.name] = transport.listen(stack, options)
                    self._spawn(self._accept(listener, transport))
                yield
        finally:
            self.addresses.clear()
            for token in list(self._offers):
                self.withdraw(token)
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket, transport: Transport) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection could not be accepted", transport=transport.name, error=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._tasks) > MAX_HANDSHAKES:
                sock.close()
            else:
                self._spawn(self._handshake(sock, transport))

    async def _handshake(self, raw: socket.socket, transport: Transport) -> None:
        """Hands a connection to the stream with the shown token, or closes the connection."""
        sock: FramedSocket | None = None
        error: Exception = StreamBroken("refused")
        taken = False
        try:
            sock = transport.frame(raw, server=True)
            async with asyncio.timeout(self._handshake_s):
                offer, end, description = await self._opening(sock, transport)
            sock.send_message(kv_pb2.TransportOpened(description=description))
            offer.attach(end)
            taken = True
            self.opened[transport.name] += 1
        except PeerLeftSilently:
            pass  # a neighbour checked for a listener (`remove_stale`)
        except (MoonpoolError, OSError, TimeoutError) as failure:
            error = failure
            self.refused += 1
            # at level debug: whoever can connect must not fill the log; the client reports this, and a gauge
            log.debug("connection refused", transport=transport.name, reason=str(failure) or "nothing came")
            if sock is not None:
                with contextlib.suppress(StreamBroken):
                    sock.send_message(kv_pb2.TransportOpened(refused=str(failure) or "nothing came"))
        finally:
            if sock is None:
                raw.close()
            elif not taken:
                sock.close(error)

    async def _opening(self, sock: FramedSocket, transport: Transport) -> tuple[_Offer, ConnectionEnd, bytes]:
        """The offer that the peer takes, this side's end, and this side's description."""
        transport.check_peer(sock.raw_socket)
        await sock.secure()
        fds: list[int] = []
        try:
            opening = await sock.receive_opening(fds)
            offer = self._offers.get(opening.token)
            if offer is None or offer.transport is not transport or opening.epoch != self._epoch:
                raise PermissionDenied("there is no such offer")
            self.withdraw(opening.token)
            found = transport.accept_regions(fds, opening)
            end = ConnectionEnd(
                transport, sock, readable=found.readable, borrowed=found.borrowed, peer_description=opening.description
            )
            return offer, end, found.description
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def offer(
        self, hello: kv_pb2.StreamHello, attach: Callable[[ConnectionEnd], None], *, one_shot: bool = False
    ) -> kv_pb2.TransportOffer | None:
        """Offers the first transport of a hello that both sides can use; None if there is none.

        Args:
            hello: The client's.
            attach: Gets this side's end of the connection.
            one_shot: Whether the stream takes one-shot messages.
        """
        for kind in hello.transports:
            transport = self._transports.get(kind)
            if transport is None or transport.name not in self.addresses or not transport.can_use(hello):
                continue
            token = world.random_bytes(TOKEN_BYTES)
            timer = asyncio.get_running_loop().call_later(OFFER_S, self.withdraw, token)
            self._offers[token] = _Offer(transport, attach, timer)
            brief = one_shot and transport.takes_one_shot
            return kv_pb2.TransportOffer(kind=kind, address=self.addresses[transport.name], token=token, brief=brief)
        return None

    def withdraw(self, token: bytes) -> None:
        """An offer does not stand any more. Idempotent."""
        offer = self._offers.pop(token, None)
        if offer is not None:
            offer.timer.cancel()


DIAL_S = 2.0
RETRY_S = 10.0
"""How long a process leaves a peer's transports alone after a failure."""
MAX_FAILURES = 1024


def _opened_connections(transport: str) -> Metric[TransportListener]:
    text = f"Connections of transport `{transport}` that peers opened."
    return counter(f"transports_{transport}_opened_total", text, lambda listener: listener.opened[transport])


LISTENER_METRICS: tuple[Metric[TransportListener], ...] = (
    *map(_opened_connections, TRANSPORTS),
    counter(
        "transports_refused_total", "Connections of peers that were not accepted.", lambda listener: listener.refused
    ),
    Metric("transport_offers", "Transports offered to peers that have not connected yet.", lambda it: it.offers, 0),
)
"""Reported by the side that streams are opened to."""


class TransportDialer:
    """Opens transport connections for a process's streams to others; one per process.

    Attributes:
        failures: connections that could not be opened, or broke, so far.
    """

    def __init__(
        self,
        transports: Sequence[Transport] = (),
        share: Callable[[], Sequence[SharedRegion]] = tuple,
        *,
        retry_s: float = RETRY_S,
        dial_s: float = DIAL_S,
    ) -> None:
        """Opens no connection yet.

        Args:
            transports: What this process can use, best first.
            share: Gives the memory that peers may read: this process' KV pool. Called when a connection opens.
            retry_s: How long a peer's transports are left alone after a failure.
            dial_s: Longest time to open a connection.
        """
        self._transports = {transport.kind: transport for transport in transports}
        self._share = share
        self._retry_s = retry_s
        self._dial_s = dial_s
        self._failed: dict[int, float] = {}  # when, by the peer's epoch
        self._connections: list[Connection[Any]] = []
        self.failures = 0

    def fill(self, hello: kv_pb2.StreamHello) -> None:
        """Says in a hello what this side can use."""
        for transport in self._transports.values():
            hello.transports.append(cast("Any", transport.kind))
            hello.transport_place = hello.transport_place or transport.scope

    def retry_at(self, epoch: int) -> float:
        """From when on the transports of an epoch may be tried, on the event loop's clock."""
        failed_at = self._failed.get(epoch)
        return 0.0 if failed_at is None else failed_at + self._retry_s

    def failed(self, name: str, transport: str, epoch: int, error: Exception) -> None:
        """A connection to a peer could not be opened, or broke: streams to the peer stay on gRPC for a while."""
        self.failures += 1
        self._failed[epoch] = asyncio.get_running_loop().time()
        if len(self._failed) > MAX_FAILURES:
            del self._failed[min(self._failed, key=self._failed.__getitem__)]
        log.warning("transport failed; using gRPC", stream=name, transport=transport, error=str(error))

    async def dial(
        self,
        offer: kv_pb2.TransportOffer,
        epoch: int,
        cls: type[M],
        mailbox_bytes: int,
        acknowledge: Callable[[Message], None],
    ) -> ZeroCopyConnection[M]:
        """Opens the connection that a peer offers.

        Args:
            offer: Of the peer's welcome.
            epoch: Of the peer.
            cls: Messages that come.
            mailbox_bytes: Payload bytes that the peer may be ahead in sending; 0 if this side sends payloads.
            acknowledge: Sends a message to the peer, in turn.

        Raises:
            MoonpoolError: The peer refuses, or the answer is malformed.
            OSError: No process listens there.
            TimeoutError: Opening took too long.
        """
        connection = (await self.join(offer, epoch, mailbox_bytes)).open(cls, acknowledge)
        self._connections = [each for each in self._connections if not each.closed]
        self._connections.append(connection)
        return connection

    async def join(
        self, offer: kv_pb2.TransportOffer, epoch: int, mailbox_bytes: int, share: Sequence[SharedRegion] = ()
    ) -> ConnectionEnd:
        """As `dial`, without a `Connection`; `share` is more memory for the peer to read, if the peer may read any."""
        transport = self._transports.get(offer.kind)
        if transport is None:
            raise FrameError(f"{transport_name(offer.kind)} was not asked for")
        async with asyncio.timeout(self._dial_s):
            raw = await transport.connect(offer.address)
            try:
                sock = transport.frame(raw, server=False)
            except BaseException:
                raw.close()
                raise
            try:
                transport.check_peer(sock.raw_socket)
                await sock.secure()
                regions = transport.offer_regions([*self._share(), *share], mailbox_bytes)
                opening = kv_pb2.TransportOpen(token=offer.token, epoch=epoch)
                return await _shake_hands(transport, sock, opening, regions)
            except BaseException as error:
                sock.close(error if isinstance(error, Exception) else StreamBroken("given up"))
                raise

    def count_open(self, name: str) -> int:
        """Number of open connections on the transport with this name."""
        return sum(each.name == name and not each.closed for each in self._connections)


def _open_connections(transport: str) -> Metric[TransportDialer]:
    text = f"Open connections of transport `{transport}` to peers."
    return Metric(f"transports_{transport}", text, lambda dialer: dialer.count_open(transport))


DIALER_METRICS: tuple[Metric[TransportDialer], ...] = (
    *map(_open_connections, TRANSPORTS),
    counter(
        "transport_failures_total",
        "Connections to peers that could not be opened or broke; gRPC takes their place.",
        lambda dialer: dialer.failures,
    ),
)
"""Reported by the side that opens streams."""


async def _shake_hands(
    transport: Transport, sock: FramedSocket, opening: kv_pb2.TransportOpen, regions: OfferedRegions
) -> ConnectionEnd:
    """Shows the token and the regions, and waits for the answer."""
    shared, mailbox = regions.shared, regions.mailbox
    opening.description = regions.description
    if regions.by_address:
        opening.regions.extend(kv_pb2.Region(bytes=each.data.nbytes, address=address_of(each.data)) for each in shared)
    else:
        opening.regions.extend(kv_pb2.Region(bytes=os.fstat(each.fd).st_size) for each in shared)
    fds = [] if regions.by_address else [each.fd for each in shared]
    readable: dict[int, MappedRegion] = {}
    try:
        if mailbox is not None:
            opening.regions.add(bytes=mailbox.region.nbytes, lent=True)
            fds.append(mailbox.fd)
            readable[len(fds)] = mailbox.region
        sock.send_message(opening, fds)
    finally:
        if mailbox is not None:
            mailbox.close()
    answer = await sock.receive_message(kv_pb2.TransportOpened)
    if answer.refused:
        raise MoonpoolError(f"refused: {answer.refused}")
    mailbox_number = next(iter(readable), None)
    return ConnectionEnd(
        transport, sock, ExportedRegions(shared), readable, mailbox_number, peer_description=answer.description
    )
