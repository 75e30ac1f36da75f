"""A transport with a connection of its own, as docs/extend/kv_transport.md describes: payloads go to the peer's folder.

The sender writes a payload where the receiver wants payloads, as RDMA writes do. So each side describes itself to the
other: the opening side in the opening, the accepting side in the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from google.protobuf.message import Message

from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.base import AcceptedRegions, ConnectionEnd, ListenOptions, OfferedRegions, Transport
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.connection import M, OutgoingItem, ReceiveCallbacks, UnsentRest, ZeroCopyConnection
from moonpool.base.transport.framing import LENGTH_PREFIX
from moonpool.base.transport.payloads import PendingPayload
from moonpool.base.transport.regions import SharedRegion
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.toy import ToyTransport

_numbers = itertools.count()
"""Both sides are in this process: a file's number is unique in all folders."""


class FileTransport(Transport):
    """Payloads as files in a folder of the receiver's process."""

    name = "files"
    kind = 101

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mp-files-"))
        weakref.finalize(self, shutil.rmtree, self.folder)
        self._sockets = ToyTransport()

    @classmethod
    def create(cls, config: TransportConfig, tls: Tls | None) -> Self:
        return cls()

    def listen(self, stack: contextlib.ExitStack, options: ListenOptions) -> tuple[socket.socket, str]:
        return self._sockets.listen(stack, options)

    async def connect(self, address: str) -> socket.socket:
        return await self._sockets.connect(address)

    def check_peer(self, sock: socket.socket) -> None:
        """Accepts every process of this machine."""

    def offer_regions(self, share: Sequence[SharedRegion], mailbox_bytes: int) -> OfferedRegions:
        return OfferedRegions(description=os.fsencode(self.folder))

    def accept_regions(self, fds: Sequence[int], opening: kv_pb2.TransportOpen) -> AcceptedRegions:
        super().accept_regions(fds, opening)
        return AcceptedRegions(description=os.fsencode(self.folder))

    def open_connection(
        self, end: ConnectionEnd, cls: type[M], acknowledge: Callable[[Message], None]
    ) -> FileConnection[M]:
        return FileConnection(end, self.folder, cls)


class FileConnection(ZeroCopyConnection[M]):
    """Messages over the handshake's socket; `TransportFrame.extents` has the number and size of a payload's file."""

    def __init__(self, end: ConnectionEnd, own: Path, cls: type[M]) -> None:
        self.name = end.name
        self._sock = end.sock
        self._own = own
        self._peer = Path(os.fsdecode(end.peer_description))
        self._cls = cls
        self._error: Exception | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()

    @property
    def closed(self) -> bool:
        return self._error is not None

    async def run(self, callbacks: ReceiveCallbacks) -> Exception:
        while True:
            try:
                frame = await self._sock.receive_message(kv_pb2.TransportFrame)
            except MoonpoolError as error:
                return error
            await self._wanted.wait()
            await self._deliver(frame, callbacks)

    async def _deliver(self, frame: kv_pb2.TransportFrame, callbacks: ReceiveCallbacks) -> None:
        message: Any = self._cls.FromString(frame.message)
        if not frame.extents:
            callbacks.take(message, memoryview(b""))
            return
        file = self._own / str(frame.extents[0].offset)
        payload = memoryview(file.read_bytes())
        file.unlink()
        buffer = callbacks.receive_into(message, payload.nbytes)
        callbacks.take(message, await buffer.receive(payload) if buffer else payload)

    def pause(self) -> None:
        self._wanted.clear()

    def resume(self) -> None:
        self._wanted.set()

    def start(self, item: OutgoingItem) -> UnsentRest | None:
        held = item if isinstance(item, PendingPayload) else None
        message = held.message if held else item
        assert isinstance(message, Message | bytes), "connections without one-shot messages get no answers to them"
        frame = kv_pb2.TransportFrame(message=message if isinstance(message, bytes) else message.SerializeToString())
        try:
            if held is not None:
                number = next(_numbers)
                with (self._peer / str(number)).open("xb") as file:
                    file.writelines(held.parts)
                frame.extents.add(offset=number, length=held.nbytes)
            text = frame.SerializeToString()
            left = self._sock.send_now([LENGTH_PREFIX.pack(len(text), 0) + text])
        except Exception as error:
            return UnsentRest([], held, error)
        if held is not None:
            held.finish()  # the file holds a copy
        return UnsentRest(left) if left else None

    async def write(self, item: OutgoingItem | UnsentRest) -> None:
        rest = item if isinstance(item, UnsentRest) else self.start(item)
        if rest is None:
            return
        if rest.error is not None:
            if rest.held is not None:
                rest.held.fail(rest.error)
            raise rest.error
        await self._sock.send(rest.parts)

    def close(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._sock.close(error)
