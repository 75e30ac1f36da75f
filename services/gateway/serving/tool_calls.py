"""Tool calling: the tools that a request offers, and parsers that find tool calls in generated text while it arrives.

Text is passed on at once. A call is passed on at its end or, in a stream, as soon as its function is known.

Formats: Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Llama 3 writes `{"name":
..., "parameters": {...}}` as the whole answer, also after `<|python_tag|>`, with `;` between calls. Mistral writes
`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or, later, `[TOOL_CALLS]NAME[ARGS]{...}`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import from_json

from moonpool.errors import InvalidRequest

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Functions that the model may call.

    Attributes:
        definitions: OpenAI's definitions, as chat templates take them.
        parallel: an answer may have more than one call.
        tool_choice: the function that an answer must call; "" for any function, None for no obligation.
    """

    definitions: Sequence[Mapping[str, Any]]
    parallel: bool = True
    tool_choice: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(definition["function"]["name"] for definition in self.definitions)

    def schema(self) -> dict[str, Any]:
        """JSON schema of an answer that must call: the arguments of a function, or a list of calls.

        Raises:
            InvalidRequest: the parameters have definitions, which a list of calls cannot have; names `tools`.
        """
        parameters = {it["function"]["name"]: it["function"]["parameters"] for it in self.definitions}
        if self.tool_choice:
            return dict(parameters[self.tool_choice])
        if any("$defs" in schema or "definitions" in schema for schema in parameters.values()):
            raise InvalidRequest("tools", "if parameters have $defs, tool_choice must name a function")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in parameters.items()
        ]
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if self.parallel else {"maxItems": 1})}


def tool_definition(
    field: str, name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> dict[str, Any]:
    """OpenAI's definition of a function, as chat templates take definitions.

    Raises:
        InvalidRequest: the name is wrong; names `field`.
    """
    if not _FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(f"{field}.name", "must have 1 to 64 letters, digits, _, . and -")
    optional = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **optional, "parameters": parameters or _NO_PARAMETERS}}


def checked_tools(
    definitions: Sequence[Mapping[str, Any]], tool_choice: str | None, *, parallel: bool
) -> ToolSet | None:
    """The functions of a request; None without functions.

    Raises:
        InvalidRequest: two functions have the same name, or `tool_choice` names none of them.
    """
    if tool_choice == "" and len(definitions) == 1:
        tool_choice = str(definitions[0]["function"]["name"])
    tools = ToolSet(definitions, parallel, tool_choice)
    if len(tools.names) < len(definitions):
        raise InvalidRequest("tools", "two functions have the same name")
    if tool_choice is not None and tool_choice not in ({""} if definitions else set()) | tools.names:
        raise InvalidRequest("tool_choice", "must name a function of tools")
    return tools if definitions else None


DEFAULT_CALL_ID = "call_{:.24}"
"""Format of the id of a call; the argument is hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes tool calls.

    Attributes:
        marker: text before a call.
        end_marker: text that may follow a call and is not passed on.
        allow_unmarked: a call that is the whole answer needs no marker.
        name_before_json: the name may stand before the JSON, and the JSON may be a list of calls.
        id_format: format of the id of a call.
    """

    marker: str
    end_marker: str = ""
    allow_unmarked: bool = False
    name_before_json: bool = False
    id_format: str = DEFAULT_CALL_ID


TOOL_CALL_FORMATS = {
    "hermes": ToolCallFormat("<tool_call>", end_marker="</tool_call>"),
    "llama3": ToolCallFormat("<|python_tag|>", end_marker=";", allow_unmarked=True),
    # Mistral's chat templates refuse other ids.
    "mistral": ToolCallFormat("[TOOL_CALLS]", name_before_json=True, id_format="{:.9}"),
}
"""Formats by the name that `--tool-call-parser` takes."""


