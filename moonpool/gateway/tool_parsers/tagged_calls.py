"""Tool calls in tags, a tag for each argument: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

A value may hold any mark. A value ends at a closing mark behind which the form goes on: with the next parameter, or
with the end of the function. A call that is quoted within a value, from its beginning to its end, is part of the value.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.base.answer_formats import TaggedCalls
from moonpool.base.grammar import AnswerGrammar, text_expressions
from moonpool.gateway.tool_parsers.base import ArgumentsDelta, CallReader, ParserOutput, ToolCallStart, ToolParameters
from moonpool.gateway.tool_parsers.forms import CallForms, written
from moonpool.gateway.tool_parsers.marked_text import Openings
from moonpool.gateway.tool_parsers.schema_forms import (
    ObjectForm,
    is_text,
    json_value,
    member_schemas,
    object_forms,
    text_schemas,
)

_MAX_MARK_CHARS = 600
"""Characters of a mark with a name."""
_FIELDS = {
    "{name}": r"""[^<>\s"']{1,256}""",
    "{key}": r"""[^<>\n"]{1,256}?""",
    "{string}": "true|false",
}
_SPACE = r"\s*"
_BEGUN = {"{name}": r"""\s*+[^<>\s"']*+\s*+""", "{key}": r"""\s*+[^<>\n"]*+\s*+""", "{string}": "[a-z]*"}
_GROUPS = {"{name}": "name", "{key}": "key"}
_FIELD = re.compile(r"(\{name\}|\{key\}|\{string\}|\s+)")


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark in a text: its kind, where it stands, and the name of the function or the parameter."""

    kind: str
    begin: int
    end: int
    name: str = ""


class TagLexer:
    """Finds the marks of a row in a text."""

    def __init__(self, syntax: TaggedCalls) -> None:
        """Take a row's form."""
        named = [("function", syntax.function.strip()), ("parameter", syntax.parameter.strip())]
        plain = [
            ("parameter_end", syntax.parameter_end.strip()),
            ("function_end", syntax.function_end.strip()),
            ("begin", syntax.begin.strip()),
            ("end", syntax.end.strip()),
        ]
        follows = (syntax.parameter.partition("{")[0], syntax.function_end.strip())
        whole, begun = list[str](), list[str]()
        for kind, text in [*named, *plain]:
            if text:
                parts = [part for part in _FIELD.split(text) if part]
                open_end = parts[-1] == "{name}"  # the name ends where the arguments begin, or the call ends
                ahead = rf"\s*(?={'|'.join(map(re.escape, follows))})" if open_end else ""
                inner = "".join(_whole(part, kind) for part in parts)
                whole.append(f"(?P<{kind}>{inner}{ahead})")
                rest = rf"\s*(?:{'|'.join(map(_begun_text, follows))})?" if open_end else ""
                begun.append(_begun(parts, rest))
        self._whole = re.compile("|".join(whole))
        self._begun = re.compile(rf"(?:{'|'.join(begun)})\Z")

    def next(self, text: str, at: int) -> Mark | None:
        """The first mark behind a place; None if there is none yet."""
        found = self._whole.search(text, at)
        if found is None:
            return None
        kind = str(found.lastgroup)
        return Mark(kind, found.start(), found.end(), found.groupdict().get(f"{kind}_name") or "")

    def certain(self, text: str, at: int) -> int:
        """The place behind `at` up to which the text holds no mark, whatever follows."""
        found = self._begun.search(text, max(at, len(text) - _MAX_MARK_CHARS))
        return len(text) if found is None else found.start()


def _whole(part: str, kind: str) -> str:
    if part.isspace():
        return r"\s*"
    if part in _GROUPS:
        return rf"\s*+(?P<{kind}_name>{_FIELDS[part]})\s*+"
    return f"(?:{_FIELDS[part]})" if part in _FIELDS else re.escape(part)


def _begun_text(text: str) -> str:
    """A regular expression of every beginning of a text."""
    behind = ""
    for char in reversed(text):
        behind = f"(?:{re.escape(char)}{behind})?"
    return behind.removeprefix("(?:").removesuffix(")?")


def _begun(parts: Sequence[str], rest: str) -> str:
    """A regular expression of every beginning of a mark."""
    behind = rest
    for part in reversed(parts):
        if part in _BEGUN or part.isspace():
            behind = f"{_BEGUN.get(part, _SPACE)}(?:{behind})?"
        else:
            for char in reversed(part):
                behind = f"{re.escape(char)}(?:{behind})?" if behind else re.escape(char)
    return behind


