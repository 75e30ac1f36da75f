"""Calls of functions in an answer's text: where they begin and end in each family of models.

Text goes on as it comes; a call goes on whole, when its end is there. What looks like a call and is none is text.
Forms: Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 writes
`{"name": ..., "parameters": {...}}` as the whole answer (also after `<|python_tag|>`, several with `;` between them),
Mistral writes `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or, later, `[TOOL_CALLS]NAME[ARGS]{...}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

MAX_NAME_CHARS = 256
"""Characters that may stand between a marker and the object, for the form in which the name stands there."""
_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")


DEFAULT_IDS = "call_{:.24}"
"""Form of a call's id, of hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of a family write calls.

    Attributes:
        marker: what a call begins with.
        closer: what may stand behind a call and is no text.
        bare: calls that are a whole answer need no marker.
        named: the name may stand before the object.
        ids: form of a call's id.
    """

    marker: str
    closer: str = ""
    bare: bool = False
    named: bool = False
    ids: str = DEFAULT_IDS


FAMILIES = {
    "hermes": Family("<tool_call>", closer="</tool_call>"),
    "llama3": Family("<|python_tag|>", closer=";", bare=True),
    "mistral": Family("[TOOL_CALLS]", named=True, ids="{:.9}"),  # its templates refuse other ids
}


def family_of(chat_template: str) -> str:
    """The family whose marker a chat template writes or speaks of; "" = none that is known."""
    if "<function=" in chat_template:  # Qwen3-Coder's, which is no JSON
        return ""
    found = [name for name, family in FAMILIES.items() if family.marker in chat_template]
    if not found and '"parameters"' in chat_template and "<|start_header_id|>" in chat_template:
        return "llama3"
    return found[0] if found else ""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call: the function's name, and its arguments, a JSON object as text."""

    name: str
    arguments: str


class CallFinder:
    """Finds the calls in one answer. What `push` and `end` return is the answer, in order."""

    def __init__(self, family: Family, names: Collection[str]) -> None:
        """`names` are the functions that may be called: what calls another one is text."""
        self._family = family
        self._names = names
        self._held = ""  # text that may be part of a call or stand before one
        self._object: _Object | None = None  # of the call that `_held` begins with
        self._written = False  # some text has been returned
        self._called = False  # a call was the last that was returned

    def push(self, text: str) -> list[str | FoundCall]:
        """Take further text; returns what is certain now."""
        self._held += text
        found: list[str | FoundCall] = []
        while self._in_call(found) if self._object is not None else self._in_text(found):
            pass
        return found

    def end(self) -> list[str | FoundCall]:
        """Return what is still held back; the answer has ended."""
        rest, self._held = self._held, ""
        over = self._called and self._family.closer.startswith(rest.strip())
        return [rest] if rest and not over else []

    def _in_text(self, found: list[str | FoundCall]) -> bool:
        """Return text up to the next call; tells whether there is more to find."""
        family, stripped = self._family, self._held.lstrip()
        if self._called and family.closer and stripped.startswith(family.closer):
            self._held = stripped.removeprefix(family.closer)
            return True
        if family.bare and not self._written and stripped.startswith("{"):
            self._begin(self._held.index("{"), 0, found)
            return True
        at = self._held.find(family.marker)
        if at >= 0:
            self._begin(at, len(family.marker), found)
            return True
        self._return_text(self._certain(stripped), found)
        return False

    def _certain(self, stripped: str) -> int:
        """Characters that belong to no call, and have more than white space behind them."""
        closer = self._family.closer
        if self._called and closer.startswith(stripped):
            return 0
        return len(self._held[: len(self._held) - _overlap(self._held, self._family.marker)].rstrip())

    def _begin(self, at: int, marker_chars: int, found: list[str | FoundCall]) -> None:
        """A call begins behind so many characters; white space before it belongs to it."""
        space = at - len(self._held[:at].rstrip())
        self._return_text(at - space, found)
        self._object = _Object(self._family, space + marker_chars)

    def _return_text(self, chars: int, found: list[str | FoundCall]) -> None:
        text, self._held = self._held[:chars], self._held[chars:]
        if self._called:
            text = text.lstrip()
        if text:
            found.append(text)
            self._written, self._called = True, False

    def _in_call(self, found: list[str | FoundCall]) -> bool:
        """Return the call when its end is there; tells whether there is more to find."""
        assert self._object is not None
        end = self._object.end(self._held)
        if end is None:
            return False
        calls = self._object.calls(self._held[:end], self._names)
        self._object = None
        if calls:
            self._held, self._called = self._held[end:], True
            found += calls
        else:
            self._called = False
            self._return_text(end, found)
        return True


class ForcedCalls:
    """Takes an answer for calls: it was made to be the arguments of one function, or a list of calls."""

    def __init__(self, name: str, names: Collection[str]) -> None:
        """`name` is the function, "" = the answer is a list that says which of `names` it calls."""
        self._name = name
        self._names = names
        self._text = ""

    def push(self, text: str) -> list[str | FoundCall]:
        """Take further text; nothing is certain before the end."""
        self._text += text
        return []

    def end(self) -> list[str | FoundCall]:
        """The calls; the text where the answer was cut."""
        value = _json(self._text)
        given = [{"name": self._name, "arguments": value}] if self._name and isinstance(value, dict) else value
        found = [_call(item, self._names) for item in given] if isinstance(given, list) else []
        calls = [call for call in found if call is not None]
        return [*calls] if calls and len(calls) == len(found) else [self._text] if self._text else []


class _Object:
    """A marker and the JSON behind it, in text that grows."""

    def __init__(self, family: Family, marker_chars: int) -> None:
        """`marker_chars` are before the JSON: white space and the marker."""
        self._family = family
        self._marker_chars = marker_chars
        self._begin: int | None = None
        self._name = ""
        self._seen = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Where the JSON ends, or the marker where none begins; None = that is to come."""
        if self._begin is None:
            rest = text[self._marker_chars :]
            if not self._find_begin(rest):
                return None if self._may_begin(rest) else self._marker_chars
        return self._scan(text)

    def calls(self, text: str, names: Collection[str]) -> list[FoundCall]:
        """The calls of what ended; none when it is no JSON, or calls what is not among `names`."""
        if self._begin is None:
            return []
        value = _json(text[self._begin :])
        if self._name:
            value = {"name": self._name, "arguments": value}
        found = [_call(item, names) for item in (value if isinstance(value, list) else [value])]
        return [call for call in found if call is not None] if None not in found else []

    def _find_begin(self, rest: str) -> bool:
        stripped = rest.lstrip()
        if stripped.startswith("{") or (self._family.named and stripped.startswith("[")):
            self._begin = self._marker_chars + len(rest) - len(stripped)
        elif self._family.named and (named := _NAMED.match(rest)):
            self._name, self._begin = named["name"], self._marker_chars + named.end()
        self._seen = self._begin or 0
        return self._begin is not None

    def _may_begin(self, rest: str) -> bool:
        stripped = rest.lstrip()
        return not stripped or (self._family.named and len(stripped) < MAX_NAME_CHARS and "{" not in stripped)

    def _scan(self, text: str) -> int | None:
        """Look at what is new. Brackets of either kind count: what is balanced wrongly is no JSON anyway."""
        for at in range(self._seen, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        self._seen = len(text)
        return None


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` with which `marker` begins."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def _json(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def _call(item: Any, names: Collection[str]) -> FoundCall | None:
    """A call of one JSON value; arguments may be an object, such an object as text, or nothing."""
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        return FoundCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None
