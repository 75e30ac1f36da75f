"""Tool calls as JSON: `{"name": ..., "arguments": {...}}`, in a list, or arguments behind a function's name.

A call is passed on as soon as the function is known and the arguments have begun. From there on the call is a call,
whatever the arguments turn out to be: an answer read whole has to say the same as a streamed answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.base.answer_formats import JsonCalls
from moonpool.base.grammar import AnswerGrammar
from moonpool.gateway.tool_parsers.base import (
    SPACE,
    ArgumentsDelta,
    CallReader,
    ParsedToolCall,
    ParserOutput,
    ToolCallStart,
    ToolParameters,
    ToolParser,
    parse_json,
    tool_call_from_json,
)
from moonpool.gateway.tool_parsers.forms import CallForms, written
from moonpool.gateway.tool_parsers.marked_text import Openings

MAX_NAME_CHARS = 256
"""Characters that may stand between a marker and the JSON, in formats where the name stands there."""
_CALL_HEAD = re.compile(
    r'\{\s*(?:"(?:tool_call_id|id|type)"\s*:\s*"[^"]*"\s*,\s*)*"(?:name|tool_name)"\s*:\s*"(?P<name>[\w.-]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*'
)
"""Start of a call whose arguments can be sent before the call ends."""
_GAP = r"/[ \n]{0,12}/"
"""White space between the parts of a list or of a call."""
_FIELDS = {"{name}": r"(?P<name>[\w.-]+?)", "{number}": r"(?P<number>\d{1,6})", "{id}": r"[\w-]+"}
_FIELD = re.compile(r"(\{name\}|\{number\}|\{id\}|\s+)")


def head_expression(head: str) -> re.Pattern[str]:
    """A regular expression of what stands before the arguments, in a row's notation."""
    parts = [_FIELDS.get(part, r"\s*" if part.isspace() else re.escape(part)) for part in _FIELD.split(head)]
    return re.compile(rf"\s*{''.join(parts)}\s*(?=\{{)")


@dataclass(slots=True)
class PartialToolCall:
    """A call within JSON. The numbers are positions in the text; `name` is known once the arguments have started."""

    start: int
    end: int | None = None
    name: str = ""
    number: int | None = None
    arguments: int = 0
    arguments_end: int | None = None


class ToolCallJson:
    """An incremental parser for the JSON after a marker: a call, a list of calls, or one call's arguments.

    The caller passes the whole text so far each time. Every character is looked at once.
    """

    def __init__(
        self,
        names: Collection[str],
        marker_chars: int = 0,
        heads: Collection[re.Pattern[str]] = (),
        *,
        only_heads: bool = False,
        takes_list: bool = True,
        name: str = "",
    ) -> None:
        """Start before the first character.

        Args:
            names: functions that may be called.
            marker_chars: characters before the JSON: the marker.
            heads: what may stand before the arguments of a call, with the function's name.
            only_heads: the JSON is always a call's arguments.
            takes_list: the JSON may be a list of calls.
            name: the function whose arguments the JSON is, if the marker says so.
        """
        self._names = names
        self._marked_name = name
        self._marker_chars = marker_chars
        self._heads = heads
        self._only_heads = only_heads
        self._takes_list = takes_list
        self._start: int | None = None
        self._name = ""
        self._number: int | None = None
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

    def is_undecided(self) -> bool:
        """Whether no function is known yet."""
        return not self._calls or (len(self._calls) == 1 and not self._calls[0].name)

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
                yield ToolCallStart(call.name, call.number)
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
        if self._marked_name:
            if stripped.startswith("{"):
                self._name, self._start = self._marked_name, self._marker_chars + len(rest) - len(stripped)
        elif not self._only_heads and stripped.startswith(("{", "[") if self._takes_list else "{"):
            self._start = self._marker_chars + len(rest) - len(stripped)
            self._outer_depth = int(stripped.startswith("["))
        else:
            match = next((found for head in self._heads if (found := head.match(rest))), None)
            if match is not None:
                self._name, self._start = match["name"], self._marker_chars + match.end()
                number = match.groupdict().get("number")
                self._number = None if number is None else int(number)
        self._scanned = self._start or 0
        return self._start is not None

    def _may_start(self, rest: str) -> bool:
        stripped = rest.lstrip()
        return not stripped or (
            bool(self._heads) and not self._marked_name and len(stripped) < MAX_NAME_CHARS and "{" not in stripped
        )

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
                self._calls.append(PartialToolCall(at, name=self._name, number=self._number, arguments=at))
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


class JsonCallReader(CallReader):
    """Reads JSON behind a mark."""

    def __init__(self, calls_json: ToolCallJson, *, is_marked: bool = True) -> None:
        """Start at the mark, or at the JSON if `is_marked` is false."""
        self._json = calls_json
        self._is_marked = is_marked
        self._text = ""
        self.rest: str | None = None

    def push(self, text: str) -> list[ParserOutput]:
        self._text += text
        end = self._json.find_end(self._text)
        output = list(self._json.stream(self._text if end is None else self._text[:end]))
        if end is None:
            return output
        self.rest = self._text[end:]
        if not self._json.streamed:
            output += self._json.calls(self._text[:end]) or [self._text[:end]]
        return output

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        begun = is_cut and self._is_marked and self._json.is_undecided()
        return [] if self._json.streamed or begun else [self._text]


