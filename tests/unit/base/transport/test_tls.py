"""The TLS transport: who is let in, what crosses the wire, and how much a socket takes and gives at once."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import MoonpoolError, StreamBroken
from moonpool.base.rpc.tls import NAME, Tls
from moonpool.base.transport.base import ConnectionEnd
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.framed_socket import remaining_parts
from moonpool.base.transport.framing import LENGTH_PREFIX
from moonpool.base.transport.listener import TransportListener
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.tcp import TcpTransport
from moonpool.base.transport.tls import RECORD_BYTES, TlsSocket
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.rpc.certificates import tls
from tests.unit.base.transport.pairs import REQUEST, certificates, read, transport_settings

EPOCH = 9
WAIT_S = 60.0


@dataclass
class Server:
    """A server of the transport, and what it has attached."""

    listener: TransportListener
    opened: list[ConnectionEnd] = field(default_factory=list)
    links: list[Any] = field(default_factory=list)

    def offer(self) -> kv_pb2.TransportOffer:
        hello = kv_pb2.StreamHello(transports=[kv_pb2.TRANSPORT_KIND_TLS])
        offer = self.listener.offer(hello, self.opened.append)
        assert offer is not None
        return offer

    async def dial(self, dialer: TransportDialer, offer: kv_pb2.TransportOffer | None = None) -> Any:
        offer = offer or self.offer()
        link = await dialer.dial(offer, EPOCH, kvstore_pb2.GetResponse, 0, lambda message: None)
        self.links.append(link)
        return link

    async def refusal(self, dialer: TransportDialer) -> str:
        """Why a client gets no connection."""
        with pytest.raises(MoonpoolError) as found:
            await self.dial(dialer)
        return str(found.value)


def client(files: Tls) -> TransportDialer:
    """A client with these certificates."""
    return TransportDialer(open_transports(TransportConfig(kv_transports="tls"), files), dial_s=WAIT_S)


@asynccontextmanager
async def served(files: Tls | None = None, *, handshake_s: float = WAIT_S) -> AsyncIterator[Server]:
    config = TransportConfig(**transport_settings("tls", Path("/unused")))
    server = Server(TransportListener(open_transports(config, files), EPOCH, handshake_s=handshake_s))
    async with server.listener.running(config):
        yield server
    for each in (*server.links, *(end.sock for end in server.opened)):
        each.close(StreamBroken("the test is over"))


async def test_a_message_crosses_the_wire() -> None:
    async with served() as server:
        link = await server.dial(client(tls(certificates(), "prefill")))
        far: Any = server.opened[0].open(kvstore_pb2.PutRequest, lambda message: None)
        await link.write(REQUEST)
        assert (await read(far))[0] == REQUEST
        assert (link.name, server.listener.opened) == ("tls", {"tls": 1})


async def test_a_plain_client_reads_which_settings_it_lacks() -> None:
    async with served() as server:
        offer = server.offer()
        offer.kind = kv_pb2.TRANSPORT_KIND_TCP
        with pytest.raises(MoonpoolError, match="takes TLS only: set tls_cert, tls_key and tls_ca"):
            await server.dial(TransportDialer((TcpTransport(),), dial_s=WAIT_S), offer)
        assert (server.opened, server.listener.refused) == ([], 1)
        assert (
            server.listener.offer(kv_pb2.StreamHello(transports=[kv_pb2.TRANSPORT_KIND_TCP]), server.opened.append)
            is None
        )


async def test_a_client_of_another_authority_is_refused_and_refuses(tmp_path: Path) -> None:
    other = tls(tmp_path, "prefill")
    async with served() as server:
        assert "certificate is not accepted (tls_ca)" in await server.refusal(client(other))
        # Of this authority in its own eyes: the server finds out.
        (tmp_path / "ca.pem").write_bytes((certificates() / "ca.pem").read_bytes())
        assert await server.refusal(
            client(Tls(tmp_path / "ca.pem", tmp_path / "prefill.pem", tmp_path / "prefill.key"))
        )
        assert (server.opened, server.listener.refused) == ([], 2)
        await server.dial(client(tls(certificates(), "prefill")))
        assert len(server.opened) == 1


async def test_who_has_no_certificate_or_no_token_is_refused() -> None:
    async with served() as server:
        offer = server.offer()
        host, _, port = offer.address.rpartition(":")
        bare = ssl.create_default_context(cafile=str(certificates() / "ca.pem"))
        reader, writer = await asyncio.open_connection(host, int(port), ssl=bare, server_hostname=NAME)
        opening = kv_pb2.TransportOpen(token=offer.token, epoch=EPOCH).SerializeToString()
        writer.write(LENGTH_PREFIX.pack(len(opening), 0) + opening)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            await reader.read()
        writer.close()
        forged = kv_pb2.TransportOffer(kind=kv_pb2.TRANSPORT_KIND_TLS, address=offer.address, token=bytes(32))
        with pytest.raises(MoonpoolError, match="refused: there is no such offer"):
            await server.dial(client(tls(certificates(), "prefill")), forged)
        assert (server.opened, server.listener.refused) == ([], 2)


async def test_who_says_nothing_is_not_waited_for_and_who_only_looks_is_not_counted() -> None:
    async with served() as server:
        host, _, port = server.offer().address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write_eof()
        assert await reader.read() == b""
        assert server.listener.refused == 0
        writer.close()
    async with served(handshake_s=0.05) as server:
        host, _, port = server.offer().address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01")
        await reader.read()
        assert server.listener.refused == 1
        writer.close()


async def test_changed_files_count_for_new_connections_and_wrong_ones_do_not(tmp_path: Path) -> None:
    files = tls(tmp_path, "kvstore")
    async with served(files) as server:
        await server.dial(client(tls(tmp_path, "prefill")))
        (tmp_path / "kvstore.key").write_bytes((tmp_path / "prefill.key").read_bytes())  # half of a change
        await server.dial(client(tls(tmp_path, "prefill")))
        (anew := tmp_path / "anew").mkdir()
        other = tls(anew, "kvstore")
        for name in ("ca.pem", "kvstore.pem", "kvstore.key"):
            (tmp_path / name).write_bytes((anew / name).read_bytes())
        await server.dial(client(other))
        assert len(server.opened) == 3


def sockets() -> tuple[TlsSocket, TlsSocket, socket.socket]:
    """Both ends of a connection with small buffers, and the plain socket below the second end."""
    near, far = socket.socketpair()
    below = far.dup()
    ends = []
    for sock, server in ((near, False), (far, True)):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        sock.setblocking(False)
        context = tls(certificates(), "kvstore").socket_context(server=server)
        context.sslsocket_class = TlsSocket
        ends.append(context.wrap_socket(sock, server, do_handshake_on_connect=False, server_hostname=names[server]))
    for _ in range(4):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    first, second = ends
    assert isinstance(first, TlsSocket)
    assert isinstance(second, TlsSocket)
    return first, second, below


names = {False: NAME, True: None}


@pytest.mark.parametrize("seed", range(4))
def test_bytes_come_as_they_were_sent_however_they_are_cut(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    near, far, below = sockets()
    sizes = [chance.choice([0, 1, 7, 4096, RECORD_BYTES - 1, RECORD_BYTES, 3 * RECORD_BYTES + 5]) for _ in range(60)]
    pieces = [chance.randbytes(size) for size in sizes]
    left, got = [memoryview(piece) for piece in pieces if piece], bytearray()
    total = sum(sizes)
    while len(got) < total:
        if left and chance.random() < 0.6:
            with suppress(BlockingIOError):
                left = remaining_parts(left, near.sendmsg(left[:8]))
        room = [memoryview(bytearray(chance.choice([1, 100, 5000, 70_000]))) for _ in range(3)]
        with suppress(BlockingIOError):
            if chance.random() < 0.5:
                count = far.recvmsg_into(room)[0]
                got += b"".join(room)[:count]
            else:
                count = far.recv_into(room[0])
                assert count == room[0].nbytes or not far.pending(), "less than full says that no more is there"
                got += room[0][:count]
    assert got == b"".join(pieces)
    for sock in (near, far, below):
        sock.close()


def test_the_wire_carries_no_plaintext_even_after_a_shutdown() -> None:
    near, far, below = sockets()
    near.send(b"a secret")
    assert b"a secret" not in below.recv(4096, socket.MSG_PEEK)
    near.shutdown(socket.SHUT_RD)  # as a thread that gives the connection up, while another sends
    assert near.send(b"a secret") == 8
    assert b"a secret" not in below.recv(1 << 16)
    for sock in (near, far, below):
        sock.close()
