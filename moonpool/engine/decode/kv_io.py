"""Moves KV blocks out of the pool and into it: write-back to kvstores, swapping to DRAM, loads of prefixes."""

import asyncio
from collections.abc import Callable, Sequence

from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.block_loader import BlockLoader, BlockRead
from moonpool.engine.decode.core.actions import StopReceiving, StoreBlock, SwapDrop, SwapIn, SwapOut
from moonpool.engine.decode.core.events import IoEnd, ReceiveEnd, StoreEnd, SwapEnd
from moonpool.engine.decode.live_requests import LiveRequest, LiveSequence
from moonpool.engine.instance import ExecutorParts
from moonpool.engine.scheduler.prefix_sources import LoadEnded

_SwappedBlock = list[tuple[bytes, int] | None]  # a slice and its hash for each layer, None if the block lacks the slice
log = get_logger(__name__)


class SwapSpace:
    """Copies blocks out of a pool and back. `save` and `restore` take time: call them in a thread."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._layers = range(pool.layout.layers)
        self._saved: dict[int, list[_SwappedBlock]] = {}

    @property
    def blocks(self) -> int:
        """Blocks that are kept."""
        return sum(map(len, self._saved.values()))

    def save(self, number: int, blocks: Sequence[int]) -> None:
        """Copy a sequence's blocks; part-filled blocks are copied as they are."""
        self._saved[number] = [[self._read(layer, block) for layer in self._layers] for block in blocks]

    def restore(self, number: int, first: int, blocks: Sequence[int]) -> None:
        """Copy the saved blocks, from block `first` on, into these blocks, and forget the copy."""
        for saved, block in zip(self._saved.pop(number)[first:], blocks, strict=True):
            for layer, found in enumerate(saved):
                if found is not None and self._pool.has(layer, block):
                    data, value = found
                    self._pool.write(layer, block, memoryview(data), value)

    def drop(self, number: int) -> None:
        """Forget a sequence; unknown sequences are ignored."""
        self._saved.pop(number, None)

    def _read(self, layer: int, block: int) -> tuple[bytes, int] | None:
        found = self._pool.find(layer, block)  # a slot that no request needs may be taken meanwhile
        return None if found is None else (bytes(found[0]), found[1])


class BlockIo:
    """The scheduler's I/O on blocks; each operation is answered by one `IoEnded`.

    Args:
        parts: the engine with the pool, the write-back and the clock.
        loading: reads prefixes.
        post: tells the scheduler.
    """

    def __init__(self, parts: ExecutorParts, loading: BlockLoader, post: Callable[[IoEnded[IoEnd]], None]) -> None:
        self._clock, self._write_back, self._engine = parts.clock, parts.write_back, parts.engine
        self._post, self._loading = post, loading
        self._loads: dict[int, asyncio.Task[LoadEnded]] = {}
        self._space = SwapSpace(parts.engine.pool)
        self._copying: dict[asyncio.Task[None], None] = {}
        self._copied_at = 0.0
        self.closed = False
        """No block is written back any more."""

    def store(self, action: StoreBlock, sequence: LiveSequence) -> None:
        """Write a block to a kvstore if the write-back queue has a free place."""
        store = sequence.request.stores[action.store]
        if self.closed or not self._write_back.room(store, 1):
            self._post(IoEnded(action.io, StoreEnd(False)))
            return
        key, parent = sequence.keys[action.index], sequence.parent(action.index)

        def over(stored: bool) -> None:
            self._post(IoEnded(action.io, StoreEnd(stored)))

        tenant, windowed = sequence.request.incoming.spec.tenant, (0,) if action.windowed else ()
        trace = sequence.request.span.traceparent if sequence.request.span is not None else ""
        self._write_back.submit(store, [key], [parent], tenant, [action.block], over, windowed, trace)

    def stop(self, action: StopReceiving, live: LiveRequest) -> None:
        """Answer when no frame is being written into a request's blocks any more."""
        live.transfer.once_quiet(lambda: self._post(IoEnded(action.io, ReceiveEnd())))

    def swap(self, action: SwapOut | SwapIn | SwapDrop) -> None:
        """Copy a request's blocks to DRAM or back, or drop the copy."""
        match action:
            case SwapOut(io, number, blocks):
                self._copy(io, lambda: self._space.save(number, blocks), fetch=blocks)
            case SwapIn(io, number, first, blocks):
                self._copy(io, lambda: self._space.restore(number, first, blocks))
            case SwapDrop(number):
                self._space.drop(number)

    def load(self, io: int, read: BlockRead) -> None:
        """Read a prompt's prefix, up to where steps compute."""

        async def load() -> LoadEnded:
            ended = await self._loading.load(read, lambda _: None)
            coming = self._engine.load() if ended.blocks else None
            if coming is not None:
                await coming
            return ended

        task = self._loads[io] = asyncio.get_running_loop().create_task(load())
        # Not a `finally` in the task: a task cancelled before the first step never reaches a `finally`.
        task.add_done_callback(lambda done: self._loaded(io, done))

    def cancel(self, io: int) -> None:
        """Stop a load, if it has not ended."""
        if (task := self._loads.get(io)) is not None:
            task.cancel()

    def _loaded(self, io: int, done: "asyncio.Task[LoadEnded]") -> None:
        del self._loads[io]
        if done.cancelled():
            self._post(IoEnded(io, LoadEnded(0)))
            return
        if (defect := done.exception()) is not None:  # the prompt is computed
            log.error("loading a prefix failed", io=io, error=repr(defect))
        self._post(IoEnded(io, done.result() if defect is None else LoadEnded(0, failed=True)))

    async def quiet(self) -> None:
        """Wait until no copy and no load uses the pool."""
        while working := [*self._copying, *self._loads.values()]:
            await asyncio.wait(working)

    def _copy(self, io: int, work: Callable[[], None], fetch: Sequence[int] = ()) -> None:
        """Make a copy in a thread, after the blocks `fetch` were fetched into the pool."""

        async def copy() -> None:
            began, ok = self._clock(), True
            try:
                if fetch:
                    await self._engine.fetch(fetch)
                await asyncio.to_thread(work)
                if not fetch and (loading := self._engine.load()) is not None:
                    await loading
            except Exception:  # blocks that are not copied are computed again
                log.exception("copying blocks between pool and swap space failed", io=io)
                ok = False
            began, self._copied_at = max(began, self._copied_at), self._clock()
            self._post(IoEnded(io, SwapEnd(ok, self._copied_at - began)))

        task = asyncio.get_running_loop().create_task(copy())
        self._copying[task] = None
        task.add_done_callback(self._copying.pop)
