"""Generation: from the body of a request to the SDK, and from the SDK's events to a response over ASGI.

A generating endpoint reads a body, prepares a `GenerationJob` with `RequestBuilder`, and answers with a
`GenerationResponse`, whose `ResponseFormatter` writes the API's own objects and events. A disconnecting client cancels
all the client's requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from starlette.types import Message, Receive, Scope, Send

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest, MoonpoolError, Unavailable
from moonpool.base.grammar import AnswerGrammar, Thinking
from moonpool.base.sampling_params import SCORED_TOKEN_COST, SamplingParams
from moonpool.client import (
    AsyncClient,
    AsyncTokenStream,
    ClusterState,
    GenerateArguments,
    GenerateResult,
    Placement,
    TokenEvent,
    Usage,
)
from moonpool.client.tracing import traceparent
from moonpool.gateway.serving.auth import BudgetCharge, CheckedRequest
from moonpool.gateway.serving.errors import ErrorResponse, error_response
from moonpool.gateway.serving.generate_body import GenerateBody
from moonpool.gateway.serving.json_response import to_json_bytes
from moonpool.gateway.serving.metrics import GatewayMetrics, RequestMetrics
from moonpool.gateway.serving.tokenizer import GatewayTokenizer
from moonpool.gateway.serving.tool_calls import AnswerParser, AnswerReading, ToolSet

MAX_QUEUED_EVENTS = 64
"""Events that wait for the response. If the queue is full, the requests wait."""
GRAMMAR_CHARS = 4
"""Characters in a schema or grammar that count as one token."""
MAX_RUNNING_PROMPTS = 64
"""Prompts in one HTTP request that run at the same time; further prompts wait."""


@dataclass(frozen=True, slots=True)
class BatchResult(GenerateResult):
    """Several prompts' answers as one result: all choices and usage, and each prompt's result."""

    results: tuple[GenerateResult, ...] = ()


def results_of(result: GenerateResult) -> Sequence[GenerateResult]:
    """The result of each prompt."""
    return result.results if isinstance(result, BatchResult) else (result,)


class MergedStream:
    """Several token streams as one. The second stream's choices are numbered after the first's.

    The first error ends every stream.
    """

    def __init__(self, streams: Sequence[AsyncTokenStream], choices_each: int) -> None:
        self._streams = streams
        self._choices_each = choices_each
        self._events: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []
        self._places = asyncio.Semaphore(MAX_RUNNING_PROMPTS)
        self.result: GenerateResult | None = None
        """The result with the choices of all streams, after the iteration. The timing is the first stream's."""

    @property
    def request_id(self) -> str:
        """Id of the first request that is placed; "" before."""
        return next((stream.request_id for stream in self._streams if stream.request_id), "")

    @property
    def placement(self) -> Placement | None:
        """Placement of the first request that is placed."""
        return next((stream.placement for stream in self._streams if stream.placement), None)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the requests that are placed."""
        return sum(stream.prompt_tokens for stream in self._streams)

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.ensure_future(self._forward(index, stream)) for index, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Iterate over all streams' events, in arrival order.

        Raises:
            MoonpoolError: a request failed.
        """
        running = len(self._streams)
        while running:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
        self.result = _merged_result([stream.result for stream in self._streams if stream.result is not None])

    async def _forward(self, index: int, stream: AsyncTokenStream) -> None:
        first = index * self._choices_each
        try:
            async with self._places, stream:
                async for event in stream:
                    await self._events.put(replace(event, choice=first + event.choice))
            await self._events.put(None)
        except Exception as error:
            await self._events.put(error)


def _merged_result(results: Sequence[GenerateResult]) -> BatchResult:
    """One result with all choices and usage."""
    usages = [result.usage for result in results]
    total = Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    )
    first = {each.name: getattr(results[0], each.name) for each in fields(GenerateResult)}
    first |= {"usage": total, "choices": tuple(choice for result in results for choice in result.choices)}
    return BatchResult(**first, results=tuple(results))


