"""The blocking client: drives the asyncio client on an event loop in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

from moonpool.client.aio import (
    CONNECT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    QUERY_TIMEOUT_S,
    RESUME_TIMEOUT_S,
    SILENCE_S,
    AsyncClient,
    AsyncTokenStream,
)
from moonpool.client.background import BackgroundLoop
from moonpool.client.contexts import DELETE_TIMEOUT_S, Contexts, DeletedKV
from moonpool.client.transport import Transport
from moonpool.client.types import (
    ClusterState,
    Explanation,
    GaugeValue,
    GenerateArguments,
    GenerateResult,
    Placement,
    TokenEvent,
)
from moonpool.rpc.tls import Tls


class TokenStream:
    """A request's events; begins when it is iterated, and can be iterated once.

    Leaving the iteration (break, an exception, garbage collection) or `close` cancels the request everywhere.
    """

    def __init__(self, stream: AsyncTokenStream, loop: BackgroundLoop) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def result(self) -> GenerateResult | None:
        """The whole answer, once the iteration has ended."""
        return self._stream.result

    @property
    def request_id(self) -> str:
        """The request's id, "" before it was placed."""
        return self._stream.request_id

    @property
    def placement(self) -> Placement | None:
        """Where the request runs now, None before it was placed."""
        return self._stream.placement

    def __iter__(self) -> Iterator[TokenEvent]:
        """Begin the request and iterate over its events.

        Raises:
            MoonpoolError: the request failed; see `moonpool.errors`.
            RuntimeError: it was iterated before, or the client is closed.
        """
        return self._events(aiter(self._stream))

    def close(self) -> None:
        """Cancel the request if it runs; may be called again, and from another thread."""
        self._loop.post(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _events(self, events: AsyncIterator[TokenEvent]) -> Iterator[TokenEvent]:
        async def following() -> TokenEvent | None:
            return await anext(events, None)

        try:
            while (event := self._loop.run(following())) is not None:
                yield event
        finally:
            self.close()


class Client:
    """Talks to a conductor; a context manager. Usable from several threads. See `AsyncClient` for asyncio."""

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        silence_s: float = SILENCE_S,
        tls: Tls | None = None,
        api_key: str = "",
        transport: Transport | Sequence[Transport] | None = None,
    ) -> None:
        """Take the arguments of `AsyncClient`; connects on first use."""
        self._client = AsyncClient(
            address,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            resume_timeout_s=resume_timeout_s,
            silence_s=silence_s,
            tls=tls,
            api_key=api_key,
            transport=transport,
        )
        self._loop = BackgroundLoop()
        self.contexts = Contexts(self._client.contexts, self._loop)
        """Named contexts: create, list, get, update, delete."""

    def generate(self, **request: Unpack[GenerateArguments]) -> GenerateResult:
        """Generate a whole answer; see `AsyncClient.generate`. KeyboardInterrupt cancels the request."""
        return self._loop.run(self._client.generate(**request))

    def stream(self, **request: Unpack[GenerateArguments]) -> TokenStream:
        """Like `generate`, token by token: iterate over what is returned. Its errors come from the iteration."""
        return TokenStream(self._client.stream(**request), self._loop)

    def cluster_state(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> ClusterState:
        """Return the cluster as the conductor sees it."""
        return self._loop.run(self._client.cluster_state(timeout_s=timeout_s))

    def change_role(self, instance_id: str, kind: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        """Let an engine instance drain and come back in the other role; see `AsyncClient.change_role`."""
        self._loop.run(self._client.change_role(instance_id, kind, timeout_s=timeout_s))

    def explain(self, request_id: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> Explanation:
        """Return how a request was placed and why; see `AsyncClient.explain`."""
        return self._loop.run(self._client.explain(request_id, timeout_s=timeout_s))

    def stats(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> tuple[GaugeValue, ...]:
        """Return everything the conductor holds, as gauges."""
        return self._loop.run(self._client.stats(timeout_s=timeout_s))

    def delete_kv(
        self,
        *,
        keys: Sequence[bytes] = (),
        tenants: Sequence[str] = (),
        namespaces: Sequence[bytes] = (),
        timeout_s: float = DELETE_TIMEOUT_S,
    ) -> DeletedKV:
        """Delete KV from every tier of every instance; see `AsyncClient.delete_kv`."""
        chosen = {"keys": keys, "tenants": tenants, "namespaces": namespaces}
        return self._loop.run(self._client.delete_kv(**chosen, timeout_s=timeout_s))  # type: ignore[arg-type]

    def close(self) -> None:
        """End all calls and the background thread; may be called again."""
        self._loop.close(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
