"""Blocks on their way out of the pool and back: to and from kvstores, and DRAM for preempted sequences."""

import asyncio
from collections.abc import Callable, Sequence

from moonpool.core.kernel import Ended
from moonpool.engine.handle import Engine
from moonpool.streams.block_reader import BlockReader
from moonpool.streams.writeback import WriteBack
from moonpool.telemetry.logs import get_logger
from services.decode.core.actions import Load, StopReceiving, Store, SwapDrop, SwapIn, SwapOut
from services.decode.core.events import IoEnd, ReceiveEnd, StoreEnd, SwapEnd
from services.decode.live import LiveRequest, LiveSequence
from services.decode.loads import Loads
from services.decode.swap import SwapSpace

log = get_logger(__name__)


class Copies:
    """The core's I/O on blocks; each is answered by one `Ended`.

    Args:
        engine: has the blocks in its pool.
        write_back: writes to kvstores.
        open_reader: makes the client of the kvstore at an address.
        post: tells the core.
        clock: seconds; never goes back.

    Attributes:
        loads: from kvstores.
    """

    def __init__(
        self,
        engine: Engine,
        write_back: WriteBack,
        open_reader: Callable[[str], BlockReader],
        post: Callable[[Ended[IoEnd]], None],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._write_back = write_back
        self._post = post
        self._engine = engine
        self._space = SwapSpace(engine.pool)
        self.loads = Loads(engine.pool, open_reader, post, clock)
        self._copying: set[asyncio.Task[None]] = set()
        self._copied_at = 0.0
        self.closed = False
        """Nothing is written back any more."""

    def begin(self, action: Store | Load, sequence: LiveSequence) -> None:
        """Reads blocks from a kvstore, or writes one to one, if the write-back has room for it."""
        if isinstance(action, Load):
            self.loads.start(action, sequence)
        else:
            self._store(action, sequence)

    def _store(self, action: Store, sequence: LiveSequence) -> None:
        store = sequence.request.stores[action.store]
        if self.closed or not self._write_back.room(store, 1):
            self._post(Ended(action.io, StoreEnd(False)))
            return
        key, parent = sequence.keys[action.index], sequence.parent(action.index)

        def over(stored: bool) -> None:
            self._post(Ended(action.io, StoreEnd(stored)))

        self._write_back.submit(store, [key], [parent], sequence.request.incoming.tenant, [action.block], over)

    def stop(self, action: StopReceiving, live: LiveRequest) -> None:
        """Lets what is being written into a request's blocks end."""
        live.transfer.once_quiet(lambda: self._post(Ended(action.io, ReceiveEnd())))

    def swap(self, action: SwapOut | SwapIn | SwapDrop) -> None:
        """Copies a sequence's blocks to DRAM or back, or forgets them."""
        match action:
            case SwapOut(io, number, blocks):
                self._copy(io, lambda: self._space.save(number, blocks), fetch=blocks)
            case SwapIn(io, number, first, blocks):
                self._copy(io, lambda: self._space.restore(number, first, blocks))
            case SwapDrop(number):
                self._space.drop(number)

    async def quiet(self) -> None:
        """Waits until no copy and no load uses the pool."""
        while self._copying:
            await asyncio.wait(self._copying)
        await self.loads.quiet()

    def _copy(self, io: int, work: Callable[[], None], fetch: Sequence[int] = ()) -> None:
        """Does a copy in a thread, when the pool has all of the blocks `fetch`."""

        async def copy() -> None:
            began, ok = self._clock(), True
            try:
                if fetch:
                    await self._engine.fetch(fetch)
                await asyncio.to_thread(work)
            except Exception:  # a copy that is not made costs computing again
                log.exception("copying blocks between pool and swap space failed", io=io)
                ok = False
            began, self._copied_at = max(began, self._copied_at), self._clock()
            self._post(Ended(io, SwapEnd(ok, self._copied_at - began)))

        task = asyncio.get_running_loop().create_task(copy())
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)
