"""Tool calls as a programming language writes them.

`weather(city="Paris")`, or Gemma's `call:weather{city:<|"|>Paris<|"|>}`.
"""

from __future__ import annotations

import functools
import json
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.base.answer_formats import ArgumentCalls
from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar
from moonpool.gateway.tool_parsers.base import (
    SPACE,
    ArgumentsDelta,
    CallReader,
    ParserOutput,
    ToolCallStart,
    ToolParameters,
)
from moonpool.gateway.tool_parsers.forms import CallForms, written
from moonpool.gateway.tool_parsers.gemma_values import gemma_form, gemma_json
from moonpool.gateway.tool_parsers.json_calls import JsonCallReader, ToolCallJson
from moonpool.gateway.tool_parsers.marked_text import Openings
from moonpool.gateway.tool_parsers.python_values import python_json
from moonpool.gateway.tool_parsers.schema_forms import ObjectForm, member_schemas, object_forms, unquoted

_LIST = rf"{SPACE}\["
_NAME = r"(?P<name>[\w.-]{1,256})"
_MAX_HEAD_CHARS = 600


@dataclass(frozen=True, slots=True)
class Language:
    """How a language writes a call.

    Attributes:
        call: what stands before the arguments, with the function's name.
        call_begun: every beginning of `call`, to the end of the text.
        key: what stands before a value, with the parameter's name.
        key_begun: every beginning of `key`, to the end of the text.
        close: what stands behind the arguments.
        quotes: marks on both sides of a text.
    """

    call: re.Pattern[str]
    call_begun: re.Pattern[str]
    key: re.Pattern[str]
    key_begun: re.Pattern[str]
    close: str
    quotes: tuple[str, ...]

    def value(self, text: str) -> str:
        """A value as JSON; as it is written if it cannot be read."""
        return python_json(text) if self.close == ")" else gemma_json(text, self.quotes[0])


PYTHON = Language(
    re.compile(rf"\s*{_NAME}\s*\("),
    re.compile(r"\s*[\w.-]*\s*\Z"),
    re.compile(r"\s*(?P<key>\w+)\s*="),
    re.compile(r"\s*\w*\s*\Z"),
    ")",
    ('"', "'"),
)


@functools.cache
def language_of(name: str, quote: str) -> Language:
    """A language by the name that a row gives; `quote` is Gemma's mark on both sides of a text."""
    if name == "python":
        return PYTHON
    mark, key = re.escape(quote), r"""[^<>:{}\[\],"]"""
    begun = "|".join(re.escape(quote[:chars]) for chars in range(len(quote), 0, -1))
    return Language(
        re.compile(rf"\s*call:\s*{_NAME}\s*\{{"),
        re.compile(r"\s*(?:c|ca|cal|call|call:\s*[\w.-]*\s*)?\Z"),
        re.compile(rf"\s*(?:{mark})?(?P<key>{key}+?)(?:{mark})?\s*:"),
        re.compile(rf"\s*(?:{begun})?{key}*(?:{begun})?\s*\Z"),
        "}",
        (quote,),
    )


_OPENING, _CLOSING = "([{", ")]}"


class ValueScanner:
    """Finds the end of a value in a text that grows. Every character is looked at once.

    A text ends at a quote behind which the form goes on, so that a text may hold quotes of its own.
    """

    def __init__(self, quotes: tuple[str, ...], at: int) -> None:
        """Start at a place."""
        self._quotes = quotes
        self._at = at
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find_end(self, text: str, *, is_whole: bool = False) -> int | None:
        """The place of the comma or bracket behind the value; None while there is none.

        `is_whole`: nothing follows.
        """
        while self._at < len(text):
            char = text[self._at]
            if self._quote:
                if not self._in_text(text, char, is_whole=is_whole):
                    return None
                continue
            quote = next((quote for quote in self._quotes if text.startswith(quote, self._at)), "")
            if quote:
                self._quote = quote
                self._at += len(quote)
                continue
            if not is_whole and any(quote.startswith(text[self._at :]) for quote in self._quotes):
                return None
            if char in _OPENING:
                self._depth += 1
            elif not self._depth and (char == "," or char in _CLOSING):
                return self._at
            elif char in _CLOSING:
                self._depth -= 1
            self._at += 1
        return None

    def _in_text(self, text: str, char: str, *, is_whole: bool) -> bool:
        """Pass a character of a text. Returns whether that was possible."""
        if self._escaped:
            self._escaped = False
        elif char == "\\" and len(self._quote) == 1:
            self._escaped = True
        elif char == self._quote[0]:
            found = text[self._at : self._at + len(self._quote)]
            if found != self._quote and self._quote.startswith(found) and self._at + len(found) == len(text):
                if not is_whole:
                    return False
            elif found == self._quote:
                behind = re.compile(r"\s*").match(text, self._at + len(self._quote))
                end = behind.end() if behind is not None else len(text)
                if end == len(text) and not is_whole:
                    return False
                if end == len(text) or text[end] in ",)]}:":
                    self._at, self._quote = self._at + len(self._quote), ""
                    return True
        self._at += 1
        return True


