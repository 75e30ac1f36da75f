"""What the gateway answers: each endpoint reads its body, checks it, and answers or starts the request."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import TypedDict

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import AsyncClient, ClusterState, GenerateArguments
from moonpool.client.tracing import TRACEPARENT, is_traceparent
from moonpool.errors import NotFound, Unavailable
from moonpool.rpc.keys import ApiKeys
from services.gateway.answering import JSON, Answering, Job
from services.gateway.cluster import Cluster
from services.gateway.config import GatewayConfig
from services.gateway.fields import (
    AnsweredBody,
    Body,
    BodyT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from services.gateway.forms import ChatForm, CompletionForm, Form, compact
from services.gateway.measuring import Meter
from services.gateway.messages import MessageForm, MessagesBody
from services.gateway.reading import read_body
from services.gateway.text import Texts

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` of plain completions; a chat's answer may fill the model's length."""
MAX_IGNORED = 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


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
        self._keys = keys
        self._registry = registry
        self._started_at = started_at
        self._cluster = Cluster(client, meter.clock)

    async def health(self, request: Request) -> Response:
        """200 when requests can be served, else 503."""
        state = await self._cluster.state()
        if not state.ready:
            raise Unavailable("no prefill or no decode instance is there")
        return _json({"status": "ok", "model": state.model})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text. Read on a thread: gauges are asked for on the event loop."""
        text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        self._tenant(request)
        return _json({"object": "list", "data": [self._card(await self._cluster.state())]})

    async def model(self, request: Request) -> Response:
        """The model of a name."""
        self._tenant(request)
        state, name = await self._cluster.state(), request.path_params["model"]
        if name != state.model:
            raise NotFound(f"only {state.model!r} is served")
        return _json(self._card(state))

    async def chat(self, request: Request) -> Answering:
        """`/v1/chat/completions`."""
        tenant, body, ignored = await self._read(request, ChatBody)
        state = await self._cluster.state()
        given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        arguments = self._arguments(body, tenant, state.max_tokens if given is None else given)
        if body.messages is not None:
            arguments["messages"] = body.turns()
        else:
            arguments["token_ids"] = body.prompt_token_ids
        form = ChatForm(state.model, **_shape(body))
        return self._answering(request, body, arguments, form, state, ignored)

    async def completion(self, request: Request) -> Answering:
        """`/v1/completions`."""
        tenant, body, ignored = await self._read(request, CompletionBody)
        state = await self._cluster.state()
        arguments = self._arguments(body, tenant, COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens)
        prompt = body.text_or_tokens()
        if isinstance(prompt, str):
            arguments["prompt"] = prompt
        else:
            arguments["token_ids"] = prompt
        form = CompletionForm(state.model, **_shape(body))
        return self._answering(request, body, arguments, form, state, ignored)

    async def messages(self, request: Request) -> Answering:
        """`/v1/messages`, as Anthropic's."""
        tenant, body, ignored = await self._read(request, MessagesBody)
        state = await self._cluster.state()
        arguments = self._arguments(body, tenant, body.max_tokens)
        arguments["messages"] = body.turns()
        form = MessageForm(state.model, body.stop_sequences or (), self._texts.decode_now)
        return self._answering(request, body, arguments, form, state, ignored)

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`, as vLLM's."""
        _, body, ignored = await self._read(request, TokenizeBody)
        state = await self._cluster.state()
        self._texts.check_model(state.model)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await self._texts.encode(body.prompt, state.max_tokens, special=special)
        else:
            special = bool(body.add_special_tokens)
            tokens = await self._texts.encode_chat(
                body.turns(), state.max_tokens, special=special, answer=body.add_generation_prompt
            )
        pieces = await self._texts.pieces(tokens) if body.return_token_strs else None
        answer = {"count": len(tokens), "max_model_len": state.max_tokens, "tokens": tokens, "token_strs": pieces}
        return _json(answer, ignored)

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`, as vLLM's."""
        _, body, ignored = await self._read(request, DetokenizeBody)
        self._texts.check_model((await self._cluster.state()).model)
        return _json({"prompt": await self._texts.decode(body.tokens)}, ignored)

    def _tenant(self, request: Request) -> str:
        """Whose request it is.

        Raises:
            HttpError: 401.
        """
        if self._keys is None:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        return self._keys.tenant(key)

    async def _read(self, request: Request, cls: type[BodyT]) -> tuple[str, BodyT, dict[str, str]]:
        """The tenant, the checked body, and the answer's warning about fields that were ignored."""
        tenant = self._tenant(request)
        body = await read_body(request, cls, self._config.max_body_bytes, self._config.read_timeout_s)
        body.check()
        return tenant, body, _warning(body)

    def _arguments(self, body: AnsweredBody, tenant: str, max_tokens: int) -> GenerateArguments:
        return {
            "sampling": body.sampling(max_tokens),
            "slo": body.limits(),
            "tenant": tenant,
            "model": body.model or "",
            "timeout_s": self._config.request_timeout_s,
        }

    def _answering(
        self,
        request: Request,
        body: AnsweredBody,
        arguments: GenerateArguments,
        form: Form,
        state: ClusterState,
        headers: dict[str, str],
    ) -> Answering:
        given = request.headers.get(TRACEPARENT, "")
        trace = given if is_traceparent(given) else ""
        job = Job(arguments, form, bool(body.stream), state.model, headers, trace)
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


class _Shape(TypedDict):
    stream: bool
    include_usage: bool
    choices: int


def _shape(body: GenerationBody) -> _Shape:
    """What an answer's form depends on."""
    return {"stream": bool(body.stream), "include_usage": body.include_usage(), "choices": body.n or 1}


def _warning(body: Body) -> dict[str, str]:
    """Names of ignored fields as a header; they come from the client, so only plain ones are repeated."""
    names = list(dict.fromkeys(name if _PLAIN_NAME.fullmatch(name) else "?" for name in body.ignored()))
    if not names:
        return {}
    listed = ", ".join(names[:MAX_IGNORED]) + (", ..." if len(names) > MAX_IGNORED else "")
    return {"warning": f'299 moonpool "ignored fields: {listed}"'}


def _json(content: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    return Response(compact(content), HTTPStatus.OK, headers, media_type=JSON)
