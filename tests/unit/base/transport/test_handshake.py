"""Who gets a connection: offers, tokens, users, epochs, regions; and those who do not keep to the handshake."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from moonpool.base.errors import FrameError, MoonpoolError, StreamBroken
from moonpool.base.transport.base import AcceptedRegions, ConnectionEnd, OfferedRegions, Transport
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.connection import ZeroCopyConnection
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.framing import LENGTH_PREFIX
from moonpool.base.transport.listener import TransportListener
from moonpool.base.transport.regions import SharedRegion
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.shared_memory import SharedMemoryTransport
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.transport.pairs import REQUEST, pool_of, read, shared
from tests.unit.base.transport.toy import ToyTransport

EPOCH = 9
WINDOW = 1 << 16
BOTH = ["local", "tcp"]
OTHER = {"local": kv_pb2.TRANSPORT_KIND_TCP, "tcp": kv_pb2.TRANSPORT_KIND_LOCAL}


class DescribedTransport(ToyTransport):
    """Toy connections of which each side says who it is."""

    def offer_regions(self, share: Sequence[SharedRegion], mailbox_bytes: int) -> OfferedRegions:
        return OfferedRegions(description=b"the opening side")

    def accept_regions(self, fds: Sequence[int], opening: kv_pb2.TransportOpen) -> AcceptedRegions:
        return AcceptedRegions(description=b"accepted: " + opening.description)


@dataclass
class Ends:
    """A server, what it has attached, and a client's dialer."""

    server: TransportListener
    dialer: TransportDialer
    transports: tuple[Transport, ...]
    opened: list[ConnectionEnd] = field(default_factory=list)
    connections: list[ZeroCopyConnection[Any]] = field(default_factory=list)
    acknowledged: list[Message] = field(default_factory=list)

    def offer(self, **changes: Any) -> kv_pb2.TransportOffer | None:
        hello = kv_pb2.StreamHello(sender=kv_pb2.Instance(id="client"))
        self.dialer.fill(hello)
        for name, value in changes.items():
            setattr(hello, name, value)
        return self.server.offer(hello, self.opened.append)

    async def dial(
        self, offer: kv_pb2.TransportOffer | None, epoch: int = EPOCH, mailbox_bytes: int = WINDOW
    ) -> ZeroCopyConnection[Any]:
        assert offer is not None
        connection = await self.dialer.dial(
            offer, epoch, kvstore_pb2.GetResponse, mailbox_bytes, self.acknowledged.append
        )
        self.connections.append(connection)
        return connection


@asynccontextmanager
async def ends(
    folder: Path, connections: str = "local,tcp", *, uid: int | None = None, **options: Any
) -> AsyncIterator[Ends]:
    config = TransportConfig(kv_transports=connections, kv_transports_dir=folder)
    transports = open_transports(config)
    served = transports if uid is None else (SharedMemoryTransport(folder, uid),)
    server = TransportListener(served, EPOCH, handshake_s=options.pop("handshake_s", 60.0))
    pool = pool_of()
    both = Ends(server, TransportDialer(transports, shared(pool), dial_s=60.0), transports)
    async with server.running(config):
        yield both
    for connection in both.connections:
        connection.close(StreamBroken("the test is over"))
    for opened in both.opened:
        opened.sock.close(StreamBroken("the test is over"))
    assert not os.listdir(folder), "a socket goes with its server"
    assert server.offers == 0
    pool.close()


def counts(dialer: TransportDialer) -> dict[str, int]:
    """Open connections by transport."""
    return {name: dialer.count_open(name) for name in BOTH}


async def raw(
    offer: kv_pb2.TransportOffer, opening: kv_pb2.TransportOpen, fds: list[int] | None = None
) -> kv_pb2.TransportOpened:
    """What a server answers to a client that sends what it likes."""

    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(offer.address)
            data = opening.SerializeToString()
            socket.send_fds(sock, [LENGTH_PREFIX.pack(len(data), 0) + data], fds or [])
            return sock.recv(4096)

    return kv_pb2.TransportOpened.FromString((await asyncio.to_thread(talk))[LENGTH_PREFIX.size :])


