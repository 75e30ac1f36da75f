"""HTTP routes: which path is served by which endpoint, and how errors become responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from moonpool.client import AsyncClient, ClusterState, GenerateArguments
from moonpool.client.tracing import TRACEPARENT, is_traceparent
from moonpool.errors import InvalidRequest, MoonpoolError, NotFound, Unavailable
from moonpool.rpc.auth import ApiKeys
from moonpool.sampling_params import SamplingParams
from services.gateway.anthropic_messages import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    MessagesBody,
    MessagesFormatter,
    messages_error_body,
)
from services.gateway.auth import AuthenticatedCaller, Authenticator
from services.gateway.cluster_state import (
    PAGE_FILES_PATH,
    PAGE_PATH,
    REQUESTS_PATH,
    STATE_PATH,
    ClusterEndpoints,
    ClusterStateCache,
    DashboardPage,
)
from services.gateway.config import GatewayConfig
from services.gateway.context_caching import CACHE_TAGS_PATH, CACHING_PATH, CachingChatBody, CachingEndpoints
from services.gateway.errors import ErrorResponse, HttpError, error_response
from services.gateway.generation import (
    JSON_MEDIA_TYPE,
    GenerationJob,
    GenerationResponse,
    ResponseFormatter,
    ResultHeaders,
)
from services.gateway.json_body import GenerateBody, json_response, to_json_bytes
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai_completions import (
    ChatFormatter,
    CompletionBody,
    CompletionFormatter,
    CompletionOptions,
    LogprobsFormatter,
    OpenAISamplingBody,
)
from services.gateway.openai_responses import RESPONSES_PATH, ResponsesBody, ResponsesFormatter
from services.gateway.tokenization import GatewayTokenizer, TokenizationEndpoints
from services.gateway.tool_calls import AnswerParser, ToolSet

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` of plain completions; a chat's answer may fill the model's length."""


