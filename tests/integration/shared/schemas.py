"""Fifty schemas of the kinds that JSONSchemaBench has, written for these tests: what real ones ask for, in small.

All that may grow without end is bounded (texts, lists, numbers), so that a model of random weights comes to an end.
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 4}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG: Schema = {"type": "boolean"}


def obj(required: str = "", /, **properties: Schema) -> dict[str, Any]:
    """An object with these members and no others; all are required unless some are named."""
    names = required.split() if required else list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def arr(items: Schema, least: int, most: int, **more: Any) -> dict[str, Any]:
    """A list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def text(pattern: str) -> dict[str, Any]:
    """A text that an expression describes."""
    return {"type": "string", "pattern": pattern}


def number(least: float, most: float, kind: str = "integer", **more: Any) -> dict[str, Any]:
    """A number within bounds."""
    return {"type": kind, "minimum": least, "maximum": most, **more}


OBJECTS: list[Schema] = [
    obj(ok=FLAG),
    obj(a=obj(b=obj(c=FLAG))),
    obj(user=obj(name=WORD, age=number(0, 99)), active=FLAG),
    obj("id", id=DIGIT, note=WORD),
    obj(**{"$id": DIGIT, "with space": FLAG, "ä": FLAG}),
    obj(point=obj(x=DIGIT, y=DIGIT), box=obj(w=DIGIT, h=DIGIT)),
    {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {"a": FLAG}, "required": ["a"], "additionalProperties": False, "title": "T"},
]
ENUMS: list[Schema] = [
    {"enum": ["red", "green", "blue"]},
    obj(kind={"const": "circle"}, r=DIGIT),
    {"enum": [1, 2.5, True, None, "x"]},
    obj(level={"type": "string", "enum": ["low", "high"]}, unit={"type": "string", "enum": ["°C", "°F"]}),
    {"enum": [{"a": 1}, [1, 2], '"quoted"']},
    {"const": {"deep": [True, {"er": None}]}},
    obj(code={"type": "integer", "enum": [200, 404, 503]}),
]
ARRAYS: list[Schema] = [
    arr(FLAG, 0, 3),
    arr(DIGIT, 3, 3),
    arr(obj(k=WORD, v=DIGIT), 1, 2),
    arr(arr(FLAG, 1, 2), 1, 2),
    obj(tags=arr({"enum": ["a", "b", "c"]}, 1, 3)),
    {"type": "array", "prefixItems": [DIGIT, FLAG, WORD], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [{"const": "v1"}], "items": DIGIT, "minItems": 2, "maxItems": 4},
]
TEXTS: list[Schema] = [
    text("^[a-z]{3}-[0-9]{2}$"),
    text(r"^\+[1-9]\d{6,9}$"),
    text(r"^#[0-9a-fA-F]{6}$"),
    obj(plate=text("^[A-Z]{1,3} [0-9]{1,4}$"), sku=text("^(AB|CD)-[0-9]{3}$")),
    {"type": "string", "minLength": 3, "maxLength": 5},
    text(r"^v\d\.\d(-rc\d)?$"),
    obj(day={"type": "string", "format": "date"}),
    obj(id={"type": "string", "format": "uuid"}),
    obj(host={"type": "string", "format": "ipv4"}),
    obj(net={"type": "string", "format": "ipv6"}),
]
NUMBERS: list[Schema] = [
    number(-5, 5),
    number(100, 999),
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    obj(lat=number(-90, 90), lon=number(-180, 180)),
    obj(percent=number(0, 100, multipleOf=10)),
    arr(number(1, 6), 2, 2),
    {"type": ["integer", "null"], "minimum": 0, "maximum": 3},
]
REFS: list[Schema] = [
    {"$ref": "#/$defs/point", "$defs": {"point": obj(x=DIGIT, y=DIGIT)}},
    {**obj(**{"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}}), "$defs": {"p": obj(x=DIGIT)}},
    {**obj(list=arr({"$ref": "#/definitions/it"}, 1, 2)), "definitions": {"it": {"enum": ["x", "y"]}}},
    {**obj(a={"$ref": "#/properties/b"}, b=FLAG)},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": obj(end=FLAG)}},
]
CHOICES: list[Schema] = [
    {"anyOf": [obj(a=DIGIT), obj(b=WORD)]},
    {"anyOf": [DIGIT, {"type": "null"}]},
    {"oneOf": [obj(kind={"const": "cat"}, lives=DIGIT), obj(kind={"const": "dog"}, good=FLAG)]},
    obj(value={"oneOf": [FLAG, number(10, 20)]}),
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    arr({"anyOf": [FLAG, {"enum": ["n/a"]}]}, 2, 2),
]
KINDS = {
    "objects": OBJECTS, "enums": ENUMS, "arrays": ARRAYS, "texts": TEXTS, "numbers": NUMBERS, "refs": REFS,
    "choices": CHOICES,
}  # fmt: skip
SCHEMAS: list[tuple[str, Schema]] = [
    (f"{kind}-{index}", schema) for kind, schemas in KINDS.items() for index, schema in enumerate(schemas)
]
