"""The gateway's addresses: which request goes to which endpoint, and how errors leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from moonpool.errors import MoonpoolError
from services.gateway.answering import JSON, Answering
from services.gateway.caching import CACHING, TAGS
from services.gateway.endpoints import Endpoints
from services.gateway.errors import HttpError, Refusal, refusal
from services.gateway.forms import compact
from services.gateway.message_form import error_body
from services.gateway.messages import COUNT_TOKENS, MESSAGES
from services.gateway.page import FILES, PAGE, Page
from services.gateway.responses import RESPONSES
from services.gateway.watching import REQUESTS, STATE

Endpoint = Callable[[Request], Awaitable[Response | Answering]]


def make_app(endpoints: Endpoints) -> Starlette:
    """The ASGI application."""
    routes: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", endpoints.health),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/v1/models", endpoints.models),
        ("GET", "/v1/models/{model:path}", endpoints.model),
        ("POST", "/v1/chat/completions", endpoints.chat),
        ("POST", "/v1/completions", endpoints.completion),
        ("POST", MESSAGES, endpoints.messages),
        ("POST", COUNT_TOKENS, endpoints.tokenizing.count_tokens),
        ("POST", RESPONSES, endpoints.responses),
        ("POST", "/tokenize", endpoints.tokenizing.tokenize),
        ("POST", "/detokenize", endpoints.tokenizing.detokenize),
    ]
    page, watching = Page(), endpoints.watching
    routes += [
        ("GET", PAGE, page.index),
        ("GET", FILES, page.file),
        ("GET", STATE, watching.state),
        ("GET", REQUESTS, watching.requests),
        ("GET", REQUESTS + "/{name:path}", watching.request),
    ]
    caching = endpoints.caching
    routes += [
        ("POST", CACHING, caching.create),
        ("GET", CACHING, caching.list),
        ("POST", TAGS, caching.create_tag),
        ("GET", TAGS, caching.list_tags),
        ("GET", TAGS + "/{name}", caching.get_tag),
        ("DELETE", TAGS + "/{name}", caching.delete_tag),
        ("GET", TAGS + "/{name}/content", caching.get_tagged),
        ("GET", CACHING + "/{name}", caching.get),
        ("PUT", CACHING + "/{name}", caching.update),
        ("DELETE", CACHING + "/{name}", caching.delete),
    ]
    errors = Errors(endpoints)
    return Starlette(
        routes=[Route(path, endpoint, methods=[method]) for method, path, endpoint in routes],
        exception_handlers={
            MoonpoolError: errors.ours,
            HTTPException: errors.of_routes,
            ClientDisconnect: errors.client_left,
            Exception: errors.defect,
        },
    )


class Errors:
    """Makes error bodies of exceptions, and counts them."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._meter = endpoints.meter

    async def ours(self, request: Request, error: Exception) -> Response:
        """An error that Moonpool raises on purpose."""
        return self._response(request, refusal(error))

    async def of_routes(self, request: Request, error: Exception) -> Response:
        """No such path, or not with this method."""
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        what = f"{request.method} {request.url.path}: {status.phrase.lower()}"
        refused = refusal(HttpError(status, "unknown_url", what))
        return self._response(request, refused, error.headers)

    async def client_left(self, request: Request, error: Exception) -> Response:
        """The client left before it was answered: nobody reads this."""
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    async def defect(self, request: Request, error: Exception) -> Response:
        """A defect of ours; uvicorn logs it."""
        return self._response(request, refusal(error))

    def _response(self, request: Request, refused: Refusal, headers: Mapping[str, str] | None = None) -> Response:
        self._meter.refused(refused.status, refused.code or "")
        body = error_body(refused) if request.url.path in (MESSAGES, COUNT_TOKENS) else refused.body()
        return Response(compact(body), refused.status, {**(headers or {}), **refused.headers}, media_type=JSON)
