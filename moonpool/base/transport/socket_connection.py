"""A connection over a stream socket, and the base class of transports whose connections are of this kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from moonpool.base.transport.base import ConnectionEnd, Transport
from moonpool.base.transport.connection import M, OutgoingItem, ReceiveCallbacks, UnsentRest, ZeroCopyConnection
from moonpool.base.transport.fault_injection import ConnectionBreaker, breaker
from moonpool.base.transport.message_receiver import MessageReceiver
from moonpool.base.transport.message_sender import MessageSender
from moonpool.base.transport.region_payloads import PlacedPayloads, RegionReader
from moonpool.base.transport.regions import (
    RemoteRegion,
    unmap_regions,
)
from moonpool.v1 import kv_pb2


class SocketConnection(ZeroCopyConnection[M]):
    """Messages on a stream socket; payloads follow their messages, or lie in regions that both processes map."""

    def __init__(
        self,
        end: ConnectionEnd,
        cls: type[M],
        acknowledge: Callable[[Message], None],
        breaks: ConnectionBreaker | None = breaker,
    ) -> None:
        """Arguments as of `Transport.open_connection`; `breaks` breaks the connection on purpose."""
        self.name = end.name
        self._sock = end.sock
        self._mapped = [region for region in end.readable.values() if not isinstance(region, RemoteRegion)]
        self._mapped += [end.borrowed[1]] if end.borrowed else []
        self._remote = [region for region in end.readable.values() if isinstance(region, RemoteRegion)]
        placed = PlacedPayloads(end.own, end.borrowed)
        reader = RegionReader(end.readable, end.mailbox)
        self._out = MessageSender(end.sock, placed, reader.take_reads, breaks)
        self._in: MessageReceiver[M] = MessageReceiver(
            end.sock,
            cls,
            reader,
            placed.on_reads,
            lambda reads: acknowledge(kv_pb2.TransportFrame(pulled=reads)),
        )
        self._error: Exception | None = None

    @property
    def closed(self) -> bool:
        return self._error is not None

    async def run(self, callbacks: ReceiveCallbacks) -> Exception:
        if self._error is not None:
            return self._error
        return await self._in.run(callbacks)

    def pause(self) -> None:
        self._in.pause()

    def resume(self) -> None:
        self._in.resume()

    def start(self, item: OutgoingItem) -> UnsentRest | None:
        unsent = self._out.start(item)
        if unsent is not None and unsent.error is not None and self._error is not None:
            self._out.fail(self._error)
        return unsent

    async def write(self, item: OutgoingItem | UnsentRest) -> None:
        unsent = item if isinstance(item, UnsentRest) else self.start(item)
        if unsent is None:
            return
        try:
            await self._out.finish(unsent)
        except BaseException:
            if self._error is not None:
                self._out.fail(self._error)
            raise

    def close(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self._sock.close(error)
        self._in.end(error)
        self._out.fail(error)
        for region in self._remote:
            region.close()
        unmap_regions(self._mapped)


class SocketTransport(Transport):
    """A transport with `SocketConnection`s as connections."""

    takes_one_shot = True

    def open_connection(
        self, end: ConnectionEnd, cls: type[M], acknowledge: Callable[[Message], None]
    ) -> SocketConnection[M]:
        return SocketConnection(end, cls, acknowledge)


async def connect_socket(sock: socket.socket, address: Any) -> socket.socket:
    """Connect a new stream socket, which is closed if that fails."""
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
