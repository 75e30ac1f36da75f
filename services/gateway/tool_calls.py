"""Tool calling: the tools a request offers, and a streaming parser that finds calls in generated text.

Text is passed on as it comes. A call is passed on whole at its end, or in pieces as soon as its function is known.
Formats: Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 writes `{"name":
..., "parameters": {...}}` as the whole answer (also after `<|python_tag|>`, several with `;` between them), Mistral
writes `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or, later, `[TOOL_CALLS]NAME[ARGS]{...}`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from moonpool.errors import InvalidRequest

MAX_NAME_CHARS = 256
"""Characters that may stand between a marker and the object, for the form in which the name stands there."""


_NAME_BEFORE_OBJECT = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")


_CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""What a call begins with whose arguments can be told before its end is there."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A call: the function's name, and its arguments, a JSON object as text."""

    name: str
    arguments: str


@dataclass(slots=True)
class PartialToolCall:
    """One call in the JSON, from a character to another; `name` is known when its arguments have begun."""

    begin: int
    end: int | None = None
    name: str = ""
    arguments: int = 0
    arguments_end: int | None = None


class ToolCallScanner:
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
        self.items: list[PartialToolCall] = []
        """The calls that have begun, or what stands in their places."""

    def end(self, text: str) -> int | None:
        """Where the JSON ends, or the marker where none begins; None = that is to come."""
        if self._begin is None:
            rest = text[self._marker_chars :]
            if not self._find_begin(rest):
                return None if self._may_begin(rest) else self._marker_chars
        return self._scan(text)

    def calls(self, text: str, names: Collection[str]) -> list[ParsedToolCall]:
        """The calls of what ended; none when it is no JSON, or calls what is not among `names`."""
        if self._begin is None:
            return []
        value = parse_json(text[self._begin :])
        if self._name:
            value = {"name": self._name, "arguments": value}
        found = [tool_call_from_json(item, names) for item in (value if isinstance(value, list) else [value])]
        return [call for call in found if call is not None] if None not in found else []

    def _find_begin(self, rest: str) -> bool:
        stripped = rest.lstrip()
        if stripped.startswith("{") or (self._named and stripped.startswith("[")):
            self._begin = self._marker_chars + len(rest) - len(stripped)
            self._outer = int(stripped.startswith("["))
        elif self._named and (named := _NAME_BEFORE_OBJECT.match(rest)):
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
                self.items.append(PartialToolCall(at, name=self._name, arguments=at))
        elif self._depth == self._outer + 1:
            self.items.append(PartialToolCall(at))
        elif self._depth == self._outer + 2 and text[at] == "{":
            item = self.items[-1]
            head = _CALL_HEAD.fullmatch(text, item.begin, at)
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


def parse_json(text: str) -> Any:
    """A JSON value; None also of what is no JSON."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def tool_call_from_json(item: Any, names: Collection[str]) -> ParsedToolCall | None:
    """A call of one JSON value; arguments may be an object, such an object as text, or nothing."""
    name = item.get("name") if isinstance(item, dict) else None
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


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a function begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next characters of the arguments of the call that has begun."""

    text: str


ParserOutput = str | ParsedToolCall | ToolCallStart | ArgumentsDelta
"""What an answer's text is made of: text, calls, and pieces of calls."""


class ToolCallStreamer:
    """Tells the calls of an object before its end: each from when its name is known, and its arguments have begun.

    What stands in the arguments is not looked at before it is told: a call that breaks off, or whose JSON is broken
    behind that place, is a call all the same.
    """

    def __init__(self, calls: ToolCallScanner, names: Collection[str]) -> None:
        """`names` are the functions that may be called."""
        self._calls = calls
        self._names = names
        self._told = 0  # calls that were told, or passed over
        self._at: int | None = None  # in the arguments that are being told
        self.begun = False
        """Something was told."""

    def tell(self, text: str) -> Iterator[ParserOutput]:
        """What is new in the object's text so far."""
        while self._told < len(self._calls.items):
            item = self._calls.items[self._told]
            if item.name not in self._names:
                if item.end is None or not self.begun:
                    return
                yield from self._passed(item, text)
                continue
            if self._at is None:
                self.begun, self._at = True, item.arguments
                yield ToolCallStart(item.name)
            end = len(text) if item.arguments_end is None else item.arguments_end
            if end > self._at:
                yield ArgumentsDelta(text[self._at : end])
            self._at = end
            if item.arguments_end is None:
                return
            self._told, self._at = self._told + 1, None

    def _passed(self, item: PartialToolCall, text: str) -> Iterator[ParserOutput]:
        """A call behind others that is of another form, or none: it is told when it is whole."""
        whole = text[item.begin : item.end]
        self._told += 1
        yield tool_call_from_json(parse_json(whole), self._names) or whole


