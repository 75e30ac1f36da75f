"""Clients of peers: found again, and closed when they are idle and too many."""

from __future__ import annotations

import asyncio

from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.peer_clients import PeerClients
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.turns import turn


class Client:
    """A client whose closing takes until it is let go."""

    def __init__(self, address: str, go: asyncio.Event) -> None:
        self.address = address
        self.channels = 0
        self.traffic = StreamTraffic()
        self.closed = False
        self._go = go

    async def aclose(self) -> None:
        self.closed = True
        await self._go.wait()


class Bench:
    """Peers with slow clients."""

    def __init__(self, max_peers: int) -> None:
        self.go = asyncio.Event()
        self.made: list[Client] = []
        self.peers = PeerClients(self.open_client, max_peers=max_peers)

    def open_client(self, address: str) -> Client:
        self.made.append(Client(address, self.go))
        return self.made[-1]

    async def get(self, number: int, address: str = "") -> Client:
        return await self.peers.get(kv_pb2.Instance(id=f"store-{number}", address=address or f"host:{number}"))

    @property
    def closed(self) -> list[str]:
        return [client.address for client in self.made if client.closed]


async def test_the_oldest_idle_clients_are_closed_first() -> None:
    bench = Bench(max_peers=2)
    bench.go.set()
    for number in (1, 2, 1, 3):
        await bench.get(number)
    assert bench.closed == ["host:2"]
    (await bench.get(1)).channels = 1
    await bench.get(4)
    assert bench.closed == ["host:2", "host:3"]


async def test_a_peer_that_moved_loses_its_old_client() -> None:
    bench = Bench(max_peers=9)
    bench.go.set()
    await bench.get(1)
    await bench.get(1, "elsewhere:1")
    assert bench.closed == ["host:1"]


async def test_two_who_make_room_at_the_same_time_close_each_client_once() -> None:
    bench = Bench(max_peers=2)
    for number in (1, 2):
        await bench.get(number)
    both = [asyncio.ensure_future(bench.get(number)) for number in (3, 4)]
    await turn()
    bench.go.set()
    assert [client.address for client in await asyncio.gather(*both)] == ["host:3", "host:4"]
    assert bench.closed == ["host:1", "host:2"]


async def test_a_client_that_became_busy_meanwhile_is_not_closed() -> None:
    bench = Bench(max_peers=3)
    old = [await bench.get(number) for number in (1, 2, 3)]
    old[2].channels = 1
    bench.peers.pause(kv_pb2.Instance(id="store-1", address="host:1"), 1.0)
    making = asyncio.ensure_future(bench.get(2, "elsewhere:2"))  # closes host:2
    await turn()
    again = asyncio.ensure_future(bench.get(1))
    await turn()
    busy = again.result()
    busy.channels = 1
    bench.go.set()
    await making
    assert busy is old[0]
    assert not busy.closed


async def test_a_pause_ends_when_the_peer_restarts() -> None:
    bench = Bench(max_peers=3)
    failed = kv_pb2.Instance(id="store-1", address="host:1", epoch=1)
    await bench.get(1)
    bench.peers.pause(failed, 10.0)
    assert bench.peers.paused(failed, 9.0)
    assert not bench.peers.paused(failed, 10.0)
    assert not bench.peers.paused(kv_pb2.Instance(id="store-1", address="host:1", epoch=2), 9.0)