T = TypeVar("T")
ResultHeaders = Callable[[GenerateResult], Mapping[str, str]]
"""Response headers that depend on the result; a streamed response has none of these."""
JSON_MEDIA_TYPE = "application/json"
SSE_MEDIA_TYPE = "text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """The client has closed the connection."""


@dataclass(slots=True)
class GenerationJob:
    """One generating HTTP request: the SDK's arguments, and what the response needs beside the answer.

    Attributes:
        state: the cluster when the request arrived.
        model_name: name of the model in the response and in metrics.
        arguments: arguments of `AsyncClient.stream` that all prompts share.
        stream: send the answer as server-sent events.
        budget: where the tokens are charged.
        headers: headers of the response.
        traceparent: W3C trace context of the client; "" for none.
        request_id: id of the first prompt's request; further prompts have a number behind the id.
        client_id: the client's own `x-request-id`, which the response has; "" for none.
        prompts: arguments that name one prompt each. Several prompts run at the same time, each with `n` choices.
        result_headers: further headers of a response that is not streamed.
        format_field: field of the body that says what the answer looks like; errors name the field.
        prompt_field: field of the body that has the prompts, if errors name the field; "" for the SDK's names.
        on_placed: called when an instance has taken the request, for each prompt.
    """

    state: ClusterState
    model_name: str
    arguments: GenerateArguments
    stream: bool
    budget: BudgetCharge
    headers: dict[str, str]
    traceparent: str
    request_id: str = ""
    client_id: str = ""
    prompts: Sequence[GenerateArguments] = ()
    result_headers: ResultHeaders = lambda result: {}
    format_field: str = ""
    prompt_field: str = ""
    on_placed: Callable[[], None] = lambda: None

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of all prompts."""
        return self.arguments.get("sampling") or SamplingParams()

    def charge_request(self) -> None:
        """Charge a request's costs beside tokens: further answers, a format, prompts' log probabilities."""
        sampling, budget = self.sampling, self.budget
        budget.charge_answers(len(self.prompts) * sampling.width)
        budget.charge_work(len(sampling.grammar) // GRAMMAR_CHARS)
        if sampling.prompt_logprobs is not None:
            budget.prompt_weight = SCORED_TOKEN_COST

    def request_id_of(self, index: int) -> str:
        """Request id for a prompt."""
        return f"{self.request_id}-{index}" if index and self.request_id else self.request_id

    def named_error(self, error: MoonpoolError) -> MoonpoolError:
        """An error of the conductor under the name that the field has in the body."""
        if isinstance(error, InvalidRequest) and error.field == "sampling.grammar" and self.format_field:
            return InvalidRequest(self.format_field, error.message)
        if isinstance(error, InvalidRequest) and error.field in ("prompt", "token_ids") and self.prompt_field:
            return InvalidRequest(self.prompt_field, error.message)
        return error

    def replace_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Give the prompts as tokens, in place of texts or messages."""
        self.prompts = [{"token_ids": tokens} for tokens in token_ids]
        self.arguments.pop("tools", None)

    def set_chat_options(self, options: ChatOptions) -> None:
        """Say how the messages of the prompts become tokens."""
        self.arguments["chat_template_kwargs"] = options.template_kwargs
        self.arguments["continue_final_message"] = options.continue_final_message


class RequestBuilder:
    """Builds generation jobs: the steps between body and SDK that every API shares."""

    def __init__(self, timeout_s: float, tokenizer: GatewayTokenizer, served_names: Sequence[str] = ()) -> None:
        """Build jobs.

        Args:
            timeout_s: time limit of each request.
            tokenizer: tokenizer and chat template of the served model.
            served_names: names under which clients know the model; none = the checkpoint's name.
        """
        self._timeout_s = timeout_s
        self._tokenizer = tokenizer
        self._served_names = served_names

    def _model_of(self, given: str, state: ClusterState) -> tuple[str, str]:
        """The model or LoRA adapter that the conductor knows, and the name in the response; "" for the served model.

        Raises:
            InvalidRequest: clients know the model under other names; names `model`.
        """
        shown = self._served_names[0] if self._served_names else state.model
        if any(given == lora.name for lora in state.loras):
            return given, given
        if not self._served_names or not given:
            return given, shown
        if given not in self._served_names:
            names = [*self._served_names, *(lora.name for lora in state.loras)]
            raise InvalidRequest("model", f"only {', '.join(map(repr, names))} is served, not {given!r}")
        return "", shown

    def prepare(self, checked: CheckedRequest[GenerateBody], state: ClusterState, max_tokens: int) -> GenerationJob:
        """A job without prompts, from the fields that every body has.

        Raises:
            InvalidRequest: a sampling parameter cannot be translated; names the field.
        """
        body = checked.body
        model, shown = self._model_of(body.model or "", state)
        arguments: GenerateArguments = {
            "sampling": body.to_sampling_params(max_tokens),
            "slo": body.to_slo(),
            "priority": body.priority or 0,
            "tenant": checked.caller.tenant,
            "model": model,
            "cache_salt": body.cache_salt or "",
            "session": body.to_session(checked.session_id),
            "timeout_s": self._timeout_s,
        }
        headers = dict(checked.warning_headers)
        return GenerationJob(
            state,
            shown,
            arguments,
            bool(body.stream),
            checked.caller.budget,
            headers,
            checked.traceparent,
            request_id=checked.request_id,
            client_id=checked.client_id,
            format_field=body.format_field,
        )

    def offer_tools(self, job: GenerationJob, tools: ToolSet | None, known: ToolSet | None = None) -> AnswerParser:
        """Let the model call `tools`. Returns the parser that finds thinking and calls in the answers.

        `known` are tools that the prompt has already; they count if `tools` is None.

        Raises:
            InvalidRequest: the format of tool calls is unknown, or a forced call conflicts with a response format.
            Mismatch: the cluster serves another model than the gateway's tokenizer is for.
        """
        offered = tools or known
        if tools is not None:
            job.arguments["tools"] = tools.definitions
        if offered is not None and offered.tool_choice is not None:
            if job.sampling.response_format:
                raise InvalidRequest("tool_choice", "a forced call has a format of its own; omit the response format")
            schema = to_json_bytes(offered.schema()).decode()
            job.arguments["sampling"] = replace(job.sampling, response_format="json_schema", grammar=schema)
            job.format_field = "tools"
            return AnswerParser(AnswerReading(offered))
        family = None if offered is None else self._tokenizer.tool_parser(job.state.model)
        # An answer that is held to a format has no place for thinking.
        reasoning = None if job.sampling.response_format else self._tokenizer.reasoning(job.state.model)
        special_id = self._tokenizer.special_id
        if family is not None or (reasoning is not None and special_id(reasoning.end) is not None):
            # Some models mark calls and thinking with special tokens.
            job.arguments["sampling"] = replace(job.sampling, skip_special_tokens=False)
        if offered is not None and family is not None and not job.sampling.response_format:
            thinking = None
            if reasoning is not None:
                thinking = Thinking(reasoning.begin, reasoning.end, self._is_thinking(job))
            if grammar := offered.grammar(family, AnswerGrammar(special_id, thinking)):
                job.arguments["sampling"] = replace(job.sampling, response_format="lark", grammar=grammar)
        if reasoning is None:
            return AnswerParser(AnswerReading(offered, family))
        count = partial(self._tokenizer.tokens_through, reasoning.end)
        return AnswerParser(AnswerReading(offered, family, reasoning, self._is_thinking(job), count))

    def _is_thinking(self, job: GenerationJob) -> bool:
        """Whether the prompts begin the thinking. Prompts of token ids and continued answers do not."""
        arguments = job.arguments
        if arguments.get("continue_final_message") or "messages" not in job.prompts[0]:
            return False
        return self._tokenizer.thinks_at_once(arguments.get("chat_template_kwargs") or {})

    async def prompt_token_ids(self, job: GenerationJob, *, special: bool) -> list[Sequence[int]]:
        """Tokens of each prompt.

        `special`: with the tokenizer's special tokens. The conductor adds special tokens to a text and adds none to
        messages, because the chat template writes them.

        Raises:
            Mismatch: the cluster serves another model than the gateway's tokenizer is for.
            InvalidRequest: a prompt is too long, or the chat template refuses the messages.
        """
        return [await self._encode(job.arguments | prompt, job.state, special=special) for prompt in job.prompts]

    async def _encode(self, arguments: GenerateArguments, state: ClusterState, *, special: bool) -> Sequence[int]:
        if (token_ids := arguments.get("token_ids")) is not None:
            return token_ids
        self._tokenizer.check_model(state.model)
        if (prompt := arguments.get("prompt")) is not None:
            return await self._tokenizer.encode(prompt, state.max_tokens, special=special)
        messages, tools = arguments.get("messages") or (), arguments.get("tools") or ()
        options = ChatOptions(
            continue_final_message=arguments.get("continue_final_message", False),
            template_kwargs=arguments.get("chat_template_kwargs") or {},
        )
        return await self._tokenizer.encode_chat(messages, tools, state.max_tokens, options, special=special)


class ResponseFormatter(Protocol):
    """Writes one API's responses. `start` is called before the other methods."""

    def start(self, request_id: str, *, emulated: bool) -> None:
        """Take the request's id. The first tokens have arrived. `emulated`: the cluster emulates compute."""
        ...

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        """The response as one object."""
        ...

    def first_events(self) -> Iterator[bytes]:
        """Server-sent events before the first text."""
        ...

    def add_tokens(self, event: TokenEvent) -> None:
        """Take the tokens and log probabilities of the next text."""
        ...

    def count_tokens(self, prompt_tokens: int, new_tokens: int) -> None:
        """Take the number of prompt tokens so far, and of the next event's tokens."""
        return

    def text_event(self, text: str, choice: int) -> bytes:
        """Server-sent events for the next text of a choice."""
        ...

    def last_text_event(self, text: str, choice: int, finish_reason: str) -> bytes:
        """As `text_event`, for the last text of a choice, which may be "", and the reason why the choice ended."""
        return self.text_event(text, choice) if text else b""

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        """Server-sent events after the last text."""
        ...

    async def keep(self) -> None:
        """Store the answer, if later requests may refer to the answer. Comes before the client gets the answer's end.

        Raises:
            Unavailable: the answer cannot be stored.
        """
        return

    def error_event(self, error: ErrorResponse) -> bytes:
        """The last server-sent event of a stream that failed."""
        ...

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        """Body for a response that failed before starting."""
        ...


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancels `work` if the client disconnects first.

    Raises:
        ClientGoneError: the client has disconnected.
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
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class AsgiReply:
    """Sends one HTTP response over ASGI."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        """`headers` may be extended until the response starts."""
        self._send = send
        self.headers = dict(headers)
        self.started = False

    async def send_json(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole JSON response."""
        length = {"content-length": str(len(content))}
        await self._start(status, {"content-type": JSON_MEDIA_TYPE, **length, **self.headers, **(headers or {})})
        await self._send({"type": "http.response.body", "body": content})

    async def send_events(self, content: bytes) -> None:
        """Send server-sent events, and the head of the response before the first."""
        if not self.started:
            # Without the last header, a proxy that buffers responses holds back the first tokens.
            plain = {"content-type": SSE_MEDIA_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(200, {**plain, **self.headers})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        """Send the last events and end the response."""
        await self._send({"type": "http.response.body", "body": content})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


async def to_nobody(message: Message) -> None:
    """Send a part of a response that has no client."""


class GenerationResponse:
    """Runs a job and sends the answer. Starlette calls the object like a `Response`."""

    def __init__(
        self, client: AsyncClient, metrics: GatewayMetrics, job: GenerationJob, formatter: ResponseFormatter
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._job = job
        self._formatter = formatter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._respond(AsgiReply(send, self._job.headers)))
        except ClientGoneError:
            return

    async def complete(self, send: Send = to_nobody) -> ErrorResponse | None:
        """Run the job without a client; the formatter keeps the answer. Returns why there is no answer, or None.

        `send` takes the response.
        """
        return await self._attempt(AsgiReply(send, {}))

    async def _respond(self, reply: AsgiReply) -> None:
        if (error := await self._attempt(reply)) is not None:
            await self._fail(reply, error)

    async def _attempt(self, reply: AsgiReply) -> ErrorResponse | None:
        """Send the answer. Returns what went wrong, or None."""
        traceparent.set(self._job.traceparent)  # in the context of this task only
        with self._metrics.request(self._job.model_name) as request_metrics:
            try:
                await (self._stream if self._job.stream else self._answer)(reply, request_metrics)
            except MoonpoolError as error:
                request_metrics.failed()
                response = error_response(self._job.named_error(error))
                self._metrics.refused(response.status, response.code or "")
                return response
        return None

    async def _fail(self, reply: AsgiReply, error: ErrorResponse) -> None:
        if reply.started:
            await reply.end(self._formatter.error_event(error))
        else:
            await reply.send_json(error.status, to_json_bytes(self._formatter.error_body(error)), error.headers)

    async def _answer(self, reply: AsgiReply, request_metrics: RequestMetrics) -> None:
        async with self._token_stream(request_metrics.placed, whole=True) as tokens:
            async for event in tokens:
                self._job.budget.charge(tokens.prompt_tokens, len(event.token_ids))
        result = _completed_result(tokens)
        request_metrics.finished(result)
        self._start(reply, tokens)
        reply.headers.update(self._job.result_headers(result))
        content = self._formatter.full_response(result)
        await self._formatter.keep()
        await reply.send_json(200, to_json_bytes(content))

    async def _stream(self, reply: AsgiReply, request_metrics: RequestMetrics) -> None:
        async with aclosing(self._events(reply, request_metrics)) as events:
            async for event in events:
                await reply.send_events(event)
        await reply.end()

    async def _events(self, reply: AsgiReply, request_metrics: RequestMetrics) -> AsyncGenerator[bytes, None]:
        """Server-sent events; events that are ready at the same time are one item."""
        formatter, started = self._formatter, False
        async with self._token_stream(lambda: None, whole=False) as tokens:
            async for event in tokens:
                request_metrics.tokens()
                formatter.add_tokens(event)
                formatter.count_tokens(tokens.prompt_tokens, len(event.token_ids))
                self._job.budget.charge(tokens.prompt_tokens, len(event.token_ids))
                first = b""
                if not started:
                    started = True
                    self._start(reply, tokens)
                    first = b"".join(formatter.first_events())
                if event.finish_reason is not None:
                    content = first + formatter.last_text_event(event.text, event.choice, event.finish_reason)
                else:
                    content = first + (formatter.text_event(event.text, event.choice) if event.text else b"")
                if content:
                    yield content
        result = _completed_result(tokens)
        request_metrics.finished(result)
        if not started:
            self._start(reply, tokens)
            yield b"".join(formatter.first_events())
        last = b"".join(formatter.last_events(result))
        await formatter.keep()
        yield last

    def _token_stream(self, on_placed: Callable[[], None], *, whole: bool) -> AsyncTokenStream | MergedStream:
        def placed() -> None:
            """Charge the prompt as soon as placed, whether the request succeeds or not."""
            self._job.budget.charge(tokens.prompt_tokens, 0)
            self._job.on_placed()
            on_placed()

        job = self._job
        streams = [
            self._client.stream(
                on_placed=placed, whole=whole, **(job.arguments | prompt | {"request_id": job.request_id_of(index)})
            )
            for index, prompt in enumerate(job.prompts)
        ]
        tokens = streams[0] if len(streams) == 1 else MergedStream(streams, job.sampling.n)
        return tokens

    def _start(self, reply: AsgiReply, tokens: AsyncTokenStream | MergedStream) -> None:
        reply.headers["x-request-id"] = self._job.client_id or tokens.request_id
        placement = tokens.placement
        self._formatter.start(tokens.request_id, emulated=placement is not None and placement.emulated)


def _completed_result(tokens: AsyncTokenStream | MergedStream) -> GenerateResult:
    """Result of a stream that has ended.

    Raises:
        Unavailable: the cluster has cancelled the request.
    """
    result = tokens.result
    if result is None or any(choice.finish_reason == "cancelled" for choice in result.choices):
        raise Unavailable("the cluster is stopping and has ended this request")
    return result
