"""Blocks of a simulated decode instance on their way out of the pool and back: to DRAM, and to and from kvstores."""

from collections.abc import Callable, Sequence

from moonpool.core.kernel import Ended
from moonpool.kv.keys import BlockKey
from services.decode.core.events import IoEnd, LoadEnd, ReceiveEnd, StoreEnd, SwapEnd
from simulator.cluster.config import ClusterConfig
from simulator.cluster.store import Store
from simulator.kernel.clock import PS, World, ps
from simulator.kernel.links import Link, Network


class Copies:
    """Copies of one instance, until it is lost. Each is answered by one `Ended`.

    Args:
        name: of the instance.
        sends, receives: its links for KV that leaves, and for what comes.
        tell: takes the ends.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        config: ClusterConfig,
        name: str,
        sends: Link,
        receives: Link,
        tell: Callable[[Ended[IoEnd]], None],
    ) -> None:
        self._world, self._network, self._config = world, network, config
        self._sends, self._receives, self._tell = sends, receives, tell
        self._bus = Link(f"{name} bus", config.load_bytes_per_s)
        self._open: dict[int, Callable[[], None]] = {}  # with what is to be given back at their ends
        self._copied_at = 0

    def close(self) -> None:
        """The instance is lost: nobody hears of its copies."""
        for give_back in self._open.values():
            give_back()
        self._open.clear()

    def swap(self, io: int, blocks: int) -> None:
        """Between pool and DRAM."""
        begun = self._begin(io)

        def copied() -> None:
            first, self._copied_at = max(begun, self._copied_at), self._world.now
            self._end(io, SwapEnd(True, (self._world.now - first) / PS))

        self._network.send([self._bus], blocks * self._config.block_bytes, copied)

    def write(self, io: int, store: Store, chain: Sequence[BlockKey]) -> None:
        """The last block of a chain, to a store."""
        self._begin(io)
        store.write(chain, self._sends, lambda: self._end(io, StoreEnd(store.holds(chain) == len(chain))))

    def read(self, io: int, store: Store, chain: Sequence[BlockKey], first: int, timeout_s: float) -> None:
        """The blocks of a chain from `first` on, as far as the store has them."""
        blocks, give_back = store.lend(chain, first)
        begun = self._begin(io, give_back)

        def over(found: int, *, failed: bool = False) -> None:
            self._end(io, LoadEnd(found, (self._world.now - begun) / PS, failed))

        def ready() -> None:
            path = store.sends, self._receives
            self._network.send(path, blocks * self._config.block_bytes, lambda: over(blocks))

        self._world.after(ps(timeout_s), lambda _: over(0, failed=True))
        if blocks:
            store.read(chain, first, first + blocks, ready)
        else:
            self._world.after(0, lambda _: over(0))

    def _begin(self, io: int, give_back: Callable[[], None] = lambda: None) -> int:
        self._open[io] = give_back
        return self._world.now

    def _end(self, io: int, result: IoEnd) -> None:
        give_back = self._open.pop(io, None)
        if give_back is not None:
            give_back()
            self._tell(Ended(io, result))


def nothing_written(io: int) -> Ended[IoEnd]:
    """Answers `StopReceiving`: what comes is in the pool at once."""
    return Ended(io, ReceiveEnd())