class TaggedCallReader(CallReader):
    """Reads calls from a mark on."""

    def __init__(self, syntax: TaggedCalls, lexer: TagLexer, tools: ToolParameters, mark: str) -> None:
        """Start at a mark.

        Args:
            syntax: the row's form.
            lexer: the row's marks.
            tools: functions that may be called, with the types of their parameters.
            mark: the mark, of which the text begins with.
        """
        self._syntax = syntax
        self._lexer = lexer
        self._tools = tools
        self._mark = mark
        self._text = ""
        self._at = 0  # what is before has been read
        # "start", then "section" between functions, "named" behind a bare function's name, "function", "value"; "other"
        # within a function that was not offered.
        self._state = "start"
        self._name = ""
        self._schemas: Mapping[str, Mapping[str, Any]] = {}
        self._members = 0  # arguments of the function
        self._begin = 0  # of the value, or of what was not offered
        self._key = ""
        self._close: int | None = None  # of the value: the last closing mark
        self._close_end = 0
        self._function_close: int | None = None  # of the value: the last end of a function, without a closing mark
        self._depth = 0  # of functions quoted within
        self._balance = 0  # of beginnings and ends of calls within the value
        self._nested = True
        self._called = False
        self.rest: str | None = None

    def push(self, text: str) -> list[ParserOutput]:
        self._text += text
        output: list[ParserOutput] = []
        while self.rest is None and (mark := self._lexer.next(self._text, self._at)) is not None:
            self._pass_text(mark.begin, output)
            if self.rest is None:
                self._at = mark.end
                self._pass_mark(mark, output)
        if self.rest is None:
            self._pass_text(self._lexer.certain(self._text, self._at), output)
        return output

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        output: list[ParserOutput] = []
        self._at = len(self._text)
        match self._state:
            case "start" | "named" | "section":
                if not self._called and not is_cut:
                    output.append(self._text)
            case "other":
                output.append(self._text[self._begin :])
            case "value":
                closing = (self._syntax.end or self._syntax.function_end).strip()
                unpaired = self._balance < 0 if self._syntax.end else self._depth or self._close is not None
                if self._nested and unpaired and self._text.rstrip().endswith(closing):
                    # A mark within the value has no counterpart: read the value once more, without counting.
                    again = self._uncounted()
                    found = again.push("")
                    behind = (again.rest or "").strip()
                    if (
                        not is_cut or not behind or behind.startswith(self._mark)
                    ):  # else the answer was cut in the value
                        self.rest = again.rest
                        return [*found, *(again.end(is_cut=is_cut) if again.rest is None else [])]
                self._cut_value(output)
        return output

    def _uncounted(self) -> TaggedCallReader:
        """A reader that begins the value anew and counts no functions within."""
        again = copy.copy(self)
        again._nested, again._depth, again._close, again._function_close = False, 0, None, None
        again._at = self._begin
        return again

    def _pass_text(self, end: int, output: list[ParserOutput]) -> None:
        """Read text without marks, up to a place."""
        text = self._text[self._at : end]
        if self._state in ("start", "section", "named") and text.strip():
            self._leave(output)
        elif self.rest is None:
            self._at = end

    def _leave(self, output: list[ParserOutput]) -> None:
        """Go back to text: behind the calls, or behind the mark if there was no call."""
        if self._called:
            self.rest = self._text[self._at :]
        else:
            output.append(self._mark)
            self.rest = self._text[len(self._mark) :]

    def _pass_mark(self, mark: Mark, output: list[ParserOutput]) -> None:
        match self._state:
            case "value":
                self._pass_in_value(mark, output)
            case "function":
                self._pass_in_function(mark, output)
            case "other":
                self._depth += {"function": 1, "function_end": -1}.get(mark.kind, 0)
                if not self._depth:
                    output.append(self._text[self._begin : mark.end])
                    self.rest = self._text[mark.end :]
            case "named":
                if mark.kind in ("parameter", "function_end"):
                    self._call(output)
                    self._pass_in_function(mark, output)
                else:
                    self._at = mark.begin
                    self._leave(output)
            case _:
                self._pass_between(mark, output)

    def _pass_between(self, mark: Mark, output: list[ParserOutput]) -> None:
        """A mark before the first function, or between functions."""
        is_first = self._state == "start"
        if mark.kind == "begin" and is_first:
            self._state = "section"
        elif mark.kind == "end" and self._called:
            self.rest = self._text[mark.end :]
        elif mark.kind == "function":
            self._name, is_bare = mark.name, is_first and bool(self._syntax.begin)
            if mark.name not in self._tools:
                # What was not offered is text, from the beginning of the calls if there was none.
                self._state, self._begin, self._depth = "other", 0 if not self._called else mark.begin, 1
            elif is_bare:
                self._state = "named"
            else:
                self._call(output)
        else:
            self._at = mark.begin
            self._leave(output)

    def _call(self, output: list[ParserOutput]) -> None:
        self._state, self._members, self._called = "function", 0, True
        self._schemas = member_schemas(self._tools[self._name])
        output.append(ToolCallStart(self._name))

    def _pass_in_function(self, mark: Mark, output: list[ParserOutput]) -> None:
        match mark.kind:
            case "parameter":
                self._start_value(mark)
            case "function_end":
                self._finish_function(mark.end, output)
            case "end":
                self._finish_function(mark.begin, output)
                self.rest = self._text[mark.end :]
            case "function" | "begin":  # the end is missing
                self._finish_function(mark.begin, output)
                if self.rest is None:
                    self._at = mark.begin
                    self._leave(output) if mark.kind == "begin" else self._again(mark, output)

    def _again(self, mark: Mark, output: list[ParserOutput]) -> None:
        self._at = mark.end
        self._pass_between(mark, output)

    def _start_value(self, mark: Mark) -> None:
        self._state, self._begin, self._key = "value", mark.end, mark.name
        self._close, self._function_close, self._depth, self._balance = None, None, 0, 0

    def _pass_in_value(self, mark: Mark, output: list[ParserOutput]) -> None:
        """A mark within a value: a part of the value, unless the form goes on behind a closing mark."""
        self._balance += {"begin": 1, "end": -1}.get(mark.kind, 0)
        if self._depth:
            self._depth += {"function": 1, "function_end": -1}.get(mark.kind, 0)
            return
        closes = self._close is not None and (not self._nested or not self._text[self._close_end : mark.begin].strip())
        match mark.kind:
            case "parameter_end":
                self._close, self._close_end = mark.begin, mark.end
            case "function" if self._nested:
                self._depth += 1
            case "parameter" if closes:
                self._finish_value(output)
                self._start_value(mark)
            case "parameter" if self._close is None and self._begins_known(mark):
                self._close = mark.begin
                self._finish_value(output)
                self._start_value(mark)
            case "function_end" if closes:
                self._finish_value(output)
                self._finish_function(mark.end, output)
            case "function_end":
                self._function_close = mark.begin
            case "end" if closes:
                self._finish_value(output)
                self._finish_function(mark.begin, output)
                self.rest = self._text[mark.end :]
            case "end" if (close := self._function_close) is not None:
                gap = self._text[close : mark.begin].removeprefix(self._syntax.function_end.strip())
                if not gap.strip() and self._close is None:
                    self._close = close
                    self._finish_value(output)
                    self._finish_function(mark.begin, output)
                    self.rest = self._text[mark.end :]

    def _begins_known(self, mark: Mark) -> bool:
        """Whether a known parameter begins a line, so that the closing mark before was forgotten."""
        line = self._text[self._begin : mark.begin].rpartition("\n")
        return bool(line[1]) and not line[2].strip() and mark.name in self._schemas

    def _value(self, end: int) -> str:
        text = self._text[self._begin : end]
        return text.removeprefix("\n").removesuffix("\n") if self._syntax.padded else text

    def _member(self) -> str:
        return f"{', ' if self._members else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _finish_value(self, output: list[ParserOutput]) -> None:
        assert self._close is not None, "a value ends at a closing mark"
        value = json_value(self._value(self._close), self._schemas.get(self._key))
        output.append(ArgumentsDelta(f"{self._member()}{value}"))
        self._members, self._state = self._members + 1, "function"

    def _cut_value(self, output: list[ParserOutput]) -> None:
        """What there is of a value when the answer ends."""
        if self._close is not None:
            self._finish_value(output)
            return
        text = self._value(self._lexer.certain(self._text, self._begin))
        texts = is_text(self._schemas.get(self._key))
        output.append(ArgumentsDelta(f"{self._member()}{json.dumps(text, ensure_ascii=False)[:-1] if texts else text}"))

    def _finish_function(self, end: int, output: list[ParserOutput]) -> None:
        output.append(ArgumentsDelta("}" if self._members else "{}"))
        self._state = "section"
        if not self._syntax.end or self._mark != self._syntax.begin.strip():
            self.rest = self._text[end:]


