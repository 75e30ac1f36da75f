"""Where chat templates run: jinja2's sandbox, with what transformers gives to templates, and bounds of memory and time.

A template is a file of somebody else's. The sandbox refuses access to Python's internals and changes to arguments, so a
template can only compute text; the bounds here end a template that would compute too much of it. What a template
computes from a conversation's texts and numbers keeps their origins (`traced_text`).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from moonpool.base.checkpoint.traced_text import (
    TracedText,
    has_traced,
    joined,
    lifted,
    text_of,
    traced_number,
    written,
)

MAX_TEXT = 1 << 26
"""Most characters of a text that a template may make, and of what it writes; an item of a list counts as eight."""
_ITEM = 8
"""Characters that an item of a list counts as."""
MAX_MADE = 1 << 29
"""Most characters and items that one rendering may make by operators and methods, one after the other."""
_MAX_WIDTH = 1 << 16
"""Largest number that a filter or a method of texts takes, such as a width."""
_MAX_BITS = 1 << 16
"""Most bits of an integer that a power has."""
_WIDE = re.compile(r"\d{6,}|\*")
"""A width in a format that is too large, or that an argument gives."""
_BOUND_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap")
_COUNTS = ("count", "length", "wordcount")
"""Filters whose numbers are the template's own."""
_NO_FILTERS, _NO_GLOBALS = ("pprint", "xmlattr"), ("lipsum",)
_GENERATED = {"generation"}
_CODES = re.compile(r"%[-+ #0-9.]*c|:[^{}]*c}|\[")
"""In a format: a number as the character with this code, or a part of an argument."""
MAX_SECONDS = 10.0
"""Of a processor, for a rendering: templates of long conversations take a hundredth of this."""
_STEPS = 256
"""Calls and turns of loops between two looks at the time."""
_STEP_FILTER = "moonpool_step"
"""Counts a turn of a loop; a template that uses the filter counts once more."""
_spent = threading.local()


class TooLargeError(TemplateError):
    """A template would make a text or a list that is too large."""


def begin_rendering() -> None:
    """Count what a rendering makes from zero; on the thread that renders."""
    _spent.made = _spent.steps = 0
    _spent.began = time.thread_time()


def _step() -> None:
    """Count a call or a turn of a loop.

    Raises:
        TooLargeError: the rendering takes too long.
    """
    _spent.steps = steps = getattr(_spent, "steps", 0) + 1
    if not steps % _STEPS and time.thread_time() - getattr(_spent, "began", 0.0) > MAX_SECONDS:
        raise TooLargeError(f"it computes for more than {MAX_SECONDS:g} s")


@pass_context  # else jinja2 would compute the filter once, when the template is compiled
def _step_filter(_context: Context, value: Any) -> Any:
    _step()
    return value


def bounded_text(parts: Iterable[str]) -> str:
    """Join what a template writes.

    Raises:
        TooLargeError: this is too much.
    """
    taken, length = [], 0
    for part in parts:
        length += len(part)
        if length > MAX_TEXT:
            raise TooLargeError(f"it writes more than {MAX_TEXT} characters")
        taken.append(part)
    return joined(taken)


def _take(size: int) -> None:
    """Count a text or list of this size, before it is made."""
    _spent.made = getattr(_spent, "made", 0) + size
    if size > MAX_TEXT:
        raise TooLargeError(f"it makes a text or a list of {size} characters or items; {MAX_TEXT} are allowed")
    if _spent.made > MAX_MADE:
        raise TooLargeError(f"it makes texts of more than {MAX_MADE} characters, one after the other")


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple) else 0


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_WIDTH:
            raise TooLargeError(f"it asks for a width or a count of {value}; {_MAX_WIDTH} is allowed")


def _check_format(text: Any, given: Sequence[Any]) -> None:
    if isinstance(text, str) and (wide := _WIDE.search(text)) and ("%" in text or "{" in text):
        if wide[0] != "*":
            raise TooLargeError(f"it formats with a width of {wide[0][:32]}")
        _check_numbers(given)


def _joined(separator: Any, parts: Any) -> int:
    if not isinstance(parts, list | tuple):
        return 0
    return sum(_size(part) for part in parts) + _size(separator) * len(parts)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with bounds: see the module."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset(ImmutableSandboxedEnvironment.default_unop_table)
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=text_of)
        for name in _NO_GLOBALS:
            del self.globals[name]
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters |= {"join": _join, "replace": _replace, "safe": text_of, "string": text_of}
        for name in _BOUND_FILTERS:
            self.filters[name] = _bound_filter(name, self.filters[name])
        for name in self.filters:
            self.filters[name] = _traced_filter(name, self.filters[name])
        self.filters["tojson"] = _tojson
        self.filters[_STEP_FILTER] = _step_filter
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what an operator gives, unless this is too large."""
        if operator == "+":
            _take(_size(left) + _size(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if _size(value) and isinstance(times, int):
                    _take(_size(value) * max(0, times))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(0, right))
        elif operator == "%":
            _check_format(left, right if isinstance(right, tuple) else (right,))
            if type(left) is str:
                return _formatted(left, lambda given: left % given, right)
        made = super().call_binop(context, operator, left, right)
        return traced_number(made) if isinstance(made, int | float) and has_traced((left, right)) else made

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        """Compute what an operator gives."""
        made = super().call_unop(context, operator, arg)
        return traced_number(made) if has_traced(arg) else made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as jinja2's
        """Call a function or a method, unless what it makes is too large."""
        _step()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps methods that format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_numbers((*args, *kwargs.values()))
            if name == "join" and args:
                _take(_joined(owner, args[0]))
            elif name == "replace" and len(args) > 1:
                _take(_replaced(owner, args[0], args[1]))
            elif name in ("format", "format_map"):
                _check_format(owner, (*args, *kwargs.values()))
                if type(owner) is str:
                    called = super().call
                    return _formatted(
                        owner, lambda given: called(__context, __obj, *given[0], **given[1]), (args, kwargs)
                    )
            if name not in ("format", "format_map") and (lift := lifted(owner, args)) is not owner:
                __obj = getattr(lift, name)
        made = super().call(__context, __obj, *args, **kwargs)
        return TracedText(made) if isinstance(owner, bytes) and isinstance(made, str) else made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Write `a ~ b` as a sum of texts, which is an operator with a bound, and let loops count their turns."""
        parsed: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return parsed


