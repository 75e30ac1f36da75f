"""`KVClient`, which drives `AsyncKVClient` on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self

from typing_extensions import Buffer

from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.values import ValueSource
from moonpool.client.background import BackgroundLoop, same_arguments
from moonpool.client.kv.async_client import AsyncKVClient, T, ValueToPut, bytes_of, layout_for
from moonpool.client.kv.blocking_connection import BlockingKVConnection
from moonpool.client.kv.connection import KVConnection, StoreAddress
from moonpool.client.kv.value_read import ValueRead

P = ParamSpec("P")


def _blocking(
    method: Callable[Concatenate[AsyncKVClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[KVClient, P], T]:
    """The blocking version of a coroutine method: same arguments, result, errors and docstring."""

    @wraps(method)
    def call(self: KVClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._client.drive(method(self._client, *args, **kwargs))

    return call


class KVClient:
    """A client for one kvstore, for blocking code; a context manager. Several threads may use a client.

    Every call has the arguments of `AsyncKVClient`'s call with the same name.
    """

    @same_arguments(AsyncKVClient.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._loop = BackgroundLoop()
        self._client = _NonSuspendingClient(self._loop, *args, **options)

    @property
    def memory(self) -> memoryview:
        """Memory that a store on this machine reads directly; see `AsyncKVClient.memory`."""
        return self._client.memory

    @property
    def transport(self) -> str:
        """The last value's transport; see `AsyncKVClient.transport`."""
        return self._client.transport

    def put(self, key: bytes, data: Buffer, *, timeout_s: float | None = None) -> bool:
        """Store a value. Returns whether the value is new. See `AsyncKVClient.put`."""
        return self._client.put_one(key, data, timeout_s)

    def get(self, key: bytes, *, timeout_s: float | None = None) -> bytearray | None:
        """Return a value; None if the store does not have the value. See `AsyncKVClient.get`."""
        return self._client.read_one(key, None, timeout_s).value()

    def get_into(self, key: bytes, buffer: Buffer, *, timeout_s: float | None = None) -> int | None:
        """Read a value into a buffer. Returns the value's size, or None. See `AsyncKVClient.get_into`."""
        return self._client.read_one(key, bytes_of(buffer, "buffer", writable=True), timeout_s).length()

    batch_put = _blocking(AsyncKVClient.batch_put)
    batch_get = _blocking(AsyncKVClient.batch_get)
    batch_get_into = _blocking(AsyncKVClient.batch_get_into)
    exists = _blocking(AsyncKVClient.exists)
    batch_exists = _blocking(AsyncKVClient.batch_exists)
    delete = _blocking(AsyncKVClient.delete)
    batch_delete = _blocking(AsyncKVClient.batch_delete)

    def close(self) -> None:
        """End all calls and the background thread. Idempotent."""
        self._loop.close(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _NonSuspendingClient(AsyncKVClient):
    """A client on a connection with calls that never suspend, so that a coroutine can run without an event loop."""

    def __init__(self, loop: BackgroundLoop, *args: Any, **options: Any) -> None:
        self._loop = loop
        super().__init__(*args, **options)

    def _connect(self, store: StoreAddress) -> KVConnection:
        return BlockingKVConnection(self._loop, store)

    def drive(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call, which waits on this thread or for the background loop."""
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
        """What `batch_put` does, for one value and with less overhead."""
        deadline = self._deadline(timeout_s)
        identity = self._identity or self.drive(self._identify(deadline))
        source = ValueSource(bytes_of(data, "data"))
        layout = self._last_layout = source.layout
        group = [ValueToPut(self._store_key(identity.tenant, key), NO_PARENT, source)]
        return self.drive(self._put(identity, layout, group, deadline)) == 1

    def read_one(self, key: bytes, memory: memoryview | None, timeout_s: float | None) -> ValueRead:
        """What `batch_get` and `batch_get_into` do, for one value and with less overhead."""
        deadline = self._deadline(timeout_s)
        identity = self._identity or self.drive(self._identify(deadline))
        wanted = ValueRead(self._store_key(identity.tenant, key), memory)
        layout = self._last_layout if memory is None else layout_for(memory.nbytes)
        if layout is None or self.drive(self._read_some(layout, [wanted], deadline)):
            self.drive(self._read({None: [wanted]}, deadline))
        return wanted