def tagged_openings(syntax: TaggedCalls, tools: ToolParameters, hidden: tuple[str, ...] = ()) -> Openings:
    """What begins a call in this form."""
    lexer = _lexer(syntax)
    function = syntax.function.partition("{")[0]
    return Openings(
        lambda mark: TaggedCallReader(syntax, lexer, tools, mark),
        marks=(syntax.begin.strip() or function,),
        line_marks=(function,) if syntax.bare else (),
        hidden=hidden,
        closers=(syntax.end.strip(),) if syntax.end else (),
    )


@functools.cache
def _lexer(syntax: TaggedCalls) -> TagLexer:
    return TagLexer(syntax)


def tagged_forms(syntax: TaggedCalls, answer: AnswerGrammar, tools: ToolParameters, more: str) -> CallForms:
    """The forms of calls; arguments in the order of the schema."""
    # Without a mark of its own, a call begins with the function's.
    begin = syntax.begin or syntax.function.partition("{")[0]
    head = syntax.function if syntax.begin else syntax.function.removeprefix(begin)
    function = answer.form([_function(syntax, answer, head, *each) for each in tools.items()])
    space = begin[len(begin.rstrip()) :]
    call = " ".join(filter(None, [answer.text(space) if space else "", function]))
    rest = f" ({function}){more}" if more and syntax.grouped else ""
    form = f"{call}{rest} {written(answer, syntax.end)}".rstrip()
    alone, groups = ([], [form]) if syntax.grouped else ([form], [])
    return CallForms((begin.strip(),), alone, groups, between=answer.text("\n"))


