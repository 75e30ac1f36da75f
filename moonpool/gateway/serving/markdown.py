"""Safe HTML of the Markdown in answers, for the page.

The text comes from a model, so nothing in the text is trusted: HTML stays text, links lead to other sites only, and the
time that a text may take is bounded. Formulas in LaTeX become MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from html import escape
from typing import TYPE_CHECKING

import nh3
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

if TYPE_CHECKING:
    from math_core import LatexToMathML

MAX_INLINE_COST = 1 << 22
"""Bound on the sum over paragraphs of length times number of marks, with which parsing grows ("[[[[")."""
MAX_CODE_CHARS = 1 << 14
"""Characters of code in one text that get colours; what follows has none."""
MAX_FORMULA_CHARS = 2000
"""Characters of a formula; a longer one stays text. The converter recurses: it fails at some 10,000 nested braces."""
MAX_EXPANSIONS = 16
"""How often a formula may use commands that the formula defines."""
MAX_LANGUAGE_CHARS = 32
"""Characters of the name of a block's language; the code of a longer one has no colours."""
DELIMITERS = (("\\[", "\\]", True), ("\\(", "\\)", False), ("$$", "$$", True), ("$", "$", False))
"""Begin and end of formulas, and whether they stand in lines of their own."""
_MARKS = re.compile(r"[\[\]*_~`<!&\\$]")
_CELL = re.compile(r'<mtd style="([^"]*)"')
_LANGUAGE = re.compile(r"language-[\w+#.-]{1,32}")
_SIDE = re.compile(r"left|right|center")
_ALIGNMENT = re.compile(r"(left|right|center)( gap)?")
_COLOUR = re.compile(r"[a-z]{1,2}[0-9a-z]?")
_MATHML: dict[str, set[str]] = {
    **{name: set() for name in ("menclose", "merror", "mn", "mphantom", "mroot", "mrow", "ms", "msqrt", "msub")},
    **{name: set() for name in ("msubsup", "msup", "mtext", "mtr")},
    "math": {"display"},
    "mfrac": {"linethickness", "displaystyle", "scriptlevel"},
    "mi": {"mathvariant"},
    "mo": {"form", "fence", "largeop", "lspace", "maxsize", "minsize", "movablelimits", "rspace", "stretchy"},
    "mover": {"accent"},
    "mpadded": {"depth", "height", "lspace", "voffset", "width"},
    "mspace": {"depth", "height", "width"},
    "mstyle": {"displaystyle", "scriptlevel"},
    "mtable": {"displaystyle", "scriptlevel"},
    "mtd": {"class", "columnspan", "rowspan"},
    "munder": {"accentunder"},
    "munderover": {"accent", "accentunder"},
}
"""Elements of MathML, and their attributes: no style, link or script."""


def safe_html(text: str) -> str:
    """HTML of Markdown with tables, coloured code and formulas.

    HTML within the text is shown as text, a picture as a link.
    """
    return _sanitizer().clean(_parser().render(text, {"code chars": 0}))


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("js-default").disable("image")
    parser.core.ruler.at("inline", _parse_paragraphs)
    parser.add_render_rule("fence", _fence)
    parser.inline.ruler.before("escape", "formula", _inline_formula)
    ended = ["paragraph", "reference", "blockquote", "list"]  # models leave no line free before a formula
    parser.block.ruler.before("fence", "formula", _block_formula, {"alt": ended})
    parser.add_render_rule("formula", _formula)
    return parser


def _parse_paragraphs(state: StateCore) -> None:
    """Parse what stands within paragraphs, until the text's bound is reached; further paragraphs stay text."""
    left = MAX_INLINE_COST
    for token in state.tokens:
        if side := _SIDE.search(str(token.attrGet("style") or "")):
            token.attrs = {"class": side[0]}  # of a column
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


