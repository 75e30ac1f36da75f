"""Moves KV blocks out of the pool and back: kvstore writes and loads, and swapping to DRAM."""

import asyncio
from collections.abc import Callable, Sequence

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.frames import DamagedSliceError
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.pool import KVPool, PoolTarget
from moonpool.base.kv_transfer.prefix_reader import PrefixLost
from moonpool.base.kv_transfer.stored_parts import PartedReader, WindowLost
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.peer_clients import PeerClients
from moonpool.engine.decode.core.actions import LoadStoredBlocks, StopReceiving, StoreBlock, SwapDrop, SwapIn, SwapOut
from moonpool.engine.decode.core.events import IoEnd, LoadEnd, ReceiveEnd, StoreEnd, SwapEnd
from moonpool.engine.decode.live_requests import LiveRequest, LiveSequence
from moonpool.engine.instance import ExecutorParts
from moonpool.engine.interface import Engine
from moonpool.v1 import kv_pb2

_SwappedBlock = list[tuple[bytes, int] | None]  # a slice and its hash for each layer, None if the block lacks the slice


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
        """Copies a sequence's blocks; part-filled blocks are copied as they are."""
        self._saved[number] = [[self._read(layer, block) for layer in self._layers] for block in blocks]

    def restore(self, number: int, first: int, blocks: Sequence[int]) -> None:
        """Copies the saved blocks, from block `first` on, into these blocks, and forgets the copy."""
        for saved, block in zip(self._saved.pop(number)[first:], blocks, strict=True):
            for layer, found in enumerate(saved):
                if found is not None and self._pool.has(layer, block):
                    data, value = found
                    self._pool.write(layer, block, memoryview(data), value)

    def drop(self, number: int) -> None:
        """Forgets a sequence; unknown sequences are ignored."""
        self._saved.pop(number, None)

    def _read(self, layer: int, block: int) -> tuple[bytes, int] | None:
        found = self._pool.find(layer, block)  # a slot that no request needs may be taken meanwhile
        return None if found is None else (bytes(found[0]), found[1])


log = get_logger(__name__)
FAILED_STORE_PAUSE_S = 2.0
"""Seconds for which a failed store is skipped: the failure delays one request by one deadline, not every request."""


class StoreLoads:
    """Loads from kvstores; each load is answered by one `IoEnded`.

    Args:
        engine: the blocks are written to the engine's pool. Each slice is compared with the hash first.
        open_reader: makes a store's client, given the address.
        post: tells the core.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        engine: Engine,
        open_reader: Callable[[str], PartedReader],
        post: Callable[[IoEnded[IoEnd]], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._pool = engine, engine.pool
        self._stores = PeerClients(open_reader)
        self._post = post
        self._clock = clock
        self._tasks: dict[asyncio.Task[LoadEnd], None] = {}

    @property
    def sessions(self) -> int:
        """Reads in flight."""
        return self._stores.channels

    @property
    def traffic(self) -> StreamTraffic:
        """Credits and messages of the streams from all stores."""
        return self._stores.traffic

    def start(self, action: LoadStoredBlocks, sequence: LiveSequence) -> None:
        """Reads blocks. No writes into the blocks follow the answer."""
        keys = sequence.keys[action.first : action.first + len(action.blocks)]
        task = asyncio.get_running_loop().create_task(self._load(action, sequence, keys))
        self._tasks[task] = None
        # Not a `finally` in the task: a task cancelled before the first step never reaches a `finally`.
        task.add_done_callback(lambda done: self._over(action.io, done))

    async def quiet(self) -> None:
        """Cancels the loads, and waits until none writes into the pool."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._stores.aclose()

    def _over(self, io: int, task: asyncio.Task[LoadEnd]) -> None:
        self._tasks.pop(task, None)
        self._post(IoEnded(io, LoadEnd(0, 0.0, failed=True) if task.cancelled() else task.result()))

    async def _load(self, action: LoadStoredBlocks, sequence: LiveSequence, keys: Sequence[BlockKey]) -> LoadEnd:
        began, request = self._clock(), sequence.request
        store = request.stores[action.store]
        if self._stores.paused(store, began):
            return LoadEnd(0, 0.0, failed=True)
        blocks, failed = 0, False
        try:
            blocks = await self._read(action, store, keys, request.incoming.spec.tenant)
            if (loading := self._engine.load()) is not None:
                await loading
        except (PrefixLost, WindowLost) as lost:
            log.info("prefix lost while loading", store=store.id, request=request.request_id, reason=str(lost))
        except DamagedSliceError as damaged:
            log.warning("damaged slice while loading", store=store.id, request=request.request_id, reason=str(damaged))
        except MoonpoolError as error:
            log.warning("load failed", store=store.id, request=request.request_id, reason=str(error))
            failed = True
        except Exception:  # blocks that are not loaded are computed again
            log.exception("load failed", store=store.id, request=request.request_id)
            failed = True
        if failed:
            self._stores.pause(store, self._clock() + FAILED_STORE_PAUSE_S)
        return LoadEnd(blocks, self._clock() - began, failed)

    async def _read(
        self, action: LoadStoredBlocks, store: kv_pb2.Instance, keys: Sequence[BlockKey], tenant: str
    ) -> int:
        """Reads a tenant's blocks; returns how many leading blocks the store had. Raises as `read_prefix`."""
        reader = await self._stores.get(store)
        target = PoolTarget(self._pool, action.blocks)
        return await reader.read_prefix(
            keys,
            on_slice=target.take,
            into=target.into,
            on_layer=lambda layer: None,
            timeout_s=action.timeout_s,
            tenant=tenant,
        )


