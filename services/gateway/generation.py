"""Runs one generation request and sends its response over ASGI. A client that disconnects cancels the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from starlette.types import Receive, Scope, Send

from moonpool.client import (
    AsyncClient,
    AsyncTokenStream,
    GenerateArguments,
    GenerateResult,
    Placement,
    TokenEvent,
    Usage,
)
from moonpool.client.tracing import traceparent
from moonpool.errors import MoonpoolError, Unavailable
from services.gateway.auth import BudgetCharge
from services.gateway.errors import ErrorResponse, error_response
from services.gateway.json_body import to_json_bytes
from services.gateway.metrics import GatewayMetrics, RequestMetrics

MAX_QUEUED_EVENTS = 64
"""Events that wait to be taken; then the requests wait, too."""


class MergedStream:
    """Streams as one: their answers are numbered on, those of the first request first. The first failure ends all."""

    def __init__(self, streams: Sequence[AsyncTokenStream], answers_each: int) -> None:
        self._streams = streams
        self._answers_each = answers_each
        self._news: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []
        self.result: GenerateResult | None = None
        """All answers, once the iteration has ended; times are the first request's."""

    @property
    def request_id(self) -> str:
        """The id of the first of the requests that are placed."""
        return next((stream.request_id for stream in self._streams if stream.request_id), "")

    @property
    def placement(self) -> Placement | None:
        """Where that one runs."""
        return next((stream.placement for stream in self._streams if stream.placement), None)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of the requests that are placed."""
        return sum(stream.prompt_tokens for stream in self._streams)

    async def __aenter__(self) -> Self:
        follow = (self._follow(index, stream) for index, stream in enumerate(self._streams))
        self._tasks = [asyncio.ensure_future(one) for one in follow]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """All events, as they come.

        Raises:
            MoonpoolError: one of the requests failed.
        """
        running = len(self._streams)
        while running:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                running -= 1
            else:
                yield news
        self.result = _merged_result([stream.result for stream in self._streams if stream.result is not None])

    async def _follow(self, index: int, stream: AsyncTokenStream) -> None:
        first = index * self._answers_each
        try:
            async with stream:
                async for event in stream:
                    await self._news.put(replace(event, choice=first + event.choice))
            await self._news.put(None)
        except Exception as error:
            await self._news.put(error)


def _merged_result(results: Sequence[GenerateResult]) -> GenerateResult:
    """All answers of some results as those of one."""
    used = [result.usage for result in results]
    usage = Usage(
        sum(one.prompt_tokens for one in used),
        sum(one.cached_tokens for one in used),
        sum(one.completion_tokens for one in used),
    )
    choices = tuple(choice for result in results for choice in result.choices)
    return replace(results[0], usage=usage, choices=choices)


T = TypeVar("T")


ResultHeaders = Callable[[GenerateResult], Mapping[str, str]]


JSON_MEDIA_TYPE = "application/json"


SSE_MEDIA_TYPE = "text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """The client has closed its connection; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A request that was read and checked.

    Attributes:
        requests: what the SDK is asked for; several run together, and have as many answers each.
        form: what the answer looks like.
        stream: whether it is sent as it grows.
        model: its name in measures.
        headers: of the answer.
        spending: where it is counted what the request uses.
        traceparent: of the client's trace, passed on; "" = none.
        told: headers that a whole answer has for what it used.
    """

    requests: Sequence[GenerateArguments]
    form: ResponseFormatter
    stream: bool
    model: str
    headers: Mapping[str, str]
    spending: BudgetCharge
    traceparent: str = ""
    told: ResultHeaders = lambda result: {}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; it is cancelled when the client leaves first.

    Raises:
        ClientGoneError: the client has left.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _wait_disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class AsgiReply:
    """Sends one answer over ASGI."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        """Take headers of the answer; more can be added to `headers` before it starts."""
        self._send = send
        self.headers = dict(headers)
        self.started = False

    async def whole(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A JSON answer in one piece."""
        length = {"content-length": str(len(content))}
        await self._start(status, {"content-type": JSON_MEDIA_TYPE, **length, **self.headers, **(headers or {})})
        await self._send({"type": "http.response.body", "body": content})

    async def piece(self, content: bytes) -> None:
        """A part of a stream of events."""
        if not self.started:
            # A proxy that gathers what it passes on would hold back the first token.
            plain = {"content-type": SSE_MEDIA_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(200, {**plain, **self.headers})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        """The end of a stream of events."""
        await self._send({"type": "http.response.body", "body": content})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


class GenerationResponse:
    """Runs a job when Starlette sends it as a response."""

    def __init__(self, client: AsyncClient, meter: GatewayMetrics, job: GenerationJob) -> None:
        self._client = client
        self._meter = meter
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._answer(AsgiReply(send, self._job.headers)))
        except ClientGoneError:
            return

    async def _answer(self, reply: AsgiReply) -> None:
        traceparent.set(self._job.traceparent)  # of this task's context, which ends with it
        with self._meter.request(self._job.model) as watch:
            try:
                await (self._stream(reply, watch) if self._job.stream else self._whole(reply, watch))
            except MoonpoolError as error:
                watch.failed()
                await self._break(reply, error_response(error))

    async def _break(self, reply: AsgiReply, refused: ErrorResponse) -> None:
        self._meter.refused(refused.status, refused.code or "")
        if reply.started:
            await reply.end(self._job.form.failure(refused))
        else:
            await reply.whole(refused.status, to_json_bytes(self._job.form.refused(refused)), refused.headers)

    async def _stream(self, reply: AsgiReply, watch: RequestMetrics) -> None:
        async with aclosing(self._pieces(reply, watch)) as pieces:
            async for piece in pieces:
                await reply.piece(piece)
        await reply.end()

    async def _whole(self, reply: AsgiReply, watch: RequestMetrics) -> None:
        async with self._tokens() as tokens:
            async for event in tokens:
                watch.tokens()
                self._job.spending.used(tokens.prompt_tokens, len(event.token_ids))
        result = _completed_result(tokens)
        watch.finished(result)
        self._begin(reply, tokens)
        reply.headers.update(self._job.told(result))
        await reply.whole(200, to_json_bytes(self._job.form.whole(result)))

    async def _pieces(self, reply: AsgiReply, watch: RequestMetrics) -> AsyncGenerator[bytes, None]:
        """The events of a stream, several at once where they come together."""
        form, begun = self._job.form, False
        async with self._tokens() as tokens:
            async for event in tokens:
                watch.tokens()
                form.note(event)
                self._job.spending.used(tokens.prompt_tokens, len(event.token_ids))
                if not begun:
                    begun = True
                    self._begin(reply, tokens)
                    yield b"".join(form.opening()) + (form.piece(event.text, event.choice) if event.text else b"")
                elif event.text:
                    yield form.piece(event.text, event.choice)
        result = _completed_result(tokens)
        watch.finished(result)
        if not begun:
            self._begin(reply, tokens)
            yield b"".join(form.opening())
        yield b"".join(form.closing(result))

    def _tokens(self) -> AsyncTokenStream | MergedStream:
        def placed() -> None:
            """Prompts count when they are placed, whatever comes of them."""
            self._job.spending.used(tokens.prompt_tokens, 0)

        streams = [self._client.stream(on_placed=placed, **arguments) for arguments in self._job.requests]
        sampling = self._job.requests[0].get("sampling")
        each = sampling.n if sampling is not None else 1
        tokens = streams[0] if len(streams) == 1 else MergedStream(streams, each)
        return tokens

    def _begin(self, reply: AsgiReply, tokens: AsyncTokenStream | MergedStream) -> None:
        reply.headers["x-request-id"] = tokens.request_id
        placement = tokens.placement
        self._job.form.begin(tokens.request_id, emulated=placement is not None and placement.emulated)


def _completed_result(tokens: AsyncTokenStream | MergedStream) -> GenerateResult:
    """The result of a stream that has ended.

    Raises:
        Unavailable: the cluster ended it before its end.
    """
    result = tokens.result
    if result is None or any(choice.finish_reason == "cancelled" for choice in result.choices):
        raise Unavailable("the cluster is stopping and has ended this request")
    return result


class ResponseFormatter(Protocol):
    """The shape of one answer; `begin` is called before the others."""

    def begin(self, request_id: str, *, emulated: bool) -> None:
        """The request was placed, and its first tokens are there."""
        ...

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        """The answer as one object."""
        ...

    def opening(self) -> Iterator[bytes]:
        """Events before the first text."""
        ...

    def piece(self, text: str, choice: int) -> bytes:
        """The event of a piece of text of one of the request's answers."""
        ...

    def note(self, event: TokenEvent) -> None:
        """Tokens of the next piece have come."""
        ...

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        """Events after the last text."""
        ...

    def failure(self, refused: ErrorResponse) -> bytes:
        """The last event of a stream that broke."""
        ...

    def refused(self, refused: ErrorResponse) -> dict[str, Any]:
        """The body of a refusal."""
        ...
