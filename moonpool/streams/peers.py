"""Clients of KV streams, one per peer: found again, left alone after a failure, closed when idle and too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from moonpool.streams.credits import Traffic
from moonpool.v1 import kv_pb2


class KVClient(Protocol):
    """What `Peers` needs of a client; see `StreamClient`."""

    @property
    def sessions(self) -> int:
        """Open sessions."""
        ...

    @property
    def traffic(self) -> Traffic:
        """What is under way on the stream."""
        ...

    async def aclose(self) -> None:
        """Ends the stream. Idempotent."""
        ...


C = TypeVar("C", bound=KVClient)


@dataclass(slots=True)
class _Peer(Generic[C]):
    client: C
    quiet_until: float = 0.0


class Peers(Generic[C]):
    """The clients of one process for one kind of stream.

    A peer is an id at an address. Its incarnation does not matter here: clients connect again after a restart, and
    sessions check whom they speak to.
    """

    def __init__(self, open_client: Callable[[str], C], *, max_peers: int = 64) -> None:
        """`open_client` makes the client for an address; beyond `max_peers`, idle clients are closed, oldest first."""
        self._open_client = open_client
        self._max_peers = max_peers
        self._peers: OrderedDict[tuple[str, str], _Peer[C]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def sessions(self) -> int:
        """Open sessions with all peers."""
        return sum(peer.client.sessions for peer in self._peers.values())

    @property
    def traffic(self) -> Traffic:
        """What is under way on the streams to all peers."""
        return sum((peer.client.traffic for peer in self._peers.values()), Traffic())

    async def get(self, instance: kv_pb2.Instance) -> C:
        """The client for a peer. Open a session on it before anything else is awaited."""
        key = (instance.id, instance.address)
        while (peer := self._peers.get(key)) is None:
            removed = self._take_idle(instance.id)
            for client in removed:
                await client.aclose()
            if not removed:
                peer = self._peers[key] = _Peer(self._open_client(instance.address))
        self._peers.move_to_end(key)
        return peer.client

    def pause(self, instance: kv_pb2.Instance, until: float) -> None:
        """A peer has failed: it is left alone until a time on the caller's clock."""
        peer = self._peers.get((instance.id, instance.address))
        if peer is not None:
            peer.quiet_until = until

    def paused(self, instance: kv_pb2.Instance, now: float) -> bool:
        """Whether a peer is left alone now."""
        peer = self._peers.get((instance.id, instance.address))
        return peer is not None and peer.quiet_until > now

    async def aclose(self) -> None:
        """Closes all clients. Idempotent."""
        while self._peers:
            await self._peers.popitem()[1].client.aclose()

    def _take_idle(self, instance_id: str) -> list[C]:
        """Takes out what must be closed before a peer is added: its idle clients at other addresses, then the oldest.

        They are taken out first and closed later, because closing waits, and a client may become busy meanwhile.
        """
        idle = [key for key, peer in self._peers.items() if not peer.client.sessions]
        idle.sort(key=lambda key: key[0] != instance_id)
        moved = sum(key[0] == instance_id for key in idle)
        excess = len(self._peers) + 1 - self._max_peers
        return [self._peers.pop(key).client for key in idle[: max(moved, excess)]]
