"""An L2 adapter for LMCache (0.5): chunks of KV live on in Moonpool's kvstores.

    --l2-adapter '{"type": "plugin", "module_path": "moonpool.connectors.lmcache", "class_name": "MoonpoolL2Adapter",
      "adapter_params": {"stores": ["127.0.0.1:50060"]}}'

See docs/engines.md.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from moonpool.base.telemetry.logs import get_logger
from moonpool.connectors.stores import ValueSettings, ValueStores

MAX_KNOWN = 1 << 18
"""Chunks of which the size is remembered; the oldest count as gone."""
log = get_logger(__name__)


class MoonpoolL2AdapterConfig(L2AdapterConfigBase):
    """`adapter_params`: the fields of `ValueSettings`."""

    def __init__(self, settings: ValueSettings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> MoonpoolL2AdapterConfig:
        """Raise ConfigError for unknown names and wrong values."""
        return cls(ValueSettings.read(d))

    @classmethod
    def help(cls) -> str:
        """The fields."""
        return "adapter_params: " + ", ".join(ValueSettings.__dataclass_fields__)


class MoonpoolL2Adapter(L2AdapterInterface):
    """Chunks in kvstores, which evict by themselves.

    Look-ups take no locks: a chunk that goes before it is loaded is a miss.
    """

    def __init__(self, config: MoonpoolL2AdapterConfig, l1_memory_desc: object = None) -> None:
        super().__init__()  # no capacity: stores evict
        self._stores = ValueStores(config.settings)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._sizes: dict[ObjectKey, int] = {}  # of what was saved here and is not known to be gone, the oldest first
        self._saved: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._save_event, self._look_up_event, self._load_event = [create_event_notifier() for _ in range(3)]

    def get_store_event_fd(self) -> int:
        """Readable when chunks were saved."""
        return int(self._save_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when chunks were looked up."""
        return int(self._look_up_event.fileno())

    def get_load_event_fd(self) -> int:
        """Readable when chunks were loaded."""
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to save chunks; they must not change before the task is over."""
        memory, sizes = [stored.byte_array for stored in objects], [stored.get_size() for stored in objects]
        return self._begin(self._stores.save(_names(keys), memory), partial(self._take_saved, list(keys), sizes))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of the tasks that are over; a task has failed if a chunk could not be saved."""
        with self._lock:
            saved, self._saved = self._saved, {}
        return saved

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Any) -> int:
        """Begin to look chunks up."""
        return self._begin(self._stores.look_up(_names(keys)), partial(self._take_found, list(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which chunks are there; None until the task is over, and behind the first result."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to load chunks into memory, which must stay until the task is over."""
        memory = [stored.byte_array for stored in objects]
        return self._begin(self._stores.load(_names(keys), memory), partial(self._take_loaded, list(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which chunks were loaded; None until the task is over, and behind the first result."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        self._begin(self._stores.delete(_names(keys)), partial(self._take_deleted, list(keys)))

    def report_status(self) -> dict[str, Any]:
        """The adapter is healthy if a store answers."""
        with self._lock:
            self._counts.update(self._stores.take_counts())
            counts = dict(self._counts)
        open_breakers, stores = self._stores.open_breakers, list(self._stores.stores)
        healthy = open_breakers < len(stores)
        return {"is_healthy": healthy, "type": type(self).__name__, "stores": stores, "counts": counts}

    def close(self) -> None:
        self._stores.close()
        for event in (self._save_event, self._look_up_event, self._load_event):
            event.close()

    def _begin(self, work: Future[list[bool]], over: Callable[[int, list[bool]], None]) -> int:
        """Call `over` with the task's number and what is told of each chunk; with nothing if the task has failed."""
        number = next(self._numbers)

        def done(future: Future[list[bool]]) -> None:
            if future.cancelled():  # the adapter is closed
                return
            if (error := future.exception()) is not None:
                log.error("a task of LMCache has failed", error=repr(error))
            over(number, [] if error is not None else future.result())

        work.add_done_callback(done)
        return number

    def _take_saved(self, keys: list[ObjectKey], sizes: list[int], number: int, told: list[bool]) -> None:
        self._remember([(key, size) for key, size, saved in zip(keys, sizes, told, strict=False) if saved])
        whole = len(told) == len(keys) and all(told)
        with self._lock:
            self._saved[number] = L2StoreResult(whole, sum(sizes) if whole else 0)
        self._save_event.notify()

    def _take_found(self, keys: list[ObjectKey], number: int, told: list[bool]) -> None:
        there = [key for key, found in zip(keys, told, strict=False) if found]
        self._notify_keys_accessed(there)
        with self._lock:
            self._found[number] = _bitmap(len(keys), told)
        self._look_up_event.notify()

    def _take_loaded(self, keys: list[ObjectKey], number: int, told: list[bool]) -> None:
        self._forget([key for key, loaded in zip(keys, told, strict=False) if not loaded])
        with self._lock:
            self._loaded[number] = _bitmap(len(keys), told)
        self._load_event.notify()

    def _take_deleted(self, keys: list[ObjectKey], number: int, told: list[bool]) -> None:
        self._forget([key for key, gone in zip(keys, told, strict=False) if gone])

    def _remember(self, saved: Sequence[tuple[ObjectKey, int]]) -> None:
        """Tell LMCache of chunks that were saved for the first time."""
        with self._lock:
            new = [(key, size) for key, size in saved if key not in self._sizes]
            self._sizes.update(new)
            old = [*self._sizes][: max(0, len(self._sizes) - MAX_KNOWN)]
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
        self._forget(old)

    def _forget(self, keys: Sequence[ObjectKey]) -> None:
        """Tell LMCache of chunks that are gone, or may be."""
        with self._lock:
            gone = {key: self._sizes.pop(key) for key in keys if key in self._sizes}
        if gone:
            self._notify_keys_deleted(list(gone), list(gone.values()))


def _names(keys: Sequence[ObjectKey]) -> list[bytes]:
    """The chunks' keys in the stores."""
    return [
        msgspec.msgpack.encode((key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash))
        for key in keys
    ]


def _bitmap(size: int, told: Sequence[bool]) -> Bitmap:
    found = Bitmap(size)
    for at, yes in enumerate(told):
        if yes:
            found.set(at)
    return found
