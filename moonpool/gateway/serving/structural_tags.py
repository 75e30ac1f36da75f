"""Structural tags of xgrammar, as vLLM and SGLang take them, written as a grammar in Lark's notation.

A structural tag says what has a form within free text: behind a trigger, between a begin and an end. Marks that are
special tokens of the model are written as tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moonpool.base.ecma_regex import from_ecma
from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar
from moonpool.base.json_parts import parse_json
from moonpool.base.json_schema import SchemaWordError

STRUCTURAL_TAG = "structural_tag"
"""`response_format` of a request whose grammar has yet to be written; no service takes it."""
_MAX_DEPTH = 32
_MAX_PARTS = 512
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}


def tag_text(field: str, given: str | Mapping[str, Any]) -> str:
    """A structural tag in its newer form, as JSON.

    Raises:
        InvalidRequest: `given` is no JSON object, or has neither a format nor structures; names the field.
    """
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except (ValueError, RecursionError):
            raise InvalidRequest(field, "must be a JSON object, or one as text") from None
    if not isinstance(given, Mapping):
        raise InvalidRequest(field, "must be a JSON object, or one as text")
    content = given.get("format")
    if content is None:
        content = _older_form(field, given)
    return json.dumps(content, ensure_ascii=False)


def _older_form(field: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The format that `structures` and `triggers` stand for."""
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest(field, "must have format, or structures and triggers")
    tags = []
    for index, structure in enumerate(structures):
        if not isinstance(structure, Mapping):
            raise InvalidRequest(f"{field}.structures.{index}", "must be an object")
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def tag_grammar(field: str, text: str, special_id: Callable[[str], int | None]) -> str:
    """A structural tag (`tag_text`) as a grammar in Lark's notation.

    `special_id`: returns the id of a special token; None if a text is no special token.

    Raises:
        InvalidRequest: a part is wrong or not supported; names the part below `field`.
    """
    writer = _TagWriter(AnswerGrammar(special_id), special_id)
    return writer.grammar(writer.written(parse_json(text), f"{field}.format"))


