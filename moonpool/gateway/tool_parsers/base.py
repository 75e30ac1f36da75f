"""The contract for tool call parsers: what a parser finds in an answer, and what the gateway knows about a parser.

A parser is a module beside this one with a `ToolParserFamily`, and an entry in `TOOL_PARSERS`;
docs/extend/tool_call_parser.md lists the steps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic_core import from_json

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar
from moonpool.base.json_schema import inner_schemas, moved_schema

DEFAULT_CALL_ID = "call_{:.24}"
"""Format for a call's id; the argument is hexadecimal digits."""
SPACE = r"[ \n\t]*"
"""Regular expression of the white space that may stand before a call."""
MAX_FORMS = 64
"""Forms of the parameters of one function."""
_MAX_DEPTH = 16
_DEFINITIONS = ("$defs", "definitions")
ToolParameters = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters by function: the functions that may be called. A call to another function is text."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A whole call. `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call's start; the arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next characters in the arguments for the call that started last."""

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
    """The call that a JSON value describes; None if the value describes no call to a function in `names`.

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


class ToolParser(Protocol):
    """Finds the tool calls in one answer. The outputs of `push` and `end` are the answer, in order.

    Joined, the outputs must not depend on the pieces in which the text comes: whole answers and streamed answers are
    read by the same parser.
    """

    def push(self, text: str) -> list[ParserOutput]:
        """Take the next text. Returns what is certain now."""
        ...

    def end(self) -> list[ParserOutput]:
        """Return what is still held back, after the last text."""
        ...


@dataclass(frozen=True, slots=True)
class ToolParserFamily:
    """A format of tool calls.

    Attributes:
        make: returns the parser for one answer.
        is_used_by: tells from the source of a chat template whether the model writes this format.
        hold: adds function calls to an answer's grammar, so that their arguments follow the schemas.
        id_format: format for a call's id.
    """

    make: Callable[[ToolParameters], ToolParser]
    is_used_by: Callable[[str], bool]
    hold: Callable[[AnswerGrammar, ToolParameters], None]
    id_format: str = DEFAULT_CALL_ID


def call_head(name: str, key: str) -> str:
    """What stands before the arguments of a call that is {"name": NAME, KEY: {...}}."""
    return f'{{"name": {json.dumps(name)}, "{key}": '


def json_call(answer: AnswerGrammar, name: str, key: str, parameters: Mapping[str, Any]) -> str:
    """The form of a call that is {"name": NAME, KEY: {...}}."""
    return " ".join([answer.text(call_head(name, key)), answer.json(parameters), '"}"'])


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """The members that an object may have.

    Attributes:
        members: schemas by name.
        required: names that the object must have.
        is_open: the object may have members of other names.
    """

    members: Mapping[str, Mapping[str, Any]]
    required: frozenset[str]
    is_open: bool


def object_forms(parameters: Mapping[str, Any]) -> list[ObjectForm]:
    """The forms that arguments may have: one, or several where the schema has `anyOf` or `oneOf` outermost.

    Each member's schema brings the definitions that it may refer to.

    Raises:
        InvalidRequest: no arguments fit, or the names of members are limited by `patternProperties`, or there are too
            many forms; names `tools`.
    """
    shared: dict[str, Any] = {word: parameters[word] for word in _DEFINITIONS if word in parameters}
    moved = parameters
    if any(not ref.startswith(("#/$defs/", "#/definitions/")) for ref in _references(parameters)):
        moved = moved_schema(parameters, "/$defs/parameters")
        shared = {"$defs": {"parameters": moved}}
    found = []
    for form in itertools.islice(_forms(moved, {**moved, **shared}, 0), MAX_FORMS + 1):
        members = {name: {**shared, **schema} for name, schema in form.members.items()}
        found.append(replace(form, members=members))
    if not found:
        raise InvalidRequest("tools", "no arguments can satisfy the schema of a function")
    if len(found) > MAX_FORMS:
        raise InvalidRequest("tools", f"strict parameters of this model's calls have at most {MAX_FORMS} forms")
    return found


def _forms(schema: Any, whole: Mapping[str, Any], depth: int) -> Iterator[ObjectForm]:
    """The forms of an object of a schema; none if a value of the schema is no object."""
    if schema is True:
        schema = {}
    kinds = schema.get("type", "object") if isinstance(schema, Mapping) else ()
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        return
    if depth > _MAX_DEPTH:
        raise InvalidRequest("tools", "a schema refers to itself without an end")
    members, is_open = schema.get("properties") or {}, schema.get("additionalProperties") is not False
    if not is_open and "patternProperties" in schema:
        message = "strict parameters of this model's calls cannot have patternProperties outermost"
        raise InvalidRequest("tools", message)
    parts = [[ObjectForm(members, frozenset(schema.get("required") or ()), is_open)]]
    inner = [_referenced(schema["$ref"], whole)] if "$ref" in schema else []
    parts += [list(_forms(part, whole, depth + 1)) for part in [*inner, *schema.get("allOf", ())]]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            parts.append([form for part in schema[word] for form in _forms(part, whole, depth + 1)])
    for chosen in itertools.product(*parts):
        form = _joined(chosen)
        if form.required <= form.members.keys() or form.is_open:
            yield form


def _joined(forms: Sequence[ObjectForm]) -> ObjectForm:
    """The form of an object that has all of the forms."""
    members: dict[str, Mapping[str, Any]] = {}
    for form in forms:
        for name, schema in form.members.items():
            before = members.get(name)  # a schema without words holds nothing
            members[name] = {"allOf": [before, schema]} if before and schema else before or schema
    for form in forms:
        members = {name: member for name, member in members.items() if form.is_open or name in form.members}
    required = frozenset(name for form in forms for name in form.required)
    return ObjectForm(members, required, all(form.is_open for form in forms))


def _referenced(reference: object, whole: Mapping[str, Any]) -> Any:
    """The schema that `$ref` names; false if there is none."""
    found: Any = whole
    for step in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return False if found is None else found


def _references(schema: Mapping[str, Any]) -> list[str]:
    """The values of `$ref` in a schema."""
    parts = [schema, *(part for _, part in inner_schemas(schema))]
    return [part["$ref"] for part in parts if isinstance(part.get("$ref"), str)]


def marker_overlap(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that are the start of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


class DelimitedToolParser(ToolParser):
    """Finds calls that stand between two marks and are read at their end."""

    def __init__(self, begin: str, end: str, ignored: Collection[str] = ()) -> None:
        """Start an answer.

        Args:
            begin: text before a call.
            end: text behind a call.
            ignored: further marks around calls, which are not passed on.
        """
        self._begin, self._end, self._ignored = begin, end, tuple(ignored)
        self._held = ""
        self._space = ""  # before the call that is held
        self._in_call = False
        self._after_call = False

    def read(self, text: str) -> ParsedToolCall | None:
        """Return the call of the text between the marks; None if the text is no call."""
        raise NotImplementedError

    def push(self, text: str) -> list[ParserOutput]:
        self._held += text
        output: list[ParserOutput] = []
        while self._step(output):
            pass
        return output

    def end(self) -> list[ParserOutput]:
        rest, self._held = f"{self._space}{self._begin if self._in_call else ''}{self._held}", ""
        return [rest] if rest.strip() or (rest and not self._after_call) else []

    def _step(self, output: list[ParserOutput]) -> bool:
        """Move what is certain to `output`. Returns whether there may be more."""
        marks = (self._end,) if self._in_call else (self._begin, *self._ignored)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if self._in_call:
            if not found:
                return False
            self._finish_call(found[0][0], output)
            return True
        at, mark = min(found, default=(len(self._held) - max(marker_overlap(self._held, sign) for sign in marks), ""))
        text = self._held[:at].rstrip()
        if mark:
            self._say(text, output)
            self._in_call = mark == self._begin
            self._space = self._held[len(text) : at] if self._in_call and not self._after_call else ""
            self._held = self._held[at + len(mark) :]
            self._after_call |= not self._in_call
            return True
        self._held = self._held[len(text) :]
        self._say(text, output)
        return False

    def _finish_call(self, at: int, output: list[ParserOutput]) -> None:
        text, self._held, self._in_call = self._held[:at], self._held[at + len(self._end) :], False
        call = self.read(text)
        self._after_call = call is not None
        output.append(f"{self._space}{self._begin}{text}{self._end}" if call is None else call)
        self._space = ""

    def _say(self, text: str, output: list[ParserOutput]) -> None:
        said = text.lstrip() if self._after_call else text
        if said:
            output.append(said)
            self._after_call = False
