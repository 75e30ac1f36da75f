"""The route table, and the ASGI application that serves the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from moonpool.base.errors import MoonpoolError
from moonpool.gateway.endpoints import (
    anthropic_messages,
    batches,
    classify,
    cluster,
    context_caching,
    dashboard,
    embeddings,
    files,
    lora_adapters,
    models,
    ollama,
    openai_chat,
    openai_completions,
    prefetch,
    scores,
    server,
    sessions,
    tokenization,
)
from moonpool.gateway.endpoints.base import Endpoint, openai_error_body
from moonpool.gateway.responses import conversations
from moonpool.gateway.responses import handlers as responses
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.serving.envelope import AllowedHosts, RequestEnvelope
from moonpool.gateway.serving.errors import ErrorResponse, HttpError, error_response
from moonpool.gateway.serving.json_response import JSON_TYPE, to_json_bytes
from moonpool.gateway.serving.served_request import ServedRequest, served_request

ROUTES: Sequence[Endpoint] = (
    # Most requests come here, and rows are tried in order.
    Endpoint("POST", "/v1/chat/completions", openai_chat.chat_completions),
    Endpoint("POST", "/v1/completions", openai_completions.completions),
    Endpoint("GET", "/health", server.health),
    Endpoint("GET", "/ping", server.health),
    Endpoint("POST", "/ping", server.health),
    Endpoint("GET", "/version", server.version),
    Endpoint("GET", "/load", server.load),
    Endpoint("GET", "/metrics", server.metrics),
    Endpoint("GET", "/v1/models", models.list_models),
    Endpoint("GET", "/v1/models/{model:path}", models.get_model),
    Endpoint("POST", "/v1/load_lora_adapter", lora_adapters.load_lora_adapter),
    Endpoint("POST", "/v1/unload_lora_adapter", lora_adapters.unload_lora_adapter),
    Endpoint("POST", "/v1/responses", responses.create_response),
    Endpoint("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
    Endpoint("GET", "/v1/responses/{name}", responses.get_response),
    Endpoint("POST", "/v1/responses/{name}/cancel", responses.cancel_response),
    Endpoint("DELETE", "/v1/responses/{name}", responses.delete_response),
    Endpoint("GET", "/v1/responses/{name}/input_items", responses.list_input_items),
    Endpoint("POST", "/v1/conversations", conversations.create_conversation),
    Endpoint("GET", "/v1/conversations/{name}", conversations.get_conversation),
    Endpoint("POST", "/v1/conversations/{name}", conversations.update_conversation),
    Endpoint("DELETE", "/v1/conversations/{name}", conversations.delete_conversation),
    Endpoint("GET", "/v1/conversations/{name}/items", conversations.list_items),
    Endpoint("POST", "/v1/conversations/{name}/items", conversations.add_items),
    Endpoint("GET", "/v1/conversations/{name}/items/{item}", conversations.get_item),
    Endpoint("DELETE", "/v1/conversations/{name}/items/{item}", conversations.delete_item),
    Endpoint("POST", "/v1/embeddings", embeddings.embeddings),
    *(Endpoint("POST", path, scores.scores) for path in ("/score", "/v1/score")),
    *(Endpoint("POST", path, classify.classify) for path in ("/classify", "/v1/classify")),
    *(Endpoint("POST", path, classify.pooling) for path in ("/pooling", "/v1/pooling")),
    *(Endpoint("POST", path, scores.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Endpoint("POST", "/v1/messages", anthropic_messages.messages, anthropic_messages.anthropic_error_body),
    Endpoint(
        "POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens, anthropic_messages.anthropic_error_body
    ),
    Endpoint("POST", "/api/chat", ollama.chat, ollama.ollama_error_body),
    Endpoint("POST", "/api/generate", ollama.generate, ollama.ollama_error_body),
    Endpoint("POST", "/api/embed", ollama.embed, ollama.ollama_error_body),
    Endpoint("POST", "/api/show", ollama.show, ollama.ollama_error_body),
    Endpoint("GET", "/api/tags", ollama.tags, ollama.ollama_error_body),
    Endpoint("GET", "/api/version", ollama.version),
    Endpoint("POST", "/v1/prefetch", prefetch.prefetch),
    Endpoint("POST", "/v1/files", files.upload_file),
    Endpoint("GET", "/v1/files", files.list_files),
    Endpoint("GET", "/v1/files/{name}", files.get_file),
    Endpoint("GET", "/v1/files/{name}/content", files.get_file_content),
    Endpoint("DELETE", "/v1/files/{name}", files.delete_file),
    Endpoint("POST", "/v1/batches", batches.create_batch),
    Endpoint("GET", "/v1/batches", batches.list_batches),
    Endpoint("GET", "/v1/batches/{name}", batches.get_batch),
    Endpoint("POST", "/v1/batches/{name}/cancel", batches.cancel_batch),
    Endpoint("POST", "/tokenize", tokenization.tokenize),
    Endpoint("POST", "/detokenize", tokenization.detokenize),
    Endpoint("GET", "/tokenizer_info", tokenization.tokenizer_info),
    Endpoint("POST", "/v1/caching", context_caching.create_cache),
    Endpoint("GET", "/v1/caching", context_caching.list_caches),
    Endpoint("POST", "/v1/caching/refs/tags", context_caching.create_tag),
    Endpoint("GET", "/v1/caching/refs/tags", context_caching.list_tags),
    Endpoint("GET", "/v1/caching/refs/tags/{name}", context_caching.get_tag),
    Endpoint("DELETE", "/v1/caching/refs/tags/{name}", context_caching.delete_tag),
    Endpoint("GET", "/v1/caching/refs/tags/{name}/content", context_caching.get_tagged_cache),
    Endpoint("GET", "/v1/caching/{name}", context_caching.get_cache),
    Endpoint("PUT", "/v1/caching/{name}", context_caching.update_cache),
    Endpoint("DELETE", "/v1/caching/{name}", context_caching.delete_cache),
    Endpoint("GET", "/moonpool/state", cluster.state),
    Endpoint("GET", "/moonpool/requests", cluster.list_requests),
    Endpoint("GET", "/moonpool/requests/{name:path}", cluster.get_request),
    Endpoint("POST", "/moonpool/sessions/{name:path}", sessions.update_session),
    Endpoint("DELETE", "/moonpool/sessions/{name:path}", sessions.end_session),
    Endpoint("POST", "/moonpool/markdown", dashboard.markdown),
    Endpoint("GET", "/", dashboard.index),
    Endpoint("GET", "/page/{name}", dashboard.file),
)
"""Every path of the gateway. The first row that matches serves a request."""


EXPOSED_HEADERS = ("x-request-id", "warning", "retry-after", "retry-after-ms")
"""Headers that a page of another origin may read."""


def make_app(gateway: ResponsesContext, hosts: AllowedHosts, allowed_origins: Sequence[str] = ()) -> Starlette:
    """The ASGI application with every route, for requests to `hosts`.

    Web pages from `allowed_origins` may use the application; "*" stands for all.
    """
    errors = ErrorHandlers(gateway.metrics.refused, {row.path: row.error_body for row in ROUTES})

    def ended(request: ServedRequest) -> None:
        gateway.metrics.http.ended(request)
        gateway.log.ended(request)

    middleware = [Middleware(RequestEnvelope, hosts, ended, gateway.metrics.clock)]
    if allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
        middleware.append(cors)
    return Starlette(
        middleware=middleware,
        routes=[Route(row.path, partial(row.handler, gateway), methods=[row.method]) for row in ROUTES],
        exception_handlers={
            MoonpoolError: errors.moonpool_error,
            HTTPException: errors.unknown_route,
            ClientDisconnect: errors.client_gone,
            Exception: errors.internal_error,
        },
    )


class ErrorHandlers:
    """Turns exceptions into error responses, and counts the responses."""

    def __init__(
        self,
        count: Callable[[int, str], None],
        error_bodies: Mapping[str, Callable[[ErrorResponse], dict[str, Any]]],
    ) -> None:
        """`count` takes status and code; `error_bodies` writes the body, by path."""
        self._count = count
        self._error_bodies = error_bodies

    async def moonpool_error(self, request: Request, error: Exception) -> Response:
        """An error that a handler raised on purpose."""
        return self._respond(request, error_response(error))

    async def unknown_route(self, request: Request, error: Exception) -> Response:
        """No route has this path, or none has this method."""
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        message = f"{request.method} {request.url.path}: {status.phrase.lower()}"
        return self._respond(request, error_response(HttpError(status, "unknown_url", message)), error.headers)

    async def client_gone(self, request: Request, error: Exception) -> Response:
        """The client disconnected before the response; no client reads the response."""
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    async def internal_error(self, request: Request, error: Exception) -> Response:
        """A defect of the gateway, which uvicorn logs."""
        return self._respond(request, error_response(error))

    def _respond(self, request: Request, error: ErrorResponse, headers: Mapping[str, str] | None = None) -> Response:
        self._count(error.status, error.code or "")
        served_request(request.scope).notes.update(error.notes())
        body = self._error_bodies.get(request.url.path, openai_error_body)(error)
        return Response(to_json_bytes(body), error.status, {**(headers or {}), **error.headers}, media_type=JSON_TYPE)
