"""Runs a generation job, and sends the SDK's events as a response.

A generating endpoint reads a body, prepares a `GenerationJob` with `RequestBuilder`, and answers with a
`GenerationResponse`, whose `ResponseFormatter` writes the API's own objects and events. A disconnecting client cancels
all the client's requests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.logprobs import LogprobRows, PromptLogprobRows, TokenLogprobs
from moonpool.base.runtime.tenant_turns import LoopTurns, TenantPlaces, TenantTurns
from moonpool.base.telemetry.spans import CURRENT, OpenSpan
from moonpool.client import (
    AsyncClient,
    AsyncTokenStream,
    GenerateResult,
    TokenEvent,
)
from moonpool.client.tracing import traceparent
from moonpool.gateway.serving.asgi_reply import AsgiReply, to_nobody
from moonpool.gateway.serving.body_limits import SCORE_BYTES, BodyMemory
from moonpool.gateway.serving.client_watch import ClientGoneError, while_connected
from moonpool.gateway.serving.errors import ErrorResponse, error_response
from moonpool.gateway.serving.generation_job import GenerationJob
from moonpool.gateway.serving.json_response import to_json_bytes, to_json_in_pieces
from moonpool.gateway.serving.merged_stream import MAX_BEGUN_PROMPTS, MIN_BEGUN_PROMPTS, MergedStream, results_of
from moonpool.gateway.serving.metrics import GatewayMetrics, RequestMetrics
from moonpool.gateway.serving.pictures import PictureReader
from moonpool.gateway.serving.response_formatter import ResponseFormatter
from moonpool.gateway.serving.served_request import served_request

T = TypeVar("T")
PROMPT_PARTS = 4
"""What a list's prompt costs in a response, in log probabilities."""
MAX_LOOP_SCORES = 256
"""Log probabilities whose text is written on the loop at once: about half a millisecond. More are for a thread."""


@dataclass(frozen=True, slots=True)
class AnswerTurns:
    """Turns of tenants for the answers of this gateway.

    Attributes:
        threads: write many log probabilities.
        memory: has those of answers that are sent whole.
        begun: places of lists' prompts that have no token yet, fewer beside other tenants' requests.
        writing: writes few log probabilities, between other answers' tokens.
    """

    threads: TenantTurns
    memory: BodyMemory
    begun: TenantPlaces = field(default_factory=lambda: TenantPlaces(MIN_BEGUN_PROMPTS, MAX_BEGUN_PROMPTS))
    writing: LoopTurns = field(default_factory=LoopTurns)


