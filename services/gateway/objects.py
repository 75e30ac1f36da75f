"""The JSON of calls in text that grows: where it ends, and which calls have begun in it."""

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
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""What a call begins with whose arguments can be told before its end is there."""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call: the function's name, and its arguments, a JSON object as text."""

    name: str
    arguments: str


@dataclass(slots=True)
class Item:
    """One call in the JSON, from a character to another; `name` is known when its arguments have begun."""

    begin: int
    end: int | None = None
    name: str = ""
    arguments: int = 0
    arguments_end: int | None = None


class CallObject:
    """A marker and the JSON behind it: an object that is a call, a list of them, or a call's arguments."""

    def __init__(self, marker_chars: int, *, named: bool) -> None:
        """Begin before the first character.

        Args:
            marker_chars: characters before the JSON: white space and the marker.
            named: the JSON may be a list, and a name may stand before it, which makes it this function's arguments.
        """
        self._marker_chars = marker_chars
        self._named = named
        self._begin: int | None = None
        self._name = ""
        self._outer = 0  # depth around a call
        self._seen = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.items: list[Item] = []
        """The calls that have begun, or what stands in their places."""

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
        value = parsed(text[self._begin :])
        if self._name:
            value = {"name": self._name, "arguments": value}
        found = [call_of(item, names) for item in (value if isinstance(value, list) else [value])]
        return [call for call in found if call is not None] if None not in found else []

    def _find_begin(self, rest: str) -> bool:
        stripped = rest.lstrip()
        if stripped.startswith("{") or (self._named and stripped.startswith("[")):
            self._begin = self._marker_chars + len(rest) - len(stripped)
            self._outer = int(stripped.startswith("["))
        elif self._named and (named := _NAMED.match(rest)):
            self._name, self._begin = named["name"], self._marker_chars + named.end()
        self._seen = self._begin or 0
        return self._begin is not None

    def _may_begin(self, rest: str) -> bool:
        stripped = rest.lstrip()
        return not stripped or (self._named and len(stripped) < MAX_NAME_CHARS and "{" not in stripped)

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
                self._opened(text, at)
            elif char in "}]":
                self._depth -= 1
                self._closed(at + 1)
                if not self._depth:
                    return at + 1
        self._seen = len(text)
        return None

    def _opened(self, text: str, at: int) -> None:
        """A bracket opens there: of a call, or maybe of its arguments."""
        if self._name:
            if self._depth == 1:
                self.items.append(Item(at, name=self._name, arguments=at))
        elif self._depth == self._outer + 1:
            self.items.append(Item(at))
        elif self._depth == self._outer + 2 and text[at] == "{":
            item = self.items[-1]
            head = _HEAD.fullmatch(text, item.begin, at)
            if head is not None:
                item.name, item.arguments = head["name"], at

    def _closed(self, end: int) -> None:
        """A bracket closes before `end`."""
        if not self.items:
            return
        item, inner = self.items[-1], self._outer + (not self._name)
        if item.name and item.arguments_end is None and self._depth == inner:
            item.arguments_end = end
        if self._depth == self._outer and item.end is None:
            item.end = end


def parsed(text: str) -> Any:
    """A JSON value; None also of what is no JSON."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def call_of(item: Any, names: Collection[str]) -> FoundCall | None:
    """A call of one JSON value; arguments may be an object, such an object as text, or nothing."""
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        return FoundCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None
