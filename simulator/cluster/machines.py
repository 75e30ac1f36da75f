"""Machines whose engine is a prefill or a decode instance, and changes its role when it is ordered to.

As in the service: it drains, which lets the conductor move what can be moved; when it is empty it leaves, and after a
while the same machine joins again with an empty pool as an instance of the other kind.
"""

from collections.abc import Callable

from moonpool.frozen import frozen
from services.conductor.core.changes import ChangeRole
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.engines import Engines
from simulator.cluster.prefill import PrefillInstance
from simulator.kernel.clock import World, ps

LOOK_S = 0.5
"""An instance that drains is looked at so often."""
Engine = PrefillInstance | DecodeInstance


@frozen
class Draining:
    """An instance on its way out, and which life of it."""

    instance: Engine
    incarnation: int


class Machines:
    """All machines: the n-th is either the n-th prefill or the n-th decode instance.

    Args:
        change_s: from an engine's leaving to its being there again.
        left, back: called with an instance that has left, and with one that is there.

    Attributes:
        changed: changes that are over, as (picoseconds, who is there now).
    """

    def __init__(
        self,
        world: World,
        engines: Engines,
        change_s: float,
        left: Callable[[Engine], None],
        back: Callable[[Engine], None],
    ) -> None:
        self._world, self._engines, self._change_s = world, engines, change_s
        self._left, self._back = left, back
        self.changed: list[tuple[int, str]] = []

    def change(self, order: ChangeRole) -> None:
        """An instance is to change its role; one that is lost, or drains already, is fine."""
        instance = self._engines[order.instance]
        if instance.up and instance.incarnation == order.incarnation and not instance.draining:
            instance.drain()
            self._look(Draining(instance, order.incarnation))

    def _look(self, leaving: Draining) -> None:
        instance = leaving.instance
        if not instance.up or instance.incarnation != leaving.incarnation:
            return  # it was lost meanwhile
        if not instance.empty:
            self._world.after(ps(LOOK_S), self._look, leaving)
            return
        instance.crash()
        instance.up = False
        self._left(instance)
        self._world.after(ps(self._change_s), self._begin, self._other(instance.name))

    def _begin(self, instance: Engine) -> None:
        instance.up = True
        self.changed.append((self._world.now, instance.name))
        self._back(instance)

    def _other(self, name: str) -> Engine:
        return self._engines[("d" if name[0] == "p" else "p") + name[1:]]
