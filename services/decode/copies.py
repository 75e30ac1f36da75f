"""Blocks on their way out of the pool and back: to kvstores, and to DRAM for preempted sequences."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from moonpool.core.kernel import Ended
from moonpool.kv.pool import KVPool
from moonpool.streams.writeback import WriteBack
from moonpool.telemetry.logs import get_logger
from services.decode.core.messages import Store, SwapDrop, SwapEnd, SwapIn, SwapOut
from services.decode.live import LiveSequence
from services.decode.swap import SwapSpace

log = get_logger(__name__)


class Copies:
    """The core's I/O on blocks; each is answered by one `Ended`.

    Args:
        pool: the blocks.
        write_back: writes to kvstores; hand its releases to `written_back`.
        post: tells the core.
    """

    def __init__(self, pool: KVPool, write_back: WriteBack, post: Callable[[Ended[SwapEnd | None]], None]) -> None:
        self._write_back = write_back
        self._post = post
        self._space = SwapSpace(pool)
        self._writing: defaultdict[int, list[int]] = defaultdict(list)  # by block
        self._copying: set[asyncio.Task[None]] = set()
        self.closed = False
        """Nothing is written back any more."""

    def store(self, action: Store, sequence: LiveSequence) -> None:
        """Writes a block to one of a request's kvstores, if the write-back has room for it."""
        store = sequence.request.stores[action.store]
        if self.closed or not self._write_back.room(store, 1):
            self._post(Ended(action.io, None))
            return
        self._writing[action.block].append(action.io)
        key, parent = sequence.keys[action.index], sequence.parent(action.index)
        self._write_back.submit(store, [key], [parent], sequence.request.incoming.tenant, [action.block])

    def written_back(self, blocks: Sequence[int]) -> None:
        """The write-back lets go of blocks, once each. Which of a block's copies it was makes no difference."""
        for block in blocks:
            ios = self._writing[block]
            io = ios.pop()
            if not ios:
                del self._writing[block]
            self._post(Ended(io, None))

    def swap(self, action: SwapOut | SwapIn | SwapDrop) -> None:
        """Copies a sequence's blocks to DRAM or back, or forgets them."""
        match action:
            case SwapOut(io, number, blocks):
                self._copy(io, lambda: self._space.save(number, blocks))
            case SwapIn(io, number, first, blocks):
                self._copy(io, lambda: self._space.restore(number, first, blocks))
            case SwapDrop(number):
                self._space.drop(number)

    async def quiet(self) -> None:
        """Waits until no copy uses the pool."""
        while self._copying:
            await asyncio.wait(self._copying)

    def _copy(self, io: int, work: Callable[[], None]) -> None:
        async def copy() -> None:
            began, ok = time.monotonic(), True
            try:
                await asyncio.to_thread(work)
            except Exception:  # a copy that is not made costs computing again
                log.exception("swapping failed", io=io)
                ok = False
            self._post(Ended(io, SwapEnd(ok, time.monotonic() - began)))

        task = asyncio.get_running_loop().create_task(copy())
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)
