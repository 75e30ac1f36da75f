"""Reads blocks of preempted sequences back from kvstores into the pool."""

import asyncio
from collections.abc import Callable, Sequence

from moonpool.core.kernel import Ended
from moonpool.errors import MoonpoolError
from moonpool.kv.frames import DamagedSliceError
from moonpool.kv.keys import BlockKey
from moonpool.kv.pool import KVPool, PoolTarget
from moonpool.streams.block_reader import BlockReader, PrefixLost
from moonpool.streams.credits import Traffic
from moonpool.streams.peers import Peers
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2
from services.decode.core.actions import Load
from services.decode.core.events import IoEnd, LoadEnd
from services.decode.live import LiveSequence

log = get_logger(__name__)

PAUSE_S = 2.0
"""Seconds for which a store that failed is not asked: it delays one sequence by one deadline, not each."""


class Loads:
    """The core's loads; each is answered by one `Ended`.

    Args:
        pool: the blocks are written there. Each slice is compared with its hash first.
        open_reader: makes the client of a store at an address.
        post: tells the core.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        pool: KVPool,
        open_reader: Callable[[str], BlockReader],
        post: Callable[[Ended[IoEnd]], None],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._stores = Peers(open_reader)
        self._post = post
        self._clock = clock
        self._tasks: set[asyncio.Task[LoadEnd]] = set()

    @property
    def sessions(self) -> int:
        """Reads under way."""
        return self._stores.sessions

    @property
    def traffic(self) -> Traffic:
        """Credits and messages of the streams from all stores."""
        return self._stores.traffic

    def start(self, action: Load, sequence: LiveSequence) -> None:
        """Reads blocks; nothing is written into them once the core was told of the end."""
        keys = sequence.keys[action.first : action.first + len(action.blocks)]
        task = asyncio.get_running_loop().create_task(self._load(action, sequence, keys))
        self._tasks.add(task)
        # Not a `finally` in the task: a task that is cancelled before its first step never reaches it.
        task.add_done_callback(lambda done: self._over(action.io, done))

    async def quiet(self) -> None:
        """Gives up what is under way, and waits until nothing writes into the pool."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._stores.aclose()

    def _over(self, io: int, task: asyncio.Task[LoadEnd]) -> None:
        self._tasks.discard(task)
        self._post(Ended(io, LoadEnd(0, 0.0, failed=True) if task.cancelled() else task.result()))

    async def _load(self, action: Load, sequence: LiveSequence, keys: Sequence[BlockKey]) -> LoadEnd:
        began, request = self._clock(), sequence.request
        store = request.stores[action.store]
        if self._stores.paused(store, began):
            return LoadEnd(0, 0.0, failed=True)
        blocks, failed = 0, False
        try:
            blocks = await self._read(action, store, keys, request.incoming.tenant)
        except PrefixLost as lost:
            log.info("prefix lost while loading", store=store.id, request=request.request_id, reason=str(lost))
        except DamagedSliceError as damaged:
            log.warning("damaged slice while loading", store=store.id, request=request.request_id, reason=str(damaged))
        except MoonpoolError as error:
            log.warning("load failed", store=store.id, request=request.request_id, reason=str(error))
            failed = True
        except Exception:  # what is not loaded costs computing again
            log.exception("load failed", store=store.id, request=request.request_id)
            failed = True
        if failed:
            self._stores.pause(store, self._clock() + PAUSE_S)
        return LoadEnd(blocks, self._clock() - began, failed)

    async def _read(self, action: Load, store: kv_pb2.Instance, keys: Sequence[BlockKey], tenant: str) -> int:
        """Reads a tenant's blocks; returns how many leading ones the store had. Raises as `BlockReader.read`."""
        reader = await self._stores.get(store)
        target = PoolTarget(self._pool, action.blocks)
        return await reader.read(
            keys,
            layers=range(self._pool.layout.layers),
            on_slice=target.take,
            into=target.into,
            on_layer=lambda layer: None,
            timeout_s=action.timeout_s,
            tenant=tenant,
        )
