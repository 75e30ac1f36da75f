"""Reads the arguments of past tool calls. Models and clients write them badly, and a conversation must go on."""

from __future__ import annotations

import ast
import json
from typing import Any

from pydantic_core import from_json

_MAX_PYTHON_CHARS = 10_000


def call_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a past call as an object.

    A text may be JSON, JSON that was cut, or a Python dictionary; all else has no arguments.
    """
    if isinstance(value, str):
        value = next((found for read in _READERS if (found := read(value)) is not None), None)
    return value if isinstance(value, dict) else {}


def _json(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def _cut_json(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings") or None
    except ValueError:
        return None


def _python(text: str) -> Any:
    if len(text) > _MAX_PYTHON_CHARS:
        return None
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


_READERS = (_json, _python, _cut_json)
