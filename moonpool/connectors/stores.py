"""The kvstores behind an engine: look-ups with a time limit, loads and saves, all in the background."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar

from typing_extensions import Buffer

from moonpool.base.config import suggestion
from moonpool.base.errors import ConfigError, InvalidRequest, MoonpoolError, Overloaded
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.rendezvous import ranked
from moonpool.client.background import BackgroundLoop
from moonpool.client.kv import AsyncBlockClient, AsyncKVClient
from moonpool.connectors.breaker import Breaker

MAX_CLIENTS = 64
"""Clients that are kept open: one for each store and tenant."""
ClientT = TypeVar("ClientT", bound=AsyncKVClient)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How an engine uses kvstores.

    Attributes:
        stores: "host:port" of each kvstore.
        lookup_limit_s: longest wait of a request for a look-up.
        transfer_limit_s: longest load or save.
        breaker_failures: failures in a row after which a store gets no calls.
        breaker_pause_s: time until such a store is tried again.
        save_bytes: most bytes that wait to be saved; what is more is not saved.
    """

    stores: tuple[str, ...]
    lookup_limit_s: float = 0.2
    transfer_limit_s: float = 10.0
    breaker_failures: int = 3
    breaker_pause_s: float = 5.0
    save_bytes: int = 256 << 20

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Settings by name. Raises ConfigError for unknown names and wrong values."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name in given:
            if name not in defaults:
                raise ConfigError(name, f"is no setting of the connector{suggestion(name, list(defaults))}")
        stores = given.get("stores")
        if isinstance(stores, str):
            stores = [address.strip() for address in stores.split(",")]
        if not stores or not all(isinstance(store, str) and ":" in store for store in stores):
            raise ConfigError("stores", 'must be a list of "host:port"')
        values: dict[str, Any] = {"stores": tuple(stores)}
        for name, value in given.items():
            if name == "stores":
                continue
            if isinstance(defaults[name], str):
                if not isinstance(value, str):
                    raise ConfigError(name, "must be a text")
            elif not isinstance(value, int | float) or not value > 0:
                raise ConfigError(name, "must be a number above 0")
            values[name] = value
        return cls(**values)


@dataclass(frozen=True, slots=True)
class PageSettings(StoreSettings):
    """How an engine keeps pages. `weights` names the weights; "" = a hash over the checkpoint's files."""

    weights: str = ""


@dataclass(frozen=True, slots=True)
class ValueSettings(StoreSettings):
    """How values are kept. `namespace` is common to those who share values; `tenant` owns the values."""

    namespace: str = ""
    tenant: str = ""


class Page(NamedTuple):
    """A block to save: key, key of the block before, and bytes."""

    key: BlockKey
    parent: BlockKey
    data: Buffer