DEFAULT_CALL_ID = "call_{:.24}"
"""Form of a call's id, of hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
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
    ids: str = DEFAULT_CALL_ID


TOOL_CALL_FORMATS = {
    "hermes": ToolCallFormat("<tool_call>", closer="</tool_call>"),
    "llama3": ToolCallFormat("<|python_tag|>", closer=";", bare=True),
    "mistral": ToolCallFormat("[TOOL_CALLS]", named=True, ids="{:.9}"),  # its templates refuse other ids
}


def tool_call_format_of(chat_template: str) -> str:
    """The family whose marker a chat template writes or speaks of; "" = none that is known."""
    if "<function=" in chat_template:  # Qwen3-Coder's, which is no JSON
        return ""
    found = [name for name, family in TOOL_CALL_FORMATS.items() if family.marker in chat_template]
    if not found and '"parameters"' in chat_template and "<|start_header_id|>" in chat_template:
        return "llama3"
    return found[0] if found else ""


class ToolCallParser:
    """Finds the calls in one answer. What `push` and `end` return is the answer, in order."""

    def __init__(self, family: ToolCallFormat, names: Collection[str], *, piecewise: bool = False) -> None:
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
        self._object: ToolCallScanner | None = None  # of the call that `_held` begins with
        self._telling: ToolCallStreamer | None = None  # its pieces
        self._written = False  # some text has been returned
        self._called = False  # a call was the last that was returned

    def push(self, text: str) -> list[ParserOutput]:
        """Take further text; returns what is certain now."""
        self._held += text
        found: list[ParserOutput] = []
        while self._in_call(found) if self._object is not None else self._in_text(found):
            pass
        return found

    def end(self) -> list[ParserOutput]:
        """Return what is still held back; the answer has ended."""
        rest, self._held = self._held, ""
        if self._telling is not None and self._telling.begun:
            return []
        over = self._called and self._family.closer.startswith(rest.strip())
        return [rest] if rest and not over else []

    def _in_text(self, found: list[ParserOutput]) -> bool:
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
        return len(self._held[: len(self._held) - _marker_overlap(self._held, self._family.marker)].rstrip())

    def _begin(self, at: int, marker_chars: int, found: list[ParserOutput]) -> None:
        """A call begins behind so many characters; white space before it belongs to it."""
        space = at - len(self._held[:at].rstrip())
        self._return_text(at - space, found)
        self._object = ToolCallScanner(space + marker_chars, named=self._family.named)
        self._telling = ToolCallStreamer(self._object, self._names) if self._piecewise else None

    def _return_text(self, chars: int, found: list[ParserOutput]) -> None:
        text, self._held = self._held[:chars], self._held[chars:]
        if self._called:
            text = text.lstrip()
        if text:
            found.append(text)
            self._written, self._called = True, False

    def _in_call(self, found: list[ParserOutput]) -> bool:
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


class ForcedToolCallParser:
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
        self._calls = ToolCallScanner(0, named=True)
        self._telling = ToolCallStreamer(self._calls, names) if piecewise else None
        self._begun = False

    def push(self, text: str) -> list[ParserOutput]:
        """Take further text; nothing is certain before the end, unless calls go on in pieces."""
        self._text += text
        if self._telling is None:
            return []
        if self._name:
            return self._arguments(text)
        self._calls.end(self._text)
        return list(self._telling.tell(self._text))

    def _arguments(self, text: str) -> list[ParserOutput]:
        """All of the answer is arguments, but white space before them."""
        if self._begun:
            return [ArgumentsDelta(text)] if text else []
        begin = self._text.lstrip()
        if not begin:
            return []
        self._begun = True
        return [ToolCallStart(self._name), ArgumentsDelta(begin)]

    def end(self) -> list[ParserOutput]:
        """The calls; the text where the answer was cut."""
        if self._begun or (self._telling is not None and self._telling.begun):
            return []
        value = parse_json(self._text)
        given = [{"name": self._name, "arguments": value}] if self._name and isinstance(value, dict) else value
        found = [tool_call_from_json(item, self._names) for item in given] if isinstance(given, list) else []
        calls = [call for call in found if call is not None]
        return [*calls] if calls and len(calls) == len(found) else [self._text] if self._text else []


def _marker_overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` with which `marker` begins."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Functions that may be called.

    Attributes:
        definitions: in OpenAI's form, as chat templates take them.
        several: an answer may call more than one.
        forced: what an answer has to call: a function by its name, "" = any of them, None = it need not.
    """

    definitions: Sequence[Mapping[str, Any]]
    several: bool = True
    forced: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(definition["function"]["name"] for definition in self.definitions)

    def schema(self) -> dict[str, Any]:
        """What an answer is made to be that has to call: the arguments, or a list of calls.

        Raises:
            InvalidRequest: naming `tools`: references in parameters do not hold within the list's schema.
        """
        parameters = {it["function"]["name"]: it["function"]["parameters"] for it in self.definitions}
        if self.forced:
            return dict(parameters[self.forced])
        if any("$defs" in schema or "definitions" in schema for schema in parameters.values()):
            raise InvalidRequest("tools", "with $defs in parameters, tool_choice can name a function, not require any")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in parameters.items()
        ]
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if self.several else {"maxItems": 1})}


