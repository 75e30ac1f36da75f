"""Instances by name, and machines that change their role when ordered.

As in the service: an instance drains, so the conductor can move the requests. The empty instance leaves. After a
while the same machine joins again as an instance of the other role: here with an empty pool, which the service keeps.
"""

from collections.abc import Callable, Iterator

from moonpool.base.frozen import frozen
from moonpool.conductor.core.actions import ChangeRole
from moonpool.simulator.clock import SimulatedWorld, ps
from moonpool.simulator.cluster.decode import SimulatedDecode
from moonpool.simulator.cluster.prefill import SimulatedPrefill

LOOK_S = 0.5
"""An instance that drains is looked at so often."""


@frozen
class Instances:
    """Prefill instances are called "p0", "p1" and so on, decode instances "d0"."""

    prefills: dict[str, SimulatedPrefill]
    decodes: dict[str, SimulatedDecode]

    def __iter__(self) -> Iterator[SimulatedPrefill | SimulatedDecode]:
        """Prefill instances first."""
        yield from self.prefills.values()
        yield from self.decodes.values()

    def __getitem__(self, name: str) -> SimulatedPrefill | SimulatedDecode:
        return self.prefills[name] if name in self.prefills else self.decodes[name]


EngineInstance = SimulatedPrefill | SimulatedDecode


@frozen
class Draining:
    """An instance that is leaving, and the instance's epoch."""

    instance: EngineInstance
    epoch: int


class Machines:
    """All machines: the n-th is either the n-th prefill or the n-th decode instance.

    Args:
        change_s: seconds from an engine's leaving until the engine is back.
        left, back: called with an instance that has left, and with an instance that is there.

    Attributes:
        changed: changes that are over, as (picoseconds, the instance that is there now).
    """

    def __init__(
        self,
        world: SimulatedWorld,
        engines: Instances,
        change_s: float,
        left: Callable[[EngineInstance], None],
        back: Callable[[EngineInstance], None],
    ) -> None:
        self._world, self._engines, self._change_s = world, engines, change_s
        self._left, self._back = left, back
        self.changed: list[tuple[int, str]] = []

    def change(self, order: ChangeRole) -> None:
        """Order an instance to change role; ignored if the instance is lost or drains already."""
        instance = self._engines[order.instance]
        if instance.up and instance.epoch == order.epoch and not instance.draining:
            instance.drain()
            self._look(Draining(instance, order.epoch))

    def _look(self, leaving: Draining) -> None:
        instance = leaving.instance
        if not instance.up or instance.epoch != leaving.epoch:
            return  # the instance was lost meanwhile
        if not instance.empty:
            self._world.after(ps(LOOK_S), self._look, leaving)
            return
        instance.crash()
        instance.up = False
        self._left(instance)
        self._world.after(ps(self._change_s), self._begin, self._other(instance.name))

    def _begin(self, instance: EngineInstance) -> None:
        instance.up = True
        self.changed.append((self._world.now, instance.name))
        self._back(instance)

    def _other(self, name: str) -> EngineInstance:
        return self._engines[("d" if name[0] == "p" else "p") + name[1:]]