class _TagWriter:
    """Writes formats as right sides of Lark's rules."""

    def __init__(self, answer: AnswerGrammar, special_id: Callable[[str], int | None]) -> None:
        self._answer, self._special_id = answer, special_id
        self._parts = self._depth = 0

    def grammar(self, start: str) -> str:
        """The whole grammar, whose answers are `start`."""
        return self._answer.lark_of(start)

    def written(self, part: Any, field: str) -> str:
        """A format."""
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidRequest(field, "must be an object with a type")
        self._parts, self._depth = self._parts + 1, self._depth + 1
        if self._depth > _MAX_DEPTH or self._parts > _MAX_PARTS:
            raise InvalidRequest(
                field, f"there are more than {_MAX_PARTS} formats, or more than {_MAX_DEPTH} within others"
            )
        try:
            return self._rule(part, str(part["type"]), field)
        finally:
            self._depth -= 1

    def _rule(self, part: Mapping[str, Any], kind: str, field: str) -> str:
        match kind:
            case "const_string":
                return self._marks(self._text(part, "value", field))
            case "json_schema":
                return self._json(part.get("json_schema"), part, field)
            case "regex":
                return self._answer.expression(from_ecma(self._text(part, "pattern", field)))
            case "any_text":
                return "TEXT"
            case "sequence":
                return self._sequence(self._list(part, "elements", field), field)
            case "or":
                elements = self._list(part, "elements", field)
                return self._answer.form(
                    [self.written(one, f"{field}.elements.{at}") for at, one in enumerate(elements)]
                )
            case "optional" | "star" | "plus":
                return f"({self.written(part.get('content'), f'{field}.content')}){_REPEATS[kind]}"
            case "tag":
                return self._marks(self._text(part, "begin", field)) + " " + self._behind_begin(part, field)
            case "triggered_tags":
                return self._triggered(part, field)
            case "tags_with_separator":
                return self._separated(part, field)
        raise InvalidRequest(f"{field}.type", f"{kind[:32]!r} is not supported yet")

    def _json(self, schema: Any, part: Mapping[str, Any], field: str) -> str:
        if part.get("style") not in (None, "json"):
            raise InvalidRequest(f"{field}.style", "only JSON is supported yet")
        if schema is True or schema is None:
            schema = {}
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"{field}.json_schema", "must be a JSON schema")
        try:
            return self._answer.json(schema)
        except SchemaWordError as error:
            raise InvalidRequest(f"{field}.json_schema", str(error)) from None

    def _sequence(self, elements: Sequence[Any], field: str) -> str:
        """Formats one behind the other. A text ends where the mark begins that is behind it."""
        written = []
        for at, element in enumerate(elements):
            place, last = f"{field}.elements.{at}", at == len(elements) - 1
            if isinstance(element, Mapping) and element.get("type") in ("any_text", "triggered_tags") and not last:
                raise InvalidRequest(place, "free text is supported at the end of a sequence, or within a tag")
            written.append(self.written(element, place))
        return " ".join(written)

    def _behind_begin(self, part: Mapping[str, Any], field: str, begun: str = "") -> str:
        """A tag without what it begins with. `begun`: the text of the begin that a trigger has taken already."""
        begin, ends = self._text(part, "begin", field), part.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise InvalidRequest(f"{field}.end", "must be a text, or a list of texts")
        content, place = part.get("content"), f"{field}.content"
        rest = self._marks(begin.removeprefix(begun)) if begun and begin != begun else ""
        if isinstance(content, Mapping) and content.get("type") == "any_text":
            inner = self._answer.form([self._text_through(end, place) for end in ends])
        else:
            last = self._answer.form([self._marks(end) for end in ends]) if any(ends) else ""
            inner = f"{self.written(content, place)} {last}"
        return f"{rest} {inner}".strip()

    def _text_through(self, end: str, field: str) -> str:
        if not end:
            raise InvalidRequest(field, "free text needs an end")
        return f"TEXT {self._answer.mark(end)}" if self._special_id(end) is not None else self._answer.text_until(end)

    def _triggered(self, part: Mapping[str, Any], field: str) -> str:
        """Free text, in which a trigger begins a tag."""
        triggers = self._list(part, "triggers", field)
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise InvalidRequest(f"{field}.triggers", "must be texts")
        forms: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for at, tag in enumerate(self._list(part, "tags", field)):
            place = f"{field}.tags.{at}"
            begin = self._text(tag, "begin", place)
            trigger = next((found for found in triggers if begin.startswith(found)), None)
            if trigger is None:
                raise InvalidRequest(f"{place}.begin", "must begin with a trigger")
            forms[trigger].append(self._behind_begin(tag, place, trigger))
        for at, trigger in enumerate(triggers):
            if not forms[trigger]:
                raise InvalidRequest(f"{field}.triggers.{at}", "no tag begins with it")
        pieces = " | ".join(
            self._answer.piece("TEXT", trigger, self._answer.form(forms[trigger])) for trigger in triggers
        )
        least, only = bool(part.get("at_least_one")), bool(part.get("stop_after_first"))
        if only:
            return f"({pieces})" if least else f"({pieces} | TEXT)"
        return f"({pieces}){'+' if least else '*'} TEXT"

    def _separated(self, part: Mapping[str, Any], field: str) -> str:
        tags = [
            self.written({**tag, "type": "tag"} if isinstance(tag, Mapping) else tag, f"{field}.tags.{at}")
            for at, tag in enumerate(self._list(part, "tags", field))
        ]
        one = self._answer.form(tags)
        separator = self._text(part, "separator", field)
        more = "" if part.get("stop_after_first") else f" ({self._marks(separator)} {one})*"
        return f"{one}{more}" if part.get("at_least_one") else f"({one}{more})?"

    def _marks(self, text: str) -> str:
        """A text, in which special tokens of the model are tokens."""
        found = [piece for piece in re.split(r"(<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\])", text) if piece]
        joined: list[str] = []
        for piece in found:
            if self._special_id(piece) is None and joined and joined[-1].startswith('"'):
                joined[-1] = self._answer.text(json.loads(joined[-1]) + piece)
            else:
                joined.append(self._answer.mark(piece))
        return " ".join(joined) or '""'

    def _text(self, part: Any, name: str, field: str) -> str:
        value = part.get(name) if isinstance(part, Mapping) else None
        if not isinstance(value, str):
            raise InvalidRequest(f"{field}.{name}", "must be a text")
        return value

    def _list(self, part: Mapping[str, Any], name: str, field: str) -> list[Any]:
        value = part.get(name)
        if not isinstance(value, list) or not value:
            raise InvalidRequest(f"{field}.{name}", "must be a list that is not empty")
        return value
