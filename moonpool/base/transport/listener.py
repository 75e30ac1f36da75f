"""Accepts connections of the transports that a service offers; a connection shows the offer's token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from moonpool.base import world
from moonpool.base.config import ServiceConfig
from moonpool.base.errors import MoonpoolError, PermissionDenied, StreamBroken
from moonpool.base.rpc.accept import accept, close_if_cancelled
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.base.transport.base import (
    ConnectionEnd,
    ListenOptions,
    Transport,
)
from moonpool.base.transport.config import TRANSPORTS
from moonpool.base.transport.framed_socket import FramedSocket, PeerLeftSilently
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
OFFER_S = 10.0
"""How long an offer stands."""
HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 64
PAUSE_S = 0.1
TOKEN_BYTES = 32


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
        """Listen while the body runs.

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
        while True:
            try:
                sock, _ = await accept(listener)
            except OSError as error:
                log.warning("a connection could not be accepted", transport=transport.name, error=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._tasks) > MAX_HANDSHAKES:
                sock.close()
            else:
                close_if_cancelled(self._spawn(self._handshake(sock, transport)), sock)

    async def _handshake(self, raw: socket.socket, transport: Transport) -> None:
        """Hand a connection to the stream with the shown token, or close the connection."""
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def offer(
        self, hello: kv_pb2.StreamHello, attach: Callable[[ConnectionEnd], None], *, one_shot: bool = False
    ) -> kv_pb2.TransportOffer | None:
        """Offer the first transport of a hello that both sides can use; None if there is none.

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


def _opened_connections(transport: str) -> Metric[TransportListener]:
    text = f"Connections of transport `{transport}` that peers opened."
    return counter(f"transports_{transport}_opened_total", text, lambda listener: listener.opened[transport])


LISTENER_METRICS: tuple[Metric[TransportListener], ...] = (
    *map(_opened_connections, TRANSPORTS),
    counter(
        "transports_refused_total", "Connections of peers that were not accepted.", lambda listener: listener.refused
    ),
    Metric(
        "transport_offers",
        "Transports offered to peers that have not connected yet.",
        lambda listener: listener.offers,
        0,
    ),
)
"""Reported by the side that streams are opened to."""
