"""The NIXL transport: reads, places outside regions, peers that go; and NIXL itself, where installed."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from moonpool.base.errors import FrameError, StreamBroken
from moonpool.base.transport.base import OfferedRegions, TransportUnavailableError
from moonpool.base.transport.nixl import NixlAgent, NixlRegion, NixlTransport
from moonpool.base.transport.regions import SharedMemory, address_of
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.pairs import NIXL

BYTES = 4096


class FakeNixl:
    """A `nixl_agent` of which the peers are in this process.

    Attributes:
        states: what the next reads are, one look after the other; the last one stays.
        refuses: calls that raise.
        registered: bytes by address.
        peers: names that were added, less those that were removed.
        released: reads that were ended.
    """

    def __init__(self) -> None:
        self.states = ["PROC", "PROC", "DONE"]
        self.refuses: set[str] = set()
        self.registered: dict[int, int] = {}
        self.peers: list[str] = []
        self.looks, self.looked = 0, asyncio.Event()
        self.released = 0

    def _call(self, name: str) -> None:
        if name in self.refuses:
            raise RuntimeError(f"{name} is refused")

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> list[tuple[int, int, int, str]]:
        self.registered |= {address: nbytes for address, nbytes, *_ in places}
        return places

    def deregister_memory(self, places: list[tuple[int, int, int, str]]) -> None:
        for address, *_ in places:
            del self.registered[address]

    def get_agent_metadata(self) -> bytes:
        return b"peer"

    def add_remote_agent(self, description: bytes) -> bytes:
        self._call("add")
        self.peers.append(description.decode())
        return description

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)
        self._call("remove")

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return places

    def initialize_xfer(self, what: str, ours: list[Any], theirs: list[Any], peer: str) -> Callable[[], None]:
        assert (what, peer) == ("READ", "peer")

        def move() -> None:
            for (to, nbytes, _), (source, _, _) in zip(ours, theirs, strict=True):
                ctypes.memmove(to, source, nbytes)

        return move

    def transfer(self, move: Callable[[], None]) -> str:
        self._call("transfer")
        move()
        return self.states[0]

    def check_xfer_state(self, move: Callable[[], None]) -> str:
        self.looks += 1
        self.looked.set()
        return self.states[min(self.looks, len(self.states) - 1)]

    def release_xfer_handle(self, move: Callable[[], None]) -> None:
        self._call("release")
        self.released += 1


def joined(nixl: FakeNixl) -> tuple[NixlTransport, NixlAgent, SharedMemory, NixlRegion]:
    """A client's pool, and the server's region for it."""
    agent = NixlAgent(nixl)
    transport, pool = NixlTransport(agent), SharedMemory(BYTES)
    pool.shared.data[:] = bytes(range(256)) * (BYTES // 256)
    offered = transport.offer_regions([pool.shared], 0)
    place = kv_pb2.Region(bytes=BYTES, address=address_of(pool.shared.data))
    accepted = transport.accept_regions([], kv_pb2.TransportOpen(regions=[place], description=offered.description))
    region = accepted.readable[1]
    assert isinstance(region, NixlRegion)
    assert accepted.borrowed is None
    return transport, agent, pool, region


async def test_parts_come_in_order_and_staging_memory_is_used_again() -> None:
    nixl = FakeNixl()
    _, _, pool, region = joined(nixl)
    for _ in range(3):
        nixl.looks = 0
        found = await region.fetch([(256, 10), (0, 3), (BYTES - 1, 1)])
        assert [bytes(part) for part in found.parts] == [bytes(range(10)), bytes(range(3)), b"\xff"]
        found.release()
    assert len(nixl.registered) == 2  # the pool, and one piece of staging memory
    assert nixl.registered[address_of(pool.shared.data)] == BYTES
    first, second = await region.fetch([(0, 4)]), await region.fetch([(4, 4)])
    assert [bytes(found.parts[0]) for found in (first, second)] == [bytes(range(4)), bytes(range(4, 8))]


async def test_a_pool_is_registered_once_and_a_side_that_reads_shows_nothing() -> None:
    nixl = FakeNixl()
    transport, _, pool, _ = joined(nixl)
    assert transport.offer_regions([pool.shared], 0).shared == [pool.shared]
    assert len(nixl.registered) == 1
    assert transport.offer_regions([pool.shared], 1 << 20) == OfferedRegions()
    assert transport.offer_regions([], 0) == OfferedRegions()


@pytest.mark.parametrize("place", [(0, BYTES + 1), (BYTES, 1), (1 << 40, 1)])
async def test_places_outside_the_region_are_refused(place: tuple[int, int]) -> None:
    _, _, _pool, region = joined(FakeNixl())
    with pytest.raises(FrameError, match="of a region of 4096"):
        await region.fetch([place])


@pytest.mark.parametrize(
    ("regions", "fds"),
    [
        ([kv_pb2.Region(bytes=1, lent=True)], []),
        ([kv_pb2.Region()], []),
        ([kv_pb2.Region(bytes=1 << 50)], []),
        ([], [3]),
    ],
)
def test_wrong_regions_are_refused(regions: list[kv_pb2.Region], fds: list[int]) -> None:
    with pytest.raises(FrameError, match="regions of NIXL"):
        NixlTransport(NixlAgent(FakeNixl())).accept_regions(fds, kv_pb2.TransportOpen(regions=regions))


def test_a_wrong_description_is_refused() -> None:
    nixl = FakeNixl()
    nixl.refuses = {"add"}
    with pytest.raises(FrameError, match="no description of a NIXL agent"):
        NixlTransport(NixlAgent(nixl)).accept_regions([], kv_pb2.TransportOpen(regions=[kv_pb2.Region(bytes=1)]))


@pytest.mark.parametrize("what", ["transfer", "ERR"])
async def test_a_read_that_fails_breaks_the_stream_and_its_memory_is_free(what: str) -> None:
    nixl = FakeNixl()
    _, _, _pool, region = joined(nixl)
    nixl.states, nixl.refuses = ["PROC", "ERR"], {what}
    for _ in range(2):
        with pytest.raises(StreamBroken, match="NIXL: "):
            await region.fetch([(0, 4)])
    assert len(nixl.registered) == 2


async def test_a_cancelled_read_ends_and_its_memory_is_used_again() -> None:
    nixl = FakeNixl()
    _, _, _pool, region = joined(nixl)
    nixl.states = ["PROC"]
    reading = asyncio.ensure_future(region.fetch([(0, 4)]))
    await nixl.looked.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert nixl.released == 1
    nixl.states = ["DONE"]
    found = await region.fetch([(0, 4)])
    assert len(nixl.registered) == 2
    found.release()


async def test_memory_of_a_read_that_does_not_end_is_never_used_again() -> None:
    nixl = FakeNixl()
    _, _, _pool, region = joined(nixl)
    nixl.states, nixl.refuses = ["ERR"], {"release"}
    for _ in range(2):
        with pytest.raises(StreamBroken, match="NIXL: ERR"):
            await region.fetch([(0, 4)])
    assert len(nixl.registered) == 3


async def test_closing_a_region_ends_its_reads_and_the_peer_is_forgotten_with_its_last_region() -> None:
    nixl = FakeNixl()
    transport, _, pool, region = joined(nixl)
    place = kv_pb2.Region(bytes=BYTES, address=address_of(pool.shared.data))
    opening = kv_pb2.TransportOpen(regions=[place], description=b"peer")
    other = transport.accept_regions([], opening).readable[1]
    nixl.states = ["PROC"]
    reading = asyncio.ensure_future(region.fetch([(0, 4)]))
    await nixl.looked.wait()
    region.close()
    with pytest.raises(StreamBroken):
        await reading
    with pytest.raises(StreamBroken, match="was closed"):
        await region.fetch([(0, 4)])
    nixl.peers = ["peer"]
    nixl.refuses = {"remove"}  # it is gone already
    region.close()
    other.close()
    assert nixl.peers == []


def test_without_nixl_the_transport_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("nixl"):
            raise ImportError(f"no module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(TransportUnavailableError, match="with its extra `nixl`"):
        NixlAgent.create()


@pytest.mark.parametrize("_", [NIXL])
async def test_nixl_itself_reads_what_is_in_the_pool(_: str) -> None:
    owner, reader, pool = NixlTransport(NixlAgent.create()), NixlTransport(NixlAgent.create()), SharedMemory(8 << 20)
    for at in range(8):
        pool.shared.data[at << 20 : (at + 1) << 20] = bytes([at + 1]) * (1 << 20)
    offered = owner.offer_regions([pool.shared], 0)
    place = kv_pb2.Region(bytes=8 << 20, address=address_of(pool.shared.data))
    opening = kv_pb2.TransportOpen(regions=[place], description=offered.description)
    region = reader.accept_regions([], opening).readable[1]
    assert isinstance(region, NixlRegion)
    found = await region.fetch([(7 << 20, 1 << 20), ((1 << 20) - 2, 4)])
    assert bytes(found.parts[0]) == b"\x08" * (1 << 20)
    assert bytes(found.parts[1]) == b"\x01\x01\x02\x02"
    found.release()
    region.close()
    with pytest.raises(FrameError, match="no description"):
        reader.accept_regions([], kv_pb2.TransportOpen(regions=[place], description=b"nonsense"))
