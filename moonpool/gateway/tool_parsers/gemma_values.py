"""Values in Gemma's notation: JSON whose texts stand between marks of their own, and whose names may be bare.

The mark is `<|"|>` in Gemma 4, and `<escape>` in FunctionGemma.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar, text_expressions
from moonpool.gateway.tool_parsers.base import parse_json
from moonpool.gateway.tool_parsers.schema_forms import ObjectForm, object_forms, referenced

_BARE = re.compile(r"[^,{}\[\]]*")
_MAX_DEPTH = 64
_MAX_REFERENCES = 6
"""Depth up to which values follow `$ref`; deeper values may be any."""


class _NoValueError(ValueError):
    """A text that is no value."""


def gemma_json(text: str, quote: str) -> str:
    """A value as JSON; what is no value comes back unchanged. `quote` stands on both sides of a text."""
    try:
        value, end = _notation(quote).value(text, 0, 0)
    except _NoValueError:
        return text
    return text if text[end:].strip() else value


@dataclass(frozen=True, slots=True)
class _Notation:
    """Reads values.

    Attributes:
        quote: mark on both sides of a text.
        text: a text behind its first mark, with the second.
        key: a name, with the colon.
    """

    quote: str
    text: re.Pattern[str]
    key: re.Pattern[str]

    def value(self, text: str, at: int, depth: int) -> tuple[str, int]:
        """A value as JSON, and the place behind it."""
        at = _skip(text, at)
        if depth > _MAX_DEPTH:
            raise _NoValueError
        if text.startswith(self.quote, at):
            found = self.text.match(text, at + len(self.quote))
            if found is None:
                raise _NoValueError
            return json.dumps(found[1], ensure_ascii=False), found.end()
        if text.startswith("{", at):
            return self._members(text, at + 1, depth)
        if text.startswith("[", at):
            return self._items(text, at + 1, depth)
        found = _BARE.match(text, at)
        bare = found[0].strip() if found is not None else ""
        if found is None or not bare:
            raise _NoValueError
        written = {"None": "null", "True": "true", "False": "false"}.get(bare, bare)
        is_json = written == "null" or parse_json(written) is not None
        return (written if is_json else json.dumps(bare, ensure_ascii=False)), found.end()

    def _items(self, text: str, at: int, depth: int) -> tuple[str, int]:
        items = list[str]()
        while True:
            at = _skip(text, at)
            if text.startswith("]", at):
                return f"[{', '.join(items)}]", at + 1
            value, at = self.value(text, at, depth + 1)
            items.append(value)
            at = _behind(text, at, "]")

    def _members(self, text: str, at: int, depth: int) -> tuple[str, int]:
        members = list[str]()
        while True:
            at = _skip(text, at)
            if text.startswith("}", at):
                return f"{{{', '.join(members)}}}", at + 1
            key = self.key.match(text, at)
            if key is None:
                raise _NoValueError
            name = key[1] if key[1] is not None else key[2].strip('"')
            value, at = self.value(text, key.end(), depth + 1)
            members.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")
            at = _behind(text, at, "}")


@functools.cache
def _notation(quote: str) -> _Notation:
    mark = re.escape(quote)
    return _Notation(
        quote,
        re.compile(rf"(.*?){mark}(?=\s*(?:[,:}}\]]|\Z))", re.DOTALL),
        re.compile(rf'\s*(?:{mark}(.*?){mark}|([^<>:{{}}\[\],"]+?|"[^"]*"))\s*:', re.DOTALL),
    )


def _skip(text: str, at: int) -> int:
    return at + len(text[at:]) - len(text[at:].lstrip())


def _behind(text: str, at: int, close: str) -> int:
    """The place behind a comma, or of the closing bracket."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return at + 1
    if text.startswith(close, at):
        return at
    raise _NoValueError


