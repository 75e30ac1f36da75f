"""Safe HTML of the Markdown in answers, for the page.

The text comes from a model, so nothing in the text is trusted: HTML stays text, links lead to other sites only, and the
time that a text may take is bounded.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape

import nh3
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

MAX_INLINE_COST = 1 << 22
"""Bound on the sum over paragraphs of length times number of marks, with which parsing grows ("[[[[")."""
MAX_CODE_CHARS = 1 << 14
"""Characters of code in one text that get colours; what follows has none."""
_MARKS = re.compile(r"[\[\]*_~`<!&\\]")
_LANGUAGE = re.compile(r"language-[\w+#.-]{1,32}")
_COLOUR = re.compile(r"[a-z]{1,2}[0-9a-z]?")


def safe_html(text: str) -> str:
    """HTML of Markdown with tables and coloured code. HTML within the text is shown as text, a picture as a link."""
    return _sanitizer().clean(_parser().render(text, {"code chars": 0}))


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("js-default").disable("image")
    parser.core.ruler.at("inline", _parse_paragraphs)
    parser.add_render_rule("fence", _fence)
    return parser


def _parse_paragraphs(state: StateCore) -> None:
    """Parse what stands within paragraphs, until the text's bound is reached; further paragraphs stay text."""
    left = MAX_INLINE_COST
    for token in state.tokens:
        if token.type != "inline":
            continue
        cost = len(token.content) * len(_MARKS.findall(token.content))
        if cost > left:
            token.children = [Token("text", "", 0, content=token.content)]
        else:
            left -= cost
            token.children = []
            state.md.inline.parse(token.content, state.md, state.env, token.children)


def _fence(self: object, tokens: list[Token], index: int, options: object, env: dict[str, int]) -> str:
    token = tokens[index]
    language = token.info.strip().split(" ")[0]
    code = token.content
    env["code chars"] += len(code)
    lexer = _lexer(language) if env["code chars"] <= MAX_CODE_CHARS else None
    inner = escape(code, quote=False) if lexer is None else highlight(code, lexer, HtmlFormatter(nowrap=True))
    named = f' class="language-{escape(language)}"' if language else ""
    return f"<pre><code{named}>{inner}</code></pre>\n"


@cache
def _known(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def _lexer(language: str) -> Lexer | None:
    """How a language is read; None if the language is unknown, or none is named."""
    return _known(language) if re.fullmatch(r"[\w+#.-]{1,32}", language) and language.isascii() else None


@cache
def _sanitizer() -> nh3.Cleaner:
    """Keep the tags that Markdown makes, in case the parser lets more pass."""
    return nh3.Cleaner(
        tags={
            "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
            "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
        },
        attributes={"a": {"href", "title"}, "code": {"class"}, "ol": {"start"}, "span": {"class"}},
        attribute_filter=_safe_attribute,
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )  # fmt: skip


def _safe_attribute(tag: str, name: str, value: str) -> str | None:
    """The value of an attribute; None to leave the attribute out. Classes are a code's language and its colours."""
    if name != "class":
        return value
    return value if (_LANGUAGE if tag == "code" else _COLOUR).fullmatch(value) else None
