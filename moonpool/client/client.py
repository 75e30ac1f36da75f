"""The SDK's clients of a conductor: `AsyncClient` implements every call, `Client` drives it from blocking code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from google.protobuf.message import Message

from moonpool.client import translate
from moonpool.client.background import BackgroundLoop
from moonpool.client.contexts import DELETE_TIMEOUT_S, AsyncContexts, Contexts, DeletedKV, delete_request, deleted_kv
from moonpool.client.explain import Explanation
from moonpool.client.transport import (
    ConductorFailover,
    ConductorList,
    GenerateCall,
    GrpcTransport,
    NotConnected,
    Transport,
)
from moonpool.client.types import ClusterState, GaugeValue, GenerateArguments, GenerateResult, Placement, TokenEvent
from moonpool.errors import DeadlineExceeded, Overloaded, Unavailable
from moonpool.rpc.tls import Tls
from moonpool.v1 import conductor_pb2, kv_pb2

DEFAULT_TIMEOUT_S = 600.0


CONNECT_TIMEOUT_S = 5.0


QUERY_TIMEOUT_S = 10.0


RESUME_TIMEOUT_S = 30.0


SILENCE_S = 1.0


class AsyncTokenStream:
    """A request's events; begins when it is iterated, and can be iterated once.

    Leaving the iteration (break, an exception, garbage collection), cancelling the task that iterates, or `aclose`
    cancels the request everywhere.
    """

    def __init__(
        self,
        conductors: ConductorList,
        request: conductor_pb2.GenerateRequest,
        timeout_s: float,
        connect_timeout_s: float,
        resume_timeout_s: float,
        on_placed: Callable[[], None],
    ) -> None:
        self._conductors = conductors
        self._request = request
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._on_placed = on_placed
        self._collector = translate.ResultCollector()
        self._search = ConductorFailover(conductors, connect_timeout_s)
        self._call: GenerateCall | None = None
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
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, 0 before it was placed."""
        return self._collector.prompt_tokens

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
        left: conductor_pb2.GenerateResponse | None = None
        try:
            while not self._closed:
                heard = False
                try:
                    self._call = self._begin(_remaining(deadline))
                    async for message in self._call:
                        if not heard:
                            heard = True
                            self._search.found()
                            left = None
                        if self._is_left(message):
                            left = message
                            self._call.cancel()
                            raise NotConnected("the conductor drains, and the answer goes on at another one")
                        event = self._collector.take(message)
                        if message.HasField("placed") and not message.placed.corrected:
                            self._on_placed()
                        if event is not None:
                            yield event
                    self._collector.ended()
                    return
                except (Unavailable, Overloaded) as error:
                    pause_s = self._pause_after(error, heard=heard)
                    if left is not None and pause_s is None:  # nobody goes on with it
                        self._collector.take(left)
                        return
                    await _pause(pause_s, deadline)
        except (Exception, asyncio.CancelledError):
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise  # otherwise the error comes from our own cancel
        finally:
            if self._call is not None:
                self._call.cancel()

    def _is_left(self, message: conductor_pb2.GenerateResponse) -> bool:
        """Whether a conductor that drains has ended the answer before its time, and another one may go on with it."""
        reasons = message.finished.reason, *[end.reason for end in message.finished.choices]
        early = kv_pb2.FINISH_REASON_CANCELLED in reasons
        elsewhere = len(self._conductors) > 1 and self._collector.resumable and self._resume_timeout_s > 0.0
        return early and elsewhere

    def _begin(self, seconds: float) -> GenerateCall:
        return self._search.transport.generate(self._collector.resume(self._request), seconds)

    def _pause_after(self, error: Unavailable | Overloaded, *, heard: bool) -> float | None:
        """Seconds until the next attempt; None when there is to be none."""
        lost, resuming = isinstance(error, NotConnected), self._collector.started
        if resuming and not (self._collector.resumable and self._resume_timeout_s):
            return None
        if heard and not lost:
            return None  # the conductor is there: this is its answer
        if heard:
            self._search = ConductorFailover(self._conductors, self._resume_timeout_s, self._search.number)
        pause_s = self._search.failed()
        if lost or resuming:
            return pause_s
        # One that answers, but not with what was asked for: another one may, or that one soon, if it has just started.
        again = len(self._conductors) > 1 or not self._search.round
        return pause_s if isinstance(error, Unavailable) and again else None


