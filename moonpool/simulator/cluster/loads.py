"""Loads of prefixes from kvstores and other instances, in virtual time: layer by layer over the network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.base.kv.keys import BlockKey
from moonpool.engine.scheduler.prefix_sources import LoadEnded
from moonpool.simulator.clock import PS, SimulatedWorld, ps
from moonpool.simulator.cluster.store import Loan, Readable
from moonpool.simulator.network import Flow, Link, SimulatedNetwork


@dataclass(slots=True, eq=False)
class SimulatedPrefixLoad:
    """Blocks on their way."""

    io: int
    source: str
    loan: Loan
    missing: int | None
    """The first block that the instance does not have."""
    begun: int
    by_layer: bool
    """Each layer is told."""
    layers: int = 0
    flow: Flow | None = None


class PrefixLoader:
    """One instance's loads.

    Args:
        find: gives a store or another instance by name.
        receives: the instance's link.
        slice_bytes: bytes for one layer in one block.
        layers: KV layers.
        ended: takes a load's end, by the load's number.
        layer_came: takes a load's number and a layer that is here, of loads that are told by layer.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        find: Callable[[str], Readable],
        receives: Link,
        slice_bytes: int,
        layers: int,
        ended: Callable[[int, LoadEnded], None],
        layer_came: Callable[[int, int], None] = lambda io, layer: None,
    ) -> None:
        self._world, self._network, self._receives = world, network, receives
        self._find = find
        self._slice_bytes, self._layers, self._ended, self._layer_came = slice_bytes, layers, ended, layer_came
        self._loads: dict[int, SimulatedPrefixLoad] = {}

    def begin(
        self, io: int, name: str, keys: Sequence[BlockKey], first: int, timeout_s: float, *, by_layer: bool
    ) -> None:
        """Load a chain's blocks from `first` on, as far as the source has the blocks."""
        source, wanted = self._find(name), len(keys) - first
        loan = source.lend(keys, first)
        blocks = loan.blocks
        load = SimulatedPrefixLoad(io, name, loan, blocks if blocks < wanted else None, self._world.now, by_layer)
        self._loads[io] = load
        self._world.after(ps(timeout_s), lambda _: self._end(load, failed=True))
        if blocks:
            source.read(keys, first, first + blocks, lambda: self._next(load))
        else:
            self._world.after(0, lambda _: self._end(load))

    def cancel(self, io: int) -> None:
        """A load is not wanted any more; others are fine."""
        load = self._loads.get(io)
        if load is not None:
            self._world.after(0, lambda _: self._end(load, failed=False, cancelled=True))

    def lose(self, source: str) -> None:
        """A store or another instance is gone."""
        for load in [load for load in self._loads.values() if load.source == source]:
            self._end(load, failed=True)

    def stop(self) -> None:
        """The instance is gone: loads end unheard."""
        for load in self._loads.values():
            self._drop(load)
        self._loads.clear()

    def _next(self, load: SimulatedPrefixLoad) -> None:
        """The next layer crosses the network."""
        if self._loads.get(load.io) is load:
            path = self._find(load.source).sends, self._receives
            load.flow = self._network.send(path, load.loan.blocks * self._slice_bytes, lambda: self._came(load))

    def _came(self, load: SimulatedPrefixLoad) -> None:
        load.flow = None
        load.layers += 1
        if load.by_layer and load.missing is None:
            self._layer_came(load.io, load.layers - 1)
        if load.layers == self._layers:
            self._end(load)
        else:
            self._next(load)

    def _end(self, load: SimulatedPrefixLoad, *, failed: bool = False, cancelled: bool = False) -> None:
        if self._loads.get(load.io) is not load:
            return
        del self._loads[load.io]
        self._drop(load)
        whole = load.layers == self._layers
        missing = None if failed or cancelled else load.missing
        blocks = load.loan.blocks if whole else 0
        self._ended(load.io, LoadEnded(blocks, missing, failed, (self._world.now - load.begun) / PS))

    def _drop(self, load: SimulatedPrefixLoad) -> None:
        if load.flow is not None:
            self._network.cancel(load.flow)
        load.loan.give_back()
