"""Clients of a kvstore: `AsyncKVClient` implements every call, `KVClient` drives it on the caller's thread."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import ValidationError
from typing_extensions import Buffer

from moonpool.client.background import BackgroundLoop
from moonpool.client.kv.connection import (
    MAX_KEYS_PER_CALL,
    BlockingKVConnection,
    KVConnection,
    ValueRead,
    read_values,
    remaining_s,
)
from moonpool.errors import ConfigError, InvalidRequest
from moonpool.kv.blocks import NO_PARENT
from moonpool.kv.keys import BlockKey, slice_hash
from moonpool.kv.layout import KVLayout
from moonpool.kv.values import ValueSource, layout_of, value_key, value_namespace
from moonpool.kv_transfer.store_writer import BlocksToPut
from moonpool.rpc.tls import Tls
from moonpool.transport.config import TransportConfig, TransportSettings
from moonpool.transport.handshake import TransportDialer
from moonpool.transport.shared_memory import SharedMemory

DEFAULT_TIMEOUT_S = 30.0


T = TypeVar("T")


class _CallerIdentity(NamedTuple):
    """Who the store says that the caller is, and the deletions of that tenant's values that were."""

    tenant: str
    deletions: Sequence[str]


class AsyncKVClient:
    """Keeps values in one kvstore; an async context manager. Use it on one event loop.

    A value is never changed: who puts another one under its key deletes it first. The store may evict any value at any
    time, so that each read may be a miss.
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
        lanes: str | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """Talk to the kvstore at `address`; connects on first use.

        Args:
            address: "host:port" of the kvstore.
            namespace: what everything that makes KV differ is put into: engine, model, data type, layout, version. Keys
                of different namespaces have nothing to do with each other.
            tenant: whose values these are, for quotas and deletions; no other tenant finds them. With an API key, or a
                certificate of the role client, it is known already and can be left out.
            timeout_s: seconds a call may take, unless the call says otherwise.
            tls: certificates; default: those that MOONPOOL_TLS_CA, MOONPOOL_TLS_CERT and MOONPOOL_TLS_KEY name, and
                plaintext without the first.
            api_key: shown to the store, over TLS only; default: MOONPOOL_API_KEY.
            lanes: as `--kv-lanes` of services (docs/lanes.md); default: MOONPOOL_KV_LANES, else local. With TLS there
                are none.
            memory_bytes: size of `memory`.

        Raises:
            ConfigError: a certificate or a lane cannot be used.
        """
        tls = tls or Tls.from_environment()
        settings = TransportSettings() if tls else TransportSettings.of(_lane_config(lanes))
        shared = self._shared = SharedMemory(memory_bytes) if memory_bytes else None
        dialer = TransportDialer(
            settings, lambda: [shared.shared] if shared is not None else []
        )  # a stream keeps no client
        self._namespace = value_namespace(namespace)
        key = api_key or os.environ.get("MOONPOOL_API_KEY", "")
        self._connection = self._connect(address, self._namespace, tls, key, dialer)
        self._asked_tenant = tenant
        self._identity: _CallerIdentity | None = None
        self._timeout_s = timeout_s
        self._usual: KVLayout | None = None  # of the values used last: a guess for the next

    def _connect(
        self, address: str, namespace: bytes, tls: Tls | None, key: str, lanes: TransportDialer
    ) -> KVConnection:
        return KVConnection(address, namespace, tls, key, lanes)

    @property
    def memory(self) -> memoryview:
        """Writable memory of `memory_bytes`, which a store on this machine reads directly.

        A value put from here is not copied on its way to the store (lane `local`). It must stay as it is until `put`
        returns.
        """
        return self._shared.shared.data if self._shared is not None else memoryview(bytearray())

    @property
    def lane(self) -> str:
        """How values travelled last: "local", "tcp" or "grpc"; "" before the first."""
        return self._connection.lane

    async def put(self, key: bytes, data: Buffer, *, timeout_s: float | None = None) -> bool:
        """Keep a value; whether it is new. One that is there under this key already stays as it is.

        Args:
            key: 1 to `MAX_KEY_BYTES` bytes; `content_key(data)` for a value that is its own name.
            data: contiguous bytes, at most `MAX_VALUE_BYTES`; they must stay as they are until `put` returns.
            timeout_s: seconds it may take.

        Raises:
            InvalidRequest: key or value cannot be kept, or values of the tenant were deleted meanwhile.
            Overloaded: the store has no room; says why and when to try again.
            Unavailable: the store cannot be reached.
            TransferFailed: it took too long, or the store gave up.
            Unauthenticated, PermissionDenied: the caller may not.
        """
        return await self.batch_put({key: data}, timeout_s=timeout_s) == 1

    async def batch_put(self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None) -> int:
        """Keep values of any sizes; how many are new. Raises as `put`; some of them may be kept then all the same."""
        until = self._until(timeout_s)
        identity = await self._speaking_as(until)
        groups: dict[KVLayout, list[tuple[BlockKey, ValueSource]]] = {}
        for key, data in items.items():
            source = ValueSource(bytes_of(data, "data"))
            groups.setdefault(source.layout, []).append((value_key(self._namespace, identity.tenant, key), source))
        stored = 0
        for layout, group in groups.items():
            self._usual = layout
            for portion in _split_portions(group, self._connection.portion(layout)):
                stored += await self._put(identity, layout, portion, until)
        return stored

    async def get(self, key: bytes, *, timeout_s: float | None = None) -> bytearray | None:
        """Return a value, None when the store does not have it.

        Raises:
            InvalidRequest: the key is empty or too long.
            Unavailable: the store cannot be reached.
            TransferFailed: it took too long, or the store gave up.
            Unauthenticated, PermissionDenied: the caller may not.
        """
        return (await self.batch_get([key], timeout_s=timeout_s))[0]

    async def batch_get(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bytearray | None]:
        """Return the values of keys, in their order; None for each that the store does not have. Raises as `get`."""
        until = self._until(timeout_s)
        tenant = (await self._speaking_as(until)).tenant
        wanted = [ValueRead(value_key(self._namespace, tenant, key)) for key in keys]
        await self._read({self._usual: wanted}, until)
        return [one.value() for one in wanted]

    async def get_into(self, key: bytes, buffer: Buffer, *, timeout_s: float | None = None) -> int | None:
        """Read a value into memory; its number of bytes, None when the store does not have it.

        Args:
            key: the value's.
            buffer: writable and contiguous, at least as large as the value, best just so. What is behind the value, and
                all of it when this is a miss or fails, is undefined afterwards.
            timeout_s: seconds it may take.

        Raises:
            InvalidRequest: the buffer is too small or cannot be written; otherwise as `get`.
        """
        return (await self.batch_get_into({key: buffer}, timeout_s=timeout_s))[0]

    async def batch_get_into(
        self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None
    ) -> list[int | None]:
        """Read values into a buffer each, as `get_into`; the numbers of bytes, in the order of the keys."""
        until = self._until(timeout_s)
        tenant = (await self._speaking_as(until)).tenant
        guesses: dict[KVLayout | None, list[ValueRead]] = {}
        wanted = []
        for key, buffer in items.items():
            memory = bytes_of(buffer, "buffer", writable=True)
            wanted.append(ValueRead(value_key(self._namespace, tenant, key), memory))
            guesses.setdefault(layout_for(memory.nbytes), []).append(wanted[-1])
        await self._read(guesses, until)
        return [one.length() for one in wanted]

    async def exists(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Return whether the store has a value now. Raises as `get`."""
        return (await self.batch_exists([key], timeout_s=timeout_s))[0]

    async def batch_exists(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        """Return for each key whether the store has its value now. Raises as `get`."""
        until = self._until(timeout_s)
        tenant = (await self._speaking_as(until)).tenant
        found = await self._find([value_key(self._namespace, tenant, key) for key in keys], until)
        return [layout is not None for layout in found]

    async def delete(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Delete a value from memory and disk; whether it was there. Raises as `get`.

        A `put` of the key that is under way elsewhere fails. Afterwards the key can be put again.
        """
        return await self.batch_delete([key], timeout_s=timeout_s) == 1

    async def batch_delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Delete values; how many were there. Raises as `get`."""
        until = self._until(timeout_s)
        tenant = (await self._speaking_as(until)).tenant
        found = [value_key(self._namespace, tenant, key) for key in dict.fromkeys(keys)]
        return sum([await self._connection.remove(portion, remaining_s(until)) for portion in _split_portions(found)])

    async def aclose(self) -> None:
        """End all calls; may be called again. `memory` stays as long as something refers to it."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _until(self, timeout_s: float | None) -> float:
        """When a call is to be over, by `time.monotonic`: all its parts share the time."""
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    async def _speaking_as(self, until: float) -> _CallerIdentity:
        """Asked from the store at first. Each call takes it once: another one may ask anew meanwhile."""
        if self._identity is None:
            answer = await self._connection.find((), self._asked_tenant, remaining_s(until))
            self._identity = _CallerIdentity(answer.tenant, list(answer.deletions))
        return self._identity

    async def _find(self, keys: Sequence[BlockKey], until: float) -> list[KVLayout | None]:
        """The layout of each block, None of one that is not there."""
        found: list[KVLayout | None] = []
        for portion in _split_portions(keys):
            answer = await self._connection.find(portion, self._asked_tenant, remaining_s(until))
            layouts = [None, *map(KVLayout.from_proto, answer.layouts)]
            found += [layouts[number] for number in answer.found]
        return found

    async def _put(
        self, identity: _CallerIdentity, layout: KVLayout, group: Sequence[tuple[BlockKey, ValueSource]], until: float
    ) -> int:
        """Puts values of one layout; how many are new."""
        keys = [key for key, _ in group]

        def read(layer: int, index: int) -> tuple[memoryview, int]:
            data = group[index][1].slice(layer)
            return data, slice_hash(data)

        blocks = BlocksToPut(keys, [NO_PARENT] * len(keys), identity.tenant, read, identity.deletions)
        try:
            outcome = await self._connection.put(layout, blocks, remaining_s(until))
        except InvalidRequest:
            left = await self._not_otherwise_there(layout, group, until)
            if len(left) == len(group):
                if self._identity is identity:
                    self._identity = None  # values of it were deleted perhaps; the next call asks
                raise
            return await self._put(identity, layout, left, until) if left else 0
        return outcome.stored

    async def _not_otherwise_there(
        self, layout: KVLayout, group: Sequence[tuple[BlockKey, ValueSource]], until: float
    ) -> list[tuple[BlockKey, ValueSource]]:
        """Those whose key has no value of another size in the store: with one among them it refuses all."""
        found = await self._find([key for key, _ in group], until)
        return [one for one, there in zip(group, found, strict=True) if there is None or there == layout]

    async def _read(self, guesses: Mapping[KVLayout | None, Sequence[ValueRead]], until: float) -> None:
        """Reads values where they are guessed to be, then the others where the store says that they are."""
        left: list[ValueRead] = []
        for layout, wanted in guesses.items():
            for portion in _split_portions(wanted):
                left += portion if layout is None else await self._read_some(layout, portion, until)
        groups: dict[KVLayout, list[ValueRead]] = {}
        for one, there in zip(left, await self._find([one.key for one in left], until), strict=True):
            if there is not None:
                groups.setdefault(there, []).append(one)
        for there, wanted in groups.items():
            self._usual = there
            for portion in _split_portions(wanted):
                rest: Sequence[ValueRead] = portion
                while rest:  # a store reads fewer at once when it has little room; if none, the first is gone by now
                    after = await self._read_some(there, rest, until)
                    rest = after if len(after) < len(rest) else after[1:]

    async def _read_some(self, layout: KVLayout, wanted: Sequence[ValueRead], until: float) -> Sequence[ValueRead]:
        """Reads values of one layout; those from the first on that is not there."""
        return wanted[await read_values(self._connection, layout, wanted, until) :]


def _lane_config(lanes: str | None) -> TransportConfig:
    try:
        return TransportConfig() if lanes is None else TransportConfig(kv_lanes=lanes)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "lanes" if lanes is not None else str(first["loc"][0])  # as in the environment
        raise ConfigError(field, first["msg"].removeprefix("Value error, ")) from None


def bytes_of(data: Buffer, field: str, *, writable: bool = False) -> memoryview:
    """The bytes of an object; raises InvalidRequest unless it is contiguous, and can be written if it must."""
    try:
        view = memoryview(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"gives no bytes: {error}") from error
    if not view.c_contiguous or (writable and view.readonly):
        raise InvalidRequest(field, "must be contiguous" + (" and writable" if writable else ""))
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def layout_for(nbytes: int) -> KVLayout | None:
    """That of a value which just fits into a buffer; None for a buffer that is larger than any value."""
    try:
        return layout_of(nbytes)
    except InvalidRequest:
        return None


def _split_portions(items: Iterable[T], count: int = MAX_KEYS_PER_CALL) -> Iterator[list[T]]:
    rest = iter(items)
    while portion := list(itertools.islice(rest, count)):
        yield portion


class _NonSuspendingClient(AsyncKVClient):
    """The client on a connection whose calls never suspend."""

    def __init__(self, loop: BackgroundLoop, address: str, **options: Any) -> None:
        self._loop = loop
        super().__init__(address, **options)

    def _connect(
        self, address: str, namespace: bytes, tls: Tls | None, key: str, lanes: TransportDialer
    ) -> KVConnection:
        return BlockingKVConnection(self._loop, address, namespace, tls, key, lanes)

    def drive(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call, which never suspends: it waits on this thread, or for the loop in the background."""
        try:
            self._loop.check()
            call.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            call.close()
        raise AssertionError("a call of the blocking client has waited for an event loop")

    def put_one(self, key: bytes, data: Buffer, timeout_s: float | None) -> bool:
        """As `put`: what `batch_put` does for one value."""
        until = self._until(timeout_s)
        identity = self._identity or self.drive(self._speaking_as(until))
        source = ValueSource(bytes_of(data, "data"))
        layout = self._usual = source.layout
        group = [(value_key(self._namespace, identity.tenant, key), source)]
        return self.drive(self._put(identity, layout, group, until)) == 1

    def read_one(self, key: bytes, memory: memoryview | None, timeout_s: float | None) -> ValueRead:
        """Reads a value: what `batch_get` and `batch_get_into` do for one."""
        until = self._until(timeout_s)
        identity = self._identity or self.drive(self._speaking_as(until))
        wanted = ValueRead(value_key(self._namespace, identity.tenant, key), memory)
        layout = self._usual if memory is None else layout_for(memory.nbytes)
        if layout is None or self.drive(self._read_some(layout, [wanted], until)):
            self.drive(self._read({None: [wanted]}, until))
        return wanted


class KVClient:
    """Keeps values in one kvstore; a context manager. Usable from several threads. See `AsyncKVClient` for asyncio."""

    def __init__(
        self,
        address: str,
        *,
        namespace: str,
        tenant: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: Tls | None = None,
        api_key: str = "",
        lanes: str | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """Take the arguments of `AsyncKVClient`; connects on first use."""
        self._loop = BackgroundLoop()
        self._client = _NonSuspendingClient(
            self._loop,
            address,
            namespace=namespace,
            tenant=tenant,
            timeout_s=timeout_s,
            tls=tls,
            api_key=api_key,
            lanes=lanes,
            memory_bytes=memory_bytes,
        )

    @property
    def memory(self) -> memoryview:
        """Memory that a store on this machine reads directly; see `AsyncKVClient.memory`."""
        return self._client.memory

    @property
    def lane(self) -> str:
        """How values travelled last; see `AsyncKVClient.lane`."""
        return self._client.lane

    def put(self, key: bytes, data: Buffer, *, timeout_s: float | None = None) -> bool:
        """Keep a value; whether it is new. See `AsyncKVClient.put`."""
        return self._client.put_one(key, data, timeout_s)

    def batch_put(self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None) -> int:
        """Keep values of any sizes; how many are new. See `AsyncKVClient.batch_put`."""
        return self._client.drive(self._client.batch_put(items, timeout_s=timeout_s))

    def get(self, key: bytes, *, timeout_s: float | None = None) -> bytearray | None:
        """Return a value, None when the store does not have it. See `AsyncKVClient.get`."""
        return self._client.read_one(key, None, timeout_s).value()

    def batch_get(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bytearray | None]:
        """Return the values of keys, None for each that is not there. See `AsyncKVClient.batch_get`."""
        return self._client.drive(self._client.batch_get(keys, timeout_s=timeout_s))

    def get_into(self, key: bytes, buffer: Buffer, *, timeout_s: float | None = None) -> int | None:
        """Read a value into memory; its number of bytes, or None. See `AsyncKVClient.get_into`."""
        return self._client.read_one(key, bytes_of(buffer, "buffer", writable=True), timeout_s).length()

    def batch_get_into(self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None) -> list[int | None]:
        """Read values into a buffer each. See `AsyncKVClient.batch_get_into`."""
        return self._client.drive(self._client.batch_get_into(items, timeout_s=timeout_s))

    def exists(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Return whether the store has a value now. See `AsyncKVClient.exists`."""
        return self._client.drive(self._client.exists(key, timeout_s=timeout_s))

    def batch_exists(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        """Return for each key whether the store has its value now. See `AsyncKVClient.batch_exists`."""
        return self._client.drive(self._client.batch_exists(keys, timeout_s=timeout_s))

    def delete(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Delete a value from memory and disk; whether it was there. See `AsyncKVClient.delete`."""
        return self._client.drive(self._client.delete(key, timeout_s=timeout_s))

    def batch_delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Delete values; how many were there. See `AsyncKVClient.batch_delete`."""
        return self._client.drive(self._client.batch_delete(keys, timeout_s=timeout_s))

    def close(self) -> None:
        """End all calls and the background thread; may be called again."""
        self._loop.close(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
