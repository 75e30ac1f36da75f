"""What the gateway answers: each endpoint reads its body, checks it, and answers or starts the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import AsyncClient, ClusterState, GenerateArguments, SamplingParams
from moonpool.client.tracing import TRACEPARENT, is_traceparent
from moonpool.errors import InvalidRequest, NotFound, Unavailable
from moonpool.rpc.keys import ApiKeys
from services.gateway.answering import Answering, Job, Told
from services.gateway.caching import Caching, CachingChatBody
from services.gateway.cluster import Cluster
from services.gateway.config import GatewayConfig
from services.gateway.door import Caller, Door, json_response
from services.gateway.fields import AnsweredBody, CompletionBody, GenerationBody
from services.gateway.forms import ChatForm, CompletionForm, Form, Shape, compact
from services.gateway.measuring import Meter
from services.gateway.message_form import MessageForm
from services.gateway.messages import MessagesBody
from services.gateway.response_form import ResponseForm
from services.gateway.responses import ResponsesBody
from services.gateway.scores import Scores
from services.gateway.text import Texts
from services.gateway.tokenizing import Tokenizing
from services.gateway.tools import Reading, Tools
from services.gateway.watching import Watching

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` of plain completions; a chat's answer may fill the model's length."""


class Endpoints:
    """All endpoints; each takes a request and returns a response or raises MoonpoolError."""

    def __init__(
        self,
        config: GatewayConfig,
        client: AsyncClient,
        texts: Texts,
        keys: ApiKeys | None,
        meter: Meter,
        registry: CollectorRegistry,
        started_at: int,
    ) -> None:
        """`registry` is what `/metrics` shows; `started_at` is what models were created at, seconds since 1970."""
        self.meter = meter
        self._config = config
        self._client = client
        self._texts = texts
        self._door = Door(config, keys, meter.clock)
        self._registry = registry
        self._started_at = started_at
        self._cluster = Cluster(client, meter.clock)
        self.caching = Caching(client, self._door)
        """Caches, and chats that use them."""
        self.tokenizing = Tokenizing(self._door, self._cluster, texts)
        """Those that only tokenise."""
        self.watching = Watching(self._door, self._cluster, client)
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

    async def chat(self, request: Request) -> Answering:
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
        scores, shape = self._scores(body, state), _shape(body)
        if body.return_token_ids:
            if "context" in arguments:
                raise InvalidRequest("return_token_ids", "is not for a chat that begins with a cache")
            shape = replace(shape, prompt_ids=[await self._prompt_ids(arguments, state)])
        form = ChatForm(state.model, scores, shape, offer)
        headers = ignored | cached.headers
        return self._answering(request, caller, body, [arguments], form, state, headers, cached.told)

    async def completion(self, request: Request) -> Answering:
        """`/v1/completions`."""
        caller, body, ignored = await self._door.read(request, CompletionBody)
        state = await self._cluster.state()
        arguments = self._arguments(body, caller, COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens)
        requests = [arguments | _prompt(prompt) for prompt in body.prompts()]
        scores, shape = self._scores(body, state), _shape(body)
        if body.return_token_ids:
            shape = replace(shape, prompt_ids=[await self._prompt_ids(one, state) for one in requests])
        form = CompletionForm(state.model, scores, shape)
        return self._answering(request, caller, body, requests, form, state, ignored)

    async def messages(self, request: Request) -> Answering:
        """`/v1/messages`, as Anthropic's."""
        caller, body, ignored = await self._door.read(request, MessagesBody)
        state = await self._cluster.state()
        arguments = self._arguments(body, caller, body.max_tokens)
        arguments["messages"] = body.turns()
        reading = self._offer(body, arguments, state)
        sampling = arguments["sampling"] or SamplingParams()
        decode = partial(self._texts.decode_now, skip_special=sampling.skip_special_tokens)
        form = MessageForm(state.model, reading, body.stop_sequences or (), decode)
        return self._answering(request, caller, body, [arguments], form, state, ignored)

    async def responses(self, request: Request) -> Answering:
        """`/v1/responses`."""
        caller, body, ignored = await self._door.read(request, ResponsesBody)
        state = await self._cluster.state()
        longest = state.max_tokens if body.max_output_tokens is None else body.max_output_tokens
        arguments = self._arguments(body, caller, longest)
        arguments["messages"] = body.turns()
        form = ResponseForm(
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

    def _scores(self, body: AnsweredBody, state: ClusterState) -> Scores:
        """What spells log probabilities, if some are asked for.

        Raises:
            Mismatch: this gateway has another model's tokenizer.
        """
        if body.wants_scores():
            self._texts.check_model(state.model)
        return Scores(lambda token: self._texts.decode_now([token], skip_special=False))

    def _offer(
        self, body: AnsweredBody, arguments: GenerateArguments, state: ClusterState, known: Tools | None = None
    ) -> Reading:
        """Add the body's tools to what the SDK is asked for; returns what finds the calls in the answers.

        The model has heard of `known` tools already.
        """
        given = body.tools_offered()
        tools = given or known
        if tools is None:
            return Reading(None, "")
        if given is not None:
            arguments["tools"] = given.definitions
        sampling = arguments["sampling"] or SamplingParams()
        if tools.forced is not None:
            if sampling.response_format:
                raise InvalidRequest("tool_choice", "has a format of its own: an answer that has to call has no other")
            schema = compact(tools.schema()).decode()
            arguments["sampling"] = replace(sampling, response_format="json_schema", grammar=schema)
            return Reading(tools, "")
        # Some models mark calls with special tokens.
        arguments["sampling"] = replace(sampling, skip_special_tokens=False)
        return Reading(tools, self._texts.calls_family(state.model))

    def _arguments(self, body: AnsweredBody, caller: Caller, max_tokens: int) -> GenerateArguments:
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
        caller: Caller,
        body: AnsweredBody,
        requests: Sequence[GenerateArguments],
        form: Form,
        state: ClusterState,
        headers: dict[str, str],
        told: Told = lambda result: {},
    ) -> Answering:
        given = request.headers.get(TRACEPARENT, "")
        trace = given if is_traceparent(given) else ""
        job = Job(requests, form, bool(body.stream), state.model, headers, caller.spending, trace, told)
        return Answering(self._client, self.meter, job)

    def _card(self, state: ClusterState) -> dict[str, object]:
        """OpenAI's model object, with vLLM's length."""
        return {
            "id": state.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "moonpool",
            "max_model_len": state.max_tokens,
        }


def _shape(body: GenerationBody) -> Shape:
    return Shape(bool(body.stream), body.include_usage(), body.n or 1)


def _prompt(prompt: str | list[int]) -> GenerateArguments:
    return {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
