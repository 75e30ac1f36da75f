"""One request from its arguments to its last byte. A client that leaves ends the request everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from moonpool.client import AsyncClient, AsyncTokenStream, GenerateArguments, GenerateResult
from moonpool.client.tracing import traceparent
from moonpool.errors import MoonpoolError, Unavailable
from services.gateway.budgets import Spending
from services.gateway.errors import Refusal, refusal
from services.gateway.forms import Form, compact
from services.gateway.measuring import Meter, Watch
from services.gateway.several import SeveralStreams

T = TypeVar("T")

Told = Callable[[GenerateResult], Mapping[str, str]]

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """The client has closed its connection; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Job:
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
    form: Form
    stream: bool
    model: str
    headers: Mapping[str, str]
    spending: Spending
    traceparent: str = ""
    told: Told = lambda result: {}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; it is cancelled when the client leaves first.

    Raises:
        ClientGoneError: the client has left.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """Sends one answer over ASGI."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        """Take headers of the answer; more can be added to `headers` before it starts."""
        self._send = send
        self.headers = dict(headers)
        self.started = False

    async def whole(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A JSON answer in one piece."""
        length = {"content-length": str(len(content))}
        await self._start(status, {"content-type": JSON, **length, **self.headers, **(headers or {})})
        await self._send({"type": "http.response.body", "body": content})

    async def piece(self, content: bytes) -> None:
        """A part of a stream of events."""
        if not self.started:
            # A proxy that gathers what it passes on would hold back the first token.
            plain = {"content-type": EVENTS, "cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(200, {**plain, **self.headers})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        """The end of a stream of events."""
        await self._send({"type": "http.response.body", "body": content})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


class Answering:
    """Runs a job when Starlette sends it as a response."""

    def __init__(self, client: AsyncClient, meter: Meter, job: Job) -> None:
        self._client = client
        self._meter = meter
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._answer(Reply(send, self._job.headers)))
        except ClientGoneError:
            return

    async def _answer(self, reply: Reply) -> None:
        traceparent.set(self._job.traceparent)  # of this task's context, which ends with it
        with self._meter.request(self._job.model) as watch:
            try:
                await (self._stream(reply, watch) if self._job.stream else self._whole(reply, watch))
            except MoonpoolError as error:
                watch.failed()
                await self._break(reply, refusal(error))

    async def _break(self, reply: Reply, refused: Refusal) -> None:
        self._meter.refused(refused.status, refused.code or "")
        if reply.started:
            await reply.end(self._job.form.failure(refused))
        else:
            await reply.whole(refused.status, compact(self._job.form.refused(refused)), refused.headers)

    async def _stream(self, reply: Reply, watch: Watch) -> None:
        async with aclosing(self._pieces(reply, watch)) as pieces:
            async for piece in pieces:
                await reply.piece(piece)
        await reply.end()

    async def _whole(self, reply: Reply, watch: Watch) -> None:
        async with self._tokens() as tokens:
            async for event in tokens:
                watch.tokens()
                self._job.spending.used(tokens.prompt_tokens, len(event.token_ids))
        result = _complete(tokens)
        watch.finished(result)
        self._begin(reply, tokens)
        reply.headers.update(self._job.told(result))
        await reply.whole(200, compact(self._job.form.whole(result)))

    async def _pieces(self, reply: Reply, watch: Watch) -> AsyncGenerator[bytes, None]:
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
        result = _complete(tokens)
        watch.finished(result)
        if not begun:
            self._begin(reply, tokens)
            yield b"".join(form.opening())
        yield b"".join(form.closing(result))

    def _tokens(self) -> AsyncTokenStream | SeveralStreams:
        def placed() -> None:
            """Prompts count when they are placed, whatever comes of them."""
            self._job.spending.used(tokens.prompt_tokens, 0)

        streams = [self._client.stream(on_placed=placed, **arguments) for arguments in self._job.requests]
        sampling = self._job.requests[0].get("sampling")
        each = sampling.n if sampling is not None else 1
        tokens = streams[0] if len(streams) == 1 else SeveralStreams(streams, each)
        return tokens

    def _begin(self, reply: Reply, tokens: AsyncTokenStream | SeveralStreams) -> None:
        reply.headers["x-request-id"] = tokens.request_id
        placement = tokens.placement
        self._job.form.begin(tokens.request_id, emulated=placement is not None and placement.emulated)


def _complete(tokens: AsyncTokenStream | SeveralStreams) -> GenerateResult:
    """The result of a stream that has ended.

    Raises:
        Unavailable: the cluster ended it before its end.
    """
    result = tokens.result
    if result is None or any(choice.finish_reason == "cancelled" for choice in result.choices):
        raise Unavailable("the cluster is stopping and has ended this request")
    return result