class BlockIo:
    """The scheduler's I/O on blocks; each operation is answered by one `IoEnded`.

    Args:
        parts: the engine with the pool, the write-back and the clock.
        open_reader: makes a kvstore's client, given the address.
        post: tells the scheduler.

    Attributes:
        loads: from kvstores.
    """

    def __init__(
        self,
        parts: ExecutorParts,
        open_reader: Callable[[str], PartedReader],
        post: Callable[[IoEnded[IoEnd]], None],
    ) -> None:
        self._clock, self._write_back, self._engine = parts.clock, parts.write_back, parts.engine
        self._post = post
        self._space = SwapSpace(parts.engine.pool)
        self.loads = StoreLoads(parts.engine, open_reader, post, parts.clock)
        self._copying: dict[asyncio.Task[None], None] = {}
        self._copied_at = 0.0
        self.closed = False
        """No block is written back any more."""

    def begin(self, action: StoreBlock | LoadStoredBlocks, sequence: LiveSequence) -> None:
        """Reads blocks from a kvstore, or writes a block there if the write-back queue has a free place."""
        if isinstance(action, LoadStoredBlocks):
            self.loads.start(action, sequence)
        else:
            self._store(action, sequence)

    def _store(self, action: StoreBlock, sequence: LiveSequence) -> None:
        store = sequence.request.stores[action.store]
        if self.closed or not self._write_back.room(store, 1):
            self._post(IoEnded(action.io, StoreEnd(False)))
            return
        key, parent = sequence.keys[action.index], sequence.parent(action.index)

        def over(stored: bool) -> None:
            self._post(IoEnded(action.io, StoreEnd(stored)))

        tenant, windowed = sequence.request.incoming.spec.tenant, (0,) if action.windowed else ()
        self._write_back.submit(store, [key], [parent], tenant, [action.block], over, windowed)

    def stop(self, action: StopReceiving, live: LiveRequest) -> None:
        """Answers when no frame is being written into a request's blocks any more."""
        live.transfer.once_quiet(lambda: self._post(IoEnded(action.io, ReceiveEnd())))

    def swap(self, action: SwapOut | SwapIn | SwapDrop) -> None:
        """Copies a request's blocks to DRAM or back, or drops the copy."""
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
        """Makes a copy in a thread, after the blocks `fetch` were fetched into the pool."""

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