class AsyncClient:
    """Talks to a conductor from asyncio; an async context manager. Use it on one event loop.

    A stream whose conductor or connection is lost goes on: it is resumed there or at another address, without a gap and
    without a doubled token.
    """

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
        """Talk to the conductor at `address`; connects on first use.

        Args:
            address: "host:port", or several: the next one is asked when one cannot be reached.
            timeout_s: seconds a request may take, unless the call says otherwise.
            connect_timeout_s: seconds for which conductors that cannot be reached are tried again.
            resume_timeout_s: the same for a stream that was lost; 0 = it is not resumed.
            silence_s: seconds after which a conductor counts as lost that is connected and says nothing, not even when
                it is asked whether it is there; 0 = it is waited for. Of interest only where there is another one.
            tls: certificates; default: those that MOONPOOL_TLS_CA, MOONPOOL_TLS_CERT and MOONPOOL_TLS_KEY name, and
                plaintext without the first.
            api_key: shown to the conductor, over TLS only; default: MOONPOOL_API_KEY.
            transport: for tests; `address` is ignored.

        Raises:
            InvalidRequest: no address is given.
            ConfigError: a certificate cannot be read.
        """
        addresses = [address] if isinstance(address, str) else address
        if transport is None:
            tls, key = tls or Tls.from_environment(), api_key or os.environ.get("MOONPOOL_API_KEY", "")
            silence_s = silence_s if len(addresses) > 1 else 0.0
            transport = [GrpcTransport(one, tls, key, silence_s) for one in addresses]
        self._conductors = ConductorList(transport if isinstance(transport, Sequence) else [transport])
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._resume_timeout_s = resume_timeout_s
        self.contexts = AsyncContexts(self._query)
        """Named contexts: create, list, get, update, delete."""

    async def generate(self, **request: Unpack[GenerateArguments]) -> GenerateResult:
        """Generate a whole answer to exactly one of `prompt`, `token_ids` and `messages`.

        It comes in one piece, which costs all who take part less than `stream` does.

        Args:
            request: see `GenerateArguments`.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: no placement can keep the SLO; says why, the prediction and when to retry.
            Unavailable: no instance can serve it, or the conductor cannot be reached.
            DeadlineExceeded: it took longer than `timeout_s`.
        """
        stream = self._stream(request, lambda: None, whole=True)
        async for _ in stream:
            pass
        assert stream.result is not None, "a stream that ended has a result"
        return stream.result

    def stream(
        self, *, on_placed: Callable[[], None] = lambda: None, **request: Unpack[GenerateArguments]
    ) -> AsyncTokenStream:
        """Like `generate`, token by token: iterate over what is returned. Its errors come from the iteration.

        `on_placed` is called before any token, and again whenever the request was placed anew: the stream's
        `request_id`, `prompt_tokens` and `placement` are known then.

        Raises:
            InvalidRequest: an argument cannot be sent; names the field.
        """
        return self._stream(request, on_placed, whole=False)

    def _stream(self, request: GenerateArguments, on_placed: Callable[[], None], *, whole: bool) -> AsyncTokenStream:
        timeout_s = request.get("timeout_s")
        return AsyncTokenStream(
            self._conductors,
            translate.generate_request(request, whole=whole),
            self._timeout_s if timeout_s is None else timeout_s,
            self._connect_timeout_s,
            self._resume_timeout_s,
            on_placed,
        )

    async def cluster_state(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> ClusterState:
        """Return the cluster as the conductor sees it."""
        request = conductor_pb2.ClusterStateRequest()
        return translate.cluster_state(await self._query(request, timeout_s))

    async def change_role(self, instance_id: str, kind: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        """Let an engine instance drain and come back as "prefill" or "decode"; returns when it was told.

        Raises:
            NotFound: no such instance has joined.
            InvalidRequest: it cannot become that; names the field.
        """
        await self._query(translate.change_role(instance_id, kind), timeout_s)

    async def explain(self, request_id: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> Explanation:
        """Return how a request was placed and why.

        Raises:
            NotFound: the conductor knows no such request (any more).
        """
        request = conductor_pb2.ExplainRequest(request_id=request_id)
        return translate.explanation(await self._query(request, timeout_s))

    async def stats(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> tuple[GaugeValue, ...]:
        """Return everything the conductor holds, as gauges."""
        request = conductor_pb2.ConductorStatsRequest()
        return translate.gauges(await self._query(request, timeout_s))

    async def delete_kv(
        self,
        *,
        keys: Sequence[bytes] = (),
        tenants: Sequence[str] = (),
        namespaces: Sequence[bytes] = (),
        timeout_s: float = DELETE_TIMEOUT_S,
    ) -> DeletedKV:
        """Delete KV from every tier of every instance: all blocks that one of the arguments names.

        It is carried out once, also if no answer comes and it is asked for again at another conductor; the counts are
        those of the call that was answered.

        Raises:
            InvalidRequest: nothing is named, or a key or namespace has not 32 bytes.
        """
        return deleted_kv(await self._query(delete_request(keys, tenants, namespaces), timeout_s))

    async def aclose(self) -> None:
        """End all calls; may be called again."""
        await self._conductors.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _query(self, request: Message, timeout_s: float) -> Any:
        deadline = _now() + timeout_s
        search = ConductorFailover(self._conductors, self._connect_timeout_s)
        while True:
            try:
                answer = await search.transport.ask(request, _remaining(deadline))
            except NotConnected:
                await _pause(search.failed(), deadline)
            else:
                search.found()
                return answer


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