def _function(syntax: TaggedCalls, answer: AnswerGrammar, head: str, name: str, parameters: Mapping[str, Any]) -> str:
    """The form of a function and the function's arguments."""
    arguments = [_arguments(syntax, answer, form) for form in object_forms(parameters)]
    return f"{written(answer, head.replace('{name}', name))} ({' | '.join(arguments)})"


def _arguments(syntax: TaggedCalls, answer: AnswerGrammar, form: ObjectForm) -> str:
    if form.is_open:
        texts = {"{key}": r"/[^<>\n\"]{1,256}/", "{string}": "/true|false/"}
        parts = [part for part in re.split(r"(\{key\}|\{string\})", syntax.parameter) if part]
        head = " ".join(texts.get(part) or written(answer, part) for part in parts)
        end = f"{_pad(syntax)}{syntax.parameter_end}"
        return f"({head} {answer.text_until(end)})* {written(answer, syntax.function_end)}"
    arguments: list[str] = []
    for member, schema in form.members.items():
        text = syntax.parameter.replace("{key}", member).replace("{string}", "true" if is_text(schema) else "false")
        argument = f"{written(answer, text)} {_argument(syntax, answer, schema)}"
        arguments.append(argument if member in form.required else f"({argument})?")
    return " ".join([*arguments, written(answer, syntax.function_end)])


def _argument(syntax: TaggedCalls, answer: AnswerGrammar, schema: Mapping[str, Any]) -> str:
    """The form of an argument: text unchanged, anything else as JSON."""
    pad = _pad(syntax)
    end = f"{pad}{syntax.parameter_end}"
    begin = f"{answer.text(pad)} " if pad else ""
    if not is_text(schema):
        return f"{begin}{answer.json(schema)} {written(answer, end)}"
    return f"{begin}({' | '.join(_text(answer, each, end) for each in text_schemas(schema))})"


def _pad(syntax: TaggedCalls) -> str:
    return "\n" if syntax.padded else ""


def _text(answer: AnswerGrammar, schema: Mapping[str, Any], end: str) -> str:
    """The form of a text and what stands behind."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        return f"({' | '.join(answer.text(str(choice)) for choice in choices)}) {written(answer, end)}"
    return answer.text_until(end, text_expressions(schema))
