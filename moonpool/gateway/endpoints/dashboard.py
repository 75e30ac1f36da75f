"""The dashboard page: the package's static files, read once, and the Markdown in the answers that the page shows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from importlib import resources

import nh3
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moonpool.gateway.serving.body import Body
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.json_response import json_response

INDEX_FILE = "index.html"
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
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
MAX_PARAGRAPH_CHARS = 1 << 12
"""Maximum length for a paragraph with emphasis and links, whose parsing takes quadratic time ("[[[[")."""
_LANGUAGE = re.compile(r"language-[\w+#.-]{1,32}")


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
    rendering = asyncio.get_running_loop().run_in_executor(gateway.aside, _safe_html, checked.body.text)
    return json_response({"html": await rendering})


def _safe_html(text: str) -> str:
    """HTML of Markdown with tables. HTML within the text is shown as text, and a picture as a link to the picture."""
    return _sanitizer().clean(_parser().render(text))


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("js-default").disable("image")
    parser.core.ruler.at("inline", _parse_paragraphs)
    return parser


def _parse_paragraphs(state: StateCore) -> None:
    """Parse what stands within paragraphs. A paragraph that is too long stays text."""
    for token in state.tokens:
        if token.type != "inline":
            continue
        if len(token.content) > MAX_PARAGRAPH_CHARS:
            token.children = [Token("text", "", 0, content=token.content)]
        else:
            token.children = []
            state.md.inline.parse(token.content, state.md, state.env, token.children)


@cache
def _sanitizer() -> nh3.Cleaner:
    """Keep the tags that Markdown makes, in case the parser lets more pass."""
    return nh3.Cleaner(
        tags={
            "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
            "s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
        },
        attributes={"a": {"href", "title"}, "code": {"class"}, "ol": {"start"}},
        attribute_filter=_safe_attribute,
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )  # fmt: skip


def _safe_attribute(tag: str, name: str, value: str) -> str | None:
    """The value of an attribute; None to leave the attribute out. The one class is a code block's language."""
    return value if name != "class" or _LANGUAGE.fullmatch(value) else None


@cache
def _files() -> Mapping[str, bytes]:
    """Content of the page's files by name."""
    folder = resources.files("moonpool.gateway") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.count(".") == 1}


def _file_response(name: str) -> Response:
    return Response(_files()[name], headers=HEADERS, media_type=MEDIA_TYPES[name.rpartition(".")[2]])
