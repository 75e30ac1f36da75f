"""Reads the arguments of past tool calls. Models and clients write them badly, and a conversation must go on."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from moonpool.base.answer_formats import AnswerFormat, written_calls
from moonpool.base.checkpoint.traced_text import joined, written
from moonpool.base.errors import InvalidRequest

_MAX_PYTHON_CHARS = 10_000


def past_arguments(value: Any, field: str) -> dict[str, Any]:
    """Return the arguments of a past call as an object; see `call_arguments`.

    Raises:
        InvalidRequest: a text has half a character, which no prompt can have; names `field`.
    """
    found = _object(value)
    if not _is_text(found):
        raise InvalidRequest(field, "have half of a character (a lone surrogate)")
    return found


def call_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    A text may be JSON, JSON that was cut, or a Python dictionary; all else, also half a character, has no arguments.
    """
    found = _object(value)
    return found if _is_text(found) else {}


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a chat template takes an assistant's turn with calls.

    Attributes:
        texts: arguments are JSON as text, not objects.
        parts: a turn without text has a part without text, not an empty text.
    """

    texts: bool = False
    parts: bool = False

    def shaped(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a turn whose arguments are objects as the template takes the turn."""
        if self.texts:
            calls = [
                {**call, "function": {**call["function"], "arguments": _json_text(call["function"]["arguments"])}}
                for call in turn["tool_calls"]
            ]
            turn = {**turn, "tool_calls": calls}
        if self.parts and not turn.get("content"):
            turn = {**turn, "content": [{"type": "text", "text": ""}]}
        return turn


CALL_SHAPES = (CallShape(), CallShape(texts=True), CallShape(parts=True), CallShape(texts=True, parts=True))
"""Shapes, of which a template takes the first that it does not refuse."""


def with_text_of_calls(turn: dict[str, Any], calls: Sequence[Mapping[str, Any]], row: AnswerFormat) -> dict[str, Any]:
    """Return a turn with calls in its content, as a family writes calls; arguments are objects."""
    if calls:
        named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        text = written(lambda each: written_calls(row, each), named)
        turn = {**turn, "content": joined(filter(None, (turn.get("content"), text)), "\n")}
    return turn


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_text(found: dict[str, Any]) -> bool:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(value: Any) -> dict[str, Any]:
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
