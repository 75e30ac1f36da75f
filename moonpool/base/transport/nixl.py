"""The NIXL transport ("nixl"): messages over TCP; payloads in a sender's pool are read by the receiver over NIXL.

NIXL moves memory by what both machines have: RDMA, shared memory or TCP (UCX chooses). The side that opens a stream
shows its pool. The other side copies payloads from the pool into staging memory, and takes them from there, as from a
mapped region. Payloads that lie elsewhere follow their messages over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from moonpool.base import world
from moonpool.base.config import EXTRA_ADVICE
from moonpool.base.errors import FrameError, StreamBroken
from moonpool.base.rpc.tls import Tls
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.base import AcceptedRegions, OfferedRegions, TransportUnavailableError
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.regions import (
    MAX_REGION_BYTES,
    FetchedParts,
    RemoteRegion,
    SharedRegion,
    address_of,
)
from moonpool.base.transport.tcp import TcpTransport
from moonpool.v1 import kv_pb2

BACKEND, MEMORY = "UCX", "DRAM"
LEAST_STAGING_BYTES = 64 << 10
POLL_S = 0.0002
"""Seconds between looks at reads under way: NIXL does not report the end of a read."""
log = get_logger(__name__)


class NixlAgent:
    """This process at NIXL: registered memory, known peers, reads. To be used on the event loop.

    Args:
        agent: a `description` of a peer.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._registered: dict[int, int] = {}  # bytes by address
        self._peers: dict[str, int] = {}  # regions in use, by the peer's name
        self._free: dict[int, list[StagingMemory]] = {}  # by size
        self._stuck: list[object] = []  # NIXL may still write to this memory

    @classmethod
    def create(cls) -> Self:
        """Raises TransportUnavailableError if NIXL is not installed, or does not run."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise TransportUnavailableError(f"{EXTRA_ADVICE.format('nixl')}: {error}") from error
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            return cls(nixl_agent(world.random_hex(8), nixl_agent_config(backends=[BACKEND], sync_mode=strict)))
        except Exception as error:
            raise TransportUnavailableError(f"NIXL does not run: {error}") from error

    def describe(self, regions: Sequence[SharedRegion]) -> bytes:
        """Description of this process for a peer that is to read the regions."""
        for region in regions:
            address, nbytes = address_of(region.data), region.data.nbytes
            if self._registered.get(address) != nbytes:
                self._agent.register_memory([(address, nbytes, 0, "")], MEMORY)
                self._registered[address] = nbytes
        found: bytes = self._agent.get_agent_metadata()
        return found

    def add_peer(self, description: bytes, regions: int) -> str:
        """Name of the peer with this description; `drop_peer` is to be called for each region. Raises FrameError."""
        try:
            told = self._agent.add_remote_agent(description)
        except Exception as error:
            raise FrameError(f"no description of a NIXL agent: {error}") from error
        name: str = told.decode() if isinstance(told, bytes) else told
        self._peers[name] = self._peers.get(name, 0) + regions
        return name

    def drop_peer(self, name: str) -> None:
        """End the use of a peer's region: the region is not read any more."""
        self._peers[name] -= 1
        if not self._peers[name]:
            del self._peers[name]
            with contextlib.suppress(Exception):  # the peer may have gone
                self._agent.remove_remote_agent(name)

    def staging(self, nbytes: int) -> StagingMemory:
        """Memory for so many bytes; return the memory with `give_back`."""
        size = max(LEAST_STAGING_BYTES, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        return free.pop() if free else StagingMemory(self._agent, size)

    def give_back(self, memory: StagingMemory) -> None:
        """Staging memory is free."""
        self._free[memory.data.nbytes].append(memory)

    async def read(
        self, peer: str, places: Sequence[tuple[int, int]], memory: StagingMemory, ended: Callable[[], bool]
    ) -> None:
        """Read parts of a peer's memory, each given by address and length, one after the other into `memory`.

        Raises:
            StreamBroken: the peer cannot be reached, or `ended`.
        """
        ours, at = [], memory.address
        for _, nbytes in places:
            ours.append((at, nbytes, 0))
            at += nbytes
        theirs = [(address, nbytes, 0) for address, nbytes in places]
        agent, handle, state = self._agent, None, "not begun"
        try:
            local, remote = agent.get_xfer_descs(ours, MEMORY), agent.get_xfer_descs(theirs, MEMORY)
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC" and not ended():
                await asyncio.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
        except Exception as error:
            state = str(error)
        finally:  # also if the caller is cancelled
            released = handle is None or self._release(handle, memory)
            if released and state != "DONE":
                self.give_back(memory)
        if not released or state != "DONE":
            raise StreamBroken(f"NIXL: {state}")

    def _release(self, handle: object, memory: StagingMemory) -> bool:
        """End a read; return whether the memory is free. If not, NIXL keeps the memory."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            log.warning("NIXL does not end a read", error=str(error))
            self._stuck += (handle, memory)
            return False
        return True


class StagingMemory:
    """This process's registered memory that NIXL writes to.

    Attributes:
        data: the bytes.
        address: of the first byte.
    """

    def __init__(self, agent: Any, nbytes: int) -> None:
        self.data = memoryview(mmap.mmap(-1, nbytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        registered = agent.register_memory([(self.address, nbytes, 0, "")], MEMORY)
        weakref.finalize(self, agent.deregister_memory, registered)


@dataclass
class NixlRegion(RemoteRegion):
    """A peer's region.

    Args:
        agent: this process's.
        peer: the peer's agent name.
        address: of the first byte, at the peer.
        nbytes: size.
    """

    agent: NixlAgent
    peer: str
    address: int
    nbytes: int
    _closed: bool = False

    async def fetch(self, places: Sequence[tuple[int, int]]) -> FetchedParts:
        for offset, nbytes in places:
            if offset + nbytes > self.nbytes:
                raise FrameError(f"bytes {offset} to {offset + nbytes} of a region of {self.nbytes}")
        if self._closed:
            raise StreamBroken("the region was closed")
        memory = self.agent.staging(sum([nbytes for _, nbytes in places]))
        there = [(self.address + offset, nbytes) for offset, nbytes in places]
        await self.agent.read(self.peer, there, memory, lambda: self._closed)
        parts, at = list[memoryview](), 0
        for _, nbytes in places:
            parts.append(memory.data[at : at + nbytes])
            at += nbytes
        return FetchedParts(parts, lambda: self.agent.give_back(memory))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.agent.drop_peer(self.peer)


class NixlTransport(TcpTransport):
    """TCP, and reads over NIXL: no encryption, no authentication besides the offer's token."""

    name = "nixl"
    kind = kv_pb2.TRANSPORT_KIND_NIXL
    encrypted_as = "tls"
    takes_one_shot = False

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent

    @classmethod
    def create(cls, config: TransportConfig, tls: Tls | None) -> Self:
        return cls(NixlAgent.create())

    def offer_regions(self, share: Sequence[SharedRegion], mailbox_bytes: int) -> OfferedRegions:
        """Show `share` if payloads go to the peer."""
        if mailbox_bytes or not share:
            return OfferedRegions()
        return OfferedRegions(share, by_address=True, description=self._agent.describe(share))

    def accept_regions(self, fds: Sequence[int], opening: kv_pb2.TransportOpen) -> AcceptedRegions:
        """Regions that are read over NIXL. Reads are one-sided: the peer needs no description of this process."""
        if fds or any(region.lent or not 0 < region.bytes <= MAX_REGION_BYTES for region in opening.regions):
            raise FrameError("regions of NIXL come without descriptors, are not lent, and have bytes")
        if not opening.regions:
            return AcceptedRegions()
        peer = self._agent.add_peer(opening.description, len(opening.regions))
        regions = [NixlRegion(self._agent, peer, region.address, region.bytes) for region in opening.regions]
        return AcceptedRegions(dict(enumerate(regions, 1)))
