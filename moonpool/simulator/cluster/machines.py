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
    """An instance that is leaving, the instance's epoch, and the instance that its machine becomes; None = it goes."""

    instance: EngineInstance
    epoch: int
    then: EngineInstance | None


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
            self._look(Draining(instance, order.epoch, self._other(order.instance)))

    def leave(self, instance: EngineInstance) -> None:
        """Order an instance that is there to drain and to go."""
        instance.drain()
        self._look(Draining(instance, instance.epoch, None))

    def begin(self, instance: EngineInstance) -> None:
        """Let an instance join that is not there."""
        assert not instance.up
        instance.up = True
        self._back(instance)

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
        if leaving.then is not None:
            self._world.after(ps(self._change_s), self._begin, leaving.then)

    def _begin(self, instance: EngineInstance) -> None:
        self.changed.append((self._world.now, instance.name))
        self.begin(instance)

    def _other(self, name: str) -> EngineInstance:
        return self._engines[("d" if name[0] == "p" else "p") + name[1:]]
