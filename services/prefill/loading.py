"""Reads prefixes from kvstores into the pool."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from moonpool.engine.handle import Engine
from moonpool.errors import MoonpoolError
from moonpool.kv.frames import DamagedSliceError
from moonpool.streams.credits import Traffic
from moonpool.streams.peers import Peers
from moonpool.streams.store_reader import PrefixLost, StoreReader
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from services.prefill.core.actions import LoadBlocks
from services.prefill.core.events import LoadEnded
from services.prefill.requests import Request

log = get_logger(__name__)


class Pace:
    """Holds layers back until emulated hardware would have loaded them.

    Args:
        seconds: of loading all layers, which come at equal distances; 0 = nothing is held back.
        layers: of the model.
        on_layer: is told of each layer, in order.
    """

    def __init__(self, seconds: float, layers: int, on_layer: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._layer_s = seconds / layers
        self._on_layer = on_layer
        self._held: deque[int] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()

    def came(self, layer: int) -> None:
        """A layer is in the pool."""
        self._held.append(layer)
        self._quiet.clear()
        if self._timer is None:
            self._go_on()

    async def over(self) -> None:
        """Waits until nothing is held back."""
        await self._quiet.wait()

    def close(self) -> None:
        """Nothing more is told."""
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = None
        while self._held:
            due = self._began + (self._held[0] + 1) * self._layer_s
            if self._layer_s and due > self._loop.time():
                self._timer = self._loop.call_at(due, self._go_on)
                return
            self._on_layer(self._held.popleft())
        self._quiet.set()


class Loading:
    """Does the core's loads.

    Args:
        engine: the KV is written to its pool.
        open_reader: makes the client of a store at an address.
        spans: where loading is recorded.
        emulated_s: seconds that emulated hardware takes to load so many bytes; None = it is not emulated.
    """

    def __init__(
        self,
        engine: Engine,
        open_reader: Callable[[str], StoreReader],
        spans: Recorder,
        emulated_s: Callable[[int], float] | None = None,
    ) -> None:
        self._emulated_s = emulated_s
        self._pool = engine.pool
        self._layout = engine.layout
        self._stores = Peers(open_reader)
        self._spans = spans

    @property
    def sessions(self) -> int:
        """Reads under way."""
        return self._stores.sessions

    @property
    def traffic(self) -> Traffic:
        """Credits and messages of the streams from all stores."""
        return self._stores.traffic

    async def aclose(self) -> None:
        """Closes all streams."""
        await self._stores.aclose()

    async def load(self, order: LoadBlocks, request: Request, on_layer: Callable[[int], None]) -> LoadEnded:
        """Reads blocks; nothing is written once it has returned.

        Args:
            order: what to read, and where to.
            request: whose blocks they are.
            on_layer: called in order for each layer whose blocks have all come.
        """
        store, wanted = request.sources[order.source].instance, len(order.blocks)
        began = time.monotonic()
        try:
            reader = await self._stores.get(store)
            pace = Pace(self._load_s(wanted), self._layout.layers, on_layer)
            try:
                loaded = await self._read(reader, order, request, pace.came)
                await pace.over()
            finally:
                pace.close()
            ended = time.monotonic()
            request.note_load(loaded * self._layout.block_tokens, began, ended)
            return LoadEnded(loaded, loaded if loaded < wanted else None, seconds=ended - began)
        except PrefixLost as lost:
            log.info("prefix lost while loading", store=store.id, request=request.request_id, reason=str(lost))
            return LoadEnded(0, lost.blocks)
        except DamagedSliceError as damaged:
            log.warning("damaged slice while loading", store=store.id, request=request.request_id, reason=str(damaged))
            return LoadEnded(0)
        except MoonpoolError as error:
            log.warning("load failed", store=store.id, request=request.request_id, reason=str(error))
            return LoadEnded(0, failed=True)

    def _load_s(self, blocks: int) -> float:
        return self._emulated_s(blocks * self._layout.block_bytes) if self._emulated_s is not None else 0.0

    async def _read(
        self, reader: StoreReader, order: LoadBlocks, request: Request, on_layer: Callable[[int], None]
    ) -> int:
        """Reads from one store; returns how many leading blocks it had. Raises as `StoreReader.read`."""
        wanted, layers = len(order.blocks), range(self._layout.layers)
        counts, last_ns = [0] * len(layers), time.monotonic_ns()

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            self._pool.write(layer, order.blocks[index], data, value)
            counts[layer] += 1

        def layer_done(layer: int) -> None:
            nonlocal last_ns
            now_ns = time.monotonic_ns()
            size = counts[layer] * self._layout.slice_bytes
            self._spans.add("kv.load", last_ns, now_ns, request=request.request_id, layer=layer, bytes=size)
            last_ns = now_ns
            if counts[layer] == wanted:
                on_layer(layer)

        keys = request.incoming.keys[order.first : order.first + wanted]
        return await reader.read(keys, layers=layers, on_slice=take, on_layer=layer_done, timeout_s=order.timeout_s)