class ArgumentCallReader(CallReader):
    """Reads calls from a mark on, or from the bracket of a list."""

    def __init__(self, syntax: ArgumentCalls, tools: ToolParameters, mark: str) -> None:
        """Start at a mark; `tools` are the functions that may be called."""
        self._syntax = syntax
        self._language = language_of(syntax.language, syntax.quote)
        self._tools = tools
        self._mark = mark
        self._text = ""
        self._at = 0 if mark == "[" else len(mark)
        # "list" before the bracket, then "call", "key", "value", "next" behind a value, "behind" a call.
        self._state = "list" if syntax.layout == "list" else "call"
        self._name = ""
        self._schemas: Mapping[str, Mapping[str, Any]] = {}  # of the function's parameters
        self._key = ""
        self._members = 0
        self._begin = 0  # of the value
        self._value: ValueScanner | None = None
        self._called = False
        self._started = False  # the call of the state has been passed on
        self._json: JsonCallReader | None = None
        self.rest: str | None = None

    def push(self, text: str) -> list[ParserOutput]:
        if self._json is not None:
            return self._from_json(self._json.push(text))
        self._text += text
        output: list[ParserOutput] = []
        while self.rest is None and self._step(output):
            pass
        return output

    def end(self, *, is_cut: bool = False) -> list[ParserOutput]:
        if self._json is not None:
            return self._from_json(self._json.end(is_cut=is_cut))
        output: list[ParserOutput] = []
        if self._state == "value":
            assert self._value is not None, "a value is being read"
            end = self._value.find_end(self._text, is_whole=True)
            shown = self._text[self._begin : end]
            if shown.strip():
                output.append(ArgumentsDelta(f"{self._member()}{_cut(shown.strip(), self._language)}"))
        elif not self._called and not (is_cut and self._mark != "["):
            output.append(self._text)
        return output

    def _from_json(self, output: list[ParserOutput]) -> list[ParserOutput]:
        assert self._json is not None, "the calls are JSON"
        self.rest = self._json.rest
        return output

    def _step(self, output: list[ParserOutput]) -> bool:
        """Read on. Returns whether there may be more."""
        match self._state:
            case "list":
                return self._open_list(output)
            case "call":
                return self._read_head(output)
            case "key":
                return self._read_key(output)
            case "value":
                return self._read_value(output)
            case "next":
                return self._read_next(output)
        return self._read_behind()

    def _stripped(self) -> str:
        """What follows, without white space before it."""
        return self._text[self._at : self._at + _MAX_HEAD_CHARS].lstrip()

    def _open_list(self, output: list[ParserOutput]) -> bool:
        stripped = self._stripped()
        if not stripped:
            return False
        if stripped[0] != "[":
            return self._fail(output)
        inner = stripped[1:].lstrip()
        if self._syntax.json and not inner:
            return False
        if self._syntax.json and inner[0] == "{":
            self._json = JsonCallReader(ToolCallJson(self._tools.keys(), self._at))
            output += self._from_json(self._json.push(self._text))
            return False
        self._at = self._text.index("[", self._at) + 1
        self._state = "call"
        return True

    def _read_head(self, output: list[ParserOutput]) -> bool:
        head = self._language.call.match(self._text, self._at)
        if head is None:
            rest = self._text[self._at :]
            if len(rest) < _MAX_HEAD_CHARS and self._language.call_begun.match(rest):
                return False
            return self._fail(output)
        if head["name"] not in self._tools:
            return self._fail(output)
        self._name, self._state, self._members, self._started = head["name"], "key", 0, False
        self._schemas = member_schemas(self._tools[self._name])
        self._call_at, self._at = self._at, head.end()
        return True

    def _read_key(self, output: list[ParserOutput]) -> bool:
        stripped = self._stripped()
        if stripped.startswith(self._language.close):
            self._start(output)
            output.append(ArgumentsDelta("}" if self._members else "{}"))
            self._at = self._text.index(self._language.close, self._at) + 1
            self._state = "behind"
            return True
        key = self._language.key.match(self._text, self._at)
        if key is None:
            rest = self._text[self._at :]
            if len(rest) < _MAX_HEAD_CHARS and self._language.key_begun.match(rest):
                return False
            if not self._started:
                self._at = self._call_at
                return self._fail(output)
            # An argument without a name: the arguments are broken, and come as they are.
            self._key, self._begin = "", self._at
        else:
            self._start(output)
            self._key, self._begin = key["key"], key.end()
        self._at, self._state = self._begin, "value"
        self._value = ValueScanner(self._language.quotes, self._begin)
        return True

    def _start(self, output: list[ParserOutput]) -> None:
        if not self._started:
            self._started = self._called = True
            output.append(ToolCallStart(self._name))

    def _member(self) -> str:
        key = f"{json.dumps(self._key, ensure_ascii=False)}: " if self._key else ""
        return f"{', ' if self._members else '{'}{key}"

    def _read_value(self, output: list[ParserOutput]) -> bool:
        assert self._value is not None, "a value is being read"
        end = self._value.find_end(self._text)
        if end is None:
            return False
        value = unquoted(self._language.value(self._text[self._begin : end].strip()), self._schemas.get(self._key))
        output.append(ArgumentsDelta(f"{self._member()}{value}"))
        self._members += 1
        self._at, self._state = end, "next"
        return True

    def _read_next(self, output: list[ParserOutput]) -> bool:
        if self._text[self._at] == ",":
            self._at += 1
            self._state = "key"
        elif self._text[self._at] == self._language.close:
            self._state = "key"
        else:  # a bracket too many
            self._at += 1
            self._key, self._begin, self._state = "", self._at, "value"
            self._value = ValueScanner(self._language.quotes, self._at)
        return True

    def _read_behind(self) -> bool:
        """Behind a call: another call, or the end."""
        stripped = self._stripped()
        if not stripped:
            return False
        closes = stripped[0] == "]" and self._syntax.layout == "list"
        more = stripped[0] == "," and self._syntax.layout != "alone"
        if closes or more:
            self._at = self._text.index(stripped[0], self._at) + 1
        if closes or self._syntax.layout == "alone":
            self.rest = self._text[self._at :]
        elif more or (self._syntax.layout == "lines" and re.match(r"[\w.-]", stripped)):
            self._state = "call"
        else:
            self.rest = self._text[self._at :]
        return True

    def _fail(self, output: list[ParserOutput]) -> bool:
        """What is no call: text."""
        if self._called:
            self.rest = self._text[self._at :]
        else:
            output.append(self._mark)
            self.rest = self._text[len(self._mark) :]
        return True


