"""An instance joined to several conductors at once: each is told everything, and none of them knows of the others.

The instance is the authority on itself, so conductors need not agree on anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moonpool.cluster.events import HeldKeys
from moonpool.cluster.join import JoinAgent, RoleTaker, Wake, no_role
from moonpool.kv.changes import KeyChanges, NetChanges
from moonpool.rpc.channels import Channels
from moonpool.v1 import conductor_pb2


class Bell:
    """Wakes all who wait for a change."""

    def __init__(self) -> None:
        self._wakes: list[Wake] = []

    def add(self) -> Wake:
        """What one of them waits for."""
        wake = Wake()
        self._wakes.append(wake)
        return wake

    def ring(self, *, soon: bool = False) -> None:
        """Something has changed; cheap, callable at any time on the event loop. See `Notify`."""
        for wake in self._wakes:
            wake.ring(soon=soon)


class KeyNews:
    """Changes of the keys, for several readers: the net effect per key since each has asked last.

    A reader that does not follow misses changes: it begins with a snapshot.
    """

    def __init__(self, take: Callable[[], KeyChanges]) -> None:
        """Reads from `take`, which tells each change once."""
        self._take = take
        self._readers: list[tuple[Callable[[], bool], NetChanges]] = []

    def reader(self, follows: Callable[[], bool]) -> Callable[[], KeyChanges]:
        """What one reader takes its changes from; `follows` tells whether it wants them now."""
        changes = NetChanges()
        self._readers.append((follows, changes))

        def take() -> KeyChanges:
            self.changed(self._take())
            return changes.take()

        return take

    def changed(self, news: KeyChanges) -> None:
        """Notes changes for all who follow, as those that were taken."""
        lists = [list(keys) for keys in news]
        for follows, changes in self._readers:
            if follows():
                changes.note(*lists)
            else:
                changes.clear()


class Joining:
    """Keeps one instance joined to all conductors of a list."""

    def __init__(
        self,
        channels: Channels,
        conductors: Sequence[str],
        hello: conductor_pb2.JoinHello,
        load: Callable[[], conductor_pb2.LoadReport],
        take_events: Callable[[], KeyChanges] | None,
        held: HeldKeys,
        on_drain: Callable[[], None] = lambda: None,
        on_replicate: Callable[[conductor_pb2.ReplicateOrder], None] = lambda _: None,
        on_role: RoleTaker = no_role,
        *,
        bell: Bell | None = None,
    ) -> None:
        """Wire it; nothing happens before `run`. See `JoinAgent`; `bell` rings when load or keys have changed.

        Without `take_events`, `changed` is told of all changes.
        """
        self._bell = bell or Bell()
        self._news = KeyNews(take_events or KeyChanges)
        self._agents: list[JoinAgent] = []
        for number, address in enumerate(conductors):
            take = self._news.reader(lambda number=number: self._agents[number].follows)  # type: ignore[misc]
            orders = on_drain, on_replicate, on_role
            agent = JoinAgent(channels, address, hello, load, take, held, *orders, wake=self._bell.add())
            self._agents.append(agent)

    def changed(self, news: KeyChanges) -> None:
        """Keys have changed; cheap, callable at any time on the event loop."""
        self._news.changed(news)
        self._bell.ring()

    def notify(self, *, soon: bool = False) -> None:
        """Say that load or keys have changed; see `JoinAgent.notify`."""
        self._bell.ring(soon=soon)

    async def run(self, stopping: asyncio.Event) -> None:
        """Stay joined until `stopping` is set.

        Raises:
            Mismatch: a conductor serves something else; trying again cannot help.
            InvalidRequest: a conductor finds the hello wrong.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for agent in self._agents:
                    group.create_task(agent.run(stopping))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
