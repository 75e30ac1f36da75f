"""LoRA adapters by name: loaded and unloaded at run time, announced to the engines, shared with other conductors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.checkpoint.lora import LoraAdapter, read_adapter
from moonpool.base.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequest,
    MoonpoolError,
    NotFound,
    Overloaded,
    Unavailable,
)
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.records import RecordSync
from moonpool.v1 import kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub

log = get_logger(__name__)

LORA_RECORD = "lora"
"""Kind of the records; a record without an id says that the adapter was unloaded."""
KEPT_S = 3650 * 86400.0
"""Seconds for which conductors share an adapter, or that an adapter was unloaded."""
LOAD_TIMEOUT_S = 120.0
MAX_NAME_CHARS = 128
MAX_LORAS = 1024
"""Most adapters by name."""
_STUBS = {
    kv_pb2.INSTANCE_KIND_PREFILL: PrefillServiceStub,
    kv_pb2.INSTANCE_KIND_DECODE: DecodeServiceStub,
}


@dataclass(frozen=True, slots=True)
class LoraEngine:
    """An engine instance, and whether the instance takes adapters."""

    instance: kv_pb2.Instance
    takes_loras: bool


class LoraAdapters:
    """The adapters that requests may ask for.

    An adapter is a record that conductors share through the kvstores, or comes from the settings: the newer one counts.

    Args:
        sync: the records that conductors share.
        channels: to instances.
        engines: prefill and decode instances that have joined.
        model: name of the base model.
        folder: where adapters may be loaded from at run time; None = they may not.
        from_settings: the settings' adapters (`read_settings_loras`).
    """

    def __init__(
        self,
        sync: RecordSync,
        channels: Channels,
        engines: Callable[[], Sequence[LoraEngine]],
        model: str,
        folder: Path | None,
        from_settings: Sequence[kv_pb2.LoraAdapter],
    ) -> None:
        self._sync = sync
        self._channels = channels
        self._engines = engines
        self._model = model
        self._folder = folder
        now = sync.clock()
        self._from_settings = {  # each with the version of a record from now
            lora.name: (sync.records.version((LORA_RECORD, "", lora.name), now), lora) for lora in from_settings
        }
        self._announcing: dict[asyncio.Task[None], None] = {}
        self._changing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self.known())

    async def aclose(self) -> None:
        """End the announcements that are under way."""
        for task in self._announcing:
            task.cancel()
        await asyncio.gather(*self._announcing, return_exceptions=True)

    def get(self, name: str) -> kv_pb2.LoraAdapter | None:
        """Return the adapter of this name; None without one."""
        record, own = self._sync.records.get(LORA_RECORD, "", name), self._from_settings.get(name)
        if record is not None and (own is None or record.version > own[0]):
            lora = kv_pb2.LoraAdapter.FromString(record.value)
            return lora if lora.id else None
        return None if own is None else own[1]

    def known(self) -> list[kv_pb2.LoraAdapter]:
        """Return all adapters, in the order of their names."""
        names = {record.id for record in self._sync.records.of(LORA_RECORD, "")} | self._from_settings.keys()
        found = (self.get(name) for name in sorted(names))
        return [lora for lora in found if lora is not None]

    async def load(self, name: str, path: str, *, in_place: bool) -> tuple[kv_pb2.LoraAdapter, int]:
        """Add an adapter from a folder; return the adapter, and how many instances have loaded it.

        Raises:
            InvalidRequest: the name is taken, the folder is not allowed, or the adapter cannot be computed; names
                `lora_name` or `lora_path`.
            Unavailable: no prefill or no decode instance could load the adapter.
            Overloaded: there are too many adapters.
        """
        check_name(name, self._model)
        folder = await asyncio.to_thread(self._allowed, path)
        try:
            lora = await asyncio.to_thread(_read, folder, name)
        except CheckpointError as error:
            raise InvalidRequest("lora_path", str(error)) from None
        async with self._changing:
            earlier = self.get(name)
            if earlier is not None and not in_place:
                raise InvalidRequest("lora_name", f"{name!r} is loaded already; load_inplace = true replaces it")
            if earlier is None and len(self) >= MAX_LORAS:
                raise Overloaded(f"{MAX_LORAS} LoRA adapters are loaded", reason="max_loras", retry_after_s=60.0)
            loaded = await self._load_everywhere(lora)
            await self._keep(name, lora)
            if earlier is not None:
                await self._unload_everywhere(earlier.id)
        log.info("LoRA adapter loaded", name=name, path=lora.path, rank=lora.rank, instances=loaded)
        return lora, loaded

    async def unload(self, name: str) -> None:
        """Remove an adapter. Requests that have begun go on.

        Raises:
            NotFound: there is no adapter of this name.
        """
        async with self._changing:
            lora = self.get(name)
            if lora is None:
                raise NotFound(f"no LoRA adapter {name!r} is loaded")
            await self._keep(name, kv_pb2.LoraAdapter(name=name))
            await self._unload_everywhere(lora.id)
        log.info("LoRA adapter unloaded", name=name)

    def announce(self, instance: kv_pb2.Instance) -> None:
        """Let an instance that joins load all adapters, in the background. What fails is loaded by requests."""
        if instance.kind in _STUBS and len(self):
            task = asyncio.create_task(self._announce(instance))
            self._announcing[task] = None
            task.add_done_callback(self._announcing.pop)

    async def _announce(self, instance: kv_pb2.Instance) -> None:
        for lora in self.known():
            try:
                await self._load_at(instance, lora)
            except MoonpoolError as error:
                log.warning("LoRA adapter not loaded", name=lora.name, instance=instance.id, error=str(error))
                return

    def _allowed(self, path: str) -> Path:
        """Return the folder of a path, which counts from the configured folder.

        Raises:
            InvalidRequest: the path leads elsewhere, or no folder is configured.
        """
        if self._folder is None:
            raise InvalidRequest("lora_path", "no folder is allowed: the conductor was started without lora_folder")
        root = self._folder.resolve()
        try:
            found = (root / path).resolve()
        except (OSError, ValueError) as error:  # a loop of links, a NUL
            raise InvalidRequest("lora_path", str(error)) from None
        if not path or not found.is_relative_to(root):
            raise InvalidRequest("lora_path", "must lie in the folder that lora_folder names")
        return found

    async def _keep(self, name: str, lora: kv_pb2.LoraAdapter) -> None:
        expires_at = self._sync.clock() + KEPT_S
        record = self._sync.record(LORA_RECORD, "", name, lora.SerializeToString(), expires_at)
        own = self._from_settings.get(name)
        if own is not None:
            record.version = max(record.version, own[0] + 1)
        await self._sync.push([record])

    async def _load_everywhere(self, lora: kv_pb2.LoraAdapter) -> int:
        """Let all engines load an adapter; return how many have."""
        engines = [engine.instance for engine in self._engines() if engine.takes_loras]
        if not engines:
            if self._engines():
                raise InvalidRequest("lora_path", "no engine takes LoRA adapters: start them with max_loras")
            raise Unavailable("no prefill and no decode instance has joined")
        answers = await asyncio.gather(*(self._load_at(engine, lora) for engine in engines), return_exceptions=True)
        failed = {engine.id: error for engine, error in zip(engines, answers, strict=True) if error is not None}
        for error in failed.values():
            if isinstance(error, InvalidRequest):
                await self._unload_everywhere(lora.id)
                raise InvalidRequest("lora_path", error.message)
            if not isinstance(error, MoonpoolError):
                raise error
        for kind in _STUBS:
            of_kind = [engine.id for engine in engines if engine.kind == kind]
            if of_kind and all(name in failed and not isinstance(failed[name], Overloaded) for name in of_kind):
                await self._unload_everywhere(lora.id)
                raise Unavailable(str(failed[of_kind[0]]))
        for name, error in failed.items():
            log.warning("LoRA adapter not loaded", name=lora.name, instance=name, error=str(error))
        return len(engines) - len(failed)

    async def _load_at(self, instance: kv_pb2.Instance, lora: kv_pb2.LoraAdapter) -> None:
        stub = _STUBS[instance.kind](self._channels.get(instance.address))
        await stub.LoadLora(kv_pb2.LoadLoraRequest(lora=lora), timeout=LOAD_TIMEOUT_S)

    async def _unload_everywhere(self, lora: bytes) -> None:
        """Tell all engines that an adapter is unloaded, unless it has another name. An engine drops what is unused."""
        if any(adapter.id == lora for adapter in self.known()):
            return
        engines = [engine.instance for engine in self._engines() if engine.takes_loras]
        order = kv_pb2.UnloadLoraRequest(id=lora)
        stubs = [_STUBS[engine.kind](self._channels.get(engine.address)) for engine in engines]
        answers = await asyncio.gather(
            *(stub.UnloadLora(order, timeout=LOAD_TIMEOUT_S) for stub in stubs), return_exceptions=True
        )
        for instance, answer in zip(engines, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("LoRA adapter not unloaded", instance=instance.id, error=str(answer))


def check_name(name: str, model: str) -> None:
    """Check an adapter's name beside the name of the base model.

    Raises:
        InvalidRequest: the name is wrong or taken; names `lora_name`.
    """
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest("lora_name", f"has 1 to {MAX_NAME_CHARS} printable characters")
    if name == model:
        raise InvalidRequest("lora_name", f"{name!r} is the model's own name")


def read_settings_loras(modules: Mapping[str, str], model: str) -> list[kv_pb2.LoraAdapter]:
    """Return the adapters that the settings name, by name; values are folders. `model`: name of the base model.

    Raises:
        ConfigError: an adapter cannot be used; names `lora_modules.NAME`.
    """
    found = []
    for name, path in modules.items():
        try:
            check_name(name, model)
            found.append(_read(Path(path), name))
        except (CheckpointError, InvalidRequest) as error:
            raise ConfigError(f"lora_modules.{name}", str(error)) from None
        log.info("LoRA adapter", name=name, path=found[-1].path, rank=found[-1].rank)
    return found


def _read(folder: Path, name: str) -> kv_pb2.LoraAdapter:
    lora: LoraAdapter = read_adapter(folder)
    path = str(folder.resolve())
    return kv_pb2.LoraAdapter(id=lora.id, name=name, path=path, rank=lora.rank, base_model=lora.base_model)
