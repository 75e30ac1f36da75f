"""The contract for readers of answers: what a reader finds, and how a reader of calls fits in.

`moonpool.base.answer_formats` says how each family writes calls; the modules beside this one read and write the kinds
of forms.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import from_json

from moonpool.gateway.reasoning_parsers.base import ReasoningText

SPACE = r"[ \n\t]*"
"""Regular expression of the white space that may stand before a call."""
ToolParameters = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters by function: the functions that may be called. A call to another function is text."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A whole call. `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call's start; the arguments follow. `number` is the number that the model gives to the call, if any."""

    name: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next characters in the arguments for the call that started last."""

    text: str


ParserOutput = str | ReasoningText | ParsedToolCall | ToolCallStart | ArgumentsDelta
"""A part of an answer: text, thinking, a whole call, or a part of a call."""


class ToolParser(Protocol):
    """Finds the tool calls in one answer. The outputs of `push` and `end` are the answer, in order.

    Joined, the outputs must not depend on the pieces in which the text comes: whole answers and streamed answers are
    read by the same parser.
    """

    def push(self, text: str) -> list[ParserOutput]:
        """Take the next text. Returns what is certain now."""
        ...

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        """Return what is still held back, after the last text.

        `is_cut`: the answer was cut. A call that had only begun is then not shown: nobody can use half a mark.
        """
        ...


class CallReader(Protocol):
    """Reads an answer from a mark of a call on.

    Attributes:
        rest: what follows the calls, once the calls have ended; None before.
    """

    rest: str | None

    def push(self, text: str) -> list[ParserOutput]:
        """Take the next text, the first time with the mark. Returns what is certain now.

        What is no call is returned as text; the rest is then read anew.
        """
        ...

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        """Return what is still held back, after the last text; see `ToolParser.end`."""
        ...


def parse_json(text: str) -> Any:
    """Parse a JSON value. Returns None for null, and for text that is not JSON."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def tool_call_from_json(item: Any, names: Collection[str]) -> ParsedToolCall | None:
    """The call that a JSON value describes; None if the value describes no call to a function in `names`.

    The arguments may be an object, an object as text, or missing.
    """
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    name = item.get("name", item.get("tool_name")) if isinstance(item, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        return ParsedToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


def marker_overlap(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that are the start of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
