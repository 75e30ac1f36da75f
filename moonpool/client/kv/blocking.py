"""The blocking client of a kvstore: drives the asyncio client on an event loop in the background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from moonpool.client.background import BackgroundLoop
from moonpool.client.kv.aio import DEFAULT_TIMEOUT_S, AsyncKVClient
from moonpool.rpc.tls import Tls


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
        self._client = AsyncKVClient(
            address,
            namespace=namespace,
            tenant=tenant,
            timeout_s=timeout_s,
            tls=tls,
            api_key=api_key,
            lanes=lanes,
            memory_bytes=memory_bytes,
        )
        self._loop = BackgroundLoop()

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
        return self._loop.run(self._client.put(key, data, timeout_s=timeout_s))

    def batch_put(self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None) -> int:
        """Keep values of any sizes; how many are new. See `AsyncKVClient.batch_put`."""
        return self._loop.run(self._client.batch_put(items, timeout_s=timeout_s))

    def get(self, key: bytes, *, timeout_s: float | None = None) -> bytearray | None:
        """Return a value, None when the store does not have it. See `AsyncKVClient.get`."""
        return self._loop.run(self._client.get(key, timeout_s=timeout_s))

    def batch_get(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bytearray | None]:
        """Return the values of keys, None for each that is not there. See `AsyncKVClient.batch_get`."""
        return self._loop.run(self._client.batch_get(keys, timeout_s=timeout_s))

    def get_into(self, key: bytes, buffer: Buffer, *, timeout_s: float | None = None) -> int | None:
        """Read a value into memory; its number of bytes, or None. See `AsyncKVClient.get_into`."""
        return self._loop.run(self._client.get_into(key, buffer, timeout_s=timeout_s))

    def batch_get_into(self, items: Mapping[bytes, Buffer], *, timeout_s: float | None = None) -> list[int | None]:
        """Read values into a buffer each. See `AsyncKVClient.batch_get_into`."""
        return self._loop.run(self._client.batch_get_into(items, timeout_s=timeout_s))

    def exists(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Return whether the store has a value now. See `AsyncKVClient.exists`."""
        return self._loop.run(self._client.exists(key, timeout_s=timeout_s))

    def batch_exists(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        """Return for each key whether the store has its value now. See `AsyncKVClient.batch_exists`."""
        return self._loop.run(self._client.batch_exists(keys, timeout_s=timeout_s))

    def delete(self, key: bytes, *, timeout_s: float | None = None) -> bool:
        """Delete a value from memory and disk; whether it was there. See `AsyncKVClient.delete`."""
        return self._loop.run(self._client.delete(key, timeout_s=timeout_s))

    def batch_delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Delete values; how many were there. See `AsyncKVClient.batch_delete`."""
        return self._loop.run(self._client.batch_delete(keys, timeout_s=timeout_s))

    def close(self) -> None:
        """End all calls and the background thread; may be called again."""
        self._loop.close(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
