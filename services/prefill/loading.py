"""Reads prefixes from kvstores and other instances into the pool."""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from moonpool.engine.handle import Engine
from moonpool.errors import MoonpoolError
from moonpool.kv.frames import DamagedSliceError
from moonpool.kv.keys import BlockKey
from moonpool.kv.pool import PoolTarget
from moonpool.streams.block_reader import FROM_DECODE, FROM_PREFILL, FROM_STORE, BlockReader, PrefixLost, ReadMethod
from moonpool.streams.credits import Traffic
from moonpool.streams.peers import Peers
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import kv_pb2
from services.prefill.core.actions import LoadBlocks
from services.prefill.core.events import LoadEnded
from services.prefill.requests import Request

log = get_logger(__name__)

METHODS: Mapping[kv_pb2.InstanceKind.ValueType, ReadMethod] = {
    kv_pb2.INSTANCE_KIND_KVSTORE: FROM_STORE,
    kv_pb2.INSTANCE_KIND_PREFILL: FROM_PREFILL,
    kv_pb2.INSTANCE_KIND_DECODE: FROM_DECODE,
}
"""How each kind of source is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRead:
    """Blocks to be read into the pool.

    Attributes:
        source: whom to read from.
        keys: of the blocks, consecutive ones of a chain.
        blocks: where they go.
        timeout_s: longest time for all of it.
        tenant: whose KV it is.
        request: whose they are, for logs and spans.
        came: told of the tokens of those that came, and from when to when by `time.monotonic()`.
    """

    source: kv_pb2.Instance
    keys: Sequence[BlockKey]
    blocks: Sequence[int]
    timeout_s: float
    tenant: str
    request: str
    came: Callable[[int, float, float], None] = lambda *_: None

    @classmethod
    def of_request(cls, order: LoadBlocks, request: Request) -> "BlockRead":
        """A prompt's prefix."""
        keys = request.incoming.keys[order.first : order.first + len(order.blocks)]
        source, whose = request.sources[order.source].instance, (request.incoming.tenant, request.request_id)
        return cls(source, keys, order.blocks, order.timeout_s, *whose, request.note_load)


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
        open_reader: makes the client of an instance at an address, to be read by a method.
        spans: where loading is recorded.
        emulated_s: seconds that emulated hardware takes to load so many bytes; None = it is not emulated.
    """

    def __init__(
        self,
        engine: Engine,
        open_reader: Callable[[str, ReadMethod], BlockReader],
        spans: Recorder,
        emulated_s: Callable[[int], float] | None = None,
    ) -> None:
        self._emulated_s = emulated_s
        self._pool = engine.pool
        self._layout = engine.layout
        self._peers = {kind: Peers(partial(_open, open_reader, method)) for kind, method in METHODS.items()}
        self._spans = spans

    @property
    def sessions(self) -> int:
        """Reads under way."""
        return sum(peers.sessions for peers in self._peers.values())

    @property
    def traffic(self) -> Traffic:
        """Credits and messages of the streams from all sources."""
        return sum((peers.traffic for peers in self._peers.values()), Traffic())

    async def aclose(self) -> None:
        """Closes all streams."""
        for peers in self._peers.values():
            await peers.aclose()

    async def load(self, read: BlockRead, on_layer: Callable[[int], None]) -> LoadEnded:
        """Reads blocks; nothing is written once it has returned.

        Args:
            read: what to read, and where to.
            on_layer: called in order for each layer whose blocks have all come.
        """
        source, wanted = read.source, len(read.blocks)
        began = time.monotonic()
        try:
            reader = await self._peers[source.kind].get(source)
            pace = Pace(self._load_s(wanted), self._layout.layers, on_layer)
            try:
                loaded = await self._read(reader, read, pace.came)
                await pace.over()
            finally:
                pace.close()
            ended = time.monotonic()
            read.came(loaded * self._layout.block_tokens, began, ended)
            return LoadEnded(loaded, loaded if loaded < wanted else None, seconds=ended - began)
        except PrefixLost as lost:
            log.info("prefix lost while loading", source=source.id, request=read.request, reason=str(lost))
            return LoadEnded(0, lost.blocks)
        except DamagedSliceError as damaged:
            log.warning("damaged slice while loading", source=source.id, request=read.request, reason=str(damaged))
            return LoadEnded(0)
        except MoonpoolError as error:
            log.warning("load failed", source=source.id, request=read.request, reason=str(error))
            return LoadEnded(0, failed=True)

    def _load_s(self, blocks: int) -> float:
        return self._emulated_s(blocks * self._layout.block_bytes) if self._emulated_s is not None else 0.0

    async def _read(self, reader: BlockReader, read: BlockRead, on_layer: Callable[[int], None]) -> int:
        """Reads from one source; returns how many leading blocks it had. Raises as `BlockReader.read`."""
        wanted, layers = len(read.blocks), range(self._layout.layers)
        counts, last_ns = [0] * len(layers), time.monotonic_ns()
        target = PoolTarget(self._pool, read.blocks)

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            target.take(layer, index, data, value)
            counts[layer] += 1

        def layer_done(layer: int) -> None:
            nonlocal last_ns
            now_ns = time.monotonic_ns()
            size = counts[layer] * self._layout.slice_bytes
            self._spans.add("kv.load", last_ns, now_ns, request=read.request, layer=layer, bytes=size)
            last_ns = now_ns
            if counts[layer] == wanted:
                on_layer(layer)

        return await reader.read(
            read.keys,
            layers=layers,
            on_slice=take,
            into=target.into,
            on_layer=layer_done,
            timeout_s=read.timeout_s,
            tenant=read.tenant,
        )


def _open(open_reader: Callable[[str, ReadMethod], BlockReader], method: ReadMethod, address: str) -> BlockReader:
    return open_reader(address, method)