@pytest.mark.parametrize("name", BOTH)
async def test_an_offer_that_is_taken_is_a_connection(sockets: Path, name: str) -> None:
    async with ends(sockets, name) as both:
        offer = both.offer()
        connection = await both.dial(offer)
        assert (connection.name, [opened.name for opened in both.opened]) == (name, [name])
        [opened] = both.opened
        expected: dict[str, tuple[list[int], int | None]] = {"local": ([], 1), "tcp": ([], None)}
        assert (list(opened.readable), opened.borrowed and opened.borrowed[0]) == expected[name]
        far: ZeroCopyConnection[Any] = opened.open(kvstore_pb2.PutRequest, both.acknowledged.append)
        await connection.write(REQUEST)
        assert (await read(far))[0] == REQUEST
        assert both.server.opened == {name: 1}
        assert counts(both.dialer) == {"local": 0, "tcp": 0, name: 1}
        connection.close(StreamBroken("enough"))
        assert counts(both.dialer) == {"local": 0, "tcp": 0}


async def test_a_pool_is_shown_to_those_who_read_it_only(sockets: Path) -> None:
    async with ends(sockets, "local") as both:
        await both.dial(both.offer())
        await both.dial(both.offer(), mailbox_bytes=0)
        reading, writing = both.opened
        assert (list(reading.readable), reading.borrowed is not None) == ([], True)
        assert (list(writing.readable), writing.borrowed is not None) == ([1], False)


async def test_the_client_s_best_transport_that_both_have_is_offered(sockets: Path) -> None:
    async with ends(sockets) as both:
        for connections, kind in ((["tcp", "local"], "TCP"), (["local", "tcp"], "LOCAL"), (["tcp"], "TCP")):
            hello = kv_pb2.StreamHello(transport_place=both.transports[0].scope)
            hello.transports.extend(
                kv_pb2.TransportKind.Value(f"TRANSPORT_KIND_{each.upper()}") for each in connections
            )
            offer = both.server.offer(hello, both.opened.append)
            assert offer is not None
            assert offer.kind == kv_pb2.TransportKind.Value(f"TRANSPORT_KIND_{kind}")
        assert both.server.offer(kv_pb2.StreamHello(transports=[7]), both.opened.append) is None  # type: ignore[list-item]
    async with ends(sockets, "grpc") as both:
        assert both.offer(transport_place="anywhere") is None


async def test_another_machine_user_or_folder_gets_no_local_transport(sockets: Path) -> None:
    async with ends(sockets, "local") as both:
        assert both.offer(transport_place="elsewhere") is None
    async with ends(sockets) as both:
        offer = both.offer(transport_place="elsewhere")
        assert offer is not None
        assert offer.kind == kv_pb2.TRANSPORT_KIND_TCP


@pytest.mark.parametrize("name", BOTH)
async def test_a_token_opens_one_connection_of_its_kind_at_its_epoch(sockets: Path, name: str) -> None:
    async with ends(sockets) as both:
        kind = kv_pb2.TransportKind.Value(f"TRANSPORT_KIND_{name.upper()}")
        hello = kv_pb2.StreamHello(transports=[kind], transport_place=both.transports[0].scope)
        offers = [both.server.offer(hello, both.opened.append) for _ in range(4)]
        used, wrong, gone, late = (each for each in offers if each is not None)
        await both.dial(used)
        forged = kv_pb2.TransportOffer(kind=kind, address=wrong.address, token=bytes(32))
        both.server.withdraw(gone.token)
        for offer, epoch in ((used, EPOCH), (forged, EPOCH), (gone, EPOCH), (late, 8)):
            with pytest.raises(MoonpoolError, match="refused: there is no such offer"):
                await both.dial(offer, epoch)
        other = next(address for each, address in both.server.addresses.items() if each != name)
        swapped = kv_pb2.TransportOffer(kind=OTHER[name], address=other, token=wrong.token)
        with pytest.raises(MoonpoolError, match="refused: there is no such offer"):
            await both.dial(swapped)
        assert (len(both.opened), both.server.refused) == (1, 5)
        await both.dial(wrong)  # it has not been used up by those who did not have it


async def test_another_user_is_refused(sockets: Path) -> None:
    async with ends(sockets, "local", uid=os.getuid() + 1) as both:
        with pytest.raises(MoonpoolError, match="refused: the peer is another user's"):
            await both.dial(both.offer())
        assert not both.opened