class Endpoints:
    """All endpoints; each takes a request and returns a response or raises MoonpoolError."""

    def __init__(
        self,
        config: GatewayConfig,
        client: AsyncClient,
        texts: GatewayTokenizer,
        keys: ApiKeys | None,
        meter: GatewayMetrics,
        registry: CollectorRegistry,
        started_at: int,
    ) -> None:
        """`registry` is what `/metrics` shows; `started_at` is what models were created at, seconds since 1970."""
        self.meter = meter
        self._config = config
        self._client = client
        self._texts = texts
        self._door = Authenticator(config, keys, meter.clock)
        self._registry = registry
        self._started_at = started_at
        self._cluster = ClusterStateCache(client, meter.clock)
        self.caching = CachingEndpoints(client, self._door)
        """Caches, and chats that use them."""
        self.tokenizing = TokenizationEndpoints(self._door, self._cluster, texts)
        """Those that only tokenise."""
        self.watching = ClusterEndpoints(self._door, self._cluster, client)
        """Those that show the cluster and its requests."""

    async def health(self, request: Request) -> Response:
        """200 when requests can be served, else 503."""
        state = await self._cluster.state()
        if not state.ready:
            raise Unavailable("no prefill or no decode instance is there")
        return json_response({"status": "ok", "model": state.model})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text. Read on a thread: gauges are asked for on the event loop."""
        text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        self._door.tenant(request)
        return json_response({"object": "list", "data": [self._card(await self._cluster.state())]})

    async def model(self, request: Request) -> Response:
        """The model of a name."""
        self._door.tenant(request)
        state, name = await self._cluster.state(), request.path_params["model"]
        if name != state.model:
            raise NotFound(f"only {state.model!r} is served")
        return json_response(self._card(state))

    async def chat(self, request: Request) -> GenerationResponse:
        """`/v1/chat/completions`."""
        caller, body, ignored = await self._door.read(request, CachingChatBody)
        state = await self._cluster.state()
        given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        arguments = self._arguments(body, caller, state.max_tokens if given is None else given)
        if body.messages is not None:
            arguments["messages"] = body.turns()
        else:
            arguments["token_ids"] = body.prompt_token_ids
        cached = await self.caching.apply(request, caller.tenant, body, arguments)
        offer = self._offer(body, arguments, state, cached.tools)
        scores, shape = self._scores(body, state), _completion_options(body)
        if body.return_token_ids:
            if "context" in arguments:
                raise InvalidRequest("return_token_ids", "is not for a chat that begins with a cache")
            shape = replace(shape, prompt_ids=[await self._prompt_ids(arguments, state)])
        form = ChatFormatter(state.model, scores, shape, offer)
        headers = ignored | cached.headers
        return self._answering(request, caller, body, [arguments], form, state, headers, cached.told)

    async def completion(self, request: Request) -> GenerationResponse:
        """`/v1/completions`."""
        caller, body, ignored = await self._door.read(request, CompletionBody)
        state = await self._cluster.state()
        arguments = self._arguments(
            body, caller, DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        )
        requests = [arguments | _prompt_argument(prompt) for prompt in body.prompts()]
        scores, shape = self._scores(body, state), _completion_options(body)
        if body.return_token_ids:
            shape = replace(shape, prompt_ids=[await self._prompt_ids(one, state) for one in requests])
        form = CompletionFormatter(state.model, scores, shape)
        return self._answering(request, caller, body, requests, form, state, ignored)

    async def messages(self, request: Request) -> GenerationResponse:
        """`/v1/messages`, as Anthropic's."""
        caller, body, ignored = await self._door.read(request, MessagesBody)
        state = await self._cluster.state()
        arguments = self._arguments(body, caller, body.max_tokens)
        arguments["messages"] = body.turns()
        reading = self._offer(body, arguments, state)
        sampling = arguments["sampling"] or SamplingParams()
        decode = partial(self._texts.decode_now, skip_special=sampling.skip_special_tokens)
        form = MessagesFormatter(state.model, reading, body.stop_sequences or (), decode)
        return self._answering(request, caller, body, [arguments], form, state, ignored)

    async def responses(self, request: Request) -> GenerationResponse:
        """`/v1/responses`."""
        caller, body, ignored = await self._door.read(request, ResponsesBody)
        state = await self._cluster.state()
        longest = state.max_tokens if body.max_output_tokens is None else body.max_output_tokens
        arguments = self._arguments(body, caller, longest)
        arguments["messages"] = body.turns()
        form = ResponsesFormatter(
            state.model, self._offer(body, arguments, state), body.told(), self._scores(body, state).chat
        )
        return self._answering(request, caller, body, [arguments], form, state, ignored)

    async def _prompt_ids(self, arguments: GenerateArguments, state: ClusterState) -> Sequence[int]:
        """Tokens of a request's prompt, as the conductor makes them.

        Raises:
            Mismatch: this gateway has another model's tokenizer.
            InvalidRequest: the prompt is too long, or the chat template refuses it.
        """
        if (token_ids := arguments.get("token_ids")) is not None:
            return token_ids
        self._texts.check_model(state.model)
        if (prompt := arguments.get("prompt")) is not None:
            return await self._texts.encode(prompt, state.max_tokens, special=True)
        turns, tools = arguments.get("messages") or (), arguments.get("tools") or ()
        return await self._texts.encode_chat(turns, tools, state.max_tokens, special=False, answer=True)

    def _scores(self, body: GenerateBody, state: ClusterState) -> LogprobsFormatter:
        """What spells log probabilities, if some are asked for.

        Raises:
            Mismatch: this gateway has another model's tokenizer.
        """
        if body.wants_scores():
            self._texts.check_model(state.model)
        return LogprobsFormatter(lambda token: self._texts.decode_now([token], skip_special=False))

    def _offer(
        self, body: GenerateBody, arguments: GenerateArguments, state: ClusterState, known: ToolSet | None = None
    ) -> AnswerParser:
        """Add the body's tools to what the SDK is asked for; returns what finds the calls in the answers.

        The model has heard of `known` tools already.
        """
        given = body.tools_offered()
        tools = given or known
        if tools is None:
            return AnswerParser(None, "")
        if given is not None:
            arguments["tools"] = given.definitions
        sampling = arguments["sampling"] or SamplingParams()
        if tools.forced is not None:
            if sampling.response_format:
                raise InvalidRequest("tool_choice", "has a format of its own: an answer that has to call has no other")
            schema = to_json_bytes(tools.schema()).decode()
            arguments["sampling"] = replace(sampling, response_format="json_schema", grammar=schema)
            return AnswerParser(tools, "")
        # Some models mark calls with special tokens.
        arguments["sampling"] = replace(sampling, skip_special_tokens=False)
        return AnswerParser(tools, self._texts.calls_family(state.model))

    def _arguments(self, body: GenerateBody, caller: AuthenticatedCaller, max_tokens: int) -> GenerateArguments:
        return {
            "sampling": body.sampling(max_tokens),
            "slo": body.limits(),
            "priority": body.priority or 0,
            "tenant": caller.tenant,
            "model": body.model or "",
            "timeout_s": self._config.request_timeout_s,
        }

    def _answering(
        self,
        request: Request,
        caller: AuthenticatedCaller,
        body: GenerateBody,
        requests: Sequence[GenerateArguments],
        form: ResponseFormatter,
        state: ClusterState,
        headers: dict[str, str],
        told: ResultHeaders = lambda result: {},
    ) -> GenerationResponse:
        given = request.headers.get(TRACEPARENT, "")
        trace = given if is_traceparent(given) else ""
        job = GenerationJob(requests, form, bool(body.stream), state.model, headers, caller.spending, trace, told)
        return GenerationResponse(self._client, self.meter, job)

    def _card(self, state: ClusterState) -> dict[str, object]:
        """OpenAI's model object, with vLLM's length."""
        return {
            "id": state.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "moonpool",
            "max_model_len": state.max_tokens,
        }


