"""`AsyncKVClient`, the kvstore client for asyncio."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import ValidationError
from typing_extensions import Buffer

from moonpool.base import world
from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.keys import BlockKey, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.values import ValueSource, layout_of, value_key, value_namespace
from moonpool.base.kv_transfer.store_writer import BlocksToPut
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.regions import SharedMemory
from moonpool.base.transport.registry import open_transports
from moonpool.client.kv.connection import MAX_KEYS_PER_CALL, KVConnection, StoreAddress
from moonpool.client.kv.value_read import ValueRead, read_values, remaining_s

DEFAULT_TIMEOUT_S = 30.0
T = TypeVar("T")


class AsyncKVClient:
    """A client for one kvstore, for asyncio; an async context manager. Use a client on one event loop.

    A value never changes. To put another value under a key, delete the key first. The store may evict any value at any
    time, so every read may be a miss.
    """

    def __init__(
        self,
        address: str,
        *,
        namespace: str,
        tenant: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: Tls | None = None,
        api_key: str = "",
        transports: str | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """Talk to the kvstore at `address`. The client connects on first use.

        Args:
            address: the kvstore's "host:port".
            namespace: everything that makes KV differ: engine, model, data type, layout, version. Namespaces do not
                share keys.
            tenant: the values' owner, for quotas and deletions; other tenants do not find the values. With an API key
                or a client certificate, the store knows the tenant, and the argument may be left out.
            timeout_s: default time limit for a call, in seconds.
            tls: certificates. Default: the files that MOONPOOL_TLS_CA, MOONPOOL_TLS_CERT and MOONPOOL_TLS_KEY name, or
                no TLS if MOONPOOL_TLS_CA is not set.
            api_key: API key, sent over TLS only. Default: MOONPOOL_API_KEY.
            transports: as the services' `--kv-transports` (docs/transports.md). Default: MOONPOOL_KV_TRANSPORTS, else
                local. With certificates, `tcp` is `tls`; without an own certificate (API keys), values go to other
                machines over gRPC.
            memory_bytes: size of `memory`, in bytes.

        Raises:
            ConfigError: a certificate or `transports` is wrong.
        """
        tls = tls or Tls.from_environment()
        opened = open_transports(_transport_config(transports), tls)
        shared = self._shared = SharedMemory(memory_bytes) if memory_bytes else None
        # The dialer must not refer to the client, which would then live as long as its streams.
        dialer = TransportDialer(opened, lambda: [shared.shared] if shared is not None else [])
        self._namespace = self._namespace_of(namespace)
        key = api_key or os.environ.get("MOONPOOL_API_KEY", "")
        self._connection = self._connect(StoreAddress(address, self._namespace, tls, key, dialer))
        self._tenant = tenant
        self._identity: _CallerIdentity | None = None
        self._timeout_s = timeout_s
        self._last_layout: KVLayout | None = None  # of the values used last: a guess for the next

    def _connect(self, store: StoreAddress) -> KVConnection:
        return KVConnection(store)

    def _namespace_of(self, name: str) -> bytes:
        return value_namespace(name)

    def _store_key(self, tenant: str, key: bytes) -> BlockKey:
        """The store's key for a value."""
        return value_key(self._namespace, tenant, key)

    @property
    def memory(self) -> memoryview:
        """Writable memory of `memory_bytes`, which a store on this machine reads directly.

        On the transport `local`, a value in this memory is not copied on the way to the store. Do not change the value
        before `put` returns.
        """
        return self._shared.shared.data if self._shared is not None else memoryview(bytearray())

    @property
    def transport(self) -> str:
        """The last value's transport: "local", "tcp", "tls" or "grpc"; "" before the first value."""
        return self._connection.transport

    async def put(self, key: bytes, data: Buffer, *, timeout_s: float | None = None) -> bool:
        """Store a value. Returns whether the value is new; a value that the key has already is not changed.

        Args:
            key: 1 to `MAX_KEY_BYTES` bytes; `content_key(data)` derives a key from the value.
            data: contiguous bytes, at most `MAX_VALUE_BYTES`. Do not change the bytes before `put` returns.
            timeout_s: time limit in seconds.

        Raises:
            InvalidRequest: the key or the value is wrong, or the tenant's values were deleted during the call.
            Overloaded: the store is full; has the reason and the time to retry.
            Unavailable: the store cannot be reached.
            TransferFailed: the call took too long, or the store gave up.
            Unauthenticated, PermissionDenied: the credentials are wrong or do not allow the call.
        """
        return await self.batch_put({key: data}, timeout_s=timeout_s) == 1

    async def batch_put(self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None) -> int:
        """Store values of any sizes. Returns the number of new values. Raises as `put`, possibly after storing some."""
        return await self._put_all([(key, NO_PARENT, data) for key, data in items.items()], self._deadline(timeout_s))

    async def _put_all(self, items: Iterable[tuple[bytes, BlockKey, Buffer]], deadline: float) -> int:
        """Store values with the keys before theirs in a chain. Returns the number of new values."""
        identity = await self._identify(deadline)
        groups: dict[KVLayout, list[ValueToPut]] = {}
        for key, parent, data in items:
            source = ValueSource(bytes_of(data, "data"))
            value = ValueToPut(self._store_key(identity.tenant, key), parent, source)
            groups.setdefault(source.layout, []).append(value)
        stored = 0
        for layout, group in groups.items():
            self._last_layout = layout
            for portion in _split_portions(group, self._connection.portion(layout)):
                stored += await self._put(identity, layout, portion, deadline)
        return stored

    async def get(self, key: bytes, *, timeout_s: float | None = None) -> bytearray | None:
        """Return a value; None if the store does not have the value.

        Raises:
            InvalidRequest: the key is empty or too long.
            Unavailable: the store cannot be reached.
            TransferFailed: the call took too long, or the store gave up.
            Unauthenticated, PermissionDenied: the credentials are wrong or do not allow the call.
        """
        return (await self.batch_get([key], timeout_s=timeout_s))[0]

    async def batch_get(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bytearray | None]:
        """Return the values in key order; None for values that the store does not have. Raises as `get`."""
        deadline = self._deadline(timeout_s)
        tenant = (await self._identify(deadline)).tenant
        wanted = [ValueRead(self._store_key(tenant, key)) for key in keys]
        await self._read({self._last_layout: wanted}, deadline)
        return [read.value() for read in wanted]

    async def get_into(self, key: bytes, buffer: Buffer, *, timeout_s: float | None = None) -> int | None:
        """Read a value into a buffer. Returns the value's size in bytes; None if the store does not have the value.

        Args:
            key: the value's key.
            buffer: writable and contiguous, at least as large as the value, and fastest if exactly as large. The bytes
                behind the value are undefined afterwards. After a miss or an error, all bytes are undefined.
            timeout_s: time limit in seconds.

        Raises:
            InvalidRequest: the buffer is too small or read-only; otherwise as `get`.
        """
        return (await self.batch_get_into({key: buffer}, timeout_s=timeout_s))[0]

    async def batch_get_into(
        self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None
    ) -> list[int | None]:
        """Read each value into a buffer, as `get_into`. Returns the sizes in key order."""
        deadline = self._deadline(timeout_s)
        tenant = (await self._identify(deadline)).tenant
        guesses: dict[KVLayout | None, list[ValueRead]] = {}
        wanted = []
        for key, buffer in items.items():
            memory = bytes_of(buffer, "buffer", writable=True)
            wanted.append(ValueRead(self._store_key(tenant, key), memory))
            guesses.setdefault(layout_for(memory.nbytes), []).append(wanted[-1])
        await self._read(guesses, deadline)
        return [read.length() for read in wanted]

    async def exists(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Whether the store has a value now. Raises as `get`."""
        return (await self.batch_exists([key], timeout_s=timeout_s))[0]

    async def batch_exists(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        """For each key, whether the store has the value now. Raises as `get`."""
        deadline = self._deadline(timeout_s)
        tenant = (await self._identify(deadline)).tenant
        found = await self._find([self._store_key(tenant, key) for key in keys], deadline)
        return [layout is not None for layout in found]

    async def delete(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Delete a value from memory and disk. Returns whether the store had the value. Raises as `get`.

        A `put` of the key that runs at the same time fails. Afterwards, the key can be used again.
        """
        return await self.batch_delete([key], timeout_s=timeout_s) == 1

    async def batch_delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Delete values. Returns how many the store had. Raises as `get`."""
        deadline = self._deadline(timeout_s)
        tenant = (await self._identify(deadline)).tenant
        found = [self._store_key(tenant, key) for key in dict.fromkeys(keys)]
        return sum(
            [await self._connection.remove(portion, remaining_s(deadline)) for portion in _split_portions(found)]
        )

    async def aclose(self) -> None:
        """End all calls. Idempotent. `memory` stays valid while referenced."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _deadline(self, timeout_s: float | None) -> float:
        """A call's end on the clock `world.monotonic`. All the call's parts share the time."""
        return world.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    async def _identify(self, deadline: float) -> _CallerIdentity:
        """The caller's identity. The first call asks the store.

        A call uses one identity; another call may reset the identity.
        """
        if self._identity is None:
            answer = await self._connection.find((), self._tenant, remaining_s(deadline))
            self._identity = _CallerIdentity(answer.tenant, list(answer.deletions))
        return self._identity

    async def _find(self, keys: Sequence[BlockKey], deadline: float) -> list[KVLayout | None]:
        """Each block's layout; None if the store does not have the block."""
        found: list[KVLayout | None] = []
        for portion in _split_portions(keys):
            answer = await self._connection.find(portion, self._tenant, remaining_s(deadline))
            layouts = [None, *map(KVLayout.from_proto, answer.layouts)]
            found += [layouts[number] for number in answer.found]
        return found

    async def _put(
        self,
        identity: _CallerIdentity,
        layout: KVLayout,
        group: Sequence[ValueToPut],
        deadline: float,
    ) -> int:
        """Put values with one layout. Returns the number of new values."""
        keys, parents = [value.key for value in group], [value.parent for value in group]

        def read(layer: int, index: int) -> tuple[memoryview, int]:
            data = group[index].source.slice(layer)
            return data, slice_hash(data)

        blocks = BlocksToPut(keys, parents, identity.tenant, read, identity.deletions)
        try:
            outcome = await self._connection.put(layout, blocks, remaining_s(deadline))
        except InvalidRequest:
            left = await self._without_other_layouts(layout, group, deadline)
            if len(left) == len(group):
                if self._identity is identity:
                    self._identity = None  # values of the tenant may have been deleted; the next call asks again
                raise
            return await self._put(identity, layout, left, deadline) if left else 0
        return outcome.stored

    async def _without_other_layouts(
        self, layout: KVLayout, group: Sequence[ValueToPut], deadline: float
    ) -> list[ValueToPut]:
        """Drop values whose key has a value with another size: the store would refuse all values."""
        found = await self._find([value.key for value in group], deadline)
        return [value for value, there in zip(group, found, strict=True) if there is None or there == layout]

    async def _read(self, guesses: Mapping[KVLayout | None, Sequence[ValueRead]], deadline: float) -> None:
        """Read values with the guessed layouts, then the missing values with the layouts that the store reports."""
        left: list[ValueRead] = []
        for layout, wanted in guesses.items():
            for portion in _split_portions(wanted):
                left += portion if layout is None else await self._read_some(layout, portion, deadline)
        groups: dict[KVLayout, list[ValueRead]] = {}
        for read, there in zip(left, await self._find([read.key for read in left], deadline), strict=True):
            if there is not None:
                groups.setdefault(there, []).append(read)
        for there, wanted in groups.items():
            self._last_layout = there
            for portion in _split_portions(wanted):
                rest: Sequence[ValueRead] = portion
                while rest:  # a store with little memory reads fewer at once; if none, the first value is gone
                    after = await self._read_some(there, rest, deadline)
                    rest = after if len(after) < len(rest) else after[1:]

    async def _read_some(self, layout: KVLayout, wanted: Sequence[ValueRead], deadline: float) -> Sequence[ValueRead]:
        """Read values with one layout. Returns the values from the first missing value on."""
        return wanted[await read_values(self._connection, layout, wanted, deadline) :]


class _CallerIdentity(NamedTuple):
    """The tenant that the store derives from the caller's credentials, and past deletions of the tenant's values."""

    tenant: str
    deletions: Sequence[str]


class ValueToPut(NamedTuple):
    """A value, the value's key in the store, and the key before in a chain."""

    key: BlockKey
    parent: BlockKey
    source: ValueSource


def _transport_config(transports: str | None) -> TransportConfig:
    try:
        # The client has certificates already, perhaps none of its own.
        settings: dict[str, Any] = dict.fromkeys(("tls_cert", "tls_key", "tls_ca", "tls_revoked"))
        return TransportConfig(**settings | ({} if transports is None else {"kv_transports": transports}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "transports" if transports is not None else str(first["loc"][0])  # as in the environment
        raise ConfigError(field, first["msg"].removeprefix("Value error, ")) from None


def bytes_of(data: Buffer, field: str, *, writable: bool = False) -> memoryview:
    """A buffer's bytes.

    Raises:
        InvalidRequest: the buffer is not contiguous, or is read-only although `writable` is set.
    """
    try:
        view = memoryview(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"is not a buffer of bytes: {error}") from error
    if not view.c_contiguous or (writable and view.readonly):
        raise InvalidRequest(field, "must be contiguous" + (" and writable" if writable else ""))
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def layout_for(nbytes: int) -> KVLayout | None:
    """The layout for a value with exactly `nbytes`; None if no value is that large."""
    try:
        return layout_of(nbytes)
    except InvalidRequest:
        return None


def _split_portions(items: Iterable[T], count: int = MAX_KEYS_PER_CALL) -> Iterator[list[T]]:
    rest = iter(items)
    while portion := list(itertools.islice(rest, count)):
        yield portion