async def test_regions_that_are_not_what_was_told_are_refused(sockets: Path) -> None:
    async with ends(sockets, "local") as both:
        for size, seals, says in ((4096, 0, "shorter"), (8192, fcntl.F_SEAL_SHRINK, "4096 bytes, not 8192")):
            fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            os.truncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            offer = both.offer()
            assert offer is not None
            opening = kv_pb2.TransportOpen(token=offer.token, epoch=EPOCH)
            opening.regions.add(bytes=size)
            assert says in (await raw(offer, opening, [fd])).refused
            os.close(fd)
        offer = both.offer()
        assert offer is not None
        opening = kv_pb2.TransportOpen(token=offer.token, epoch=EPOCH)
        opening.regions.add(bytes=4096)
        assert "0 descriptors came for 1 regions" in (await raw(offer, opening)).refused
        assert not both.opened


async def test_one_who_says_nothing_is_not_waited_for(sockets: Path) -> None:
    async with ends(sockets, "local", handshake_s=0.01) as both:
        offer = both.offer()
        assert offer is not None
        reader, writer = await asyncio.open_unix_connection(offer.address)
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert kv_pb2.TransportOpened.FromString(answer[LENGTH_PREFIX.size :]).refused == "nothing came"
        writer.close()


async def test_one_who_leaves_at_once_or_talks_otherwise_harms_nobody(sockets: Path) -> None:
    async with ends(sockets, "local") as both:
        offer = both.offer()
        assert offer is not None
        for sent in (
            b"",
            b"ab",
            LENGTH_PREFIX.pack(1 << 20, 0),
            LENGTH_PREFIX.pack(3, 0) + b"\xff\xff\xff",
            LENGTH_PREFIX.pack(9, 0) + b"a",
        ):
            reader, writer = await asyncio.open_unix_connection(offer.address)
            writer.write(sent)
            writer.write_eof()
            await reader.read()  # to its end: the server has closed it
            writer.close()
            await writer.wait_closed()
        assert both.server.refused == 4  # who said nothing has only looked
        await both.dial(offer)
        assert len(both.opened) == 1


async def test_a_dialer_takes_what_it_asked_for_only_and_no_longer_than_it_may(sockets: Path) -> None:
    async with ends(sockets, "local") as both:
        with pytest.raises(FrameError, match="tcp was not asked for"):
            await both.dial(kv_pb2.TransportOffer(kind=kv_pb2.TRANSPORT_KIND_TCP, address="127.0.0.1:1"))
        with pytest.raises(OSError, match="No such file"):
            await both.dial(
                kv_pb2.TransportOffer(kind=kv_pb2.TRANSPORT_KIND_LOCAL, address=str(sockets / "nobody.sock"))
            )
        hung = socket.socket(socket.AF_UNIX)
        hung.bind(str(sockets / "hung"))
        hung.listen()
        dialer = TransportDialer(both.transports, dial_s=0.01)
        offer = kv_pb2.TransportOffer(kind=kv_pb2.TRANSPORT_KIND_LOCAL, address=str(sockets / "hung"))
        with pytest.raises(TimeoutError):
            await dialer.dial(offer, EPOCH, kvstore_pb2.GetResponse, 0, both.acknowledged.append)
        hung.close()
        (sockets / "hung").unlink()


async def test_transports_of_a_peer_that_failed_are_left_alone_for_a_while(sockets: Path) -> None:
    async with ends(sockets) as both:
        dialer = TransportDialer(both.transports, retry_s=60.0)
        now = asyncio.get_running_loop().time()
        dialer.failed("KV to x", "local", 4, StreamBroken("gone"))
        assert dialer.retry_at(4) >= now + 60.0
        assert dialer.retry_at(5) == 0.0
        assert (counts(dialer), dialer.failures) == ({"local": 0, "tcp": 0}, 1)


async def test_each_side_gets_the_other_s_description() -> None:
    server, dialer = TransportListener((DescribedTransport(),), EPOCH), TransportDialer((DescribedTransport(),))
    accepted: list[ConnectionEnd] = []
    async with server.running(TransportConfig()):
        hello = kv_pb2.StreamHello(sender=kv_pb2.Instance(id="client"))
        dialer.fill(hello)
        offer = server.offer(hello, accepted.append)
        assert offer is not None
        opened = await dialer.join(offer, EPOCH, 0)
    ends = (opened, *accepted)
    assert [end.peer_description for end in ends] == [b"accepted: the opening side", b"the opening side"]
    for end in ends:
        end.sock.close(StreamBroken("the test is over"))
