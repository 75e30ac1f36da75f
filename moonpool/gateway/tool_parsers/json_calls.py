"""Tool calls as JSON behind a mark: the formats of Hermes and Qwen, Llama 3, and Mistral.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Llama 3 writes `{"name": ...,
"parameters": {...}}` as the whole answer, also after `<|python_tag|>`, with `;` between calls. Mistral writes
`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or, later, `[TOOL_CALLS]NAME[ARGS]{...}`.

Text is passed on at once. A call is passed on as soon as the function is known and the arguments have begun. From there
on the call is a call, whatever the arguments turn out to be: an answer read whole has to say the same as a streamed
answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from moonpool.base.grammar import AnswerGrammar
from moonpool.gateway.tool_parsers.base import (
    SPACE,
    ArgumentsDelta,
    ParsedToolCall,
    ParserOutput,
    ToolCallStart,
    ToolParameters,
    ToolParser,
    ToolParserFamily,
    call_head,
    json_call,
    marker_overlap,
    parse_json,
    tool_call_from_json,
)

MAX_NAME_CHARS = 256
"""Characters that may stand between a marker and the JSON, in formats where the name stands there."""
_NAME_BEFORE_JSON = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")
_CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""Start of a call whose arguments can be sent before the call ends."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes tool calls.

    Attributes:
        marker: text before a call.
        end_marker: text that may follow a call and is not passed on.
        allow_unmarked: a call that is the whole answer needs no marker.
        name_before_json: the name may stand before the JSON, and the JSON may be a list of calls.
    """

    marker: str
    end_marker: str = ""
    allow_unmarked: bool = False
    name_before_json: bool = False


@dataclass(slots=True)
class PartialToolCall:
    """A call within JSON. The numbers are positions in the text; `name` is known once the arguments have started."""

    start: int
    end: int | None = None
    name: str = ""
    arguments: int = 0
    arguments_end: int | None = None


class ToolCallJson:
    """An incremental parser for the JSON after a marker: a call, a list of calls, or one call's arguments.

    The caller passes the whole text so far each time. Every character is looked at once.
    """

    def __init__(self, names: Collection[str], marker_chars: int = 0, *, name_before_json: bool = True) -> None:
        """Start before the first character.

        Args:
            names: functions that may be called.
            marker_chars: characters before the JSON: white space and the marker.
            name_before_json: the JSON may be a list, or may have a function's name before it.
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

        A call starts as soon as the name is known and the arguments have started. The arguments are not checked: a call
        that is cut off, or with broken JSON further on, counts as a call.
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
        """Note the start of a call, or of a call's arguments."""
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
        """Note the end of a call's arguments, or of a call."""
        if not self._calls:
            return
        call, inner = self._calls[-1], self._outer_depth + (not self._name)
        if call.name and call.arguments_end is None and self._depth == inner:
            call.arguments_end = end
        if self._depth == self._outer_depth and call.end is None:
            call.end = end


class MarkedToolParser(ToolParser):
    """Finds calls that the model marks, in the family's format."""

    def __init__(self, call_format: ToolCallFormat, names: Collection[str]) -> None:
        """Start an answer.

        Args:
            call_format: format of the model's family.
            names: functions that may be called; a call of another function is text.
        """
        self._format = call_format
        self._names = names
        self._held = ""  # text that may be part of a call or precede a call
        self._json: ToolCallJson | None = None  # for the call at the start of `_held`
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
        return len(self._held[: len(self._held) - marker_overlap(self._held, self._format.marker)].rstrip())

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
        """Move a complete call, or the call's new parts, to `output`. Returns whether there may be more to parse."""
        assert self._json is not None
        calls_json, end = self._json, self._json.find_end(self._held)
        output += calls_json.stream(self._held if end is None else self._held[:end])
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
    """Reads an answer that a grammar forces to be one function's arguments, or a list of calls."""

    def __init__(self, function: str, names: Collection[str]) -> None:
        """Start an answer.

        Args:
            function: name of the function whose arguments are the answer; "" if the answer is a list of calls.
            names: functions that may be called.
        """
        self._function = function
        self._names = names
        self._text = ""
        self._json = ToolCallJson(names)
        self._started = False

    def push(self, text: str) -> list[ParserOutput]:
        self._text += text
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
        """The text, if no call has begun before the answer was cut."""
        if self._started or self._json.streamed:
            return []
        calls = [] if self._function else self._json.calls(self._text)
        return [*calls] if calls else [self._text] if self._text else []


def _hold_hermes(answer: AnswerGrammar, tools: ToolParameters) -> None:
    calls = [json_call(answer, name, "arguments", parameters) for name, parameters in tools.items()]
    answer.add("<tool_call>", [f'"\\n" {call} "\\n" {answer.mark("</tool_call>")}' for call in calls])


def _hold_llama3(answer: AnswerGrammar, tools: ToolParameters) -> None:
    call = answer.form([json_call(answer, name, "parameters", parameters) for name, parameters in tools.items()])
    answer.add("<|python_tag|>", [call])
    # A terminal with the call's beginning tells a call from other text.
    first = [
        f'{answer.token(SPACE, call_head(name, "parameters"))} {answer.json(parameters)} "}}"'
        for name, parameters in tools.items()
    ]
    answer.open_with([f'{answer.form(first)} (";" " "? {call})*'], rf'{SPACE}\{{{SPACE}"name"')


def _hold_mistral(answer: AnswerGrammar, tools: ToolParameters) -> None:
    call = answer.form([json_call(answer, name, "arguments", parameters) for name, parameters in tools.items()])
    call_id = f"({answer.mark('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?"
    named = [
        f"{answer.text(name)} {call_id} {answer.mark('[ARGS]')}? {answer.json(parameters)}"
        for name, parameters in tools.items()
    ]
    answer.add("[TOOL_CALLS]", [f'" "? "[" {call} ("," " "? {call})* "]"', *named])


HERMES = ToolParserFamily(
    lambda tools: MarkedToolParser(ToolCallFormat("<tool_call>", end_marker="</tool_call>"), tools.keys()),
    lambda template: "<tool_call>" in template,
    _hold_hermes,
)
_LLAMA3_FORMAT = ToolCallFormat("<|python_tag|>", end_marker=";", allow_unmarked=True)
LLAMA3 = ToolParserFamily(
    lambda tools: MarkedToolParser(_LLAMA3_FORMAT, tools.keys()),
    lambda template: "<|python_tag|>" in template or ('"parameters"' in template and "<|start_header_id|>" in template),
    _hold_llama3,
)
MISTRAL = ToolParserFamily(
    lambda tools: MarkedToolParser(ToolCallFormat("[TOOL_CALLS]", name_before_json=True), tools.keys()),
    lambda template: "[TOOL_CALLS]" in template,
    _hold_mistral,
    id_format="{:.9}",  # Mistral's chat templates refuse other ids
)
