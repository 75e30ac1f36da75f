"""Pythonic tool calls: the whole answer is a list of calls in Python, `[weather(city="Paris"), add(a=1, b=2)]`."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar
from moonpool.gateway.tool_parsers.base import (
    SPACE,
    ObjectForm,
    ParsedToolCall,
    ParserOutput,
    ToolParameters,
    ToolParser,
    ToolParserFamily,
    object_forms,
)

_MAX_CHARS = 100_000
_AROUND = ("<|python_start|>", "<|python_end|>")
_LIST = rf"{SPACE}\["
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicToolParser(ToolParser):
    """Reads an answer that begins with a bracket at the answer's end, and passes on all other answers as they come."""

    def __init__(self, tools: ToolParameters) -> None:
        """Start an answer; `tools` are the functions that may be called."""
        self._names = tools.keys()
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[ParserOutput]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        start = self._held.lstrip()
        may_call = start.startswith(("[", _AROUND[0])) or _AROUND[0].startswith(start)
        if may_call and len(self._held) <= _MAX_CHARS:
            return []
        held, self._held, self._is_text = self._held, "", True
        return [held]

    def end(self) -> list[ParserOutput]:
        text, self._held = self._held, ""
        inner = text.strip().removeprefix(_AROUND[0]).removesuffix(_AROUND[1])
        calls = read_calls(inner, self._names) if inner else []
        return [*calls] if calls else [text] if text else []


def read_calls(text: str, names: Collection[str]) -> list[ParsedToolCall]:
    """Return the calls of a Python list; empty if not a list, or if a function is not in `names`."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else []
        calls = [_read_call(item, names) for item in items]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []
    return [call for call in calls if call is not None] if None not in calls else []


def _read_call(item: ast.expr, names: Collection[str]) -> ParsedToolCall | None:
    if not isinstance(item, ast.Call) or item.args or ast.unparse(item.func) not in names:
        return None
    arguments = {
        str(argument.arg): ast.literal_eval(_python(argument.value))
        for argument in item.keywords
        if argument.arg is not None
    }
    return ParsedToolCall(ast.unparse(item.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


class _JsonNames(ast.NodeTransformer):
    """Reads JSON's names of values as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _python(value: ast.expr) -> ast.expr:
    """A value, in which JSON's `true`, `false` and `null` are read as Python's."""
    read: ast.expr = _JsonNames().visit(value)
    return read


def _hold(answer: AnswerGrammar, tools: ToolParameters) -> None:
    arguments = {name: _arguments(answer, parameters) for name, parameters in tools.items()}
    call = answer.form([f'{answer.text(name + "(")} {form} ")"' for name, form in arguments.items()])
    # A terminal with bracket and name tells a list of calls from other text.
    first = [f'{answer.token(_LIST, name + "(")} {form} ")"' for name, form in arguments.items()]
    rest = f'("," " "? {call})* "]"'
    names = "|".join(re.escape(name) for name in arguments)
    answer.open_with([f"({' | '.join(first)}) {rest}"], rf"{_LIST}{SPACE}({names})\(")
    answer.add(_AROUND[0], [f'"[" {call} {rest} {answer.mark(_AROUND[1])}?'])


def _arguments(answer: AnswerGrammar, parameters: Mapping[str, Any]) -> str:
    """The form of a call's arguments, in the schema's order; values as JSON."""
    return f"({' | '.join(_form(answer, object_form) for object_form in object_forms(parameters))})"


def _form(answer: AnswerGrammar, form: ObjectForm) -> str:
    if form.is_open:
        argument = rf"/[A-Za-z_]\w*/ {answer.text('=')} {answer.json({})}"
        return f'({argument} ("," " "? {argument})*)?'
    rest, starts, may_be_empty = '""', list[str](), True
    for name, schema in reversed([*form.members.items()]):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidRequest(
                "tools", f"pythonic calls cannot have a parameter {name!r}, which is no name in Python"
            )
        argument = f"{answer.text(f'{name}=')} {answer.json(schema)}"
        if name in form.required:
            starts, may_be_empty = [], False
        starts.insert(0, f"{argument} {rest}")
        optional = "" if name in form.required else "?"
        rest = answer.form([f'("," " "? {argument}){optional} {rest}'])
    return f"({' | '.join(starts)}){'?' if may_be_empty else ''}" if starts else '""'


PYTHONIC = ToolParserFamily(
    PythonicToolParser, lambda template: "[func_name1(" in template or "<|python_start|>" in template, _hold
)