def _cut(text: str, language: Language) -> str:
    """What there is of a value when the answer ends, as the beginning of JSON if the value is a text."""
    quote = next((quote for quote in language.quotes if text.startswith(quote)), "")
    if not quote or (len(text) > len(quote) and text.endswith(quote)):
        return language.value(text)
    return json.dumps(text.removeprefix(quote), ensure_ascii=False)[:-1]


def argument_openings(syntax: ArgumentCalls, tools: ToolParameters, hidden: tuple[str, ...] = ()) -> Openings:
    """What begins a call in this form."""
    return Openings(
        lambda mark: ArgumentCallReader(syntax, tools, mark),
        marks=syntax.begins,
        first_marks=("[",) if syntax.unmarked else (),
        hidden=hidden,
        closers=(syntax.end,),
    )


def argument_forms(syntax: ArgumentCalls, answer: AnswerGrammar, tools: ToolParameters, more: str) -> CallForms:
    """The forms of calls; arguments in the order of the schema."""
    end = written(answer, syntax.end)
    if syntax.language == "gemma":
        calls = [
            f"{answer.text(f'call:{name}{{')} {gemma_form(answer, schema, syntax.quote)} {answer.text('}')} {end}"
            for name, schema in tools.items()
        ]
        return CallForms(syntax.begins, calls)
    arguments = {name: _arguments(answer, parameters) for name, parameters in tools.items()}
    call = answer.form([f"{answer.text(f'{name}(')} {form} {answer.text(')')}" for name, form in arguments.items()])
    if syntax.layout == "lines":
        rest = f" ({answer.text(chr(10))} {call}){more}" if more else ""
        return CallForms(syntax.begins, [], [f"{answer.text(chr(10))} {call}{rest} {answer.text(chr(10))} {end}"])
    rest = f' ("," " "? {call}){more} "]"' if more else ' "]"'
    group = f'"[" {call}{rest} {end}' if not syntax.unmarked else f'"[" {call}{rest} ({end})?'
    if not syntax.unmarked:
        return CallForms(syntax.begins, [], [group])
    # A terminal with bracket and name tells a list of calls from other text.
    first = [f"{answer.token(_LIST, f'{name}(')} {form} {answer.text(')')}" for name, form in arguments.items()]
    names = "|".join(re.escape(name) for name in arguments)
    opening = answer.form([f"({' | '.join(first)}){rest}"])
    return CallForms(syntax.begins, [], [group], opening=opening, begun=rf"{_LIST}{SPACE}({names})\(")


def _arguments(answer: AnswerGrammar, parameters: Mapping[str, Any]) -> str:
    """The form of a call's arguments, in the schema's order; values as JSON."""
    return f"({' | '.join(_form(answer, object_form) for object_form in object_forms(parameters))})"


def _form(answer: AnswerGrammar, form: ObjectForm) -> str:
    if form.is_open:
        argument = rf"/[A-Za-z_]\w*/ {answer.text('=')} {answer.json({})}"
        return f'({argument} ("," " "? {argument})*)?'
    rest, starts, may_be_empty = '""', list[str](), True
    for name, schema in reversed([*form.members.items()]):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidRequest(
                "tools", f"pythonic calls cannot have a parameter {name!r}, which is no name in Python"
            )
        argument = f"{answer.text(f'{name}=')} {answer.json(schema)}"
        if name in form.required:
            starts, may_be_empty = [], False
        starts.insert(0, f"{argument} {rest}")
        optional = "" if name in form.required else "?"
        rest = answer.form([f'("," " "? {argument}){optional} {rest}'])
    return f"({' | '.join(starts)}){'?' if may_be_empty else ''}" if starts else '""'
