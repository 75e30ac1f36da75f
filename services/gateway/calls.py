"""Calls of functions in an answer's text: where they begin and end in each family of models.

Text goes on as it comes. A call goes on whole, when its end is there, and what looks like a call and is none is text;
or it goes on in pieces as soon as it is known which function it calls.
Forms: Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 writes
`{"name": ..., "parameters": {...}}` as the whole answer (also after `<|python_tag|>`, several with `;` between them),
Mistral writes `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or, later, `[TOOL_CALLS]NAME[ARGS]{...}`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from services.gateway.objects import CallObject, call_of, parsed
from services.gateway.telling import Arguments, CallBegins, Found, Telling

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


class CallFinder:
    """Finds the calls in one answer. What `push` and `end` return is the answer, in order."""

    def __init__(self, family: Family, names: Collection[str], *, piecewise: bool = False) -> None:
        """Take what may be found.

        Args:
            family: of the model.
            names: functions that may be called: what calls another one is text.
            piecewise: calls go on in pieces.
        """
        self._family = family
        self._names = names
        self._piecewise = piecewise
        self._held = ""  # text that may be part of a call or stand before one
        self._object: CallObject | None = None  # of the call that `_held` begins with
        self._telling: Telling | None = None  # its pieces
        self._written = False  # some text has been returned
        self._called = False  # a call was the last that was returned

    def push(self, text: str) -> list[Found]:
        """Take further text; returns what is certain now."""
        self._held += text
        found: list[Found] = []
        while self._in_call(found) if self._object is not None else self._in_text(found):
            pass
        return found

    def end(self) -> list[Found]:
        """Return what is still held back; the answer has ended."""
        rest, self._held = self._held, ""
        if self._telling is not None and self._telling.begun:
            return []
        over = self._called and self._family.closer.startswith(rest.strip())
        return [rest] if rest and not over else []

    def _in_text(self, found: list[Found]) -> bool:
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

    def _begin(self, at: int, marker_chars: int, found: list[Found]) -> None:
        """A call begins behind so many characters; white space before it belongs to it."""
        space = at - len(self._held[:at].rstrip())
        self._return_text(at - space, found)
        self._object = CallObject(space + marker_chars, named=self._family.named)
        self._telling = Telling(self._object, self._names) if self._piecewise else None

    def _return_text(self, chars: int, found: list[Found]) -> None:
        text, self._held = self._held[:chars], self._held[chars:]
        if self._called:
            text = text.lstrip()
        if text:
            found.append(text)
            self._written, self._called = True, False

    def _in_call(self, found: list[Found]) -> bool:
        """Return the call when its end is there, or what is new of it; tells whether there is more to find."""
        assert self._object is not None
        end, telling = self._object.end(self._held), self._telling
        if telling is not None and (end is None or telling.begun):
            found += telling.tell(self._held)
        if end is None:
            return False
        begun = telling is not None and telling.begun
        calls = [] if begun else self._object.calls(self._held[:end], self._names)
        self._object = self._telling = None
        if calls or begun:
            self._held, self._called = self._held[end:], True
            found += calls
        else:
            self._called = False
            self._return_text(end, found)
        return True


class ForcedCalls:
    """Takes an answer for calls: it was made to be the arguments of one function, or a list of calls."""

    def __init__(self, name: str, names: Collection[str], *, piecewise: bool = False) -> None:
        """Take what is called.

        Args:
            name: the function, "" = the answer is a list that says which of `names` it calls.
            names: functions that may be called.
            piecewise: calls go on in pieces.
        """
        self._name = name
        self._names = names
        self._text = ""
        self._calls = CallObject(0, named=True)
        self._telling = Telling(self._calls, names) if piecewise else None
        self._begun = False

    def push(self, text: str) -> list[Found]:
        """Take further text; nothing is certain before the end, unless calls go on in pieces."""
        self._text += text
        if self._telling is None:
            return []
        if self._name:
            return self._arguments(text)
        self._calls.end(self._text)
        return list(self._telling.tell(self._text))

    def _arguments(self, text: str) -> list[Found]:
        """All of the answer is arguments, but white space before them."""
        if self._begun:
            return [Arguments(text)] if text else []
        begin = self._text.lstrip()
        if not begin:
            return []
        self._begun = True
        return [CallBegins(self._name), Arguments(begin)]

    def end(self) -> list[Found]:
        """The calls; the text where the answer was cut."""
        if self._begun or (self._telling is not None and self._telling.begun):
            return []
        value = parsed(self._text)
        given = [{"name": self._name, "arguments": value}] if self._name and isinstance(value, dict) else value
        found = [call_of(item, self._names) for item in given] if isinstance(given, list) else []
        calls = [call for call in found if call is not None]
        return [*calls] if calls and len(calls) == len(found) else [self._text] if self._text else []


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` with which `marker` begins."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
