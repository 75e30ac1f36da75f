"""The LoRA adapters of one instance: loaded when requests need them, forgotten when others need the room."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from moonpool.base.errors import CheckpointError, Internal, InvalidRequest, Overloaded, Unavailable, UnsupportedModel
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.engine.interface import Engine
from moonpool.v1 import kv_pb2

FULL_RETRY_S = 1.0
log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _HeldLora:
    """An adapter that is loaded, or is being loaded.

    `waiting`: requests that wait for the load, or are about to begin; `bytes`: of the loaded weights.
    """

    name: str
    loading: asyncio.Task[None]
    waiting: int = 0
    bytes: int = 0
    retired: bool = False


class InstanceLoras:
    """Loads adapters into an engine, at most `max_loras`; the least recently used unused adapter makes room.

    Args:
        engine: computes with the adapters.
        max_loras: adapters that the engine holds at most; 0 = none.
        in_use: ids of the adapters of all requests that have begun.
    """

    def __init__(self, engine: Engine, max_loras: int, in_use: Callable[[], Collection[bytes]]) -> None:
        self._engine = engine
        self._max_loras = max_loras
        self._in_use = in_use
        self._held: dict[bytes, _HeldLora] = {}  # the least recently used first
        self._one_at_a_time = asyncio.Lock()
        self._drops: set[asyncio.Task[None]] = set()
        self.loads = 0
        """Adapters loaded since the start."""

    def used_by(self, in_use: Callable[[], Collection[bytes]]) -> None:
        """Ask this from now on for the adapters of all requests that have begun."""
        self._in_use = in_use

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Memory that the engine holds of all adapters."""
        return sum(held.bytes for held in self._held.values())

    @asynccontextmanager
    async def using(self, lora: kv_pb2.LoraAdapter) -> AsyncIterator[int]:
        """Have an adapter loaded as long as the body runs; begin the request in the body. Without an id: no adapter.

        Yields the bytes that the engine holds of the adapter.

        Raises:
            InvalidRequest: the adapter cannot be computed, or this instance takes none; names `sequence.lora`.
            Unavailable: the adapter's files are missing, damaged or changed here, or the engine has failed.
            Overloaded: all adapters that are held are in use.
        """
        if not lora.id:
            yield 0
            return
        held = self._find(lora)
        held.waiting += 1
        try:
            await asyncio.shield(held.loading)
            yield held.bytes
        except UnsupportedModel as error:
            raise InvalidRequest("sequence.lora", f"LoRA adapter {lora.name!r}: {error}") from None
        except CheckpointError as error:
            raise Unavailable(f"LoRA adapter {lora.name!r}: {error}") from None
        finally:
            held.waiting -= 1

    async def load(self, request: kv_pb2.LoadLoraRequest) -> kv_pb2.LoadLoraResponse:
        """Load an adapter ahead of requests, by order of a conductor; raises as `using`, and names `lora.id`."""
        if not request.lora.id:
            raise InvalidRequest("lora.id", "must not be empty")
        async with self.using(request.lora) as nbytes:
            return kv_pb2.LoadLoraResponse(bytes=nbytes)

    def unload(self, request: kv_pb2.UnloadLoraRequest) -> kv_pb2.UnloadLoraResponse:
        """Forget an adapter once no request uses it, unless requests ask for it again.

        Raises:
            InvalidRequest: names `id`.
        """
        if not request.id:
            raise InvalidRequest("id", "must not be empty")
        if request.id in self._held:
            self._held[request.id].retired = True
            self.sweep()
        return kv_pb2.UnloadLoraResponse()

    def sweep(self) -> None:
        """Forget retired adapters that are unused. Call this often."""
        retired = [lora for lora, held in self._held.items() if held.retired]
        for lora in self._unused(retired) if retired else ():
            held = self._held.pop(lora)
            log.info("LoRA adapter dropped", name=held.name)
            drop = asyncio.create_task(self._drop(lora))
            self._drops.add(drop)
            drop.add_done_callback(self._drops.discard)

    def _find(self, lora: kv_pb2.LoraAdapter) -> _HeldLora:
        """Return the adapter, now the most recently used; begins to load an adapter that is not here."""
        held = self._held.pop(lora.id, None)
        if held is None:
            if not self._max_loras:
                raise InvalidRequest("sequence.lora", "this instance was started without max_loras")
            held = _HeldLora(lora.name, asyncio.create_task(self._load(lora, self._make_room())))
            held.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        held.retired = False
        self._held[lora.id] = held
        return held

    def _make_room(self) -> bytes | None:
        """Take the least recently used adapter out, if all places are taken; returns the adapter."""
        if len(self._held) < self._max_loras:
            return None
        unused = self._unused(self._held)
        if not unused:
            raise Overloaded(
                f"{len(self._held)} LoRA adapters are in use here, as many as max_loras allows",
                reason="max_loras",
                retry_after_s=FULL_RETRY_S,
            )
        del self._held[unused[0]]
        return unused[0]

    def _unused(self, among: Collection[bytes]) -> list[bytes]:
        used = self._in_use()
        found = ((lora, self._held[lora]) for lora in among if lora not in used)
        return [lora for lora, held in found if not held.waiting and held.loading.done()]

    async def _load(self, lora: kv_pb2.LoraAdapter, instead_of: bytes | None) -> None:
        async with self._one_at_a_time:
            try:
                if instead_of is not None:
                    await self._engine.drop_lora(instead_of)
                nbytes = await self._engine.load_lora(lora.id, lora.path)
            except BaseException:
                self._held.pop(lora.id, None)
                raise
        if lora.id in self._held:
            self._held[lora.id].bytes = nbytes
        self.loads += 1
        log.info("LoRA adapter loaded", name=lora.name, path=lora.path, kib=nbytes >> 10)

    async def _drop(self, lora: bytes) -> None:
        async with self._one_at_a_time:
            try:
                await self._engine.drop_lora(lora)
            except (Unavailable, Internal) as error:  # whoever watches the engine says so
                log.warning("LoRA adapter not dropped", error=str(error))


LORA_METRICS: tuple[Metric[InstanceLoras], ...] = (
    Metric("loras", "LoRA adapters that the engine holds.", len),
    Metric("lora_bytes", "Memory of these adapters, over all stages.", lambda loras: loras.nbytes),
    counter("lora_loads_total", "LoRA adapters loaded.", lambda loras: loras.loads),
)