class GenerationResponse:
    """Runs a job and sends the answer. Starlette calls the object like a `Response`."""

    def __init__(
        self,
        client: AsyncClient,
        metrics: GatewayMetrics,
        turns: AnswerTurns,
        pictures: PictureReader,
        job: GenerationJob,
        formatter: ResponseFormatter,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._turns = turns
        self._pictures = pictures
        self._job = job
        self._formatter = formatter
        self._notes: dict[str, object] = {}  # for the log
        self._span = OpenSpan("", "", "", 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._notes = served_request(scope).notes
        reply = AsgiReply(send, self._job.headers, self._formatter.stream_type)
        try:
            await while_connected(receive, self._respond(reply))
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
        job = self._job
        with (
            CURRENT.get().span(
                f"generate {job.model_name}", job.traceparent, starts=True, **job.span_attributes()
            ) as span,
            self._metrics.request(job.asked_for()) as request_metrics,
            self._turns.begun.present(self._tenant),
        ):
            self._span = span
            traceparent.set(span.traceparent or job.traceparent)  # in the context of this task only
            try:
                self._job.prompts = await self._pictures.read_prompts(self._tenant, self._job.prompts)
                await (self._stream if self._job.stream else self._answer)(reply, request_metrics)
            except MoonpoolError as error:
                request_metrics.failed()
                span.attributes["error.type"] = type(error).__name__
                response = error_response(self._job.named_error(error))
                self._metrics.refused(response.status, response.code or "")
                self._notes.update(response.notes())
                return response
        return None

    async def _fail(self, reply: AsgiReply, error: ErrorResponse) -> None:
        if reply.started:
            await reply.end(self._formatter.error_event(error))
        else:
            await reply.send_json(error.status, to_json_bytes(self._formatter.error_body(error)), error.headers)

    async def _answer(self, reply: AsgiReply, request_metrics: RequestMetrics) -> None:
        with self._turns.memory.hold(self._tenant) as take:
            scores = 0
            async with self._token_stream(request_metrics, whole=True) as tokens:
                async for event in tokens:
                    self._job.budget.charge(tokens.prompt_tokens, len(event.token_ids))
                    if new := num_scores(event.prompt_logprobs, event.logprobs):
                        take(new * SCORE_BYTES)
                        scores += new
            result = self._finished(tokens, request_metrics)
            self._start(reply, tokens)
            reply.headers.update(self._job.result_headers(result))
            parts = scores + num_parts(result)
            to_json: Callable[[dict[str, Any]], bytes] = to_json_in_pieces if parts > MAX_LOOP_SCORES else to_json_bytes
            content = await self._written(lambda: to_json(self._formatter.full_response(result)), parts)
            await self._formatter.keep()
            await reply.send_json(200, content)
        self._job.on_finished(self._job, result)

    async def _stream(self, reply: AsgiReply, request_metrics: RequestMetrics) -> None:
        async with aclosing(self._events(reply, request_metrics)) as events:
            async for event in events:
                await reply.send_events(event)
        await reply.end()

    async def _events(self, reply: AsgiReply, request_metrics: RequestMetrics) -> AsyncGenerator[bytes, None]:
        """Server-sent events; events that are ready at the same time are one item."""
        formatter, started = self._formatter, False
        async with self._token_stream(request_metrics, whole=False) as tokens:
            async for event in tokens:
                request_metrics.tokens()
                self._job.budget.charge(tokens.prompt_tokens, len(event.token_ids))
                if not started:
                    self._start(reply, tokens)
                write = partial(self._event_text, event, tokens.prompt_tokens, is_first=not started)
                started = True
                if content := await self._written(write, num_scores(event.prompt_logprobs, event.logprobs)):
                    yield content
        result = self._finished(tokens, request_metrics)
        if not started:
            self._start(reply, tokens)
            yield b"".join(formatter.first_events())
        last = b"".join(formatter.last_events(result))
        await formatter.keep()
        yield last
        self._job.on_finished(self._job, result)

    def _event_text(self, event: TokenEvent, prompt_tokens: int, *, is_first: bool) -> bytes:
        formatter = self._formatter
        formatter.add_tokens(event)
        formatter.count_tokens(prompt_tokens, len(event.token_ids))
        first = b"".join(formatter.first_events()) if is_first else b""
        if event.finish_reason is not None:
            return first + formatter.last_text_event(event.text, event.choice, event.finish_reason)
        return first + (formatter.text_event(event.text, event.choice) if event.text else b"")

    async def _written(self, write: Callable[[], T], scores: int) -> T:
        """Result of `write`, which writes so many log probabilities, in the tenant's turn."""
        if scores > MAX_LOOP_SCORES:
            return await self._turns.threads.run(self._tenant, write)
        if scores:
            await self._turns.writing.begin(self._tenant, float(scores))
        return write()

    def _token_stream(self, request_metrics: RequestMetrics, *, whole: bool) -> AsyncTokenStream | MergedStream:
        def placed() -> None:
            """Charge the prompt as soon as placed, whether the request succeeds or not."""
            self._job.budget.charge(tokens.prompt_tokens, 0)
            self._job.on_placed()
            request_metrics.placed(whole=whole)

        job = self._job
        streams = (
            self._client.stream(
                on_placed=placed, whole=whole, **(job.arguments | prompt | {"request_id": job.request_id_of(index)})
            )
            for index, prompt in enumerate(job.prompts)
        )
        number = len(job.prompts)
        tokens: AsyncTokenStream | MergedStream = (
            MergedStream(streams, number, job.sampling.n, self._turns.begun, self._tenant)
            if number > 1
            else next(streams)
        )
        return tokens

    def _finished(self, tokens: AsyncTokenStream | MergedStream, request_metrics: RequestMetrics) -> GenerateResult:
        """The result of a stream that has ended, once in the metrics and the log.

        Raises:
            Unavailable: the cluster has cancelled the request.
        """
        result = _completed_result(tokens)
        request_metrics.finished(result)
        placement, usage, timing = tokens.placement, result.usage, result.timing
        self._span.attributes |= {
            "gen_ai.response.finish_reasons": [result.finish_reason],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.latency.time_to_first_token": timing.ttft_s,
            "gen_ai.latency.time_in_queue": timing.queue_s,
            "gen_ai.latency.e2e": timing.e2e_s,
        }
        self._notes |= {
            "model": self._job.model_name,
            "stream": self._job.stream,
            "finish_reason": result.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "queue_s": round(timing.queue_s, 6),
            "ttft_s": round(timing.ttft_s, 6),
            "tpot_s": round(timing.tpot_s, 6),
            "prefill": "" if placement is None else placement.prefill,
            "decode": "" if placement is None else placement.decode,
        }
        return result

    @property
    def _tenant(self) -> str:
        return self._job.arguments.get("tenant", "")

    def _start(self, reply: AsgiReply, tokens: AsyncTokenStream | MergedStream) -> None:
        reply.headers["x-request-id"] = self._job.client_id or tokens.request_id
        placement = tokens.placement
        self._formatter.start(tokens.request_id, emulated=placement is not None and placement.emulated)


def num_scores(*logprobs: Sequence[TokenLogprobs | None]) -> int:
    """Log probabilities of tokens, and of the likely tokens beside each."""
    return sum(rows.scores for rows in logprobs if isinstance(rows, LogprobRows | PromptLogprobRows))


def num_parts(result: GenerateResult) -> int:
    """What a list's prompts and the numbers of their embeddings cost in a response, in log probabilities."""
    results = results_of(result)
    return sum(PROMPT_PARTS + len(each.embedding) for each in results) if len(results) > 1 else 0


def _completed_result(tokens: AsyncTokenStream | MergedStream) -> GenerateResult:
    """Result of a stream that has ended.

    Raises:
        Unavailable: the cluster has cancelled the request.
    """
    result = tokens.result
    if result is None or any(choice.finish_reason == "cancelled" for choice in result.choices):
        raise Unavailable("the cluster is stopping and has ended this request")
    return result