@dataclass(frozen=True, slots=True)
class AnswerToolCall:
    """A call in an answer: its number there, its id, the function, and the arguments: a JSON object as text."""

    number: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerArgumentsDelta:
    """Further characters of the arguments of a call that has begun, by its number."""

    number: int
    arguments: str


AnswerPiece = str | AnswerToolCall | AnswerArgumentsDelta
"""A part of an answer: text or a call."""


def tool_definition(
    place: str, name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A function as chat templates take it.

    Raises:
        InvalidRequest: its name is wrong; names `place`.
    """
    if not _FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(f"{place}.name", "must have 1 to 64 letters, digits, _, . and -")
    told = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **told, "parameters": parameters or _NO_PARAMETERS}}


def checked_tools(definitions: Sequence[Mapping[str, Any]], forced: str | None, *, several: bool) -> ToolSet | None:
    """The functions of a request; None when there are none.

    Raises:
        InvalidRequest: two have the same name, or what is to be called is not among them.
    """
    if forced == "" and len(definitions) == 1:
        forced = str(definitions[0]["function"]["name"])
    tools = ToolSet(definitions, several, forced)
    if len(tools.names) < len(definitions):
        raise InvalidRequest("tools", "two of them have the same name")
    if forced is not None and forced not in ({""} if definitions else set()) | tools.names:
        raise InvalidRequest("tool_choice", "calls what is not among the tools")
    return tools if definitions else None


class AnswerParser:
    """The pieces of a request's answers, as they come: calls too, where the request has tools.

    In a stream (`push`, `end`) a call comes as its beginning, with all its arguments or none, and parts of these.
    """

    def __init__(self, tools: ToolSet | None, family: str) -> None:
        """`family` is one of `FAMILIES`; any when there are no tools."""
        self._tools = tools
        self._family = TOOL_CALL_FORMATS.get(family)
        self._request_id = ""
        self._ids = self._family.ids if self._family is not None else DEFAULT_CALL_ID
        self._finders: dict[int, ToolCallParser | ForcedToolCallParser] = {}
        self._calls: dict[int, int] = {}  # how many have begun, by choice
        self._dropped: dict[int, bool] = {}  # the last that has begun is one too many

    def begin(self, request_id: str) -> None:
        """Take the request's id, from which ids of calls are made."""
        self._request_id = request_id

    def called(self, choice: int) -> bool:
        """Whether an answer has called something."""
        return bool(self._calls.get(choice))

    def push(self, text: str, choice: int) -> list[AnswerPiece]:
        """The pieces that a text of an answer makes certain."""
        if self._tools is None:
            return [text] if text else []
        return list(self._numbered(self._finder(self._tools, choice).push(text), choice))

    def end(self, choice: int) -> list[AnswerPiece]:
        """The last pieces of an answer."""
        if self._tools is None:
            return []
        return list(self._numbered(self._finder(self._tools, choice).end(), choice))

    def whole(self, text: str, choice: int) -> list[str | AnswerToolCall]:
        """The pieces of a whole answer; texts that follow one another are one, and calls are whole."""
        if self._tools is not None:
            self._finders[choice] = self._new_finder(self._tools, piecewise=False)
        pieces: list[str | AnswerToolCall] = []
        for piece in [*self.push(text, choice), *self.end(choice)]:
            assert not isinstance(piece, AnswerArgumentsDelta), "calls are whole"
            if pieces and isinstance(piece, str) and isinstance(pieces[-1], str):
                pieces[-1] += piece
            else:
                pieces.append(piece)
        return pieces

    def _finder(self, tools: ToolSet, choice: int) -> ToolCallParser | ForcedToolCallParser:
        if choice not in self._finders:
            self._finders[choice] = self._new_finder(tools, piecewise=True)
        return self._finders[choice]

    def _new_finder(self, tools: ToolSet, *, piecewise: bool) -> ToolCallParser | ForcedToolCallParser:
        if tools.forced is not None:
            return ForcedToolCallParser(tools.forced, tools.names, piecewise=piecewise)
        assert self._family is not None
        return ToolCallParser(self._family, tools.names, piecewise=piecewise)

    def _numbered(self, found: Sequence[ParserOutput], choice: int) -> Iterator[AnswerPiece]:
        for piece in found:
            match piece:
                case str():
                    yield piece
                case ParsedToolCall(name, arguments):
                    yield from self._begin(choice, name, arguments)
                case ToolCallStart(name):
                    yield from self._begin(choice, name, "")
                case ArgumentsDelta(text):
                    if not self._dropped.get(choice):
                        yield AnswerArgumentsDelta(self._calls[choice] - 1, text)

    def _begin(self, choice: int, name: str, arguments: str) -> Iterator[AnswerToolCall]:
        """The next call, unless it is one too many."""
        number = self._calls.get(choice, 0)
        self._dropped[choice] = bool(number) and self._tools is not None and not self._tools.several
        if not self._dropped[choice]:
            self._calls[choice] = number + 1
            yield AnswerToolCall(number, self._id(choice, number), name, arguments)

    def _id(self, choice: int, number: int) -> str:
        return self._ids.format(hashlib.sha256(f"{self._request_id}/{choice}/{number}".encode()).hexdigest())