class _Bounds(NodeTransformer):
    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:  # noqa: N802
        """Refuse `autoescape`, whose texts have no origins."""
        raise TemplateSyntaxError("autoescape is not for prompts", node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  # the name that jinja2 looks for
        self.generic_visit(node)
        assert node.environment is not None
        step = nodes.Filter(nodes.Const(0), _STEP_FILTER, [], [], None, None, lineno=node.lineno)
        counted = nodes.ExprStmt(step, lineno=node.lineno)
        counted.set_environment(node.environment)
        node.body.insert(0, counted)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802  # the name that jinja2 looks for
        whole, *others = [
            nodes.Filter(self.visit(part), "string", [], [], None, None, lineno=part.lineno) for part in node.nodes
        ]
        summed: nodes.Expr = whole
        for part in others:
            summed = nodes.Add(summed, part, lineno=node.lineno)
        assert node.environment is not None
        summed.set_environment(node.environment)
        return summed


class _Generation(Extension):
    """Lets `{% generation %}` through, with which some templates mark the assistant's part for training."""

    tags = _GENERATED

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TooLargeError(f"it computes a number of {bits} bits; {_MAX_BITS} are allowed")


def _replaced(text: Any, old: Any, new: Any) -> int:
    """Length of a text with replacements, at most."""
    return _size(text) + (_size(text) // max(1, _size(old)) + 1) * _size(new)


def _bound_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of jinja2 that refuses what would be too large.

    Some filters get the environment or the context before the value.
    """
    before = 1 if hasattr(plain, "jinja_pass_arg") else 0

    @wraps(plain)
    def bound(*args: Any, **kwargs: Any) -> Any:
        value, given = args[before], (*args[before + 1 :], *kwargs.values())
        _check_numbers(given)
        if name == "join":
            value = value if isinstance(value, list | tuple) else list(value)
            _take(_joined(given[0] if given else "", value))
        elif name == "replace" and len(given) > 1:
            _take(_replaced(value, given[0], given[1]))
        elif name == "format":
            _check_format(value, given)
        elif name == "indent":
            _take(_size(value) + (str(value).count("\n") + 1) * max(map(_width, given), default=4))
        return plain(*args[:before], value, *args[before + 1 :], **kwargs)

    return bound


def _traced_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose texts keep the origins of what they are made of, or are the conversation's as a whole."""
    before = 1 if hasattr(plain, "jinja_pass_arg") else 0

    @wraps(plain)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        given = (*args[before:], *kwargs.values())
        value = args[before]
        if name == "format" and type(value) is str:
            return _formatted(value, lambda each: plain(value, *each[0], **each[1]), (args[1:], kwargs))
        if not has_traced(given):
            made = plain(*args, **kwargs)
            return str.__str__(made) if isinstance(made, str) else made  # no text that escapes what is added
        if type(value) is str:
            args = (*args[:before], lifted(value, given), *args[before + 1 :])
        made = plain(*args, **kwargs)
        if not isinstance(made, str):
            return made if name in _COUNTS else traced_number(made)
        if any(made is each for each in given):
            return made
        exact = isinstance(made, TracedText) and name != "indent"
        return made if exact else TracedText(str.__str__(made))

    return filtered


def _formatted(form: str, write: Callable[[Any], Any], given: Any) -> Any:
    """Fill a format that the template has written."""
    made = written(write, given)
    return TracedText(made) if _CODES.search(form) else made


@pass_environment
def _join(environment: TemplateSandbox, value: Any, d: Any = "", attribute: Any = None) -> str:
    """Join as jinja2's filter does."""
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return joined(map(text_of, parts), text_of(d))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Replace parts as jinja2's filter does."""
    text, put = text_of(s), text_of(new)
    return lifted(text, put).replace(text_of(old), put, -1 if count is None else count)


def _strftime_now(form: str) -> str:
    made = datetime.now().strftime(form)
    return TracedText(made) if has_traced(form) else made


def _width(value: Any) -> int:
    return value if isinstance(value, int) else _size(value)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON; jinja's own filter would escape HTML characters."""
    _check_numbers((indent,))
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    text = written(lambda each: json.dumps(each, **options), _in_order(value) if sort_keys else value, json=True)
    _take(len(text))
    return text


def _in_order(value: Any) -> Any:
    """Return JSON data with the keys of objects in order."""
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value)}
    return [_in_order(item) for item in value] if isinstance(value, list | tuple) else value