def json_openings(syntax: JsonCalls, tools: ToolParameters, hidden: tuple[str, ...] = ()) -> Openings:
    """What begins a call in this form."""
    heads = [head_expression(head) for head, _ in syntax.heads]
    named = _named_marks(syntax, tools)

    def reader(mark: str) -> CallReader:
        if mark in named:
            return JsonCallReader(ToolCallJson(tools.keys(), len(mark), name=named[mark]), is_marked=False)
        chars = 0 if mark == "{" else len(mark)
        takes_list = mark != "{"
        return JsonCallReader(
            ToolCallJson(tools.keys(), chars, heads, only_heads=syntax.only_heads, takes_list=takes_list),
            is_marked=mark != "{",
        )

    return Openings(
        reader,
        marks=syntax.begins,
        first_marks=(*syntax.at_start, *named, *(("{",) if syntax.unmarked and not syntax.only_heads else ())),
        hidden=(*hidden, *filter(None, syntax.around)),
        closers=tuple(filter(None, (syntax.end, *syntax.closers))),
    )


def _named_marks(syntax: JsonCalls, tools: ToolParameters) -> dict[str, str]:
    """Functions by what an answer that is their call begins with."""
    if not (syntax.unmarked and syntax.only_heads):
        return {}
    return {syntax.heads[0][0].replace("{name}", name): name for name in tools}


class ForcedToolParser(ToolParser):
    """Reads an answer that a schema forces to be one function's arguments, or a list of calls.

    For models whose own form of calls is not known.
    """

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

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        """The text, if no call has begun before the answer was cut."""
        if self._started or self._json.streamed:
            return []
        calls = [] if self._function else self._json.calls(self._text)
        return [*calls] if calls else [self._text] if self._text else []


def json_forms(syntax: JsonCalls, answer: AnswerGrammar, tools: ToolParameters, more: str) -> CallForms:
    """The forms of calls: objects, a list of objects, and arguments behind the function's name."""
    objects = [] if syntax.only_heads else [_object(syntax, answer, *each) for each in tools.items()]
    arguments = {name: answer.form([answer.json(schema)]) for name, schema in tools.items()} if syntax.heads else {}
    named = [
        f"{_head(answer, before, name)} {inner} {written(answer, behind)}".rstrip()
        for name, inner in arguments.items()
        for before, behind in syntax.heads
    ]
    space, end = (f"{answer.text(syntax.space)} " if syntax.space else ""), written(answer, syntax.end)
    call = answer.form(objects) if objects else ""
    groups, alone = [], named
    if objects and syntax.listed:
        gap = answer.form([_GAP])
        rest = f' ("," {gap} {call}){more}' if more else ""
        before = gap if syntax.spread else '" "?'
        groups = [f'{before} "[" {gap} {call}{rest} {gap} "]" {end}'.rstrip()]
    elif objects:
        alone = [*named, f"{space}{call} {f'{space}{end}' if end else ''}".rstrip()]
    opening, begun = "", rf'{SPACE}\{{{SPACE}"{syntax.name_key}"'
    if marks := _named_marks(syntax, tools):
        names = "|".join(re.escape(mark).replace("\n", "n") for mark in marks)  # a break is a backslash before an n
        begun = rf"{SPACE}({names}){SPACE}\{{"
        opening = answer.form([f"{answer.token(SPACE, mark)} {arguments[name]}" for mark, name in marks.items()])
    elif syntax.unmarked:
        # A terminal with the call's beginning tells a call from other text.
        first = [
            f"{answer.token(SPACE, _object_head(syntax, name))} {answer.json(schema)} {answer.text('}')}"
            for name, schema in tools.items()
        ]
        rest = f' (";" " "? {call}){more}' if more else ""
        opening = answer.form([f"{answer.form(first)}{rest}"])
    between = answer.text(syntax.between) if syntax.between else ""
    return CallForms(syntax.begins, alone, groups, between, syntax.around, opening, begun)


def _object_head(syntax: JsonCalls, name: str) -> str:
    return f'{{{syntax.first_members}"{syntax.name_key}": {json.dumps(name)}, "{syntax.arguments_key}": '


def _object(syntax: JsonCalls, answer: AnswerGrammar, name: str, parameters: Mapping[str, Any]) -> str:
    """The form of a call that is an object."""
    head = _head(answer, _object_head(syntax, name), name)
    if syntax.spread:
        members = f'"{syntax.name_key}": {json.dumps(name)},', f'"{syntax.arguments_key}": '
        head = f'"{{" {_GAP} {answer.text(members[0])} {_GAP} {answer.text(members[1])}'
    return f"{head} {answer.json(parameters)} {_GAP if syntax.spread else ''} {answer.text('}')}"


def _head(answer: AnswerGrammar, head: str, name: str) -> str:
    """What stands before the arguments, in a row's notation, as a form."""
    fields = {"{name}": answer.text(name), "{number}": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9]{9}/"}
    parts = re.split(r"(\{name\}|\{number\}|\{id\})", head)
    return " ".join(fields.get(part) or written(answer, part) for part in parts if part)
