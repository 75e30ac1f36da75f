"""Both ends of a link in this process."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import StreamBroken
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.transport.base import ConnectionEnd
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.connection import ReceiveCallbacks, ZeroCopyConnection
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.framed_socket import FramedSocket
from moonpool.base.transport.payloads import PendingPayload, ReceiveBuffer, ReceivedPayload, own_memory
from moonpool.base.transport.regions import ExportedRegions, Mailbox, MappedRegion, SharedRegion
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.socket_connection import SocketConnection
from moonpool.base.transport.tcp import TcpTransport
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.rpc.certificates import issue

NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed: pip install 'moonpool[nixl]'"),
)
for setting, value in {"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error"}.items():
    os.environ.setdefault(setting, value)  # NIXL on a machine without network
LAYOUT = KVLayout.uniform(layers=2, kv_heads=2, head_dim=4, block_size=16, dtype="float32")
MAILBOX = 4 * LAYOUT.slice_bytes(0)
REQUEST = kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=7))
RESPONSE = kvstore_pb2.GetResponse(done=kv_pb2.ReadDone(transfer=7))


def pool_of(blocks: int = 4) -> KVPool:
    """A pool, no two slices alike."""
    pool = KVPool.create(LAYOUT, blocks, [(0, LAYOUT.layers)])
    for layer in range(LAYOUT.layers):
        for block in range(blocks):
            pool.slice(layer, block)[:] = bytes([16 * layer + block + 1]) * LAYOUT.slice_bytes(0)
    return pool


def shared(pool: KVPool) -> Callable[[], list[SharedRegion]]:
    """What peers may read."""
    return lambda: [SharedRegion(fd, data) for fd, data in pool.shared()]


async def read(
    link: ZeroCopyConnection[Any], receive_into: Callable[[Any, int], ReceiveBuffer | None] = own_memory
) -> tuple[Any, ReceivedPayload]:
    """The next message and its payload; raises why the link has ended."""
    found: asyncio.Future[tuple[Any, ReceivedPayload]] = asyncio.get_running_loop().create_future()

    def take(message: Any, payload: ReceivedPayload) -> None:
        link.pause()
        found.set_result((message, payload))

    link.resume()
    running = asyncio.ensure_future(link.run(ReceiveCallbacks(take, receive_into)))
    try:
        await asyncio.wait((found, running), return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise running.result()
        return found.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def came(link: ZeroCopyConnection[Any]) -> tuple[Any, bytes]:
    """The next message and its payload."""
    message, payload = await read(link)
    assert isinstance(payload, memoryview), "nobody has said where it is to land"
    return message, bytes(payload)


@functools.cache
def certificates() -> Path:
    """A folder with an authority and a certificate of a kvstore; made once."""
    folder = Path(tempfile.mkdtemp(prefix="mp-certificates-"))
    atexit.register(shutil.rmtree, folder)
    issue(folder, "kvstore")
    return folder


def transport_settings(names: str, folder: Path) -> dict[str, Any]:
    """The settings of a process with these transports."""
    settings: dict[str, Any] = {"kv_transports": names, "kv_transports_dir": folder}
    if "tls" in names:
        files = {"tls_cert": "kvstore.pem", "tls_key": "kvstore.key", "tls_ca": "ca.pem"}
        settings |= {name: certificates() / file for name, file in files.items()}
    return settings


class Cuttable(TransportDialer):
    """Remembers the links that it opened, so that a test can break them."""

    def __init__(
        self, names: str, folder: Path, share: Callable[[], Sequence[SharedRegion]] = tuple, **options: Any
    ) -> None:
        super().__init__(open_transports(TransportConfig(**transport_settings(names, folder))), share, **options)
        self.made: list[ZeroCopyConnection[Any]] = []

    async def dial(self, *args: Any, **options: Any) -> ZeroCopyConnection[Any]:
        link = await super().dial(*args, **options)
        self.made.append(link)
        return link

    def cut(self) -> None:
        """Breaks all links; their calls stay."""
        for link in self.made:
            link.close(StreamBroken("cut"))


@dataclass
class Pair:
    """A client's and a server's end, joined; `socks` are those of the two."""

    client: SocketConnection[kvstore_pb2.GetResponse]
    server: SocketConnection[kvstore_pb2.PutRequest]
    socks: tuple[FramedSocket, FramedSocket]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def held(
        self, parts: Sequence[memoryview], link: SocketConnection[kvstore_pb2.PutRequest] | None = None
    ) -> PendingPayload:
        """A payload whose message is being written, by the client unless told otherwise."""
        item = PendingPayload(REQUEST if link is None else RESPONSE, list(parts))
        self.tasks.append(asyncio.ensure_future((link or self.client).write(item)))
        return item


@asynccontextmanager
async def pair(pool: KVPool | None = None, *, mailbox: int = 0) -> AsyncIterator[Pair]:
    """A link over a socket pair; the server maps the pool, and writes to a mailbox of so many bytes."""
    near, far = map(FramedSocket, socket.socketpair())
    ends: list[SocketConnection[kvstore_pb2.GetResponse] | SocketConnection[kvstore_pb2.PutRequest]] = []

    def acknowledge(number: int) -> Callable[[object], None]:
        return lambda message: tasks.append(asyncio.ensure_future(ends[number].write(message)))  # type: ignore[arg-type]

    tasks: list[asyncio.Task[None]] = []
    own = shared(pool)() if pool is not None else []
    lent, readable, number = None, {}, None
    mapped = {number: MappedRegion(each.fd, os.fstat(each.fd).st_size) for number, each in enumerate(own, 1)}
    if mailbox:
        box = Mailbox(mailbox)
        number = len(own) + 1
        lent = number, MappedRegion(box.fd, mailbox, writable=True)
        readable[number] = box.region
        box.close()
    transport = TcpTransport()
    client: SocketConnection[kvstore_pb2.GetResponse] = SocketConnection(
        ConnectionEnd(transport, near, ExportedRegions(own), readable, number), kvstore_pb2.GetResponse, acknowledge(0)
    )
    server: SocketConnection[kvstore_pb2.PutRequest] = SocketConnection(
        ConnectionEnd(transport, far, readable=mapped, borrowed=lent), kvstore_pb2.PutRequest, acknowledge(1)
    )
    ends += [client, server]
    try:
        yield Pair(client, server, (near, far), tasks)
    finally:
        for link in ends:
            link.close(StreamBroken("the test is over"))
        await asyncio.gather(*tasks, return_exceptions=True)
