"""Pythonic tool calls: the whole answer is a list of calls in Python, `[weather(city="Paris"), add(a=1, b=2)]`."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

from services.gateway.tool_parsers.base import (
    ParsedToolCall,
    ParserOutput,
    ToolParameters,
    ToolParser,
    ToolParserFamily,
)

_MAX_CHARS = 100_000
_AROUND = ("<|python_start|>", "<|python_end|>")


class PythonicToolParser(ToolParser):
    """Reads an answer that begins with a bracket at its end, and passes on all other answers as they come."""

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
    """Return the calls of a Python list; empty if it is none, or calls a function that is not in `names`."""
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
    arguments = {str(it.arg): ast.literal_eval(it.value) for it in item.keywords if it.arg is not None}
    return ParsedToolCall(ast.unparse(item.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


PYTHONIC = ToolParserFamily(
    PythonicToolParser, lambda template: "[func_name1(" in template or "<|python_start|>" in template
)