def _completion_options(body: OpenAISamplingBody) -> CompletionOptions:
    return CompletionOptions(bool(body.stream), body.include_usage(), body.n or 1)


def _prompt_argument(prompt: str | list[int]) -> GenerateArguments:
    return {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}


Endpoint = Callable[[Request], Awaitable[Response | GenerationResponse]]


def make_app(endpoints: Endpoints) -> Starlette:
    """The ASGI application."""
    routes: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", endpoints.health),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/v1/models", endpoints.models),
        ("GET", "/v1/models/{model:path}", endpoints.model),
        ("POST", "/v1/chat/completions", endpoints.chat),
        ("POST", "/v1/completions", endpoints.completion),
        ("POST", MESSAGES_PATH, endpoints.messages),
        ("POST", COUNT_TOKENS_PATH, endpoints.tokenizing.count_tokens),
        ("POST", RESPONSES_PATH, endpoints.responses),
        ("POST", "/tokenize", endpoints.tokenizing.tokenize),
        ("POST", "/detokenize", endpoints.tokenizing.detokenize),
    ]
    page, watching = DashboardPage(), endpoints.watching
    routes += [
        ("GET", PAGE_PATH, page.index),
        ("GET", PAGE_FILES_PATH, page.file),
        ("GET", STATE_PATH, watching.state),
        ("GET", REQUESTS_PATH, watching.requests),
        ("GET", REQUESTS_PATH + "/{name:path}", watching.request),
    ]
    caching = endpoints.caching
    routes += [
        ("POST", CACHING_PATH, caching.create),
        ("GET", CACHING_PATH, caching.list),
        ("POST", CACHE_TAGS_PATH, caching.create_tag),
        ("GET", CACHE_TAGS_PATH, caching.list_tags),
        ("GET", CACHE_TAGS_PATH + "/{name}", caching.get_tag),
        ("DELETE", CACHE_TAGS_PATH + "/{name}", caching.delete_tag),
        ("GET", CACHE_TAGS_PATH + "/{name}/content", caching.get_tagged),
        ("GET", CACHING_PATH + "/{name}", caching.get),
        ("PUT", CACHING_PATH + "/{name}", caching.update),
        ("DELETE", CACHING_PATH + "/{name}", caching.delete),
    ]
    errors = ErrorHandlers(endpoints)
    return Starlette(
        routes=[Route(path, endpoint, methods=[method]) for method, path, endpoint in routes],
        exception_handlers={
            MoonpoolError: errors.ours,
            HTTPException: errors.of_routes,
            ClientDisconnect: errors.client_left,
            Exception: errors.defect,
        },
    )


class ErrorHandlers:
    """Makes error bodies of exceptions, and counts them."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._meter = endpoints.meter

    async def ours(self, request: Request, error: Exception) -> Response:
        """An error that Moonpool raises on purpose."""
        return self._response(request, error_response(error))

    async def of_routes(self, request: Request, error: Exception) -> Response:
        """No such path, or not with this method."""
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        what = f"{request.method} {request.url.path}: {status.phrase.lower()}"
        refused = error_response(HttpError(status, "unknown_url", what))
        return self._response(request, refused, error.headers)

    async def client_left(self, request: Request, error: Exception) -> Response:
        """The client left before it was answered: nobody reads this."""
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    async def defect(self, request: Request, error: Exception) -> Response:
        """A defect of ours; uvicorn logs it."""
        return self._response(request, error_response(error))

    def _response(self, request: Request, refused: ErrorResponse, headers: Mapping[str, str] | None = None) -> Response:
        self._meter.refused(refused.status, refused.code or "")
        body = (
            messages_error_body(refused) if request.url.path in (MESSAGES_PATH, COUNT_TOKENS_PATH) else refused.body()
        )
        return Response(
            to_json_bytes(body), refused.status, {**(headers or {}), **refused.headers}, media_type=JSON_MEDIA_TYPE
        )
