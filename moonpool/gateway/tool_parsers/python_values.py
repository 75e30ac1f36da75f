"""Values in Python's notation as JSON."""

from __future__ import annotations

import ast
import json

from moonpool.gateway.tool_parsers.base import parse_json

_JSON_NAMES = {"true": True, "false": False, "null": None}
_QUOTES = ('"', "'")


class _JsonNames(ast.NodeTransformer):
    """Reads JSON's names of values as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def python_json(text: str) -> str:
    """A Python value as JSON, in which JSON's `true`, `false` and `null` are read as Python's.

    A text that is quoted but not escaped is taken as it is; what is no value at all comes back unchanged.
    """
    if parse_json(text) is not None or text == "null":
        return text
    try:
        value = ast.literal_eval(_JsonNames().visit(ast.parse(text, mode="eval").body))
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if len(text) > 1 and text[0] in _QUOTES and text[-1] == text[0]:
        return json.dumps(text[1:-1], ensure_ascii=False)
    return text
