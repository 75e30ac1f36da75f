"""The asyncio client: the one implementation of every call to a conductor; the blocking client drives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar, Unpack

from moonpool.client import translate
from moonpool.client.transport import Call, GrpcTransport, NotConnected, Transport
from moonpool.client.types import (
    ClusterState,
    Explanation,
    GaugeValue,
    GenerateArguments,
    GenerateResult,
    Placement,
    TokenEvent,
)
from moonpool.errors import DeadlineExceeded
from moonpool.v1 import conductor_pb2

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 10.0


class AsyncTokenStream:
    """A request's events; begins when it is iterated, and can be iterated once.

    Leaving the iteration (break, an exception, garbage collection), cancelling the task that iterates, or `aclose`
    cancels the request everywhere.
    """

    def __init__(self, begin: Callable[[float], Call], timeout_s: float, connect_timeout_s: float) -> None:
        self._begin = begin
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._collector = translate.Collector()
        self._call: Call | None = None
        self._begun = False
        self._closed = False

    @property
    def result(self) -> GenerateResult | None:
        """The whole answer, once the iteration has ended."""
        return self._collector.result

    @property
    def request_id(self) -> str:
        """The request's id, "" before it was placed."""
        return self._collector.request_id

    @property
    def placement(self) -> Placement | None:
        """Where the request runs now, None before it was placed."""
        return self._collector.placements[-1] if self._collector.placements else None

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Begin the request and iterate over its events.

        Raises:
            MoonpoolError: the request failed; see `moonpool.errors`.
            RuntimeError: it was iterated before.
        """
        if self._begun:
            raise RuntimeError("a stream of tokens can be iterated once")
        self._begun = True
        return self._events()

    def cancel(self) -> None:
        """Cancel the request if it runs; may be called again."""
        self._closed = self._begun = True
        if self._call is not None:
            self._call.cancel()

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _events(self) -> AsyncIterator[TokenEvent]:
        deadline = _now() + self._timeout_s
        pauses = iter(translate.backoffs(self._connect_timeout_s))
        try:
            while not self._closed:
                self._call = self._begin(_remaining(deadline))
                try:
                    async for message in self._call:
                        event = self._collector.take(message)
                        if event is not None:
                            yield event
                    self._collector.ended()
                    return
                except NotConnected:
                    if self._collector.started:
                        raise
                    await _pause(next(pauses, None), deadline)
        except (Exception, asyncio.CancelledError):
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise  # otherwise the error comes from our own cancel
        finally:
            if self._call is not None:
                self._call.cancel()


class AsyncClient:
    """Talks to a conductor from asyncio; an async context manager. Use it on one event loop."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """Talk to the conductor at `address`; connects on first use.

        Args:
            address: "host:port".
            timeout_s: seconds a request may take, unless the call says otherwise.
            connect_timeout_s: seconds for which a conductor that cannot be reached is tried again.
            transport: for tests; `address` is ignored.
        """
        self._transport: Transport = transport if transport is not None else GrpcTransport(address)
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s

    async def generate(self, **request: Unpack[GenerateArguments]) -> GenerateResult:
        """Generate a whole answer to exactly one of `prompt`, `token_ids` and `messages`.

        Args:
            request: see `GenerateArguments`.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: no placement can keep the SLO; says why, the prediction and when to retry.
            Unavailable: no instance can serve it, or the conductor cannot be reached.
            DeadlineExceeded: it took longer than `timeout_s`.
        """
        stream = self.stream(**request)
        async for _ in stream:
            pass
        assert stream.result is not None, "a stream that ended has a result"
        return stream.result

    def stream(self, **request: Unpack[GenerateArguments]) -> AsyncTokenStream:
        """Like `generate`, token by token: iterate over what is returned. Its errors come from the iteration.

        Raises:
            InvalidRequest: an argument cannot be sent; names the field.
        """
        message, transport = translate.generate_request(request), self._transport
        timeout_s = request.get("timeout_s")
        return AsyncTokenStream(
            lambda seconds: transport.generate(message, seconds),
            self._timeout_s if timeout_s is None else timeout_s,
            self._connect_timeout_s,
        )

    async def cluster_state(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> ClusterState:
        """Return the cluster as the conductor sees it."""
        request = conductor_pb2.ClusterStateRequest()
        return translate.cluster_state(
            await self._query(lambda seconds: self._transport.cluster_state(request, seconds), timeout_s)
        )

    async def explain(self, request_id: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> Explanation:
        """Return how a request was placed and why.

        Raises:
            NotFound: the conductor knows no such request (any more).
        """
        request = conductor_pb2.ExplainRequest(request_id=request_id)
        return translate.explanation(
            await self._query(lambda seconds: self._transport.explain(request, seconds), timeout_s)
        )

    async def stats(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> tuple[GaugeValue, ...]:
        """Return everything the conductor holds, as gauges."""
        request = conductor_pb2.ConductorStatsRequest()
        return translate.gauges(await self._query(lambda seconds: self._transport.stats(request, seconds), timeout_s))

    async def aclose(self) -> None:
        """End all calls; may be called again."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _query(self, ask: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
        deadline = _now() + timeout_s
        pauses = iter(translate.backoffs(self._connect_timeout_s))
        while True:
            try:
                return await ask(_remaining(deadline))
            except NotConnected:
                await _pause(next(pauses, None), deadline)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _remaining(deadline: float) -> float:
    left = deadline - _now()
    if left <= 0:
        raise DeadlineExceeded("the time for this call has passed")
    return left


async def _pause(pause_s: float | None, deadline: float) -> None:
    """Wait before the next attempt; called while the error of the last one is handled, raises it if none is left."""
    if pause_s is None or _now() + pause_s >= deadline:
        raise
    await asyncio.sleep(pause_s)
