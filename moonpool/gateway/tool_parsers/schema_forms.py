"""Schemas of parameters, for forms of calls that write each argument out instead of one JSON object."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moonpool.base.errors import InvalidRequest
from moonpool.base.json_schema import inner_schemas, moved_schema
from moonpool.gateway.tool_parsers.base import parse_json

MAX_FORMS = 64
"""Forms of the parameters of one function."""
_MAX_DEPTH = 16
_DEFINITIONS = ("$defs", "definitions")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


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
    inner = [referenced(schema["$ref"], whole)] if "$ref" in schema else []
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


def referenced(reference: object, whole: Mapping[str, Any]) -> Any:
    """The schema that `$ref` names; false if there is none."""
    found: Any = whole
    for step in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return False if found is None else found


def _references(schema: Mapping[str, Any]) -> list[str]:
    """The values of `$ref` in a schema."""
    parts = [schema, *(part for _, part in inner_schemas(schema))]
    return [part["$ref"] for part in parts if isinstance(part.get("$ref"), str)]


def member_schemas(parameters: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Schemas of the parameters by name; of several forms, the first that has the parameter."""
    try:
        forms = object_forms(parameters)
    except InvalidRequest:  # not strict, so nobody has checked the schema
        members = parameters.get("properties")
        return members if isinstance(members, Mapping) else {}
    return {name: schema for form in reversed(forms) for name, schema in form.members.items()}


def is_text(schema: Any) -> bool:
    """Whether values of a schema can be nothing but texts."""
    return _kinds(schema, _root(schema), 0) == {"string"}


def text_schemas(schema: Mapping[str, Any], depth: int = 0) -> list[Mapping[str, Any]]:
    """The plain schemas of texts, of which a value of a schema of texts follows one."""
    definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
    parts: list[Any] = []
    if "$ref" in schema:
        parts = [referenced(schema["$ref"], schema)]
    for word in ("anyOf", "oneOf"):
        parts = parts or list(schema.get(word) or ())
    if not parts or depth > _MAX_DEPTH:
        return [schema]
    inner = [{**definitions, **part} for part in parts if isinstance(part, Mapping)]
    return [found for part in inner for found in text_schemas(part, depth + 1)]


def json_value(text: str, schema: Any) -> str:
    """The text of an argument as JSON.

    A text where the schema has texts only; else JSON of a kind that the schema has, as it is written; else the text.
    """
    kinds = _kinds(schema, _root(schema), 0)
    if kinds != {"string"}:
        stripped = text.strip()
        written = _PYTHON_NAMES.get(stripped, stripped)
        value = parse_json(written)
        if (value is not None or written == "null") and (not kinds or "string" not in kinds or _kind(value) & kinds):
            return written
    return json.dumps(text, ensure_ascii=False)


def unquoted(value: str, schema: Any) -> str:
    """A JSON value, of which models write some as texts: `"2"` is 2 where the schema has numbers and no texts."""
    kinds = _kinds(schema, _root(schema), 0)
    if not value.startswith('"') or not kinds or "string" in kinds:
        return value
    text = parse_json(value)
    if not isinstance(text, str):
        return value
    written = _PYTHON_NAMES.get(text.strip(), text.strip())
    found = parse_json(written)
    return written if (found is not None or written == "null") and _kind(found) & kinds else value


def _root(schema: Any) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {}


def _kind(value: Any) -> set[str]:
    """Names of the types that a value has in JSON Schema."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _kinds(schema: Any, whole: Mapping[str, Any], depth: int) -> set[str]:
    """Types that values of a schema may have; empty = unknown."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if (kinds := schema.get("type")) is not None:
        return {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
    if isinstance(values := schema.get("enum"), list):
        return set[str]().union(*map(_kind, values))
    if "const" in schema:
        return _kind(schema["const"])
    if "$ref" in schema:
        return _kinds(referenced(schema["$ref"], whole), whole, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(word), list):
            found = [_kinds(part, whole, depth + 1) for part in parts]
            return set[str]().union(*found) if all(found) else set()
    if isinstance(parts := schema.get("allOf"), list):
        return next((kinds for part in parts if (kinds := _kinds(part, whole, depth + 1))), set())
    return set()
