"""A disk: requests are served one after the other, each for a fixed time and a time per byte."""

from collections.abc import Callable

from simulator.kernel.clock import World, ps


class Disk:
    """One queue.

    Args:
        world: the time.
        bytes_per_s: of reading or writing.
        access_s: seconds that each request takes besides.

    Attributes:
        carried: bytes of all requests that have ended.
    """

    def __init__(self, world: World, bytes_per_s: float, access_s: float = 0.0) -> None:
        self._world = world
        self._bytes_per_s = bytes_per_s
        self._access_s = access_s
        self._free_at = 0
        self.carried = 0

    def request(self, nbytes: int, done: Callable[[], None]) -> None:
        """Queues a request; `done` is called when it has been served."""
        self._free_at = max(self._free_at, self._world.now) + ps(self._access_s + nbytes / self._bytes_per_s)
        self._world.at(self._free_at, self._served, (nbytes, done))

    def _served(self, request: tuple[int, Callable[[], None]]) -> None:
        nbytes, done = request
        self.carried += nbytes
        done()