class Stores(ABC, Generic[ClientT]):
    """The stores of one process. Methods return at once; threads may share the object.

    Args:
        settings: how the stores are used.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: StoreSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._breakers = {
            store: Breaker(settings.breaker_failures, settings.breaker_pause_s) for store in settings.stores
        }
        self._weights = dict.fromkeys(settings.stores, 1.0)
        self._loop = BackgroundLoop()
        self._clients: OrderedDict[tuple[str, str], ClientT] = OrderedDict()  # touched on the loop only
        self._closing: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._saving = 0
        self._idle = threading.Event()
        self._idle.set()

    @abstractmethod
    def _new_client(self, store: str, tenant: str) -> ClientT:
        """A client of a store."""

    @property
    def stores(self) -> Sequence[str]:
        """Addresses."""
        return self._settings.stores

    def accepts(self, nbytes: int) -> bool:
        """Whether so many bytes might be saved now."""
        return self.open_breakers < len(self._breakers) and self._saving + nbytes <= self._settings.save_bytes

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    @property
    def open_breakers(self) -> int:
        """Stores that get no calls."""
        return sum([breaker.open for breaker in self._breakers.values()])

    def flush(self, timeout_s: float) -> bool:
        """Wait until all saves are over; return whether they are."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """End all calls. Idempotent."""
        self._loop.close(self._close_clients)

    async def _look_up(self, store: str, tenant: str, keys: Sequence[bytes]) -> list[bool]:
        began = self._clock()
        try:
            async with asyncio.timeout(self._settings.lookup_limit_s):
                client = self._client(store, tenant)
                found = await client.batch_exists(keys, timeout_s=self._settings.lookup_limit_s)
        except (MoonpoolError, TimeoutError) as error:
            self._failed(store, error, lookups_failed=1)
            return [False] * len(keys)
        self._breakers[store].answered()
        self._count(lookups=1, lookup_seconds=self._clock() - began)
        return found

    async def _load(self, store: str, tenant: str, items: Mapping[bytes, Buffer]) -> list[bool]:
        began = self._clock()
        try:
            client = self._client(store, tenant)
            read = await client.batch_get_into(items, timeout_s=self._settings.transfer_limit_s)
        except MoonpoolError as error:
            self._failed(store, error, load_misses=len(items))
            return [False] * len(items)
        self._breakers[store].answered()
        whole = [nbytes == memoryview(memory).nbytes for nbytes, memory in zip(read, items.values(), strict=True)]
        nbytes = sum([length or 0 for length in read])
        self._count(
            blocks_loaded=sum(whole), load_misses=len(whole) - sum(whole), bytes_loaded=nbytes,
            load_seconds=self._clock() - began,
        )  # fmt: skip
        return whole

    async def _save(
        self, store: str, tenant: str, count: int, nbytes: int, put: Callable[[ClientT], Awaitable[int]]
    ) -> bool:
        """Save `count` blocks of together `nbytes`, which `_may_save` has counted. Returns whether all are there."""
        began, saved = self._clock(), False
        try:
            new = await put(self._client(store, tenant))
            saved = True
        except InvalidRequest:  # KV of the tenant was deleted
            self._on_deletion(tenant)
        except MoonpoolError as error:
            self._failed(store, error)
        else:
            self._breakers[store].answered()
            self._count(blocks_saved=new, bytes_saved=nbytes, save_seconds=self._clock() - began)
        finally:
            with self._lock:
                if not saved:
                    self._add(blocks_not_saved=count)
                self._saving -= nbytes
                if not self._saving:
                    self._idle.set()
        return saved

    def _on_deletion(self, tenant: str) -> None:
        """KV of a tenant was deleted while some of it was saved."""

    def _may_save(self, nbytes: int) -> bool:
        """Whether so many bytes more may wait; then they are counted. To be called with the lock."""
        if self._saving + nbytes > self._settings.save_bytes:
            return False
        self._saving += nbytes
        self._idle.clear()
        return True

    def _client(self, store: str, tenant: str) -> ClientT:
        key = (store, tenant)
        client = self._clients.pop(key, None) or self._new_client(store, tenant)
        self._clients[key] = client
        if len(self._clients) > MAX_CLIENTS:
            _, oldest = self._clients.popitem(last=False)
            closing = asyncio.create_task(self._close_later(oldest))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return client

    async def _close_later(self, client: ClientT) -> None:
        try:
            await asyncio.sleep(self._settings.transfer_limit_s)  # its calls end before
        finally:
            await client.aclose()

    async def _close_clients(self) -> None:
        for closing in self._closing:
            closing.cancel()
        while self._clients:
            await self._clients.popitem()[1].aclose()

    def _home(self, chain: bytes) -> str | None:
        """The store of a chain: the first by rendezvous that answers."""
        now = self._clock()
        with self._lock:
            return next((store for store in ranked(chain, self._weights) if self._breakers[store].allows(now)), None)

    def _failed(self, store: str, error: Exception, **counts: int) -> None:
        # A store without room answers; calls to it go on.
        if not isinstance(error, Overloaded):
            self._breakers[store].failed(self._clock())
        self._count(store_errors=1, **counts)

    def _count(self, **counts: float) -> None:
        with self._lock:
            self._add(**counts)

    def _add(self, **counts: float) -> None:
        for name, count in counts.items():
            if count:
                self._counts[name] = self._counts.get(name, 0) + count


class EngineStores(Stores[AsyncBlockClient]):
    """The stores of one engine process: pages of chains. All pages of a chain are in one store.

    Args:
        settings: how the stores are used.
        namespace: the pages' namespace.
        clock: seconds, monotonic.
        wall: seconds of the epoch.
    """

    def __init__(
        self,
        settings: StoreSettings,
        namespace: bytes,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(settings, clock)
        self._namespace, self._wall = namespace, wall
        self._deleted_at: dict[str, float] = {}

    def _new_client(self, store: str, tenant: str) -> AsyncBlockClient:
        return AsyncBlockClient(store, namespace=self._namespace.hex(), tenant=tenant)

    def look_up(self, tenant: str, chain: bytes, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Which blocks are there; none if the store cannot tell within the limit. `chain`: key of the first block."""
        store = self._home(chain)
        if store is None or not keys:
            self._count(lookups_skipped=int(bool(keys)))
            return _done([False] * len(keys))
        return self._loop.submit(self._look_up(store, tenant, keys))

    def load(self, tenant: str, chain: bytes, items: Mapping[BlockKey, Buffer]) -> Future[list[bool]]:
        """Read blocks, each into memory of its size. Returns which ones are complete."""
        store = self._home(chain)
        if store is None:
            self._count(load_misses=len(items))
            return _done([False] * len(items))
        buffers: dict[bytes, Buffer] = {key: memory for key, memory in items.items()}  # noqa: C416  # keys' type
        return self._loop.submit(self._load(store, tenant, buffers))

    def save(self, tenant: str, chain: bytes, pages: Sequence[Page], asked_at: float) -> None:
        """Save blocks of a request that came at `asked_at` (of the epoch); drops what is too much or was deleted."""
        nbytes = sum([memoryview(page.data).nbytes for page in pages])
        store = self._home(chain)
        with self._lock:
            # Blocks computed from KV that was deleted meanwhile would bring the KV back.
            stale = asked_at <= self._deleted_at.get(tenant, float("-inf"))
            if store is None or stale or not self._may_save(nbytes):
                self._add(blocks_not_saved=len(pages))
                return
        limit_s = self._settings.transfer_limit_s

        def put(client: AsyncBlockClient) -> Awaitable[int]:
            return client.put_chain(pages, timeout_s=limit_s)

        self._loop.submit(self._save(store, tenant, len(pages), nbytes, put))

    def _on_deletion(self, tenant: str) -> None:
        with self._lock:
            self._deleted_at[tenant] = self._wall()


