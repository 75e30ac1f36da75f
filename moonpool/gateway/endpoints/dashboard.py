"""The dashboard page: the package's static files, read once, and the Markdown of the answers that the page shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from importlib import resources

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moonpool.gateway.serving.body import Body
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.json_response import json_response
from moonpool.gateway.serving.markdown import safe_html

INDEX_FILE = "index.html"
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""The page loads nothing from other sites, sends nothing to them, and is not shown within them."""

MAX_MARKDOWN_CHARS = 1 << 15
"""Maximum length of a text that is rendered. The page shows a longer text unrendered."""


class MarkdownBody(Body):
    """`/moonpool/markdown`."""

    text: str = Field(max_length=MAX_MARKDOWN_CHARS)


async def index(gateway: GatewayContext, request: Request) -> Response:
    """The page."""
    return _file_response(INDEX_FILE)


async def file(gateway: GatewayContext, request: Request) -> Response:
    """A script, style sheet or picture of the page.

    Raises:
        HTTPException: the page has no such file.
    """
    name: str = request.path_params["name"]
    if name not in _files():
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return _file_response(name)


async def markdown(gateway: GatewayContext, request: Request) -> Response:
    """Safe HTML of a text in Markdown. Uses no budget, because the page renders every answer."""
    checked = await gateway.auth.read_body(request, MarkdownBody, uses_budget=False)
    rendered = gateway.rendering.run(checked.caller.tenant, lambda: safe_html(checked.body.text))
    html = await while_connected(request.receive, rendered)
    return json_response({"html": html})


@cache
def _files() -> Mapping[str, bytes]:
    """Content of the page's files by name."""
    folder = resources.files("moonpool.gateway") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.count(".") == 1}


def _file_response(name: str) -> Response:
    return Response(_files()[name], headers=HEADERS, media_type=MEDIA_TYPES[name.rpartition(".")[2]])
