"""The blocking client of a kvstore: drives the asyncio client on the thread of who calls, as far as that goes."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from typing_extensions import Buffer

from moonpool.client.background import BackgroundLoop
from moonpool.client.kv.aio import DEFAULT_TIMEOUT_S, AsyncKVClient, bytes_of, layout_for
from moonpool.client.kv.connection import Connection
from moonpool.client.kv.direct import DirectConnection
from moonpool.client.kv.reading import Wanted
from moonpool.kv.values import ValueSource, value_key
from moonpool.rpc.tls import Tls
from moonpool.streams.lanes.dialing import LaneDialer

T = TypeVar("T")


class _Driven(AsyncKVClient):
    """The client on a connection whose calls never suspend."""

    def __init__(self, loop: BackgroundLoop, address: str, **options: Any) -> None:
        self._loop = loop
        super().__init__(address, **options)

    def _connect(self, address: str, namespace: bytes, tls: Tls | None, key: str, lanes: LaneDialer) -> Connection:
        return DirectConnection(self._loop, address, namespace, tls, key, lanes)

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

    def read_one(self, key: bytes, memory: memoryview | None, timeout_s: float | None) -> Wanted:
        """Reads a value: what `batch_get` and `batch_get_into` do for one."""
        until = self._until(timeout_s)
        identity = self._identity or self.drive(self._speaking_as(until))
        wanted = Wanted(value_key(self._namespace, identity.tenant, key), memory)
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
        self._client = _Driven(
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