def gemma_form(answer: AnswerGrammar, parameters: Mapping[str, Any], quote: str) -> str:
    """The form of a call's arguments, in the order of the schema. `quote` stands on both sides of a text.

    Raises:
        InvalidRequest: a schema has words that this form cannot follow; names `tools`.
    """
    return _GemmaForms(answer, quote).members(parameters)


class _GemmaForms:
    """Writes the forms of values."""

    def __init__(self, answer: AnswerGrammar, quote: str) -> None:
        self._answer = answer
        self._quote = quote
        self._any = ""

    def members(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """What stands within the braces of an object."""
        return f"({' | '.join(self._form(form, depth) for form in object_forms(schema))})"

    def _form(self, form: ObjectForm, depth: int) -> str:
        if form.is_open:
            pair = rf"/[A-Za-z_]\w*/ {self._answer.text(':')} {self._anything()}"
            return f'({pair} ("," {pair})*)?'
        rest, starts, may_be_empty = '""', list[str](), True
        for name, schema in reversed([*form.members.items()]):
            argument = f"{self._answer.text(f'{name}:')} {self._value(schema, depth + 1)}"
            if name in form.required:
                starts, may_be_empty = [], False
            starts.insert(0, f"{argument} {rest}")
            rest = self._answer.form([f'("," {argument}){"" if name in form.required else "?"} {rest}'])
        return f"({' | '.join(starts)}){'?' if may_be_empty else ''}" if starts else '""'

    def _text(self, schema: Mapping[str, Any]) -> str:
        return f"{self._answer.mark(self._quote)} {self._answer.text_until(self._quote, text_expressions(schema))}"

    def _value(self, schema: Any, depth: int) -> str:
        """The form of a value."""
        if depth > _MAX_DEPTH:
            raise InvalidRequest("tools", "a schema is nested too deeply for this model's calls")
        if not isinstance(schema, Mapping):
            return self._anything()
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return f"({' | '.join(self._literal(value) for value in values)})"
        if (parts := self._parts(schema, depth)) is not None:
            return f"({' | '.join(self._value(part, depth + 1) for part in parts)})"
        return self._value_of_kind(schema, depth)

    def _parts(self, schema: Mapping[str, Any], depth: int) -> list[Any] | None:
        """The schemas of which a value follows one; None if the schema says itself what a value is."""
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if "$ref" in schema:
            found = referenced(schema["$ref"], schema) if depth <= _MAX_REFERENCES else None
            return [{**definitions, **found}] if isinstance(found, Mapping) else [True]
        for word in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(word), list):
                return [{**definitions, **part} for part in parts]
        kinds = schema.get("type")
        return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else None

    def _value_of_kind(self, schema: Mapping[str, Any], depth: int) -> str:
        match schema.get("type"):
            case "string":
                return self._text(schema)
            case "object":
                return f"{self._answer.text('{')} {self.members(schema, depth)} {self._answer.text('}')}"
            case "array":
                definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                items = schema.get("items", {})
                item = self._answer.form(
                    [self._value({**definitions, **items} if isinstance(items, Mapping) else items, depth + 1)]
                )
                least, most = schema.get("minItems", 0), schema.get("maxItems")
                more = f"{{{max(0, least - 1)},{'' if most is None else max(0, most - 1)}}}"
                return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'
            case None:
                return self._anything()
        return self._answer.json({key: value for key, value in schema.items() if key not in ("$defs", "definitions")})

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._answer.mark(self._quote)} {self._answer.text(value)} {self._answer.mark(self._quote)}"
        return self._answer.text(json.dumps(value))

    def _anything(self) -> str:
        """Any value without a schema: texts, numbers, names, lists and objects of these."""
        if not self._any:
            self._any = self._answer.form([self._text({}), self._answer.json({"type": ["number", "boolean", "null"]})])
            pair = rf"/[A-Za-z_]\w*/ {self._answer.text(':')} {self._any}"
            flat = self._any
            self._any = self._answer.form(
                [flat, f'"[" ({flat} ("," {flat})*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"']
            )
        return self._any
