"""A client of a kvstore's `Put` that keeps what it is given."""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence

from moonpool.base.kv_transfer.store_writer import PutOutcome
from moonpool.base.transport.flow_control import StreamTraffic


class FakeWriter:
    """A put is noted, waits until it may go on, reads its blocks, and says that the first one is new.

    Attributes:
        error: raised by puts that may go on, in place of reading.
        puts: first key of each put, and the deletions that it names.
        read: blocks, layer 0 of each.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.puts: list[tuple[bytes, Sequence[str]]] = []
        self.read: list[bytes] = []
        self.channels = 0
        self.traffic = StreamTraffic()
        self.closed = False
        self._free = 0.0
        self._waits: list[asyncio.Event] = []
        self._began = asyncio.Condition()

    def go(self, puts: float = math.inf) -> None:
        """Lets so many go on, the first ones that were, or will be, begun."""
        self._free = puts
        for number, wait in enumerate(self._waits):
            if number < puts:
                wait.set()

    async def until(self, puts: int) -> None:
        """Waits until so many have begun."""
        async with asyncio.timeout(60), self._began:
            await self._began.wait_for(lambda: len(self.puts) >= puts)

    async def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        tenant: str,
        read: Callable[[int, int], tuple[memoryview, int]],
        *,
        timeout_s: float,
        forgotten: Sequence[str] = (),
        windowed: Collection[int] = (),
    ) -> PutOutcome:
        self.channels += 1
        try:
            self.puts.append((keys[0], list(forgotten)))
            self._waits.append(asyncio.Event())
            if len(self._waits) <= self._free:
                self._waits[-1].set()
            wait = self._waits[-1]
            async with self._began:
                self._began.notify_all()
            await wait.wait()
            if self.error is not None:
                raise self.error
            self.read += [bytes(read(0, index)[0]) for index in range(len(keys))]
            return PutOutcome(1, len(keys) - 1)
        finally:
            self.channels -= 1

    async def aclose(self) -> None:
        self.closed = True
