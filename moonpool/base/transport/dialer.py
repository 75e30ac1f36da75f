"""Opens connections of the transports that a server offers. If dialing fails, the client stays on gRPC for a while."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

from google.protobuf.message import Message

from moonpool.base.errors import FrameError, MoonpoolError, StreamBroken
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.base.transport.base import ConnectionEnd, OfferedRegions, Transport
from moonpool.base.transport.config import TRANSPORTS
from moonpool.base.transport.connection import Connection, M, ZeroCopyConnection
from moonpool.base.transport.framed_socket import FramedSocket
from moonpool.base.transport.regions import ExportedRegions, MappedRegion, SharedRegion, address_of
from moonpool.base.transport.registry import transport_name
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
DIAL_S = 2.0
RETRY_S = 10.0
"""How long a process leaves a peer's transports alone after a failure."""
MAX_FAILURES = 1024


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
        """Open no connection yet.

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
        """Say in a hello what this side can use."""
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
        """Open the connection that a peer offers.

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
        self._connections = [connection for connection in self._connections if not connection.closed]
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
        return sum(connection.name == name and not connection.closed for connection in self._connections)


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
    """Show the token and the regions, and wait for the answer."""
    shared, mailbox = regions.shared, regions.mailbox
    opening.description = regions.description
    if regions.by_address:
        opening.regions.extend(
            kv_pb2.Region(bytes=region.data.nbytes, address=address_of(region.data)) for region in shared
        )
    else:
        opening.regions.extend(kv_pb2.Region(bytes=os.fstat(region.fd).st_size) for region in shared)
    fds = [] if regions.by_address else [region.fd for region in shared]
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
