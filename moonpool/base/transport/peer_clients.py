"""A process's clients for one kind of stream, by peer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.v1 import kv_pb2

C = TypeVar("C", bound="PeerClient")


class PeerClients(Generic[C]):
    """A process's clients for one kind of stream.

    A peer is an id at an address. The epoch does not matter here: clients connect again after a restart, and
    channels check which epoch they speak to.
    """

    def __init__(self, open_client: Callable[[str], C], *, max_peers: int = 64) -> None:
        """`open_client` makes the client for an address; beyond `max_peers`, idle clients are closed, oldest first."""
        self._open_client = open_client
        self._max_peers = max_peers
        self._peers: OrderedDict[tuple[str, str], _PeerEntry[C]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def channels(self) -> int:
        return sum(peer.client.channels for peer in self._peers.values())

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way on the streams to all peers."""
        return sum((peer.client.traffic for peer in self._peers.values()), StreamTraffic())

    async def get(self, instance: kv_pb2.Instance) -> C:
        """The client for a peer. Open a channel before anything else is awaited."""
        key = (instance.id, instance.address)
        while (peer := self._peers.get(key)) is None:
            removed = self._take_idle(instance.id)
            for client in removed:
                await client.aclose()
            if not removed:
                peer = self._peers[key] = _PeerEntry(self._open_client(instance.address))
        self._peers.move_to_end(key)
        return peer.client

    def pause(self, instance: kv_pb2.Instance, until: float) -> None:
        """Leave a peer that has failed alone until a time on the caller's clock, or until the peer has restarted."""
        peer = self._peers.get((instance.id, instance.address))
        if peer is not None:
            peer.quiet_until, peer.quiet_epoch = until, instance.epoch

    def paused(self, instance: kv_pb2.Instance, now: float) -> bool:
        """Whether a peer is left alone now."""
        peer = self._peers.get((instance.id, instance.address))
        return peer is not None and peer.quiet_until > now and peer.quiet_epoch == instance.epoch

    async def aclose(self) -> None:
        while self._peers:
            await self._peers.popitem()[1].client.aclose()

    def _take_idle(self, instance_id: str) -> list[C]:
        """Take out the clients to close before a peer is added: the peer's at other addresses, then the oldest.

        Only idle clients are taken. The caller closes them afterwards: closing waits, and a client may become busy.
        """
        idle = [key for key, peer in self._peers.items() if not peer.client.channels]
        idle.sort(key=lambda key: key[0] != instance_id)
        moved = sum(key[0] == instance_id for key in idle)
        excess = len(self._peers) + 1 - self._max_peers
        return [self._peers.pop(key).client for key in idle[: max(moved, excess)]]


class PeerClient(Protocol):
    """The client for one peer, for `PeerClients`; see `StreamClient`."""

    @property
    def channels(self) -> int:
        """Open channels."""
        ...

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way on the stream."""
        ...

    async def aclose(self) -> None:
        """End the stream. Idempotent."""
        ...


@dataclass(slots=True)
class _PeerEntry(Generic[C]):
    client: C
    quiet_until: float = 0.0
    quiet_epoch: int = 0