def _inline_formula(state: StateInline, silent: bool) -> bool:
    source, begin = state.src, state.pos
    for opening, closing, displayed in DELIMITERS:
        if source.startswith(opening, begin):
            start = begin + len(opening)
            end = _closing(source, closing, start, min(state.posMax, start + MAX_FORMULA_CHARS))
            if end < 0:
                return False
            if not silent:
                _push(state, source[start:end], source[begin : end + len(closing)], displayed=displayed)
            state.pos = end + len(closing)
            return True
    return False


def _closing(source: str, closing: str, start: int, stop: int) -> int:
    """Where a formula's end begins, or -1. A dollar is often a price: the rule for one dollar is pandoc's."""
    end = source.find(closing, start, stop)
    while end > start and closing[0] == "$" and source[end - 1] == "\\":  # escaped
        end = source.find(closing, end + 1, stop)
    if end <= start:
        return -1
    if closing == "$" and (source[start].isspace() or source[end - 1].isspace() or source[end + 1 : end + 2].isdigit()):
        return -1
    return end


def _block_formula(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """A formula in lines of its own, none of them empty."""
    if state.is_code_block(first):
        return False
    text = _line(state, first)
    found = next((each for each in DELIMITERS if each[2] and text.startswith(each[0])), None)
    if found is None:
        return False
    opening, closing, _ = found
    lines = [text[len(opening) :]]
    at = first
    while not lines[-1].endswith(closing):
        at += 1
        if at >= last or state.isEmpty(at) or state.sCount[at] < state.blkIndent:
            return False
        text = _line(state, at)
        if text.startswith(opening) and text != closing:  # another one begins: no line is looked at twice
            return False
        lines.append(text)
    source = "\n".join(lines)[: -len(closing)]
    if not source.strip() or len(source) > MAX_FORMULA_CHARS or closing in source:
        return False
    if not silent:
        _push(state, source, opening + source + closing, displayed=True)
        state.line = at + 1
    return True


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]].rstrip()


def _push(state: StateInline | StateBlock, source: str, written: str, *, displayed: bool) -> None:
    token = state.push("formula", "math", 0)
    token.content, token.info, token.block = source, written, displayed


def _formula(self: object, tokens: Sequence[Token], index: int, options: object, env: object) -> str:
    """MathML of a formula; its text where it is no LaTeX."""
    from math_core import LatexError  # with the first formula

    token = tokens[index]
    try:
        drawn = _converter().convert_with_local_state(token.content, displaystyle=token.block)
    except LatexError:
        return escape(token.info, quote=False)
    return _CELL.sub(_classed_cell, drawn)


def _classed_cell(found: re.Match[str]) -> str:
    """A cell with classes for a style: the page's policy allows no styles."""
    side = "right" if "text-align: right" in found[1] else "left" if "text-align: left" in found[1] else ""
    return f'<mtd class="{side}{" gap" if "padding-left:1em" in found[1] else ""}"'


@cache
def _converter() -> LatexToMathML:
    from math_core import LatexToMathML

    return LatexToMathML(ignore_unknown_commands=True, fancy_error=False, max_expansions=MAX_EXPANSIONS)


@lru_cache(maxsize=1024)  # whoever writes the text chooses the names
def _known(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def _lexer(language: str) -> Lexer | None:
    """How a language is read; None if the language is unknown, or none is named."""
    return _known(language) if len(language) <= MAX_LANGUAGE_CHARS else None


@cache
def _sanitizer() -> nh3.Cleaner:
    """Keep the tags that Markdown makes, in case the parser lets more pass."""
    return nh3.Cleaner(
        tags={
            "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
            "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", *_MATHML,
        },
        attributes={
            "a": {"href", "title"}, "code": {"class"}, "ol": {"start"}, "span": {"class"}, "td": {"class"},
            "th": {"class"},
        } | _MATHML,
        attribute_filter=_safe_attribute,
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )  # fmt: skip


def _safe_attribute(tag: str, name: str, value: str) -> str | None:
    """The value of an attribute; None to leave the attribute out. Classes are a code's language and its colours."""
    if name != "class":
        return value
    allowed = _LANGUAGE if tag == "code" else _COLOUR if tag == "span" else _ALIGNMENT
    return value if allowed.fullmatch(value) else None
