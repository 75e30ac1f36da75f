"""Prefixes that a simulated prefill instance loads from stores and other instances, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.core.kernel import Ended
from moonpool.kv.keys import BlockKey
from services.prefill.core.events import LayerLoaded, LoadEnded, Result
from simulator.cluster.reading import Loan, Readable
from simulator.kernel.clock import PS, World, ps
from simulator.kernel.links import Flow, Link, Network


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way."""

    io: int
    source: str
    loan: Loan
    missing: int | None
    """The first block that it has not."""
    begun: int
    by_layer: bool
    """Each layer is told."""
    layers: int = 0
    flow: Flow | None = None


class Loading:
    """Loads of one instance.

    Args:
        find: gives a store or another instance by name.
        receives: the instance's link.
        slice_bytes: one layer of one block.
        layers: of the KV.
        tell: takes what happens.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        find: Callable[[str], Readable],
        receives: Link,
        slice_bytes: int,
        layers: int,
        tell: Callable[[LayerLoaded | Ended[Result]], None],
    ) -> None:
        self._world, self._network, self._receives = world, network, receives
        self._find = find
        self._slice_bytes, self._layers, self._tell = slice_bytes, layers, tell
        self._loads: dict[int, Load] = {}

    def begin(
        self, io: int, name: str, keys: Sequence[BlockKey], first: int, timeout_s: float, *, by_layer: bool
    ) -> None:
        """Loads the blocks of a chain from `first` on, as far as the source holds it."""
        source, wanted = self._find(name), len(keys) - first
        loan = source.lend(keys, first)
        blocks = loan.blocks
        load = Load(io, name, loan, blocks if blocks < wanted else None, self._world.now, by_layer)
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
        """The instance is gone: nobody hears of its loads."""
        for load in self._loads.values():
            self._drop(load)
        self._loads.clear()

    def _next(self, load: Load) -> None:
        """The next layer crosses the network."""
        if self._loads.get(load.io) is load:
            path = self._find(load.source).sends, self._receives
            load.flow = self._network.send(path, load.loan.blocks * self._slice_bytes, lambda: self._came(load))

    def _came(self, load: Load) -> None:
        load.flow = None
        load.layers += 1
        if load.by_layer and load.missing is None:
            self._tell(LayerLoaded(load.io, load.layers - 1))
        if load.layers == self._layers:
            self._end(load)
        else:
            self._next(load)

    def _end(self, load: Load, *, failed: bool = False, cancelled: bool = False) -> None:
        if self._loads.get(load.io) is not load:
            return
        del self._loads[load.io]
        self._drop(load)
        whole = load.layers == self._layers
        missing = None if failed or cancelled else load.missing
        blocks = load.loan.blocks if whole else 0
        result: Result = LoadEnded(blocks, missing, failed, (self._world.now - load.begun) / PS)
        self._tell(Ended(load.io, result))

    def _drop(self, load: Load) -> None:
        if load.flow is not None:
            self._network.cancel(load.flow)
        load.loan.give_back()