def tool_call_format_of(chat_template: str) -> str:
    """Name of the format whose marker a chat template has; "" if the format is unknown."""
    if "<function=" in chat_template:  # Qwen3-Coder's format is not JSON
        return ""
    found = [name for name, known in TOOL_CALL_FORMATS.items() if known.marker in chat_template]
    if not found and '"parameters"' in chat_template and "<|start_header_id|>" in chat_template:
        return "llama3"
    return found[0] if found else ""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A whole call. `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a call, whose arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next characters of the arguments of the call that started last."""

    text: str


ParserOutput = str | ParsedToolCall | ToolCallStart | ArgumentsDelta
"""A part of an answer: text, a whole call, or a part of a call."""


def parse_json(text: str) -> Any:
    """Parse a JSON value. Returns None for null, and for text that is not JSON."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def tool_call_from_json(item: Any, names: Collection[str]) -> ParsedToolCall | None:
    """The call that a JSON value describes; None if it describes no call of a function in `names`.

    The arguments may be an object, an object as text, or missing.
    """
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


MAX_NAME_CHARS = 256
"""Characters that may stand between a marker and the JSON, in formats where the name stands there."""
_NAME_BEFORE_JSON = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")
_CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""Start of a call whose arguments can be sent before the call ends."""


@dataclass(slots=True)
class PartialToolCall:
    """A call within JSON. The numbers are positions in the text; `name` is known once the arguments have started."""

    start: int
    end: int | None = None
    name: str = ""
    arguments: int = 0
    arguments_end: int | None = None


class ToolCallJson:
    """An incremental parser of the JSON after a marker: a call, a list of calls, or the arguments of one call.

    The caller passes the whole text so far each time. Every character is looked at once.
    """

    def __init__(self, names: Collection[str], marker_chars: int = 0, *, name_before_json: bool = True) -> None:
        """Start before the first character.

        Args:
            names: functions that may be called.
            marker_chars: characters before the JSON: white space and the marker.
            name_before_json: the JSON may be a list, or may have the name of a function before it.
        """
        self._names = names
        self._marker_chars = marker_chars
        self._name_before_json = name_before_json
        self._start: int | None = None
        self._name = ""
        self._outer_depth = 0  # depth around a call
        self._scanned = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._calls: list[PartialToolCall] = []
        self._num_sent = 0  # calls that were sent completely
        self._sent_chars: int | None = None  # position in the arguments that are being sent
        self.streamed = False
        """Whether `stream` has returned a part of a call."""

    def find_end(self, text: str) -> int | None:
        """Position behind the JSON; None while the JSON is incomplete. Without JSON, the position behind the marker."""
        if self._start is None:
            rest = text[self._marker_chars :]
            if not self._find_start(rest):
                return None if self._may_start(rest) else self._marker_chars
        return self._scan(text)

    def calls(self, text: str) -> list[ParsedToolCall]:
        """The calls in complete JSON; empty if the JSON is broken, or calls an unknown function."""
        if self._start is None:
            return []
        value = parse_json(text[self._start :])
        if self._name:
            value = {"name": self._name, "arguments": value}
        found = [tool_call_from_json(item, self._names) for item in (value if isinstance(value, list) else [value])]
        return [call for call in found if call is not None] if None not in found else []

    def stream(self, text: str) -> Iterator[ParserOutput]:
        """The parts of calls that are new in the text so far.

        A call starts as soon as its name is known and its arguments have started. The arguments are not checked: a
        call that is cut off, or whose JSON is broken further on, counts as a call.
        """
        while self._num_sent < len(self._calls):
            call = self._calls[self._num_sent]
            if call.name not in self._names:
                if call.end is None or not self.streamed:
                    return
                yield self._other_item(text[call.start : call.end])
                continue
            if self._sent_chars is None:
                self.streamed, self._sent_chars = True, call.arguments
                yield ToolCallStart(call.name)
            end = len(text) if call.arguments_end is None else call.arguments_end
            if end > self._sent_chars:
                yield ArgumentsDelta(text[self._sent_chars : end])
            self._sent_chars = end
            if call.arguments_end is None:
                return
            self._num_sent, self._sent_chars = self._num_sent + 1, None

    def _other_item(self, item: str) -> ParserOutput:
        """An item of a list that does not start like a call: a call in another form, or text."""
        self._num_sent += 1
        return tool_call_from_json(parse_json(item), self._names) or item

    def _find_start(self, rest: str) -> bool:
        stripped = rest.lstrip()
        if stripped.startswith("{") or (self._name_before_json and stripped.startswith("[")):
            self._start = self._marker_chars + len(rest) - len(stripped)
            self._outer_depth = int(stripped.startswith("["))
        elif self._name_before_json and (match := _NAME_BEFORE_JSON.match(rest)):
            self._name, self._start = match["name"], self._marker_chars + match.end()
        self._scanned = self._start or 0
        return self._start is not None

    def _may_start(self, rest: str) -> bool:
        stripped = rest.lstrip()
        return not stripped or (self._name_before_json and len(stripped) < MAX_NAME_CHARS and "{" not in stripped)

    def _scan(self, text: str) -> int | None:
        """Scan the new characters. Both kinds of brackets count alike; `calls` refuses JSON that mixes them."""
        for at in range(self._scanned, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
                self._open_bracket(text, at)
            elif char in "}]":
                self._depth -= 1
                self._close_bracket(at + 1)
                if not self._depth:
                    return at + 1
        self._scanned = len(text)
        return None

    def _open_bracket(self, text: str, at: int) -> None:
        """Note the start of a call, or of the arguments of a call."""
        if self._name:
            if self._depth == 1:
                self._calls.append(PartialToolCall(at, name=self._name, arguments=at))
        elif self._depth == self._outer_depth + 1:
            self._calls.append(PartialToolCall(at))
        elif self._depth == self._outer_depth + 2 and text[at] == "{":
            call = self._calls[-1]
            head = _CALL_HEAD.fullmatch(text, call.start, at)
            if head is not None:
                call.name, call.arguments = head["name"], at

    def _close_bracket(self, end: int) -> None:
        """Note the end of the arguments of a call, or of a call."""
        if not self._calls:
            return
        call, inner = self._calls[-1], self._outer_depth + (not self._name)
        if call.name and call.arguments_end is None and self._depth == inner:
            call.arguments_end = end
        if self._depth == self._outer_depth and call.end is None:
            call.end = end


class ToolParser(Protocol):
    """Finds the tool calls in one answer. The outputs of `push` and `end` are the answer, in order."""

    def push(self, text: str) -> list[ParserOutput]:
        """Take the next text. Returns what is certain now."""
        ...

    def end(self) -> list[ParserOutput]:
        """Return what is still held back, after the last text."""
        ...


class MarkedToolParser(ToolParser):
    """Finds calls that the model marks, in the format of its family."""

    def __init__(self, call_format: ToolCallFormat, names: Collection[str], *, streaming: bool = False) -> None:
        """Start an answer.

        Args:
            call_format: format of the model's family.
            names: functions that may be called; a call of another function is text.
            streaming: send calls in parts.
        """
        self._format = call_format
        self._names = names
        self._streaming = streaming
        self._held = ""  # text that may be part of a call or precede a call
        self._json: ToolCallJson | None = None  # of the call at the start of `_held`
        self._had_text = False
        self._last_was_call = False

    def push(self, text: str) -> list[ParserOutput]:
        self._held += text
        output: list[ParserOutput] = []
        while self._parse_call(output) if self._json is not None else self._parse_text(output):
            pass
        return output

    def end(self) -> list[ParserOutput]:
        rest, self._held = self._held, ""
        if self._json is not None and self._json.streamed:
            return []
        is_end_marker = self._last_was_call and self._format.end_marker.startswith(rest.strip())
        return [rest] if rest and not is_end_marker else []

    def _parse_text(self, output: list[ParserOutput]) -> bool:
        """Move the text before the next call to `output`. Returns whether there may be more to parse."""
        call_format, stripped = self._format, self._held.lstrip()
        if self._last_was_call and call_format.end_marker and stripped.startswith(call_format.end_marker):
            self._held = stripped.removeprefix(call_format.end_marker)
            return True
        if call_format.allow_unmarked and not self._had_text and stripped.startswith("{"):
            self._start_call(self._held.index("{"), 0, output)
            return True
        at = self._held.find(call_format.marker)
        if at >= 0:
            self._start_call(at, len(call_format.marker), output)
            return True
        self._move_text(self._certain_chars(stripped), output)
        return False

    def _certain_chars(self, stripped: str) -> int:
        """Number of characters that are text for certain. White space at the end may precede a call."""
        if self._last_was_call and self._format.end_marker.startswith(stripped):
            return 0
        return len(self._held[: len(self._held) - _marker_overlap(self._held, self._format.marker)].rstrip())

    def _start_call(self, at: int, marker_chars: int, output: list[ParserOutput]) -> None:
        """Start a call at a position. White space before the position belongs to the call."""
        space = at - len(self._held[:at].rstrip())
        self._move_text(at - space, output)
        self._json = ToolCallJson(self._names, space + marker_chars, name_before_json=self._format.name_before_json)

    def _move_text(self, chars: int, output: list[ParserOutput]) -> None:
        text, self._held = self._held[:chars], self._held[chars:]
        if self._last_was_call:
            text = text.lstrip()
        if text:
            output.append(text)
            self._had_text, self._last_was_call = True, False

    def _parse_call(self, output: list[ParserOutput]) -> bool:
        """Move a complete call, or its new parts, to `output`. Returns whether there may be more to parse."""
        assert self._json is not None
        calls_json, end = self._json, self._json.find_end(self._held)
        if self._streaming and (end is None or calls_json.streamed):
            output += calls_json.stream(self._held)
        if end is None:
            return False
        calls = [] if calls_json.streamed else calls_json.calls(self._held[:end])
        self._json = None
        if calls or calls_json.streamed:
            self._held, self._last_was_call = self._held[end:], True
            output += calls
        else:
            self._last_was_call = False
            self._move_text(end, output)
        return True


class ForcedToolParser(ToolParser):
    """Reads an answer that a grammar forces to be the arguments of one function, or a list of calls."""

    def __init__(self, function: str, names: Collection[str], *, streaming: bool = False) -> None:
        """Start an answer.

        Args:
            function: name of the function whose arguments are the answer; "" if the answer is a list of calls.
            names: functions that may be called.
            streaming: send calls in parts.
        """
        self._function = function
        self._names = names
        self._streaming = streaming
        self._text = ""
        self._json = ToolCallJson(names)
        self._started = False

    def push(self, text: str) -> list[ParserOutput]:
        self._text += text
        if not self._streaming:
            return []
        if self._function:
            return self._stream_arguments(text)
        self._json.find_end(self._text)
        return list(self._json.stream(self._text))

    def _stream_arguments(self, text: str) -> list[ParserOutput]:
        """All of the answer is arguments, except white space before them."""
        if self._started:
            return [ArgumentsDelta(text)] if text else []
        arguments = self._text.lstrip()
        if not arguments:
            return []
        self._started = True
        return [ToolCallStart(self._function), ArgumentsDelta(arguments)]

    def end(self) -> list[ParserOutput]:
        """The calls if they were not streamed; the text if the answer was cut off."""
        if self._started or self._json.streamed:
            return []
        value = parse_json(self._text)
        items = [{"name": self._function, "arguments": value}] if self._function and isinstance(value, dict) else value
        found = [tool_call_from_json(item, self._names) for item in items] if isinstance(items, list) else []
        calls = [call for call in found if call is not None]
        return [*calls] if calls and len(calls) == len(found) else [self._text] if self._text else []


def _marker_overlap(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that are the start of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


@dataclass(frozen=True, slots=True)
class AnswerToolCall:
    """A call in an answer. `number` counts the calls of the answer from 0; `arguments` is a JSON object as text."""

    number: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerArgumentsDelta:
    """The next characters of the arguments of the call with this number."""

    number: int
    arguments: str


AnswerPart = str | AnswerToolCall | AnswerArgumentsDelta
"""A part of an answer: text, a call, or more arguments of a call."""


class AnswerParser:
    """Splits the answers of a request into text and tool calls, and gives numbers and ids to the calls.

    In a stream (`push`, `end`), a call comes as its start, with all arguments or none, then as deltas of arguments.
    """

    def __init__(self, tools: ToolSet | None, call_format: str) -> None:
        """`call_format` is a key of `TOOL_CALL_FORMATS`; unused without tools and for forced calls."""
        self._tools = tools
        self._format = TOOL_CALL_FORMATS.get(call_format)
        self._request_id = ""
        self._id_format = self._format.id_format if self._format is not None else DEFAULT_CALL_ID
        self._parsers: dict[int, ToolParser] = {}  # by choice
        self._num_calls: dict[int, int] = {}  # calls that have started, by choice
        self._dropping: dict[int, bool] = {}  # the current call is one too many, by choice

    def start(self, request_id: str) -> None:
        """Take the request's id, which the ids of the calls are derived from."""
        self._request_id = request_id

    def has_tool_calls(self, choice: int) -> bool:
        """Whether an answer has a tool call."""
        return bool(self._num_calls.get(choice))

    def push(self, text: str, choice: int) -> list[AnswerPart]:
        """Take the next text of an answer. Returns the parts that are certain now."""
        if self._tools is None:
            return [text] if text else []
        return list(self._numbered(self._parser(self._tools, choice).push(text), choice))

    def end(self, choice: int) -> list[AnswerPart]:
        """The last parts of an answer."""
        if self._tools is None:
            return []
        return list(self._numbered(self._parser(self._tools, choice).end(), choice))

    def parse_full(self, text: str, choice: int) -> list[str | AnswerToolCall]:
        """The parts of a whole answer, with whole calls. Consecutive texts are one part."""
        if self._tools is not None:
            self._parsers[choice] = self._new_parser(self._tools, streaming=False)
        parts: list[str | AnswerToolCall] = []
        for part in [*self.push(text, choice), *self.end(choice)]:
            assert not isinstance(part, AnswerArgumentsDelta), "calls are whole"
            if parts and isinstance(part, str) and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return parts

    def _parser(self, tools: ToolSet, choice: int) -> ToolParser:
        if choice not in self._parsers:
            self._parsers[choice] = self._new_parser(tools, streaming=True)
        return self._parsers[choice]

    def _new_parser(self, tools: ToolSet, *, streaming: bool) -> ToolParser:
        if tools.tool_choice is not None:
            return ForcedToolParser(tools.tool_choice, tools.names, streaming=streaming)
        assert self._format is not None
        return MarkedToolParser(self._format, tools.names, streaming=streaming)

    def _numbered(self, output: Sequence[ParserOutput], choice: int) -> Iterator[AnswerPart]:
        for part in output:
            match part:
                case str():
                    yield part
                case ParsedToolCall(name, arguments):
                    yield from self._start_call(choice, name, arguments)
                case ToolCallStart(name):
                    yield from self._start_call(choice, name, "")
                case ArgumentsDelta(text):
                    if not self._dropping.get(choice):
                        yield AnswerArgumentsDelta(self._num_calls[choice] - 1, text)

    def _start_call(self, choice: int, name: str, arguments: str) -> Iterator[AnswerToolCall]:
        """The next call, unless the answer may have one call only and has one."""
        number = self._num_calls.get(choice, 0)
        self._dropping[choice] = bool(number) and self._tools is not None and not self._tools.parallel
        if not self._dropping[choice]:
            self._num_calls[choice] = number + 1
            yield AnswerToolCall(number, self._call_id(choice, number), name, arguments)

    def _call_id(self, choice: int, number: int) -> str:
        return self._id_format.format(hashlib.sha256(f"{self._request_id}/{choice}/{number}".encode()).hexdigest())
