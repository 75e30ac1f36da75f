"""Schemas of the kinds that JSONSchemaBench has: functions' arguments, configurations, records of public interfaces."""

from typing import Any

_NAME = {"type": "string", "maxLength": 8}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def record(**properties: Any) -> dict[str, Any]:
    """An object with just these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: Any, least: int = 0, most: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _format(name: str) -> dict[str, Any]:
    return {"type": "string", "format": name}


_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_POINT = record(x={"type": "number", "minimum": -1, "maximum": 1}, y={"type": "number", "minimum": 0, "maximum": 9.5})
_SHARED = {"address": record(street=_NAME, number=_COUNT), "tag": {"enum": ["a", "b"]}}

SCHEMAS: dict[str, dict[str, Any]] = {
    # single values
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "short text": _NAME,
    "text of a length": {"type": "string", "minLength": 3, "maxLength": 5},
    "integer in a range": {"type": "integer", "minimum": -17, "maximum": 42},
    "integer without ends": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    "number in a range": {"type": "number", "minimum": 0.25, "maximum": 0.75},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "constant": {"const": {"version": 2, "kind": "x"}},
    "enum of texts": {"enum": ["red", "green", "blue"]},
    "enum of kinds": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "several types": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    # patterns and formats
    "telephone": _text("^\\+[1-9][0-9]{6,9}$"),
    "identifier": _text("^[a-z][a-z0-9_]{0,10}$"),
    "hexadecimal": _text("^(0x)?[0-9a-f]{4}$"),
    "part of a text": {"type": "string", "pattern": "ab[cd]$", "maxLength": 12},
    "date": _format("date"),
    "time": _format("time"),
    "date-time": _format("date-time"),
    "uuid": _format("uuid"),
    "ipv4": _format("ipv4"),
    "duration": _format("duration"),
    # lists
    "list of numbers": _list({"type": "number", "minimum": 0, "maximum": 1}, 1, 4),
    "list of a length": _list({"type": "boolean"}, 3, 3),
    "list of lists": _list(_list(_COUNT, 1, 2), 1, 2),
    "tuple": {"type": "array", "prefixItems": [_NAME, _COUNT, {"type": "null"}], "minItems": 3, "items": False},
    "tuple and a rest": {"type": "array", "prefixItems": [_NAME], "items": _COUNT, "minItems": 2, "maxItems": 4},
    "list of records": _list(record(id=_COUNT, name=_NAME), 1, 2),
    # objects
    "record": record(name=_NAME, age=_COUNT, member={"type": "boolean"}),
    "optional parts": {"type": "object", "properties": {"a": _COUNT, "b": _NAME}, "additionalProperties": False},
    "some required": {
        "type": "object",
        "properties": {"a": _COUNT, "b": _NAME, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": record(outer=record(middle=record(inner=_COUNT))),
    "point": _POINT,
    "path of points": record(path=_list(_POINT, 2, 3), closed={"type": "boolean"}),
    "map of numbers": {"type": "object", "additionalProperties": _COUNT, "maxProperties": 2},
    "keys by pattern": {"type": "object", "patternProperties": {"^k[0-9]$": _COUNT}, "additionalProperties": False},
    "empty": record(),
    # choices and references
    "any of": {"anyOf": [_COUNT, _NAME, {"type": "null"}]},
    "any of records": {"anyOf": [record(kind={"const": "circle"}, r=_COUNT), record(kind={"const": "dot"})]},
    "nullable": record(value={"anyOf": [{"type": "null"}, record(a=_COUNT)]}),
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    "definitions": {"$defs": _SHARED, **record(home={"$ref": "#/$defs/address"}, tag={"$ref": "#/$defs/tag"})},
    "older definitions": {
        "definitions": _SHARED,
        "type": "array",
        "items": {"$ref": "#/definitions/tag"},
        "maxItems": 3,
    },
    "recursive": {
        "$defs": {"tree": record(value=_COUNT, children=_list({"$ref": "#/$defs/tree"}, 0, 1))},
        "$ref": "#/$defs/tree",
    },
    # as functions and configurations have them
    "weather": record(
        city=_NAME, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer", "minimum": 1, "maximum": 7}
    ),
    "search": record(query=_NAME, limit=_COUNT, filters=record(lang={"enum": ["en", "de"]}, safe={"type": "boolean"})),
    "mail": record(to=_list(_text("^[a-z]{1,8}@[a-z]{1,8}\\.org$"), 1, 2), subject=_NAME),
    "service": record(image=_text("^[a-z]{1,8}:[0-9]{1,3}[.][0-9]$"), ports=_list(_PORT, 1, 2)),
    "event": record(
        id=_format("uuid"), at=_format("date-time"), level={"enum": ["info", "warn"]}, data={"type": "null"}
    ),
    "described": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Item",
        "description": "What a shop sells.",
        **record(
            sku=_text("^[A-Z]{2}-[0-9]{3}$"), price={"type": "number", "minimum": 0, "maximum": 1000, "examples": [1]}
        ),
    },
}