class ValueStores(Stores[AsyncKVClient]):
    """Values without chains, each in a store of its own choice.

    Args:
        settings: how the stores are used.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: ValueSettings, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(settings, clock)
        self._namespace, self._tenant = settings.namespace, settings.tenant

    def _new_client(self, store: str, tenant: str) -> AsyncKVClient:
        return AsyncKVClient(store, namespace=self._namespace, tenant=tenant)

    def look_up(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Which values are there; none of a store that cannot tell within the limit."""
        return self._loop.submit(
            self._spread(keys, lambda store, part: self._look_up(store, self._tenant, [keys[at] for at in part]))
        )

    def load(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> Future[list[bool]]:
        """Read values, each into memory of its size. Returns which ones are complete."""

        def read(store: str, part: Sequence[int]) -> Awaitable[list[bool]]:
            return self._load(store, self._tenant, {keys[at]: buffers[at] for at in part})

        return self._loop.submit(self._spread(keys, read))

    def save(self, keys: Sequence[bytes], values: Sequence[Buffer]) -> Future[list[bool]]:
        """Save values, which must not change meanwhile. Returns which ones are there."""
        return self._loop.submit(self._spread(keys, lambda store, part: self._save_part(store, keys, values, part)))

    async def _save_part(
        self, store: str, keys: Sequence[bytes], values: Sequence[Buffer], part: Sequence[int]
    ) -> list[bool]:
        items = {keys[at]: values[at] for at in part}
        nbytes, limit_s = sum([memoryview(value).nbytes for value in items.values()]), self._settings.transfer_limit_s
        with self._lock:
            if not self._may_save(nbytes):
                self._add(blocks_not_saved=len(items))
                return [False] * len(part)

        def put(client: AsyncKVClient) -> Awaitable[int]:
            return client.batch_put(items, timeout_s=limit_s)

        return [await self._save(store, self._tenant, len(items), nbytes, put)] * len(part)

    def delete(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Delete values. Returns which ones are gone, or were never there."""
        return self._loop.submit(self._spread(keys, lambda store, part: self._delete(store, [keys[at] for at in part])))

    async def _delete(self, store: str, keys: Sequence[bytes]) -> list[bool]:
        try:
            client = self._client(store, self._tenant)
            await client.batch_delete(keys, timeout_s=self._settings.transfer_limit_s)
        except MoonpoolError as error:
            self._failed(store, error)
            return [False] * len(keys)
        self._breakers[store].answered()
        return [True] * len(keys)

    async def _spread(
        self, keys: Sequence[bytes], call: Callable[[str, Sequence[int]], Awaitable[list[bool]]]
    ) -> list[bool]:
        """Call each store with the positions of the keys at home there; False for keys without a store."""
        parts: dict[str, list[int]] = {}
        now, found = self._clock(), [False] * len(keys)
        with self._lock:
            usable = {store: breaker.allows(now) for store, breaker in self._breakers.items()}
        for at, key in enumerate(keys):
            home = next((store for store in ranked(key, self._weights) if usable[store]), None)
            if home is not None:
                parts.setdefault(home, []).append(at)
        for part, told in zip(
            parts.values(), await asyncio.gather(*[call(*each) for each in parts.items()]), strict=True
        ):
            for at, answer in zip(part, told, strict=True):
                found[at] = answer
        return found


def _done(found: list[bool]) -> Future[list[bool]]:
    future: Future[list[bool]] = Future()
    future.set_result(found)
    return future
